"""KV caches for engines that bring their own weights."""
from __future__ import annotations

from ctypes import byref, c_uint8
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Cancel, Handle, Watch, call, lib
from ._values import (
    address, as_string, as_uint, check_names, control, fill, json_of, number_type_of, result_of,
    sized,
)
from .enums import NumberType
from .errors import BusyError, bad_argument
from .options import AttentionOptions, CacheOptions, ControlOptions, Path, Progress, takes
from .results import CacheStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class CacheShape:
    """Shape of a Cache.

    identity: the caller's 32 bytes for what makes the keys, such as a hash of its weights;
        Cache.load compares it
    """

    layers: int  # 1 to 1024
    heads: int  # query heads, 1 to 1024
    kv_heads: int  # a divisor of heads
    head_dim: int  # 1 to 512
    max_tokens: int  # 1 to 2^30; memory grows with the sequence
    identity: bytes = bytes(32)


class Cache(Handle):
    """KV cache of one sequence. For each step of 1 to 4096 tokens and layer: update, attention.

    Arrays are rows of float32, float16 or bfloat16 (a dtype of that name, or uint16 with
    number_type=NumberType.BF16), C-contiguous; the library accesses them in place. k and v are
    [tokens][kv_heads][head_dim], q and out [tokens][heads][head_dim]. A cache serves one call at a
    time, from any thread; a second concurrent call raises BusyError.
    """

    _kind, _free = "cache", "kv_cache_close"

    shape: CacheShape

    @takes(CacheOptions)
    def __init__(self, shape: CacheShape, **options: Unpack[CacheOptions]) -> None:
        """Creates an empty cache. Steps of one token use the strategy; longer ones are exact.

        Raises BadArgumentError (shape, options), NoMemoryError, LimitError; with a memory_limit
        NotFoundError, PermissionDeniedError and NoSpaceError (spill_directory).
        """
        self.shape = shape
        c_shape, filled = _shape(shape), fill(_abi.kv_cache_options, CacheOptions, options)
        call(lib.kv_cache_open, byref(c_shape), byref(filled), self._new())

    @classmethod
    @takes(CacheOptions)
    def load(
        cls,
        shape: CacheShape,
        path: Path,
        *,
        verify: bool = False,
        cancel: Optional[Cancel] = None,
        progress: Optional[Progress] = None,
        **options: Unpack[CacheOptions],
    ) -> Cache:
        """Creates a cache from a file by mapping it.

        window_tokens and precision come from the file.

        verify: True: verify the whole file now, not each page at its first use
        cancel: a Cancel; fire() stops the call
        progress: function of phase, done and total

        Raises ModelMismatchError (another shape, except query heads, another identity, or a
        session's file), and the errors of Model.load and Cache.
        """
        c_shape, cache, watch = _shape(shape), cls._empty(), Watch()
        cache.shape = shape
        filled = fill(_abi.kv_cache_options, CacheOptions, options)
        flags = _abi.VERIFY if verify else 0
        how = control({"cancel": cancel, "progress": progress}, watch, flags)
        watch.run(
            lib.kv_cache_load, byref(c_shape), as_string("path", path), byref(filled), byref(how),
            cache._new(),
        )
        return cache

    def _about(self) -> str:
        try:
            return f"{self.stats().tokens} tokens"
        except BusyError:
            return "busy"

    def update(
        self,
        layer: int,
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        q: Optional[npt.NDArray[Any]] = None,
        *,
        number_type: Optional[NumberType] = None,
    ) -> None:
        """Adds one layer's keys (after RoPE) and values of the step's tokens.

        A step is complete when every layer has its update, in any order. The strategy "infllm"
        needs q, the step's queries after RoPE.

        Raises BadArgumentError (layer, tokens; NaN, infinity, or a magnitude over 1e30) and
        BadStateError (the layer has its update; the step has another number of tokens). Also
        ContextFullError, LimitError, NoMemoryError, CorruptError, IoError, BusyError.
        """
        owner, shape = self._live(), self.shape
        number, tokens = _rows("k", k, shape.kv_heads, shape.head_dim, number_type)
        if _rows("v", v, shape.kv_heads, shape.head_dim, number_type) != (number, tokens):
            raise bad_argument("v has other tokens or another type than k")
        if q is not None:
            if _rows("q", q, shape.heads, shape.head_dim, number_type) != (number, tokens):
                raise bad_argument("q has other tokens or another type than k")
        queries = None if q is None else address(q)
        call(
            lib.kv_cache_update, owner, as_uint("layer", layer, 32), number, address(k), address(v),
            queries, tokens,
        )

    @takes(AttentionOptions)
    def attention(
        self,
        layer: int,
        q: npt.NDArray[Any],
        out: Optional[npt.NDArray[Any]] = None,
        *,
        number_type: Optional[NumberType] = None,
        **options: Unpack[AttentionOptions],
    ) -> npt.NDArray[Any]:
        """Computes the attention of the step's queries in one layer, causal, and returns it.

        The result is in `out`, or in a new array. The layer must have its update.

        Raises BadArgumentError, BadStateError, Cancelled, NoMemoryError, CorruptError, IoError,
        BusyError: cache and `out` are unchanged.
        """
        owner, shape = self._live(), self.shape
        number, tokens = _rows("q", q, shape.heads, shape.head_dim, number_type)
        if out is None:
            out = np.empty(q.shape, q.dtype)
        elif _rows("out", out, shape.heads, shape.head_dim, number_type) != (number, tokens):
            raise bad_argument("out has other tokens or another type than q")
        elif not out.flags.writeable or np.may_share_memory(q, out):
            raise bad_argument("out is read-only, or overlaps q")
        how = fill(_abi.kv_cache_attention_options, AttentionOptions, options)
        call(
            lib.kv_cache_attention, owner, as_uint("layer", layer, 32), number, address(q),
            address(out), tokens, byref(how), byref(control(options)),
        )
        return out

    def truncate(self, tokens: int) -> None:
        """Truncates the cache to its first `tokens` tokens and drops an incomplete step.

        Raises BadArgumentError (there are fewer), CorruptError, NoMemoryError, BusyError.
        """
        call(lib.kv_cache_truncate, self._live(), as_uint("tokens", tokens, 64))

    def fork(self, *, cancel: Optional[Cancel] = None) -> Cache:
        """Creates an exact copy with the same options. Both share the pages.

        cancel: a Cancel; fire() stops the building of a missing sketch

        Raises BadStateError (the step is incomplete), Cancelled, NoMemoryError, LimitError,
        CorruptError, BusyError.
        """
        owner, cache, how = self._live(), Cache._empty(), control({"cancel": cancel})
        cache.shape = self.shape
        call(lib.kv_cache_fork, owner, byref(how), cache._new())
        return cache

    @takes(ControlOptions)
    def save(self, path: Path, **options: Unpack[ControlOptions]) -> None:
        """Writes the cache to a file, as Session.save does.

        Raises BadStateError (the step is incomplete), and the errors of Session.save.
        """
        owner, watch = self._live(), Watch()
        check_names(ControlOptions, options)
        how = control(options, watch)
        watch.run(lib.kv_cache_save, owner, as_string("path", path), byref(how))

    def stats(self) -> CacheStats:
        """Returns the state of the cache. BusyError."""
        stats = sized(_abi.kv_cache_stats)
        call(lib.kv_cache_get_stats, self._live(), byref(stats))
        return result_of(CacheStats, stats)

    def stats_json(self) -> Dict[str, Any]:
        """Returns the statistics for people."""
        return json_of(lib.kv_cache_stats_json, self._live())


def _shape(shape: CacheShape) -> _abi.kv_cache_shape:
    if len(shape.identity) != 32:
        raise bad_argument(f"identity has {len(shape.identity)} bytes, not 32")
    struct = sized(_abi.kv_cache_shape)
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        setattr(struct, name, as_uint(name, getattr(shape, name), 32))
    struct.max_tokens = as_uint("max_tokens", shape.max_tokens, 64)
    struct.identity = (c_uint8 * 32)(*shape.identity)
    return struct


def _rows(
    name: str, array: npt.NDArray[Any], heads: int, dim: int, number_type: Optional[NumberType]
) -> Tuple[NumberType, int]:
    """Returns the element type and the number of tokens.

    The library receives a pointer, so everything is checked here.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a numpy array, not {type(array).__name__}")
    if array.ndim != 3 or array.shape[1:] != (heads, dim):
        raise bad_argument(f"{name} is {list(array.shape)}, not [tokens, {heads}, {dim}]")
    if not array.flags.c_contiguous or not array.dtype.isnative:
        raise bad_argument(f"{name} is not contiguous rows in the CPU's byte order")
    return number_type_of(name, array, number_type), as_uint("tokens", array.shape[0], 32)
