"""Numbers of the header that have names."""
from __future__ import annotations

import enum
from typing import Type, TypeVar, Union

Kind = TypeVar("Kind", bound=enum.IntEnum)


def known(kind: Type[Kind], number: int) -> Union[Kind, int]:
    """The number itself where a newer library has one that this package does not know."""
    try:
        return kind(number)
    except ValueError:
        return number


class Status(enum.IntEnum):
    """Why a call failed: the kv_status of the C library. Numbers never change."""

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
    WARNING = 1
    INFO = 2


class Phase(enum.IntEnum):
    OPEN = 1  # bytes of the model file checked
    PREFILL = 2  # tokens read
    SAVE = 3  # bytes written
    VERIFY = 4  # bytes checked
    PREPARE = 5  # steps of making what a strategy needs beside keys and values
    PACK = 6  # bytes of the document packed
    UNPACK = 7  # bytes of the document restored


class KvType(enum.IntEnum):
    INT8 = 0  # int8 pages behind a full-precision window
    F32 = 1  # everything in full precision, attended in full: the reference


class FilterWindow(enum.IntEnum):
    LAST = 0
    EXPONENTIAL = 1
    UNIFORM = 2


class BudgetSchedule(enum.IntEnum):
    UNIFORM = 0
    LINEAR = 1
    PYRAMID = 2


class StopReason(enum.IntEnum):
    END_OF_TURN = 1
    STRING = 2
    MAX_TOKENS = 3
    CONTEXT_FULL = 4
    CANCELLED = 5


class NumberType(enum.IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
