"""The store without a model, for an engine that brings its own weights."""
from __future__ import annotations

from ctypes import byref, c_uint8
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Cancel, Handle, Watch, address, as_string, as_uint, call, fill, json_of, lib, sized
from .enums import NumberType
from .errors import bad_argument
from .options import AttentionOptions, CallOptions, Path, Progress, StoreOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CacheShape(NamedTuple):
    layers: int
    heads: int  # query heads
    kv_heads: int  # a divisor of heads
    head_dim: int  # 1 to 256
    max_tokens: int  # that the sequence may hold
    identity: bytes = bytes(32)  # your name for what makes the keys, such as a hash of its weights: 32 bytes, compared by Cache.load


class Cache(Handle):
    """Keys and values of one sequence. For each step of 1 to 4096 tokens, and in it for each layer: update, then attention.

    Arrays are rows of float32, float16 or bfloat16 (a dtype of that name, or uint16 with number_type=NumberType.BF16), C-contiguous, and are
    read and written where they are: k, v [tokens][kv_heads][head_dim]; q, out [tokens][heads][head_dim]. One call at a time, from any thread; a
    second one raises Busy."""

    _kind, _free = "cache", "kv_cache_close"

    def __init__(self, shape: CacheShape, **options: Unpack[StoreOptions]) -> None:
        """An empty cache. BadArgument (a shape or option out of its range), NoMemory, Limit, and of spill_folder NotFound, Permission, NoSpace."""
        wanted, filled = _shape(shape), fill(_abi.kv_cache_options, StoreOptions, options)
        self.shape = shape
        call(lib.kv_cache_open, byref(wanted), byref(filled), self._new())

    @classmethod
    def load(cls, shape: CacheShape, path: Path, *, verify: bool = False, cancel: Optional[Cancel] = None,
             progress: Optional[Progress] = None, **options: Unpack[StoreOptions]) -> Cache:
        """A cache over a saved one, mapped. ModelMismatch where the file has another shape (heads are not compared) or identity, or is a session's;
        window and kv_type are the file's. Otherwise errors of Model.load."""
        wanted, cache, watch = _shape(shape), cls._empty(), Watch()
        filled = fill(_abi.kv_cache_options, StoreOptions, options)
        how = fill(_abi.kv_call_options, CallOptions, {"cancel": cancel, "progress": progress}, watch)
        how.flags = _abi.LOAD_VERIFY if verify else 0
        cache.shape = shape
        watch.run(lib.kv_cache_load, byref(wanted), as_string("path", path), byref(filled), byref(how), cache._new())
        return cache

    def update(self, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any], q: Optional[npt.NDArray[Any]] = None, *,
               number_type: Optional[NumberType] = None) -> None:
        """One layer's keys (after RoPE) and values of the step's tokens. `q`, after RoPE too, is for the strategy "infllm". The step is complete when
        every layer has had its update.

        BadArgument, BadState, ContextFull, Limit, Busy and others: the cache is as it was."""
        owner, (_, heads, kv_heads, dim, _, _) = self._live(), self.shape
        number, tokens = _rows("k", k, kv_heads, dim, number_type)
        if _rows("v", v, kv_heads, dim, number_type) != (number, tokens):
            raise bad_argument("v has other tokens or numbers than k")
        if q is not None and _rows("q", q, heads, dim, number_type) != (number, tokens):
            raise bad_argument("q has other tokens or numbers than k")
        call(lib.kv_cache_update, owner, as_uint("layer", layer, 32), number, address(k), address(v), None if q is None else address(q), tokens)

    def attention(self, layer: int, q: npt.NDArray[Any], out: Optional[npt.NDArray[Any]] = None, *, number_type: Optional[NumberType] = None,
                  **options: Unpack[AttentionOptions]) -> npt.NDArray[Any]:
        """Causal attention of the step's queries in one layer, over all tokens so far. Writes into `out`, or an array that it makes, and returns it.

        BadArgument, BadState, Cancelled, NoMemory, Corrupt, IoError, Busy: the cache is as it was."""
        owner, (_, heads, _, dim, _, _) = self._live(), self.shape
        number, tokens = _rows("q", q, heads, dim, number_type)
        if out is None:
            out = np.empty(q.shape, q.dtype)
        elif _rows("out", out, heads, dim, number_type) != (number, tokens):
            raise bad_argument("out has other tokens or numbers than q")
        elif not out.flags.writeable or np.may_share_memory(q, out):
            raise bad_argument("out is read-only, or shares memory with q")
        how = fill(_abi.kv_cache_attention_options, AttentionOptions, options)
        call(lib.kv_cache_attention, owner, as_uint("layer", layer, 32), number, address(q), address(out), tokens, byref(how))
        return out

    def truncate(self, tokens: int) -> None:
        """Goes back to the first `tokens` tokens, and drops a step that is not complete. BadArgument where there are fewer."""
        call(lib.kv_cache_truncate, self._live(), as_uint("tokens", tokens, 64))

    def fork(self, cancel: Optional[Cancel] = None) -> Cache:
        """A second cache that begins as an exact copy, pages shared, with the same options. `cancel`: of a sketch of the keys
        that has to be found first. BadState while a step is not complete, Cancelled."""
        owner, cache, token = self._live(), Cache._empty(), None if cancel is None else cancel._live()
        cache.shape = self.shape
        call(lib.kv_cache_fork, owner, token, cache._new())
        return cache

    def save(self, path: Path, **options: Unpack[CallOptions]) -> None:
        """Writes the cache to a file, atomically. BadState while a step is not complete; otherwise errors of Session.save."""
        owner, watch = self._live(), Watch()
        how = fill(_abi.kv_call_options, CallOptions, options, watch)
        watch.run(lib.kv_cache_save, owner, as_string("path", path), byref(how))

    def stats(self) -> Dict[str, Any]:
        """tokens (of complete steps), sealed_pages, window_tokens, step_tokens and more: kv_cache_stats."""
        return json_of(lib.kv_cache_stats, self._live())


def _shape(shape: CacheShape) -> _abi.kv_cache_shape:
    if len(shape.identity) != 32:
        raise bad_argument(f"identity has {len(shape.identity)} bytes, not 32")
    struct = sized(_abi.kv_cache_shape)
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        setattr(struct, name, as_uint(name, getattr(shape, name), 32))
    struct.max_tokens = as_uint("max_tokens", shape.max_tokens, 64)
    struct.identity = (c_uint8 * 32)(*shape.identity)
    return struct


def _rows(name: str, array: npt.NDArray[Any], heads: int, dim: int, number_type: Optional[NumberType]) -> Tuple[NumberType, int]:
    """What the numbers are and how many tokens. The library gets a pointer, so that everything is checked here."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a numpy array, not {type(array).__name__}")
    if array.ndim != 3 or array.shape[1:] != (heads, dim):
        raise bad_argument(f"{name} is {list(array.shape)}, not [tokens, {heads}, {dim}]")
    if not array.flags.c_contiguous or not array.dtype.isnative:
        raise bad_argument(f"{name} is not contiguous rows in the CPU's byte order")
    own = {"float32": NumberType.F32, "float16": NumberType.F16, "bfloat16": NumberType.BF16}.get(array.dtype.name)
    if own is None and array.dtype.name in ("uint16", "int16") and number_type is not None and number_type != NumberType.F32:
        own = NumberType(number_type)
    if own is None or number_type not in (None, own):
        raise bad_argument(f"{name} has numbers of type {array.dtype.name}")
    return own, as_uint("tokens", array.shape[0], 32)
