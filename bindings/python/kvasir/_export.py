"""Export of a DynamicCache of transformers, also of several processes, to one file."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from ._tensors import MAX_STEP, numbers_of, shape_of, tensor_rows
from .cache import Cache, CacheShape
from .enums import Status
from .errors import UnsupportedError
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
    shape = shape_of(model, max_tokens, identity)
    _export(shape, cache, lambda store: store.save(path), group, False, options)


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

    input_ids: [1][count], the prefilled tokens, from gguf.tokenize(text, document=True)
    gguf: the same weights as a GGUF file, also in another precision
    group: the process group; None: all processes

    Raises ModelMismatchError (gguf has other weights).
    """
    tokens = input_ids[0].cpu().numpy()
    info = gguf.info

    def write(store: Cache) -> None:
        with gguf.session_from_cache(store, tokens, document=True) as session:
            session.save(path)

    shape = shape_of(model, info.context_tokens)
    _export(shape, cache, write, group, info.architecture == "llama", options)


def _export(
    shape: CacheShape,
    cache: Any,
    write: Callable[[Cache], None],
    group: Any,
    interleave: bool,
    options: Any,
) -> None:
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    tokens = cache.get_seq_length()
    if len(layers) != shape.layers or any(
        k is None or k.shape[0] != 1 or k.shape[2] != tokens for k, _ in layers
    ):
        raise UnsupportedError(
            "use a cache of one sequence with all tokens in all layers", Status.UNSUPPORTED
        )
    heads = heads_of(layers[0][0].shape[1], shape.kv_heads, group)
    failure: List[Optional[BaseException]] = [None]
    store: Optional[Cache] = None
    try:
        store = Cache(shape, **options) if heads.rank == 0 else None
    except Exception as error:
        failure[0] = error
    _fill(store, layers, tokens, heads, interleave, failure)
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
    store: Optional[Cache],
    layers: List[Tuple[Any, Any]],
    tokens: int,
    heads: Heads,
    interleave: bool,
    failure: List[Optional[BaseException]],
) -> None:
    """Copies keys and values into the store.

    Every process gathers all parts, also after a failure: the others wait for it.
    """
    for begin in range(0, tokens, MAX_STEP):
        for layer, pair in enumerate(layers):
            parts = (tensor_rows(part[:, :, begin : begin + MAX_STEP]) for part in pair)
            k, v = (heads.gathered(part) for part in parts)
            if store is None or failure[0] is not None:
                continue
            try:
                (k, number), (v, _) = numbers_of(interleaved(k) if interleave else k), numbers_of(v)
                store.update(layer, k, v, number_type=number)
            except Exception as error:
                failure[0] = error


def interleaved(keys: Any) -> Any:
    """Interleaves the two rotated halves of each row, as GGUF files of "llama" have them."""
    tokens, heads, dim = keys.shape
    return keys.view(tokens, heads, 2, dim // 2).transpose(2, 3).reshape(tokens, heads, dim)


def heads_of(own: int, all_heads: int, group: Any) -> Heads:
    if not dist.is_available() or not dist.is_initialized():
        group, rank, count = None, 0, 1
    else:
        group = group or dist.group.WORLD
        rank, count = dist.get_rank(group), dist.get_world_size(group)
    if own * count != all_heads:
        raise UnsupportedError(
            f"{count} processes with {own} KV heads each do not have the model's {all_heads}",
            Status.UNSUPPORTED,
        )
    return Heads(group, rank, count)
