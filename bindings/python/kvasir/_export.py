"""Export of a DynamicCache of transformers, also of several processes, to one file."""
from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from ._hybrid import (
    Snapshot, check_layers, checkpoint, has_all_keys, interleaved, is_interleaved, needs_snapshot,
    remember, remembered, snapshot, snapshot_token,
)
from ._tensors import MAX_STEP, numbers_of, shape_of, tensor_rows
from .cache import Cache, CacheShape
from .enums import Status
from .errors import UnsupportedError, bad_argument
from .model import Model
from .options import CacheOptions, Path, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Heads(NamedTuple):
    """Processes that have parts of the KV heads, in the order of ranks."""

    group: Any
    rank: int
    processes: int  # 1: this one has all heads

    def gathered(self, rows: Any) -> Any:
        """Gathers the heads of all processes in the first one.

        rows: [tokens][heads of this process][head_dim]; the result: [tokens][kv_heads][head_dim]
        """
        if self.processes == 1:
            return rows
        first = dist.get_global_rank(self.group, 0)
        parts = [torch.empty_like(rows) for _ in range(self.processes)] if self.rank == 0 else None
        dist.gather(rows, parts, dst=first, group=self.group)
        return torch.cat(parts, 1) if parts else None


@takes(CacheOptions)
def save_cache(
    model: Any,
    cache: Any,
    path: Path,
    *,
    identity: bytes = bytes(32),
    max_tokens: Optional[int] = None,
    group: Any = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Writes the keys and values of a DynamicCache (one sequence) to a file for KvasirCache.load.

    Under torch.distributed every process of the group calls it with its own part of the heads. The
    first one writes; a failure there is raised in all.

    identity, max_tokens: as in KvasirCache
    group: the process group; None: all processes
    """
    if needs_snapshot(cache):
        raise UnsupportedError(
            "the file has keys and values of all tokens, no windows or states: use save_session",
            Status.UNSUPPORTED,
        )
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    given = Given(shape_of(model, max_tokens, identity), layers, cache.get_seq_length(), False)
    _export(given, lambda store: store.save(path), heads_of(given, group), options)


@takes(CacheOptions)
def save_session(
    model: Any,
    cache: Any,
    input_ids: Any,
    gguf: Model,
    path: Path,
    *,
    group: Any = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Writes a DynamicCache as a cache file that the library answers from without transformers.

    Model.load and `kvasir ask` take the file. Under torch.distributed as save_cache.

    Tokens of input_ids that the cache lacks are prefilled first, into it. Of a model with sliding
    windows or recurrent layers, the library needs what they kept some hundred tokens before the
    end: that is the end of such a cache, or a token that kvasir.transformers.prefill has chosen.
    Make the cache with DynamicCache(config=model.config).

    input_ids: [1][count], the tokens, from gguf.tokenize(text, document=True)
    gguf: the same weights as a GGUF file, also in another precision
    group: the process group; None: all processes

    Raises ModelMismatchError (gguf has other weights), UnsupportedError (a cache of another class;
    windows or states that were not copied in time).
    """
    taken = _snapshot_for(model, cache, input_ids)
    tokens, info = input_ids[0].cpu().numpy(), gguf.info
    architecture = info.architecture
    layers = [(part.keys, part.values) for part in cache.layers if has_all_keys(part)]
    given = Given(
        _shape_of_layers(model, layers, info.context_tokens, group), layers,
        cache.get_seq_length(), is_interleaved(architecture),
    )
    heads = heads_of(given, group)
    start = end = None
    if taken is not None:
        start, end = (
            checkpoint(part, model, architecture, heads.gathered)
            for part in (taken, snapshot(cache))
        )

    def write(store: Cache) -> None:
        made = (
            gguf.session_from_cache(store, tokens, document=True)
            if start is None
            else gguf.session_from_checkpoint(store, tokens, start, end, document=True)
        )
        with made as session:
            session.save(path)

    _export(given, write, heads, options)


def _snapshot_for(model: Any, cache: Any, input_ids: Any) -> Optional[Snapshot]:
    """Completes the cache. Returns its windows and states at an earlier token; None: it has none.
    """
    check_layers(cache)
    held, tokens = cache.get_seq_length(), input_ids.shape[1]
    if held < tokens:
        prefill(model, input_ids[:, held:], cache)
    if not needs_snapshot(cache):
        return None
    taken = remembered(cache)
    if taken is None or taken.tokens >= tokens:
        raise UnsupportedError(
            "windows and states of the cache are at its end: use kvasir.transformers.prefill, or "
            "prefill all but some hundred of input_ids",
            Status.UNSUPPORTED,
        )
    return taken


def _shape_of_layers(
    model: Any, layers: List[Tuple[Any, Any]], max_tokens: int, group: Any
) -> CacheShape:
    if not layers:
        raise UnsupportedError("no layer of the cache has keys of all tokens", Status.UNSUPPORTED)
    config, keys = model.config.get_text_config(), layers[0][0]
    _, _, processes = group_of(group)
    return CacheShape(
        len(layers), config.num_attention_heads, keys.shape[1] * processes, keys.shape[3],
        max_tokens,
    )


class Given(NamedTuple):
    """Keys and values of the layers that keep all tokens, [1][heads][tokens][head_dim] each."""

    shape: CacheShape
    layers: List[Tuple[Any, Any]]
    tokens: int
    interleave: bool


def _export(given: Given, write: Callable[[Cache], None], heads: Heads, options: Any) -> None:
    if len(given.layers) != given.shape.layers or any(
        k is None or k.shape[0] != 1 or k.shape[2] != given.tokens for k, _ in given.layers
    ):
        raise UnsupportedError(
            "use a cache of one sequence with all tokens in all layers", Status.UNSUPPORTED
        )
    failure: List[Optional[BaseException]] = [None]
    store: Optional[Cache] = None
    try:
        store = Cache(given.shape, **options) if heads.rank == 0 else None
    except Exception as error:
        failure[0] = error
    _fill(store, given, heads, failure)
    if store is not None:
        with store:
            if failure[0] is None:
                try:
                    write(store)
                except Exception as error:
                    failure[0] = error
    if heads.processes > 1:
        first = dist.get_global_rank(heads.group, 0)
        dist.broadcast_object_list(failure, src=first, group=heads.group)
    if failure[0] is not None:
        raise failure[0]


def _fill(
    store: Optional[Cache], given: Given, heads: Heads, failure: List[Optional[BaseException]]
) -> None:
    """Copies keys and values into the store.

    Every process gathers all parts, also after a failure: the others wait for it.
    """
    for begin in range(0, given.tokens, MAX_STEP):
        for layer, pair in enumerate(given.layers):
            parts = (tensor_rows(part[:, :, begin : begin + MAX_STEP]) for part in pair)
            k, v = (heads.gathered(part) for part in parts)
            if store is None or failure[0] is not None:
                continue
            try:
                k, number = numbers_of(interleaved(k) if given.interleave else k)
                v, _ = numbers_of(v)
                store.update(layer, k, v, number_type=number)
            except Exception as error:
                failure[0] = error


def prefill(model: Any, input_ids: Any, cache: Any, *, chunk: int = 512) -> Any:
    """Prefills tokens [1][count] into any cache of transformers, `chunk` tokens at a time.

    Before the last of them it copies the cache's windows and states, which save_session needs.

    Returns the logits after the last token, [1][1][vocabulary].
    """
    if not 0 < chunk <= MAX_STEP:
        raise bad_argument(f"chunk is {chunk}: use 1 to {MAX_STEP} tokens")
    new = "cache" in inspect.signature(model.forward).parameters
    keyword = {"cache" if new else "past_key_values": cache}
    held, copied = cache.get_seq_length(), 0
    if needs_snapshot(cache):
        copied = max(0, snapshot_token(model, cache, held + input_ids.shape[1]) - held)
    logits = None
    with torch.no_grad():
        for count, part in enumerate((input_ids[:, :copied], input_ids[:, copied:])):
            if count == 1 and needs_snapshot(cache):
                remember(cache)
            for step in torch.split(part, chunk, dim=1) if part.shape[1] > 0 else ():
                logits = model(input_ids=step, use_cache=True, logits_to_keep=1, **keyword).logits
    return logits


def group_of(group: Any) -> Tuple[Any, int, int]:
    """Returns the process group, the rank in it and its processes."""
    if not dist.is_available() or not dist.is_initialized():
        return None, 0, 1
    group = group or dist.group.WORLD
    return group, dist.get_rank(group), dist.get_world_size(group)


def heads_of(given: Given, group: Any) -> Heads:
    own, all_heads = given.layers[0][0].shape[1], given.shape.kv_heads
    group, rank, count = group_of(group)
    if own * count != all_heads:
        raise UnsupportedError(
            f"{count} processes with {own} KV heads each do not have the model's {all_heads}",
            Status.UNSUPPORTED,
        )
    return Heads(group, rank, count)
