"""Values and structs: arguments and options as the library takes them."""
from __future__ import annotations

import ctypes
import json
import operator
import os
from ctypes import Structure, byref, c_char_p, c_double, c_float, c_size_t, c_void_p
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Type, TypeVar

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Owner, Watch, call, lib
from .enums import LogLevel, NumberType, known
from .errors import bad_argument, error_of

Struct = TypeVar("Struct", bound=Structure)
Result = TypeVar("Result")

_INTEGERS: Tuple[Any, ...] = (ctypes.c_uint32, ctypes.c_uint64)


def as_uint(name: str, value: Any, bits: int) -> int:
    """Checks an unsigned number."""
    number = operator.index(value)
    if not 0 <= number < 2**bits:
        raise bad_argument(f"{name} is {number}: use 0 to 2^{bits} - 1")
    return number


def as_bytes(text: Any) -> bytes:
    """Encodes text for a pointer and a size.

    A str that was decoded with errors="surrogateescape" becomes the bytes that it came from.
    """
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"text is str or bytes, not {type(text).__name__}")


def _no_zero(name: str, encoded: bytes) -> bytes:
    if b"\0" in encoded:  # a C string would end there
        raise bad_argument(f"{name} has a zero byte")
    return encoded


def as_text(name: str, value: Any) -> bytes:
    """Encodes text for a C string."""
    return _no_zero(name, as_bytes(value))


