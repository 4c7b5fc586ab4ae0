"""What layers with windows and recurrent layers keep at one token of another engine's sequence."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np
import numpy.typing as npt

from . import _abi
from ._values import address, as_uint, number_type_of, sized
from .enums import NumberType, StateLayout
from .errors import bad_argument


@dataclass(frozen=True)
class LayerState:
    """One array of a Checkpoint: float32, float16 or bfloat16, as for a Cache, C-contiguous."""

    layer: int  # of the model, from 0
    layout: StateLayout
    numbers: npt.NDArray[Any]
    number_type: Optional[NumberType] = None


@dataclass(frozen=True)
class Checkpoint:
    """The windows and states after a sequence's first `tokens` tokens.

    states: KEYS and VALUES of each layer with a window, INPUTS of each recurrent layer, and its
        matrices if it has any
    """

    tokens: int
    states: Sequence[LayerState]


def raw(checkpoint: Checkpoint) -> _abi.kv_checkpoint:
    """Returns the struct, which lives no longer than the checkpoint."""
    array: Any = (_abi.kv_layer_state * len(checkpoint.states))()
    for to, state in zip(array, checkpoint.states):
        numbers = state.numbers
        if not isinstance(numbers, np.ndarray):
            raise TypeError(f"numbers is a numpy array, not {type(numbers).__name__}")
        if not numbers.flags.c_contiguous or not numbers.dtype.isnative:
            raise bad_argument("numbers is not contiguous in the CPU's byte order")
        to.layer = as_uint("layer", state.layer, 32)
        to.layout = as_uint("layout", state.layout, 32)
        to.type = number_type_of("numbers", numbers, state.number_type)
        to.numbers, to.count = address(numbers), numbers.size
    struct = sized(_abi.kv_checkpoint)
    struct.count, struct.tokens = len(array), as_uint("tokens", checkpoint.tokens, 64)
    struct.states = ctypes.cast(array, ctypes.c_void_p)
    struct.keep = array  # alive as long as the struct
    return struct
