"""What all handles and calls have in common: who frees a pointer, how options are checked, how exceptions cross the library."""
from __future__ import annotations

import ctypes
import functools
import json
import operator
import os
import signal
import threading
from ctypes import Structure, byref, c_char_p, c_double, c_float, c_size_t, c_void_p
from types import FrameType, TracebackType
from typing import Any, Callable, ClassVar, Dict, Mapping, Optional, Tuple, Type, TypeVar

import numpy as np
import numpy.typing as npt

from . import _abi
from .enums import LogLevel, Phase, known
from .errors import bad_argument, error_of

lib = _abi.lib
Struct = TypeVar("Struct", bound=Structure)
Self = TypeVar("Self", bound="Handle")


class Owner:
    """A pointer of the library, freed with the last reference to this. A handle holds one and a call that runs another: so close() may come at any
    time from any thread, without a lock, and frees when nothing uses the pointer. `keep` is what callbacks of the pointer need."""

    __slots__ = ("_as_parameter_", "_free", "_getpid", "process", "keep")

    def __init__(self, pointer: c_void_p, free: Callable[[c_void_p], None], keep: Tuple[object, ...]) -> None:
        self._as_parameter_, self._free, self.keep = pointer, free, keep
        self._getpid = os.getpid  # modules may be gone when the interpreter ends
        self.process = os.getpid()

    def __del__(self) -> None:
        if self._getpid() == self.process:  # after os.fork the threads of the pointer are the parent's
            self._free(self._as_parameter_)


class Handle:
    """Something that is open until close(), the end of its `with` block, or its last reference."""

    _kind: ClassVar[str]
    _free: ClassVar[str]
    _owner: Optional[Owner] = None

    def _new(self, *keep: object) -> Any:
        """Where the library writes the pointer. It is owned before it is written, so that nothing that is raised can lose it."""
        pointer = c_void_p()
        self._owner = Owner(pointer, getattr(lib, self._free), keep)
        return byref(pointer)

    @classmethod
    def _empty(cls: Type[Self]) -> Self:
        """A handle for _new, past the constructor."""
        return cls.__new__(cls)

    def _live(self) -> Owner:
        """To be held while the library uses the pointer."""
        owner = self._owner
        if owner is None:
            raise bad_argument(f"the {self._kind} is closed")
        if owner.process != os.getpid():
            raise bad_argument(f"the {self._kind} belongs to the process that opened it, not to a fork of that")
        return owner

    def close(self) -> None:
        """Ends the use of this handle; a second time does nothing. A call that runs in another thread ends first, then memory is freed."""
        self._owner = None

    @property
    def closed(self) -> bool:
        return self._owner is None

    def __enter__(self: Self) -> Self:
        self._live()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()


class Cancel(Handle):
    """Stops the calls it was given to within 100 ms, from any thread or a signal handler; they raise Cancelled."""

    _kind, _free = "cancel token", "kv_cancel_release"

    def __init__(self) -> None:
        call(lib.kv_cancel_create, self._new())

    def fire(self) -> None:
        lib.kv_cancel_fire(self._live())

    def reset(self) -> None:
        """Makes it usable again. A call that has seen it fired stays cancelled."""
        lib.kv_cancel_reset(self._live())


def call(function: Callable[..., int], *arguments: object) -> None:
    """A short call: raises what the library reports."""
    error = _abi.kv_error()
    if function(*arguments, byref(error)) != 0:
        raise error_of(error)


class Watch:
    """A call that takes long. What its callbacks raise stops it and comes out of it, and so does Ctrl-C in the main thread, where Python's own
    handler would wait for the end of the call or raise where a callback begins, from where no exception gets out."""

    def __init__(self) -> None:
        self.stopped: Optional[BaseException] = None
        self.interrupted = False

    def run(self, function: Callable[..., int], *arguments: object) -> None:
        error = _abi.kv_error()
        before = self._catch_interrupt()
        try:
            status = function(*arguments, byref(error))
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
        if self.stopped is not None:
            stopped, self.stopped = self.stopped, None
            try:
                raise stopped
            finally:
                del stopped  # or its traceback and this frame would keep each other
        if self.interrupted:
            raise KeyboardInterrupt
        if status != 0:
            raise error_of(error)

    def callback(self, function: Callable[..., object], *arguments: object) -> int:
        """The answer of a C callback: 0 to go on."""
        try:
            return 1 if self.interrupted or function(*arguments) else 0
        except BaseException as error:
            self.stopped = self.stopped or error
            return 1

    def progress(self, function: Optional[Callable[..., object]]) -> object:
        """The callback for kv_progress_fn, of every long call, for the sake of Ctrl-C."""
        def report(phase: int, done: int, total: int, _user: object) -> int:
            return self.callback(lambda: function is not None and function(known(Phase, phase), done, total))

        return _abi.PROGRESS_FN(report)

    def _catch_interrupt(self) -> Any:
        """Python's handler, to be put back; None where Ctrl-C does not interrupt this thread, or somebody else handles it."""
        if threading.current_thread() is not threading.main_thread():
            return None
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler and getattr(before, "__func__", None) is not Watch._interrupt:
            return None
        signal.signal(signal.SIGINT, self._interrupt)
        return before

    def _interrupt(self, _number: int, _frame: Optional[FrameType]) -> None:
        self.interrupted = True


