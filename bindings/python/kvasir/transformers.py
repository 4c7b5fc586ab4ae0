"""Hugging Face transformers over Kvasir's store: a cache class and an attention function, and a file of what a cluster has read.

    model.set_attn_implementation("kvasir")               # registered by importing this module
    cache = KvasirCache(model, strategy="bounded")        # in place of DynamicCache
    prefill(model, input_ids, cache)
    model.generate(input_ids, past_key_values=cache)

One sequence (a batch of one), causal attention over everything before, inference only; anything else is refused. Keys and values stay in the
processor's memory or the mapped file: tensors of a GPU are copied there and back.

A document that was read elsewhere, in several processes and on several GPUs too (tensor parallelism), is saved by save_cache from the DynamicCache
of each process, and asked at home through KvasirCache.load and the same weights.
"""
from __future__ import annotations

import hashlib
import pathlib
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.distributed as dist
import transformers
from transformers.cache_utils import Cache as AnyCache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from .cache import Cache, CacheShape
from .enums import NumberType, Status
from .errors import BadState, Unsupported, bad_argument
from .model import Model
from .options import Path, StoreOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_STEP = 4096  # tokens of one step of a cache
_NUMBERS = {torch.float32: NumberType.F32, torch.float16: NumberType.F16, torch.bfloat16: NumberType.BF16}


class KvasirCache(AnyCache):  # type: ignore[misc]
    """Keys and values in a kvasir.Cache, `store`. Only the attention function "kvasir" can read them: the model has to use it."""

    def __init__(self, model: Any, *, max_tokens: Optional[int] = None, identity: bytes = bytes(32), **options: Unpack[StoreOptions]) -> None:
        """`max_tokens`: left out, the model's context. `identity`: 32 bytes that name the weights, as identity_of."""
        self._hold(model, Cache(shape_of(model, max_tokens, identity), **options))

    @classmethod
    def load(cls, model: Any, path: Path, *, max_tokens: Optional[int] = None, identity: bytes = bytes(32), verify: bool = False,
             **options: Unpack[StoreOptions]) -> KvasirCache:
        """What save or save_cache wrote, mapped. ModelMismatch where the model has another shape or identity."""
        cache = cls.__new__(cls)
        cache._hold(model, Cache.load(shape_of(model, max_tokens, identity), path, verify=verify, **options))
        return cache

    def _hold(self, model: Any, store: Cache) -> None:
        if model.config._attn_implementation != "kvasir":
            store.close()
            raise bad_argument('the model does not attend by Kvasir: call model.set_attn_implementation("kvasir")')
        self.store = store
        self._tokens: int = store.stats()["tokens"]  # of complete steps
        self._step = 0  # tokens of the step that is not complete
        self._updated: List[int] = []  # its layers
        self._unattended: Optional[int] = None
        super().__init__(layers=[_Layer(self, i) for i in range(store.shape.layers)])

    def save(self, path: Path) -> None:
        """Writes a file that load maps."""
        self.store.save(path)

    def truncate(self, tokens: int) -> None:
        """Goes back to the first tokens, also after a forward pass that failed midway."""
        self.store.truncate(tokens)
        self._tokens, self._step, self._updated, self._unattended = tokens, 0, [], None

    def reset(self) -> None:
        self.truncate(0)

    def _take(self, layer: int, keys: Any, values: Any) -> None:
        if self._unattended is not None:
            raise BadState(f"layer {self._unattended} was not attended by Kvasir", Status.BAD_STATE)
        k, number = _rows(keys)
        v, _ = _rows(values)
        self.store.update(layer, k, v, number_type=number)
        self._unattended, self._step = layer, k.shape[0]
        self._updated.append(layer)
        if len(self._updated) == self.store.shape.layers:
            self._tokens, self._step, self._updated = self._tokens + self._step, 0, []

    def _attend(self, layer: int, query: Any, scale: float, softcap: float) -> Any:
        q, number = _rows(query)
        out = self.store.attention(layer, q, number_type=number, scale=scale, softcap=softcap)
        self._unattended = None
        result = torch.from_numpy(out.view("int16") if number == NumberType.BF16 else out).view(query.dtype)
        return result.unsqueeze(0).to(query.device)  # [1][tokens][heads][head_dim]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of one layer."""

    is_initialized = True

    def __init__(self, cache: KvasirCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        pass

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Tuple[Any, Any]:
        """Returns the step's own, from which the attention function knows the cache."""
        self.cache._take(self.index, key_states, value_states)
        key_states.kvasir = (self.cache, self.index)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.cache._tokens + (self.cache._step if self.index in self.cache._updated else 0)

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.store.shape.max_tokens

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise Unsupported("a Kvasir cache has one sequence that is cut by truncate", Status.UNSUPPORTED)

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Optional[float] = None, dropout: float = 0.0,
              softcap: Optional[float] = None, **others: Any) -> Tuple[Any, None]:
    """transformers' attention interface: query [1][heads][tokens][head_dim], the output [1][tokens][heads][head_dim]."""
    link = getattr(key, "kvasir", None)
    if link is None:
        raise BadState("attention by Kvasir needs past_key_values=KvasirCache(model)", Status.BAD_STATE)
    cache, layer = link
    del key.kvasir  # the tensor does not keep the cache
    what = [name for name in ("sliding_window", "s_aux", "position_bias", "head_mask") if others.get(name) is not None]
    if attention_mask is not None or what or dropout or query.requires_grad or others.get("is_causal") is False:
        raise Unsupported(f"attention by Kvasir is causal, over everything, for inference; not with {', '.join(what) or 'a mask, dropout or gradients'}",
                          Status.UNSUPPORTED)
    return cache._attend(layer, query, scaling or 0.0, softcap or 0.0), None


