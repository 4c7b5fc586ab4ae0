"""Named numbers of the header."""
from __future__ import annotations

import enum
from typing import Type, TypeVar, Union

Kind = TypeVar("Kind", bound=enum.IntEnum)


def known(kind: Type[Kind], number: int) -> Union[Kind, int]:
    """Returns the member, or the number itself where a newer library has one more."""
    try:
        return kind(number)
    except ValueError:
        return number


class Status(enum.IntEnum):
    """Status code of a call: kv_status. Numbers never change."""

    OK = 0
    CANCELLED = 1
    BAD_ARGUMENT = 2
    BUSY = 3
    BAD_STATE = 4
    NO_MEMORY = 5
    LIMIT = 6
    IO = 7
    NO_SPACE = 8
    NOT_FOUND = 9
    PERMISSION = 10
    NOT_A_CACHE = 11
    VERSION = 12
    CORRUPT = 13
    MODEL_MISMATCH = 14
    UNSUPPORTED = 15
    CONTEXT_FULL = 16
    INTERNAL = 17
    DEVICE = 18


class LogLevel(enum.IntEnum):
    """Level of a log line."""

    WARNING = 1
    INFO = 2


class Phase(enum.IntEnum):
    """Work that a progress report is about; the comments name the unit of done and total."""

    OPEN = 1  # never reported by this version
    PREFILL = 2  # tokens
    SAVE = 3  # bytes written
    VERIFY = 4  # bytes verified
    PREPARE = 5  # steps of building what the strategy needs besides the KV cache
    PACK = 6  # bytes of the document packed
    UNPACK = 7  # bytes of the document restored


class Precision(enum.IntEnum):
    """How the KV cache is stored."""

    INT8 = 0  # int8 pages behind a full-precision window
    F32 = 1  # float32 throughout, full attention: the reference, 7 times the memory


class StopReason(enum.IntEnum):
    """Why an answer ended."""

    END_OF_TURN = 1
    STRING = 2
    MAX_TOKENS = 3
    CONTEXT_FULL = 4
    CANCELLED = 5


class Thinking(enum.IntEnum):
    """Whether a model thinks before it answers. The option thinking takes a bool as well."""

    OFF = 0  # marks before the answer skip the thought
    ON = 1  # marks before the answer begin one


class NumberType(enum.IntEnum):
    """Element type of the arrays of a Cache."""

    F32 = 0
    F16 = 1
    BF16 = 2


class StateLayout(enum.IntEnum):
    """Order of the numbers of a LayerState. Channels and heads: as in the model's file."""

    KEYS = 0  # of a layer with a sliding window, [rows][kv_heads][head_dim] after RoPE
    VALUES = 1  # likewise
    INPUTS = 2  # of a convolution, [channels][taps - 1], the newest last
    KEY_VALUE = 3  # matrices of a gated delta net, [heads][key_dim][value_dim]
    VALUE_KEY = 4  # matrices of Mamba-2, [heads][value_dim][key_dim]


class GpuUse(enum.IntFlag):
    """What a GPU does in a session. With several GPUs a bit is set only if it holds for all."""

    OUTPUT = 1  # it computes the output layer
    ATTENDS = 2  # it attends alone in its layers
    COEXECUTES = 4  # CPU and GPU attend each layer together
    READS_PAGES = 8  # it reads pinned host memory; otherwise the CPU stages pages


class Param(enum.IntEnum):
    """Parameter of a strategy: kv_param. kvasir.experimental has those from 1000 on."""

    BUDGET_TOKENS = 1
    BUDGET_FRACTION = 2
    DENSE_LAYERS = 3
    SHARE_HEADS = 4
    ALPHA = 5
    COVERAGE = 6
    SELECT_TOKENS = 7
    EXACT_TOKENS = 8
