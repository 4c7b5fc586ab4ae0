"""Status codes as exceptions."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Type, Union

from . import _abi
from .enums import Status, known
from .results import Answer, PrefillResult


class Error(Exception):
    """Failure of a call. `str(error)` is the library's message.

    A failed call changed nothing, unless its documentation says otherwise. Attributes:

    status: a Status; a plain int where a newer library has a status that this package lacks
    sys_errno: the system's error number; 0: none
    offset: the place in a file, in bytes; None: none
    prefilled: of Session.prefill and prefill_tokens: a PrefillResult, what was appended
    answer: of Session.ask and the streams: an Answer, what was decoded before the failure
    """

    status: Union[Status, int]
    sys_errno: int
    offset: Optional[int]
    prefilled: Optional[PrefillResult] = None
    answer: Optional[Answer] = None

    def __init__(
        self,
        message: str,
        status: int = Status.INTERNAL,
        sys_errno: int = 0,
        offset: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        self.status, self.sys_errno, self.offset = known(Status, status), sys_errno, offset

    @property
    def is_stale(self) -> bool:
        """True for a cache file of another version or model: delete the file and prefill again."""
        return bool(_abi.lib.kv_status_is_stale(int(self.status)))

    def __reduce__(self) -> Tuple[Any, ...]:  # pickle keeps the status, as process pools need it
        return type(self), (str(self), int(self.status), self.sys_errno, self.offset)


class Cancelled(Error):
    """A cancel token fired, or a callback returned something true."""


class BadArgumentError(Error, ValueError):
    """An argument is out of range, or a handle is closed."""


class BusyError(Error):
    """Another call on this session, cache or library is running."""


class BadStateError(Error):
    """The call is not possible after the earlier calls; the message names what is."""


class NoMemoryError(Error, MemoryError):
    """Memory ran out."""


class LimitError(Error):
    """A limit of the system or of the options is reached."""


class IoError(Error, OSError):
    """A read or write failed; `errno` has the cause."""

    def __init__(
        self,
        message: str,
        status: int = Status.IO,
        sys_errno: int = 0,
        offset: Optional[int] = None,
    ) -> None:
        super().__init__(message, status, sys_errno, offset)
        self.errno = sys_errno or None


class NoSpaceError(IoError):
    """The disk is full, or a quota or file size limit is reached."""


class NotFoundError(IoError, FileNotFoundError):
    """The file, folder, document or device does not exist."""


class PermissionDeniedError(IoError, PermissionError):
    """The system refuses the access."""


class NotACacheError(Error):
    """The file is not a cache file."""


class VersionError(Error):
    """A newer library wrote the file: stale."""


class CorruptError(Error):
    """The data is damaged; `offset` has the place."""


class ModelMismatchError(Error):
    """The file has another model, chat format or instructions: stale."""


class UnsupportedError(Error):
    """The file is valid, but this library lacks a feature; the message names it."""


class ContextFullError(Error):
    """The context length of the model or of the session is reached."""


class InternalError(Error):
    """A bug in Kvasir."""


class DeviceError(Error):
    """A GPU failed: close the sessions and the model that use it."""


_CLASSES: Dict[int, Type[Error]] = {
    Status.CANCELLED: Cancelled,
    Status.BAD_ARGUMENT: BadArgumentError,
    Status.BUSY: BusyError,
    Status.BAD_STATE: BadStateError,
    Status.NO_MEMORY: NoMemoryError,
    Status.LIMIT: LimitError,
    Status.IO: IoError,
    Status.NO_SPACE: NoSpaceError,
    Status.NOT_FOUND: NotFoundError,
    Status.PERMISSION: PermissionDeniedError,
    Status.NOT_A_CACHE: NotACacheError,
    Status.VERSION: VersionError,
    Status.CORRUPT: CorruptError,
    Status.MODEL_MISMATCH: ModelMismatchError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.CONTEXT_FULL: ContextFullError,
    Status.INTERNAL: InternalError,
    Status.DEVICE: DeviceError,
}


def status_text(status: int) -> str:
    """Returns a short English text for a status, "unknown status" for others."""
    text: bytes = _abi.lib.kv_status_text(status)
    return text.decode()


def error_of(error: _abi.kv_error) -> Error:
    """Makes the exception for a kv_error."""
    offset = None if error.offset == _abi.NO_OFFSET else int(error.offset)
    kind = _CLASSES.get(error.status, Error)
    return kind(error.message.decode("utf-8", "replace"), error.status, error.sys_errno, offset)


def bad_argument(message: str) -> BadArgumentError:
    """Makes the exception for an argument that the package itself refuses."""
    return BadArgumentError(message, Status.BAD_ARGUMENT)
