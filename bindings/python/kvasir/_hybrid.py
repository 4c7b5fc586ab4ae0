"""Windows and states of a DynamicCache of transformers.

A layer of the cache keeps keys and values of all tokens, or of a window, or a state, or both. What
is no key or value of all tokens cannot go back: a Snapshot has it at an earlier token.
"""
from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from transformers.cache_utils import DynamicLayer

from ._tensors import NUMBERS, numbers_of, tensor_rows
from .cache import Cache, CacheShape
from .checkpoint import Checkpoint, LayerState
from .enums import StateLayout, Status
from .errors import UnsupportedError

try:
    from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin
except ImportError:  # an older version, without hybrid caches
    DummyLayer = LinearAttentionCacheLayerMixin = DynamicLayer

_SNAPSHOT = "_kvasir_snapshot"  # attribute of a cache
# GGUF files of these architectures interleave the two halves of a key that transformers rotates.
_INTERLEAVED = frozenset("granite granitehybrid granitemoe llama mistral3 smollm3".split())
_MAMBA = frozenset("falcon-h1 granitehybrid nemotron_h nemotron_h_moe".split())
_TILED_HEADS = frozenset("qwen35 qwen35moe".split())  # order of value heads in the GGUF file

Gather = Callable[[Any], Any]


class LayerCopy(NamedTuple):
    """A layer's window, [1][heads][rows][head_dim], and its state; None: it has none."""

    keys: Any
    values: Any
    inputs: Any  # of the convolution, [1][channels][taps - 1]
    matrices: Any  # [1][heads][rows][columns]


class Snapshot(NamedTuple):
    tokens: int
    layers: List[LayerCopy]


def is_windowed(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def has_state(layer: Any) -> bool:
    return hasattr(layer, "conv_states")


def has_all_keys(layer: Any) -> bool:
    """Whether it keeps the keys of all tokens. A layer that shares another's keys has none."""
    return getattr(layer, "keys", None) is not None and not is_windowed(layer)


def check_layers(cache: Any) -> None:
    """Raises UnsupportedError for layers that keep tokens in another order, or not as numbers."""
    known = (DynamicLayer, LinearAttentionCacheLayerMixin, DummyLayer)
    for layer in cache.layers:
        name = type(layer).__name__
        if not isinstance(layer, known) or "Static" in name or "Quantized" in name:
            raise UnsupportedError(
                f"the cache has a {name}: use DynamicCache(config=model.config)",
                Status.UNSUPPORTED,
            )


def needs_snapshot(cache: Any) -> bool:
    return any(is_windowed(layer) or has_state(layer) for layer in cache.layers)


def snapshot(cache: Any) -> Snapshot:
    """Copies what the layers keep now."""
    return Snapshot(cache.get_seq_length(), [_copy(layer) for layer in cache.layers])


def remember(cache: Any) -> None:
    setattr(cache, _SNAPSHOT, snapshot(cache))


def remembered(cache: Any) -> Optional[Snapshot]:
    found: Optional[Snapshot] = getattr(cache, _SNAPSHOT, None)
    return found


def snapshot_token(model: Any, cache: Any, tokens: int) -> int:
    """Returns where to copy during the prefill of a sequence of so many tokens.

    The library prefills the tokens after it again. They must reach over the extent in which the
    rows of the windows begin.
    """
    windows: List[int] = [layer.sliding_window for layer in cache.layers if is_windowed(layer)]
    if not windows:
        return max(1, tokens - 128)
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with Cache(CacheShape(1, 1, 1, min(dim, 512), 1), decode="full", threads=1) as cache_of_one:
        page = cache_of_one.stats().page_tokens
    # a window is complete as long as it has dropped nothing
    return max(1, tokens - 17 * page - 64, min(min(windows) - 1, tokens - 1))


def _copy(layer: Any) -> LayerCopy:
    keys = values = inputs = matrices = None
    if is_windowed(layer):
        if getattr(layer, "record_past", False):
            raise UnsupportedError("the cache records past windows", Status.UNSUPPORTED)
        keys, values = (part.detach().clone() for part in (layer.keys, layer.values))
    if has_state(layer):
        if len(layer.conv_states) != 1 or layer.conv_states[0] is None:
            raise UnsupportedError("a layer without one convolution", Status.UNSUPPORTED)
        inputs = layer.conv_states[0].detach()[..., 1:].clone()
        if layer.recurrent_states[0] is not None:
            matrices = layer.recurrent_states[0].detach().clone()
    return LayerCopy(keys, values, inputs, matrices)


def is_interleaved(architecture: str) -> bool:
    return architecture in _INTERLEAVED


def checkpoint(taken: Snapshot, model: Any, architecture: str, gather: Gather) -> Checkpoint:
    """Returns the copy in the layout and order of the GGUF file.

    gather: of [rows][heads of this process][head_dim], the heads of all processes. Every process
        calls it as often.
    """
    states: List[LayerState] = []
    for index, layer in enumerate(taken.layers):
        for layout, array in _arrays(layer, model, architecture, gather):
            if array is not None:
                numbers, kind = numbers_of(array.contiguous())
                states.append(LayerState(index, layout, numbers, kind))
    return Checkpoint(taken.tokens, states)


def _arrays(
    layer: LayerCopy, model: Any, architecture: str, gather: Gather
) -> Iterator[Tuple[StateLayout, Any]]:
    if layer.keys is not None:
        keys, values = gather(tensor_rows(layer.keys)), gather(tensor_rows(layer.values))
        if keys is not None and is_interleaved(architecture):
            keys = interleaved(keys)
        yield StateLayout.KEYS, keys
        yield StateLayout.VALUES, values
    if layer.inputs is None:
        return
    inputs, matrices = _one(layer.inputs), layer.matrices
    if architecture in _TILED_HEADS:
        inputs, matrices = _tiled(inputs, matrices, model.config.get_text_config())
    yield StateLayout.INPUTS, inputs
    if matrices is not None:
        mamba = architecture in _MAMBA
        yield StateLayout.VALUE_KEY if mamba else StateLayout.KEY_VALUE, _one(matrices)


def _one(states: Any) -> Any:
    if states.shape[0] != 1:
        raise UnsupportedError(f"a batch of {states.shape[0]}", Status.UNSUPPORTED)
    return states[0] if states.dtype in NUMBERS else states[0].float()


def _tiled(inputs: Any, matrices: Any, config: Any) -> Tuple[Any, Any]:
    """Orders value heads by their place in a group, as the file has them, and not by group."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    order = torch.arange(heads).view(groups, heads // groups).t().reshape(-1)
    dim, keys = config.linear_value_head_dim, 2 * groups * config.linear_key_head_dim
    values = inputs[keys:].view(heads, dim, -1)[order.to(inputs.device)]
    inputs = torch.cat([inputs[:keys], values.reshape(heads * dim, -1)])
    return inputs, matrices[:, order.to(matrices.device)]


def interleaved(keys: Any) -> Any:
    """Interleaves the two rotated halves of each row."""
    tokens, heads, dim = keys.shape
    return keys.view(tokens, heads, 2, dim // 2).transpose(2, 3).reshape(tokens, heads, dim)
