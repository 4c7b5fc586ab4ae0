"""Parts that all handles and calls share: pointers, options, callbacks and exceptions."""
from __future__ import annotations

import ctypes
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
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Handle")


class Owner:
    """Pointer of the library, freed with the last reference to this object.

    A handle holds one reference, and so does a running call. So close() may come at any time from
    any thread, without a lock: the pointer is freed when nothing uses it. `keep` is what callbacks
    of the pointer need.
    """

    __slots__ = ("_as_parameter_", "_free", "_getpid", "process", "keep")

    def __init__(
        self, pointer: c_void_p, free: Callable[[c_void_p], None], keep: Tuple[object, ...]
    ) -> None:
        self._as_parameter_, self._free, self.keep = pointer, free, keep
        self._getpid = os.getpid  # modules may be gone when the interpreter ends
        self.process = os.getpid()

    def __del__(self) -> None:
        if self._getpid() == self.process:  # after os.fork the parent owns the pointer's threads
            self._free(self._as_parameter_)


class Handle:
    """Object that is open until close(), the end of its `with` block, or its last reference."""

    _kind: ClassVar[str]
    _free: ClassVar[str]
    _owner: Optional[Owner] = None

    def _new(self, *keep: object) -> Any:
        """Returns where the library writes the pointer.

        The pointer has its owner before it is written, so no exception can leak it.
        """
        pointer = c_void_p()
        self._owner = Owner(pointer, getattr(lib, self._free), keep)
        return byref(pointer)

    @classmethod
    def _empty(cls: Type[Self]) -> Self:
        """Makes a handle for _new without the constructor."""
        return cls.__new__(cls)

    def _live(self) -> Owner:
        """Returns the owner, which a call holds while the library uses the pointer."""
        owner = self._owner
        if owner is None:
            raise bad_argument(f"the {self._kind} is closed")
        if owner.process != os.getpid():
            raise bad_argument(f"the {self._kind} belongs to the parent of this process")
        return owner

    def close(self) -> None:
        """Closes the handle. A second close does nothing.

        A call that runs in another thread ends first; then the memory is freed.
        """
        self._owner = None

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._owner is None

    def _about(self) -> str:
        """Describes an open handle for repr."""
        return "open"

    def __repr__(self) -> str:
        if self._owner is None:
            about = "closed"
        elif self._owner.process != os.getpid():
            about = "of another process"
        else:
            about = self._about()
        return f"<kvasir.{type(self).__name__}: {about}>"

    def __enter__(self: Self) -> Self:
        self._live()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


class Cancel(Handle):
    """Cancel token: fire() stops the calls that have it within 100 ms. They raise Cancelled."""

    _kind, _free = "cancel token", "kv_cancel_release"

    def __init__(self) -> None:
        """Creates a token. NoMemoryError."""
        call(lib.kv_cancel_create, self._new())

    def fire(self) -> None:
        """Fires the token: from any thread or a signal handler, any number of times."""
        lib.kv_cancel_fire(self._live())

    def reset(self) -> None:
        """Makes a fired token usable again. A call that has seen it fired stays cancelled."""
        lib.kv_cancel_reset(self._live())


def call(function: Callable[..., int], *arguments: object) -> None:
    """Makes a short call and raises what the library reports."""
    error = _abi.kv_error()
    if function(*arguments, byref(error)) != 0:
        raise error_of(error)


class Watch:
    """One long call. An exception of its callbacks stops the call and comes out of it.

    So does Ctrl-C in the main thread. Python's own handler would wait for the end of the call, or
    raise where a callback begins, from where no exception gets out.
    """

    def __init__(self) -> None:
        self.stopped: Optional[BaseException] = None
        self.interrupted = False

    def run(self, function: Callable[..., int], *arguments: object) -> None:
        """Makes the call."""
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
        """Runs a callback and returns its result for C: 0 continues."""
        try:
            return 1 if self.interrupted or function(*arguments) else 0
        except BaseException as error:
            self.stopped = self.stopped or error
            return 1

    def progress(self, function: Optional[Callable[..., object]]) -> object:
        """Makes the kv_progress_fn. Every long call has one, because Ctrl-C needs it."""

        def report(phase: int, done: int, total: int, _user: object) -> int:
            return self.callback(
                lambda: function is not None and function(known(Phase, phase), done, total)
            )

        return _abi.PROGRESS_FN(report)

    def _catch_interrupt(self) -> Any:
        """Replaces Python's handler of Ctrl-C and returns it.

        Returns None where Ctrl-C does not interrupt this thread or has another handler.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        before = signal.getsignal(signal.SIGINT)
        own = getattr(before, "__func__", None) is Watch._interrupt
        if before is not signal.default_int_handler and not own:
            return None
        signal.signal(signal.SIGINT, self._interrupt)
        return before

    def _interrupt(self, _number: int, _frame: Optional[FrameType]) -> None:
        self.interrupted = True


# ---- values -------------------------------------------------------------------------------------

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
}

_SPECIAL: Dict[str, Callable[[Any, Any], None]] = {
    "log": _set_log,
    "stop": _set_stop,
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
