"""Hugging Face transformers over a kvasir.Cache: a cache class, an attention function, and files.

    model.set_attn_implementation("kvasir")               # registered by importing this module
    cache = KvasirCache(model, decode="bounded")          # in place of DynamicCache
    prefill(model, input_ids, cache)
    model.generate(input_ids, cache=cache)                # past_key_values in older versions

One sequence (a batch of one), causal attention over everything before, inference only. Anything
else raises UnsupportedError. Keys and values stay in host memory or in the mapped file: tensors of
a GPU are copied there and back.

A cluster may prefill a document, in several processes and on several GPUs (tensor parallelism).
save_cache saves the DynamicCache of its processes as one file. KvasirCache.load maps the file for
the same weights elsewhere.
"""
from __future__ import annotations

import hashlib
import pathlib
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Union

import torch
import transformers
from transformers.cache_utils import Cache as AnyCache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from ._export import prefill, save_cache, save_session
from ._tensors import rows_of, shape_of
from .cache import Cache
from .enums import NumberType, Status
from .errors import BadStateError, UnsupportedError, bad_argument
from .options import CacheOptions, Path, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "KvasirCache", "attention", "identity_of", "prefill", "save_cache", "save_session", "shape_of",
]


class KvasirCache(AnyCache):  # type: ignore[misc]
    """Cache of transformers whose keys and values are in a kvasir.Cache, `store`.

    Only the attention function "kvasir" can read them, so the model must use it.
    """

    @takes(CacheOptions)
    def __init__(
        self,
        model: Any,
        *,
        max_tokens: Optional[int] = None,
        identity: bytes = bytes(32),
        **options: Unpack[CacheOptions],
    ) -> None:
        """Creates an empty cache for a model.

        max_tokens: maximum length; left out: the model's context
        identity: 32 bytes that name the weights, such as those of identity_of
        """
        self._hold(model, Cache(shape_of(model, max_tokens, identity), **options))

    @classmethod
    @takes(CacheOptions)
    def load(
        cls,
        model: Any,
        path: Path,
        *,
        max_tokens: Optional[int] = None,
        identity: bytes = bytes(32),
        verify: bool = False,
        **options: Unpack[CacheOptions],
    ) -> KvasirCache:
        """Creates a cache from a file of save or save_cache by mapping it.

        max_tokens, identity: as in KvasirCache
        verify: True: verify the whole file now, not each page at its first use

        Raises ModelMismatchError (the model has another shape or identity).
        """
        cache = cls.__new__(cls)
        store = Cache.load(shape_of(model, max_tokens, identity), path, verify=verify, **options)
        cache._hold(model, store)
        return cache

    def _hold(self, model: Any, store: Cache) -> None:
        if model.config._attn_implementation != "kvasir":
            store.close()
            raise bad_argument(
                'the model has another attention: call model.set_attn_implementation("kvasir")'
            )
        self.store = store
        self._tokens: int = store.stats().tokens  # of complete steps
        self._step = 0  # tokens of the incomplete step
        self._updated: List[int] = []  # its layers
        self._unattended: Optional[int] = None  # layer
        super().__init__(layers=[_Layer(self, i) for i in range(store.shape.layers)])

    def __repr__(self) -> str:
        return f"<kvasir.transformers.KvasirCache: {self.store!r}>"

    def save(self, path: Path) -> None:
        """Writes a file that load maps."""
        self.store.save(path)

    def truncate(self, tokens: int) -> None:
        """Truncates the cache to its first tokens, also after a failed forward pass."""
        self.store.truncate(tokens)
        self._tokens, self._step, self._updated, self._unattended = tokens, 0, [], None

    def reset(self) -> None:
        """Truncates the cache to no tokens."""
        self.truncate(0)

    def _take(self, layer: int, keys: Any, values: Any) -> None:
        if self._unattended is not None:
            raise BadStateError(
                f"layer {self._unattended} has another attention than Kvasir's", Status.BAD_STATE
            )
        k, number = rows_of(keys)
        v, _ = rows_of(values)
        self.store.update(layer, k, v, number_type=number)
        self._unattended, self._step = layer, k.shape[0]
        self._updated.append(layer)
        if len(self._updated) == self.store.shape.layers:
            self._tokens, self._step, self._updated = self._tokens + self._step, 0, []

    def _attend(self, layer: int, query: Any, scale: float, softcap: float) -> Any:
        q, number = rows_of(query)
        out = self.store.attention(layer, q, number_type=number, scale=scale, softcap=softcap)
        self._unattended = None
        bits = out.view("int16") if number == NumberType.BF16 else out
        result = torch.from_numpy(bits).view(query.dtype)
        return result.unsqueeze(0).to(query.device)  # [1][tokens][heads][head_dim]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers needs of one layer."""

    is_initialized = True

    def __init__(self, cache: KvasirCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        pass

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Tuple[Any, Any]:
        """Returns the step's own tensors. The attention function finds the cache by them."""
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
        raise UnsupportedError("a Kvasir cache has one sequence; use truncate", Status.UNSUPPORTED)

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    softcap: Optional[float] = None,
    **others: Any,
) -> Tuple[Any, None]:
    """Attention interface of transformers.

    query: [1][heads][tokens][head_dim]; the output: [1][tokens][heads][head_dim]
    """
    link = getattr(key, "kvasir", None)
    if link is None:
        raise BadStateError(
            "Kvasir's attention needs cache=KvasirCache(model)", Status.BAD_STATE
        )
    cache, layer = link
    del key.kvasir  # the tensor does not keep the cache
    names = ("sliding_window", "s_aux", "position_bias", "head_mask")
    refused = [name for name in names if others.get(name) is not None]
    refused += ["mask"] if attention_mask is not None else []
    refused += ["dropout"] if dropout else []
    refused += ["gradients"] if query.requires_grad else []
    refused += ["is_causal=False"] if others.get("is_causal") is False else []
    if refused:
        raise UnsupportedError(
            f"Kvasir's attention is causal, for inference, over all: no {', '.join(refused)}",
            Status.UNSUPPORTED,
        )
    return cache._attend(layer, query, scaling or 0.0, softcap or 0.0), None


def _mask(batch_size: int, mask_function: Any, attention_mask: Any = None, **_: Any) -> None:
    """Makes no mask, because the cache's attention is causal. Refuses any other mask."""
    padded = attention_mask is not None and not bool(attention_mask.all())
    if mask_function is not causal_mask_function or padded or batch_size != 1:
        raise UnsupportedError(
            "Kvasir's attention is causal over one sequence: no padding, sliding window, packing "
            "or batch",
            Status.UNSUPPORTED,
        )


transformers.AttentionInterface.register("kvasir", attention)
transformers.AttentionMaskInterface.register("kvasir", _mask)


def identity_of(path: Union[str, "pathlib.Path"]) -> bytes:
    """Returns a name for weights: the SHA-256 of a file, or of the *.safetensors of a folder.

    The files of a folder count in the order of their names.
    """
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
