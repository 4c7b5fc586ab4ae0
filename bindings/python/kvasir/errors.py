"""Statuses of the library as exceptions."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Type, Union

from . import _abi
from .enums import Status, known
from .results import Answer, Read


class Error(Exception):
    """A call failed, and changed nothing unless its documentation says otherwise. `str(error)` is the library's message, whole."""

    status: Union[Status, int]  # an int where a newer library has a status that this package does not know
    sys_errno: int  # 0 when none
    offset: Optional[int]  # in a file, bytes
    read: Optional[Read] = None  # of prefill and prefill_tokens: how far they came
    answer: Optional[Answer] = None  # of generate: what was made before

    def __init__(self, message: str, status: int = Status.INTERNAL, sys_errno: int = 0, offset: Optional[int] = None) -> None:
        super().__init__(message)
        self.status, self.sys_errno, self.offset = known(Status, status), sys_errno, offset

    @property
    def is_stale(self) -> bool:
        """True for a saved document of another version or model: delete it and read again, nothing is broken."""
        return bool(_abi.lib.kv_status_is_stale(int(self.status)))

    def __reduce__(self) -> Tuple[Any, ...]:  # with its status through pickle, as process pools do it
        return type(self), (str(self), int(self.status), self.sys_errno, self.offset)


class Cancelled(Error):
    """A cancel token fired, or a callback returned something true."""


class BadArgument(Error, ValueError):
    """An argument out of its range, or a handle that is closed."""


class Busy(Error):
    """Another call on this session, cache or library is running."""


class BadState(Error):
    """The call does not fit what happened before."""


class NoMemory(Error, MemoryError):
    """Memory ran out."""


class Limit(Error):
    """A limit of the system or of the options."""


class IoError(Error, OSError):
    """Reading or writing failed; `errno` says how."""

    def __init__(self, message: str, status: int = Status.IO, sys_errno: int = 0, offset: Optional[int] = None) -> None:
        super().__init__(message, status, sys_errno, offset)
        self.errno = sys_errno or None


class NoSpace(IoError):
    """Disk full, quota or file size limit."""


class NotFound(IoError, FileNotFoundError):
    """There is no such file, folder, document or device."""


class Permission(IoError, PermissionError):
    """Not allowed."""


class NotACache(Error):
    """The file is something else."""


class Version(Error):
    """Written by a newer library: stale."""


class Corrupt(Error):
    """Damaged; `offset` says where."""


class ModelMismatch(Error):
    """A saved document of another model: stale."""


class Unsupported(Error):
    """A good file with something that the library does not do; the message names it."""


class ContextFull(Error):
    """The model's or the session's context length is reached."""


class Internal(Error):
    """A bug in Kvasir."""


class DeviceError(Error):
    """A GPU failed or was lost: close the sessions and the model that use it."""


_CLASSES: Dict[int, Type[Error]] = {
    Status.CANCELLED: Cancelled, Status.BAD_ARGUMENT: BadArgument, Status.BUSY: Busy, Status.BAD_STATE: BadState,
    Status.NO_MEMORY: NoMemory, Status.LIMIT: Limit, Status.IO: IoError, Status.NO_SPACE: NoSpace, Status.NOT_FOUND: NotFound,
    Status.PERMISSION: Permission, Status.NOT_A_CACHE: NotACache, Status.VERSION: Version, Status.CORRUPT: Corrupt,
    Status.MODEL_MISMATCH: ModelMismatch, Status.UNSUPPORTED: Unsupported, Status.CONTEXT_FULL: ContextFull,
    Status.INTERNAL: Internal, Status.DEVICE: DeviceError,
}


def status_text(status: int) -> str:
    """A short English text for a status, "unknown status" for others."""
    text: bytes = _abi.lib.kv_status_text(status)
    return text.decode()


def error_of(error: _abi.kv_error) -> Error:
    offset = None if error.offset == _abi.NO_OFFSET else int(error.offset)
    kind = _CLASSES.get(error.status, Error)
    return kind(error.message.decode("utf-8", "replace"), error.status, error.sys_errno, offset)


def bad_argument(message: str) -> BadArgument:
    return BadArgument(message, Status.BAD_ARGUMENT)