def _mask(batch_size: int, mask_function: Any, attention_mask: Any = None, **_: Any) -> None:
    """No mask is made: the store's attention is causal. A mask that says anything else is refused."""
    if mask_function is not causal_mask_function or (attention_mask is not None and not bool(attention_mask.all())) or batch_size != 1:
        raise Unsupported("attention by Kvasir is causal over one sequence: no padding, sliding window, packing or batch", Status.UNSUPPORTED)


transformers.AttentionInterface.register("kvasir", attention)
transformers.AttentionMaskInterface.register("kvasir", _mask)


def shape_of(model: Any, max_tokens: Optional[int] = None, identity: bytes = bytes(32)) -> CacheShape:
    """The shape of the whole model's cache."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return CacheShape(config.num_hidden_layers, heads, kv_heads, dim, max_tokens or config.max_position_embeddings, identity)


def identity_of(path: Union[str, "pathlib.Path"]) -> bytes:
    """A name for weights: SHA-256 of a file, or of the *.safetensors of a folder in the order of their names."""
    place = pathlib.Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise bad_argument(f"{place} has no *.safetensors")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while True:
                block = stream.read(1 << 20)
                if not block:
                    break
                digest.update(block)
    return digest.digest()


def prefill(model: Any, input_ids: Any, cache: Any, *, chunk: int = 512) -> Any:
    """Reads tokens [1][count] into any cache of transformers, `chunk` at a time; returns the logits after the last one, [1][1][vocabulary]."""
    if not 0 < chunk <= MOST_STEP:
        raise bad_argument(f"chunk is {chunk}: it is 1 to {MOST_STEP} tokens")
    logits = None
    with torch.no_grad():
        for part in torch.split(input_ids, chunk, dim=1):
            logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits


class _Heads(NamedTuple):
    """Which processes have parts of the key/value heads, in the order of ranks."""

    group: Any
    rank: int
    processes: int  # that have parts; 1: this one has all

    def gathered(self, rows: Any) -> Any:
        """All heads [tokens][kv_heads][head_dim] in the first process, from [tokens][its heads][head_dim] in each."""
        if self.processes == 1:
            return rows
        first = dist.get_global_rank(self.group, 0)
        parts = [torch.empty_like(rows) for _ in range(self.processes)] if self.rank == 0 else None
        dist.gather(rows, parts, dst=first, group=self.group)
        return torch.cat(parts, 1) if parts else None


def save_cache(model: Any, past_key_values: Any, path: Path, *, identity: bytes = bytes(32), max_tokens: Optional[int] = None, group: Any = None,
               **options: Unpack[StoreOptions]) -> None:
    """Writes the keys and values of a DynamicCache (one sequence) to a file for KvasirCache.load. Under torch.distributed every process of the
    group (None: all) calls it with its own part of the heads; the first one writes, and what fails there is raised in all."""
    _export(shape_of(model, max_tokens, identity), past_key_values, lambda store: store.save(path), group, False, options)


def save_session(model: Any, past_key_values: Any, input_ids: Any, at_home: Model, path: Path, *, group: Any = None,
                 **options: Unpack[StoreOptions]) -> None:
    """Writes a DynamicCache as a file that the library answers from, by itself: Model.load, kvasir ask. `input_ids`: [1][count], what was read, from
    at_home.tokenize(text, document=True). `at_home`: the same weights as a GGUF file, also in another precision; ModelMismatch where they are others.
    Under torch.distributed as save_cache."""
    tokens = input_ids[0].cpu().numpy()
    shape = shape_of(model, at_home.info.context)

    def write(store: Cache) -> None:
        with at_home.session_from_cache(store, tokens, document=True) as session:
            session.save(path)

    _export(shape, past_key_values, write, group, at_home.info.architecture == "llama", options)


def _export(shape: CacheShape, past_key_values: Any, write: Callable[[Cache], None], group: Any, interleave: bool, options: Any) -> None:
    layers = [(layer.keys, layer.values) for layer in past_key_values.layers]
    tokens = past_key_values.get_seq_length()
    if len(layers) != shape.layers or any(k is None or k.shape[0] != 1 or k.shape[2] != tokens for k, _ in layers):
        raise Unsupported("a cache is saved that has one sequence, and all tokens in all layers", Status.UNSUPPORTED)
    heads = _heads_of(layers[0][0].shape[1], shape.kv_heads, group)
    failure: List[Optional[BaseException]] = [None]
    store: Optional[Cache] = None
    try:
        store = Cache(shape, **options) if heads.rank == 0 else None
    except Exception as error:
        failure[0] = error
    for begin in range(0, tokens, MOST_STEP):
        for layer, pair in enumerate(layers):
            k, v = (heads.gathered(_tensor_rows(part[:, :, begin : begin + MOST_STEP])) for part in pair)
            if store is not None and failure[0] is None:  # after a failure the other processes still have to be met
                try:
                    (k, number), (v, _) = _numbers(_interleaved(k) if interleave else k), _numbers(v)
                    store.update(layer, k, v, number_type=number)
                except Exception as error:
                    failure[0] = error
    if store is not None:
        with store:
            if failure[0] is None:
                try:
                    write(store)
                except Exception as error:
                    failure[0] = error
    if heads.processes > 1:
        dist.broadcast_object_list(failure, src=dist.get_global_rank(heads.group, 0), group=heads.group)
    if failure[0] is not None:
        raise failure[0]


def _interleaved(keys: Any) -> Any:
    """Rows whose two rotated halves lie as files of the architecture "llama" have them, pair by pair."""
    tokens, heads, dim = keys.shape
    return keys.view(tokens, heads, 2, dim // 2).transpose(2, 3).reshape(tokens, heads, dim)


def _heads_of(own: int, all_heads: int, group: Any) -> _Heads:
    if not dist.is_available() or not dist.is_initialized():
        group, rank, count = None, 0, 1
    else:
        group = group or dist.group.WORLD
        rank, count = dist.get_rank(group), dist.get_world_size(group)
    if own * count != all_heads:
        raise Unsupported(f"{count} processes with {own} key/value heads each are not the model's {all_heads}", Status.UNSUPPORTED)
    return _Heads(group, rank, count)


def _tensor_rows(states: Any) -> Any:
    """[1][heads][tokens][head_dim] as contiguous rows [tokens][heads][head_dim], which is what most models made them from: no copy."""
    if states.shape[0] != 1:
        raise Unsupported(f"a batch of {states.shape[0]}: a Kvasir cache has one sequence", Status.UNSUPPORTED)
    return states.detach()[0].transpose(0, 1).contiguous()


def _numbers(rows: Any) -> Tuple[Any, NumberType]:
    """The same memory as a numpy array, where it is the CPU's."""
    if rows.dtype not in _NUMBERS:
        raise Unsupported(f"numbers of type {rows.dtype}", Status.UNSUPPORTED)
    number, rows = _NUMBERS[rows.dtype], rows.cpu()
    return (rows.view(torch.int16) if number == NumberType.BF16 else rows).numpy(), number


def _rows(states: Any) -> Tuple[Any, NumberType]:
    return _numbers(_tensor_rows(states))
