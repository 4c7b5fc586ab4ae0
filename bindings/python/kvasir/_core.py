"""Handles and calls: pointers, callbacks and exceptions."""
from __future__ import annotations

import os
import signal
import threading
from ctypes import byref, c_void_p
from types import FrameType, TracebackType
from typing import Any, Callable, ClassVar, Optional, Tuple, Type, TypeVar

from . import _abi
from .enums import Phase, known
from .errors import bad_argument, error_of

lib = _abi.lib
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
