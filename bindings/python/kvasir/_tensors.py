"""Tensors of transformers as arrays of a kvasir.Cache."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .cache import CacheShape
from .enums import NumberType, Status
from .errors import UnsupportedError

MAX_STEP = 4096  # tokens of one step of a cache
NUMBERS = {
    torch.float32: NumberType.F32, torch.float16: NumberType.F16, torch.bfloat16: NumberType.BF16,
}


def shape_of(
    model: Any, max_tokens: Optional[int] = None, identity: bytes = bytes(32)
) -> CacheShape:
    """Returns the shape of the whole model's cache."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tokens = max_tokens or config.max_position_embeddings
    return CacheShape(config.num_hidden_layers, heads, kv_heads, dim, tokens, identity)


def tensor_rows(states: Any) -> Any:
    """Returns [1][heads][tokens][head_dim] as contiguous rows [tokens][heads][head_dim].

    Most models made the tensor from such rows, so there is no copy.
    """
    if states.shape[0] != 1:
        raise UnsupportedError(
            f"a batch of {states.shape[0]}: a Kvasir cache has one sequence", Status.UNSUPPORTED
        )
    return states.detach()[0].transpose(0, 1).contiguous()


def numbers_of(rows: Any) -> Tuple[Any, NumberType]:
    """Returns the same memory as a numpy array; a GPU's is copied."""
    if rows.dtype not in NUMBERS:
        raise UnsupportedError(f"elements of type {rows.dtype}", Status.UNSUPPORTED)
    number, rows = NUMBERS[rows.dtype], rows.cpu()
    return (rows.view(torch.int16) if number == NumberType.BF16 else rows).numpy(), number


def rows_of(states: Any) -> Tuple[Any, NumberType]:
    """Returns tensor_rows as a numpy array, and its element type."""
    return numbers_of(tensor_rows(states))