def as_string(name: str, value: Any) -> bytes:
    """Encodes a path or name for a C string."""
    return _no_zero(name, os.fsencode(value))


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns the ids as int32 [count], without a copy where they are that already."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise bad_argument(
            f"tokens are one row of whole numbers, not {array.dtype} {list(array.shape)}"
        )
    if array.dtype != np.int32 and (array.min() < -(2**31) or array.max() >= 2**31):
        raise bad_argument("a token does not fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


def address(array: npt.NDArray[Any]) -> int:
    """Returns the address of the first element."""
    where: int = array.__array_interface__["data"][0]
    return where


_NUMBER_TYPES = {
    "float32": NumberType.F32, "float16": NumberType.F16, "bfloat16": NumberType.BF16,
}


def number_type_of(
    name: str, array: npt.NDArray[Any], number_type: Optional[NumberType]
) -> NumberType:
    """Returns the element type; number_type says what 16-bit integers are."""
    own = _NUMBER_TYPES.get(array.dtype.name)
    if own is None and array.dtype.name in ("uint16", "int16"):
        own = number_type if number_type in (NumberType.F16, NumberType.BF16) else None
    if own is None or number_type not in (None, own):
        raise bad_argument(f"{name} has elements of type {array.dtype.name}")
    return own


# ---- structs ------------------------------------------------------------------------------------


def sized(kind: Type[Struct]) -> Struct:
    """Makes a struct with the library's defaults, or one for the library to fill."""
    struct = kind()
    lib.kv_init(byref(struct), ctypes.sizeof(kind))
    return struct


def check_names(known: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that is not in the TypedDict `known`."""
    for name in options:
        if name not in known.__annotations__:
            names = ", ".join(sorted(known.__annotations__))
            raise TypeError(f"unexpected option {name!r}; there are {names}")


def fill(kind: Type[Struct], known: Any, options: Mapping[str, Any]) -> Struct:
    """Makes a struct with these options, whose names are those of the TypedDict `known`.

    Options that the struct has no field for, such as cancel, are left to control(). The struct
    keeps alive what it points to.
    """
    check_names(known, options)
    struct = sized(kind)
    fields: Dict[str, Any] = {field[0]: field[1] for field in kind._fields_}
    for name, value in options.items():
        if name in _FLAGS:
            struct.flags |= _FLAGS[name] if value else 0
        elif name in _SPECIAL:
            _SPECIAL[name](struct, value)
        elif name in fields:
            setattr(struct, name, _as_field(name, fields[name], value))
    return struct


def control(options: Mapping[str, Any], watch: Optional[Watch] = None, flags: int = 0) -> Any:
    """Makes the kv_control of a call from the options cancel and progress."""
    struct: Any = sized(_abi.kv_control)
    struct.flags = flags
    cancel = options.get("cancel")
    if cancel is not None:
        struct.owner = cancel._live()  # for as long as the struct is there
        struct.cancel = struct.owner._as_parameter_
    if watch is not None:
        struct.progress = watch.progress(options.get("progress"))
    return struct


def _as_field(name: str, kind: Any, value: Any) -> Any:
    if kind in _INTEGERS:
        return as_uint(name, value, 8 * ctypes.sizeof(kind))
    if kind in (c_float, c_double):
        return float(value)
    return as_string(name, value)


def _set_log(struct: Any, log: Optional[Callable[..., object]]) -> None:
    if log is None:
        return

    def line(level: int, message: bytes, _user: object) -> None:
        log(known(LogLevel, level), message.decode("utf-8", "replace"))

    struct.log = struct.callback = _abi.LOG_FN(line)


def _set_stop(struct: Any, stop: Any) -> None:
    if isinstance(stop, (str, bytes)):
        raise TypeError("stop is a sequence of strings, not one string")
    strings = [as_text("a stop string", s) for s in stop]
    struct.stop = (c_char_p * len(strings))(*strings)
    struct.stop_count = len(strings)


def _set_instructions(struct: Any, instructions: Any) -> None:
    if instructions is not None:
        struct.instructions = as_text("instructions", instructions)


def _set_strategy(field: str) -> Callable[[Any, Any], None]:
    def set_strategy(struct: Any, strategy: Any) -> None:
        if strategy is None:
            return
        owner = strategy_owner(strategy) if isinstance(strategy, str) else strategy._owner()
        setattr(struct, field, owner._as_parameter_)
        setattr(struct, field + "_owner", owner)  # for as long as the struct is there

    return set_strategy


_FLAGS: Dict[str, int] = {
    "special": _abi.TOKENIZE_SPECIAL,
    "keep_turn": _abi.KEEP_TURN,
    "trace_passages": _abi.TRACE_PASSAGES,
    "keep_thinking": _abi.KEEP_THINKING,
    "vocabulary_only": _abi.VOCABULARY_ONLY,
    "plan_drafts": _abi.PLAN_DRAFTS,
    "no_lookup": _abi.NO_LOOKUP,
}

_SPECIAL: Dict[str, Callable[[Any, Any], None]] = {
    "log": _set_log,
    "stop": _set_stop,
    "on_thinking": lambda struct, value: None,  # Question has the callback
    "instructions": _set_instructions,
    "decode": _set_strategy("decode"),
    "prefill": _set_strategy("prefill"),
}


def log_of(struct: Any) -> Tuple[object, ...]:
    """Returns what must outlive the handle that was opened with these options."""
    return (struct.callback,) if struct.log else ()


def result_of(kind: Type[Result], struct: Any, **more: Any) -> Result:
    """Makes a dataclass from the fields of a struct that it has; nanoseconds become seconds."""
    made: Dict[str, Any] = dict(more)
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        if name.endswith("_ns"):
            name, value = name[:-3] + "_seconds", value / 1e9
        if name not in made and name in kind.__annotations__:
            made[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return kind(**made)


# ---- strategies and JSON ------------------------------------------------------------------------


def strategy_owner(name: str) -> Owner:
    """Creates a kv_strategy."""
    pointer = c_void_p()
    owner = Owner(pointer, lib.kv_strategy_destroy, ())
    call(lib.kv_strategy_create, as_string("strategy", name), byref(pointer))
    return owner


def json_of(function: Callable[..., int], owner: Owner) -> Dict[str, Any]:
    """Parses what kv_session_stats_json and kv_cache_stats_json write, however long it is."""
    size = c_size_t(16384)
    while True:
        room = ctypes.create_string_buffer(size.value)
        error = _abi.kv_error()
        if function(owner, room, len(room), byref(size), byref(error)) == 0:
            result: Dict[str, Any] = json.loads(room.value)
            return result
        if size.value <= len(room):
            raise error_of(error)