# ---- values -----------------------------------------------------------------------------------------------------------------

_INTEGERS: Tuple[Any, ...] = (ctypes.c_uint32, ctypes.c_uint64)


def as_uint(name: str, value: Any, bits: int) -> int:
    number = operator.index(value)
    if not 0 <= number < 2**bits:
        raise bad_argument(f"{name} is {number}: it is a number from 0 to 2^{bits} - 1")
    return number


def as_bytes(text: Any) -> bytes:
    """Text for a pointer and a size. A str that was read with errors="surrogateescape" gives the bytes it was read from."""
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"text is str or bytes, not {type(text).__name__}")


def as_string(name: str, value: Any) -> bytes:
    """A path or name for a C string, in which nothing may be lost behind a zero."""
    encoded = os.fsencode(value)
    if b"\0" in encoded:
        raise bad_argument(f"{name} has a zero byte")
    return encoded


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """The ids as int32 [count], without a copy where they are that."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise bad_argument(f"tokens are one row of whole numbers, not {array.dtype} {list(array.shape)}")
    if array.dtype != np.int32 and (array.min() < -(2**31) or array.max() >= 2**31):
        raise bad_argument("a token does not fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


def address(array: npt.NDArray[Any]) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


# ---- structs ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _defaults(kind: Type[Structure]) -> bytes:
    """What the struct's init function writes."""
    struct = kind()
    getattr(lib, kind.__name__ + "_init")(byref(struct), ctypes.sizeof(kind))
    return bytes(struct)


def sized(kind: Type[Struct]) -> Struct:
    """A struct for the library to fill."""
    struct = kind()
    struct.struct_size = ctypes.sizeof(kind)
    return struct


def fill(kind: Type[Struct], known: Any, options: Mapping[str, Any], watch: Optional[Watch] = None) -> Struct:
    """The library's defaults and these options, whose names are those of the TypedDict `known`. The struct keeps alive what it points to."""
    struct = kind.from_buffer_copy(_defaults(kind))
    struct.struct_size = ctypes.sizeof(kind)
    fields: Dict[str, Any] = {field[0]: field[1] for field in kind._fields_}
    for name, value in options.items():
        if name not in known.__annotations__:
            raise TypeError(f"unexpected option {name!r}; there are {', '.join(sorted(known.__annotations__))}")
        if name in _SPECIAL:
            _SPECIAL[name](struct, value)
        else:
            setattr(struct, name, _as_field(name, fields[name], value))
    if watch is not None:
        struct.progress = watch.progress(options.get("progress"))
    return struct


def _as_field(name: str, kind: Any, value: Any) -> Any:
    if kind in _INTEGERS:
        return as_uint(name, value, 8 * ctypes.sizeof(kind))
    if kind in (c_float, c_double):
        return float(value)
    return as_string(name, value)


def _set_cancel(struct: Any, cancel: Optional[Cancel]) -> None:
    if cancel is not None:
        owner = cancel._live()
        struct.cancel = owner._as_parameter_
        struct.owner = owner  # for as long as the struct is there


def _set_log(struct: Any, log: Optional[Callable[..., object]]) -> None:
    if log is None:
        return
    def line(level: int, message: bytes, _user: object) -> None:
        log(known(LogLevel, level), message.decode("utf-8", "replace"))

    struct.log = struct.callback = _abi.LOG_FN(line)


def _set_stop(struct: Any, stop: Any) -> None:
    if isinstance(stop, (str, bytes)):
        raise TypeError("stop is several strings, not one")
    strings = [as_bytes(s) for s in stop]
    if any(b"\0" in s for s in strings):
        raise bad_argument("a stop string has a zero byte")
    struct.stop = (c_char_p * len(strings))(*strings)
    struct.stop_count = len(strings)


def _set_special(struct: Any, special: Any) -> None:
    struct.flags |= _abi.TOKENIZE_SPECIAL if special else 0


_SPECIAL: Dict[str, Callable[[Any, Any], None]] = {
    "cancel": _set_cancel, "log": _set_log, "stop": _set_stop, "special": _set_special, "progress": lambda _struct, _function: None,
}


def log_of(struct: Any) -> Tuple[object, ...]:
    """What has to outlive the handle that was opened with these options."""
    return (struct.callback,) if struct.log else ()


def values(struct: Any) -> Dict[str, Any]:
    """A filled struct without its sizes."""
    result = {}
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        result[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    del result["struct_size"]
    result.pop("reserved", None)
    return result


def json_of(function: Callable[..., int], owner: Owner) -> Dict[str, Any]:
    """What kv_stats and kv_cache_stats write, however long it has become."""
    size = c_size_t(16384)
    while True:
        room = ctypes.create_string_buffer(size.value)
        error = _abi.kv_error()
        if function(owner, room, len(room), byref(size), byref(error)) == 0:
            result: Dict[str, Any] = json.loads(room.value)
            return result
        if size.value <= len(room):
            raise error_of(error)
