"""A folder of saved documents in which every text is read once."""
from __future__ import annotations

from ctypes import byref, pointer
from typing import TYPE_CHECKING, Iterator, NamedTuple, Optional, Tuple, Union

from . import _abi
from ._core import Cancel, Handle, Watch, as_bytes, as_string, call, fill, lib, log_of, sized, values
from .enums import Status, known
from .errors import NotFound
from .model import Model
from .options import CallOptions, LibraryOptions, Path, Progress, SessionOptions, Text
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Document(NamedTuple):
    status: Union[Status, int]  # OK, or why the file cannot be used; then it has no tokens
    file_bytes: int
    tokens: int
    last_used: int  # nanoseconds since 1970
    name: str
    model_name: str
    fingerprint: str


class LibraryResult(NamedTuple):
    save_status: Union[Status, int]  # OK, or why what was read is not in the library though the session is there
    tokens: int  # of the text
    tokens_found: int  # the first ones of these, that a document had
    saved: bool  # what was read is now in the library
    name: str  # of the document that was found, or saved


class Library(Handle):
    """Any number of processes and threads may use one folder at once, and any number of threads a handle. Sessions stay usable after it is closed."""

    _kind, _free = "library", "kv_library_close"

    def __init__(self, folder: Path, **options: Unpack[LibraryOptions]) -> None:
        """Makes the folder where there is none (not those above it). NotFound, Permission, IoError, Busy, NoMemory."""
        filled = fill(_abi.kv_library_options, LibraryOptions, options)
        call(lib.kv_library_open, as_string("folder", folder), byref(filled), self._new(log_of(filled)))

    def __iter__(self) -> Iterator[Document]:
        """The documents, the last used first. A handle lists for one thread at a time."""
        index = 0
        while True:
            document = sized(_abi.kv_library_document)
            try:
                call(lib.kv_library_list, self._live(), index, byref(document))
            except NotFound:
                return
            index += 1
            found = values(document)
            found["status"] = known(Status, document.status)
            yield Document(**found)

    def session(self, model: Model, text: Text, *, name: Optional[str] = None, special: bool = False, verify: bool = False, no_replace: bool = False,
                cancel: Optional[Cancel] = None, progress: Optional[Progress] = None,
                **options: Unpack[SessionOptions]) -> Tuple[Session, LibraryResult]:
        """A session that has read the text as Session.prefill reads it. What a document of the library begins with is mapped, only the rest is read,
        and the result saved as `name`: 1 to 200 bytes without slashes; left out: a hash. no_replace: a document of that name is replaced only where it
        is a beginning of the text, otherwise BadState. A failure to save is in the result.

        BadArgument (also an empty text), Cancelled (nothing was saved), ContextFull, NoMemory, IoError."""
        owner, of, watch, encoded = self._live(), model._live(), Watch(), as_bytes(text)
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = fill(_abi.kv_library_session_options, CallOptions, {"cancel": cancel, "progress": progress}, watch)
        how.flags = (_abi.TOKENIZE_SPECIAL if special else 0) | (_abi.LIBRARY_VERIFY if verify else 0) | \
            (_abi.LIBRARY_NO_REPLACE if no_replace else 0)
        how.name = None if name is None else as_string("name", name)
        how.session = pointer(filled)
        session, result = Session._made(model.info.vocabulary), sized(_abi.kv_library_result)
        keep = session._new(owner.keep, of.keep, log_of(filled))
        watch.run(lib.kv_library_session, owner, of, encoded, len(encoded), byref(how), keep, byref(result))
        told = LibraryResult(known(Status, result.save_status), result.tokens, result.tokens_found, bool(result.saved),
                             result.name.decode("utf-8", "replace"))
        return session, told

    def rename(self, old: str, new: str) -> None:
        """Durable when it returns. NotFound, BadState (there is a document of the new name), Busy."""
        call(lib.kv_library_rename, self._live(), as_string("name", old), as_string("name", new))

    def remove(self, name: str) -> None:
        """Durable when it returns. NotFound, Busy (a session has it open)."""
        call(lib.kv_library_remove, self._live(), as_string("name", name))
