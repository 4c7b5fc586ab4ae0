"""Libraries: folders of cache files in which every text is prefilled once."""
from __future__ import annotations

import datetime
from ctypes import byref, c_char_p, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterable, Iterator, Optional, Tuple, Union

from . import _abi
from ._core import Cancel, Handle, Watch, call, lib
from ._values import as_bytes, as_string, as_uint, control, fill, log_of, result_of, sized
from .enums import Status, known
from .errors import NotFoundError
from .model import Model
from .options import LibraryOptions, Path, Progress, SessionOptions, Text, takes
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Document:
    """A document of a library."""

    status: Union[Status, int]  # OK, or why the file cannot be used; then tokens is 0
    file_bytes: int
    tokens: int  # of the sequence
    last_used: datetime.datetime  # in UTC
    name: str  # without .kv
    model_name: str  # of the model that wrote it, truncated
    fingerprint: str  # as ModelInfo.fingerprint


@dataclass(frozen=True)
class LibraryResult:
    """Result of Library.session."""

    save_status: Union[Status, int]  # OK, or why the prefill is not in the library
    tokens: int  # of the text
    tokens_found: int  # the first of these, found in a document
    saved: bool  # by this call
    name: str  # of the document found or saved


class Library(Handle):
    """Folder of cache files that finds earlier prefills by itself.

    A text is prefilled once; of a text that begins like another only the rest is prefilled.
    Iteration lists the documents. Processes and threads may use one folder at once, and any number
    of threads one handle. Sessions stay usable after close().
    """

    _kind, _free = "library", "kv_library_close"

    _folder: bytes

    @takes(LibraryOptions)
    def __init__(self, folder: Path, **options: Unpack[LibraryOptions]) -> None:
        """Opens the folder and creates it where it does not exist, but not its parents.

        Raises NotFoundError, PermissionDeniedError, IoError, BusyError (another process has been
        changing the library for 10 seconds), NoMemoryError.
        """
        self._folder = as_string("folder", folder)
        filled = fill(_abi.kv_library_options, LibraryOptions, options)
        call(lib.kv_library_open, self._folder, byref(filled), self._new(log_of(filled)))

    def _about(self) -> str:
        return repr(self._folder.decode("utf-8", "surrogateescape"))

    def __iter__(self) -> Iterator[Document]:
        """Lists the documents, the most recently used first. One thread at a time may list."""
        index = 0
        while True:
            document = sized(_abi.kv_library_document)
            try:
                call(lib.kv_library_list, self._live(), index, byref(document))
            except NotFoundError as error:
                if error.sys_errno:  # the folder is gone
                    raise
                return
            index += 1
            used = datetime.datetime.fromtimestamp(document.last_used / 1e9, datetime.timezone.utc)
            yield result_of(
                Document, document, status=known(Status, document.status), last_used=used
            )

    @takes(SessionOptions)
    def session(
        self,
        model: Model,
        text: Text,
        *,
        name: Optional[str] = None,
        replace: bool = False,
        special: bool = False,
        verify: bool = False,
        cancel: Optional[Cancel] = None,
        progress: Optional[Progress] = None,
        **options: Unpack[SessionOptions],
    ) -> Tuple[Session, LibraryResult]:
        """Creates a session whose sequence is the text, as after Session.prefill.

        Maps the document that shares the longest prefix, prefills the rest and saves the result. A
        failed save is in the LibraryResult and no failure of this call.

        name: of the saved document, 1 to 200 bytes without slashes; left out: a hash. If another
            file has the name, the call makes it unique, and the result has the whole
        replace: True: replace a document of that name instead
        special: True: text that spells a control token becomes that token
        verify: True: verify the whole file now, not each page at its first use
        cancel: a Cancel; fire() stops the call
        progress: function of phase, done and total

        Raises BadArgumentError (also an empty text), Cancelled (nothing was saved),
        ContextFullError, NoMemoryError, IoError, and the errors of Model.session.
        """
        owner, used, watch, encoded = self._live(), model._live(), Watch(), as_bytes(text)
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = sized(_abi.kv_library_session_options)
        how.flags = (
            (_abi.TOKENIZE_SPECIAL if special else 0)
            | (_abi.VERIFY if verify else 0)
            | (_abi.REPLACE if replace else 0)
        )
        how.name = None if name is None else as_string("name", name)
        how.session = pointer(filled)
        session, result = model._session(), sized(_abi.kv_library_result)
        watch.run(
            lib.kv_library_session, owner, used, encoded, len(encoded), byref(how),
            byref(control({"cancel": cancel, "progress": progress}, watch)),
            session._new(owner.keep, used.keep, log_of(filled)), byref(result),
        )
        save_status = known(Status, result.save_status)
        return session, result_of(
            LibraryResult, result, save_status=save_status, saved=bool(result.saved)
        )

    @takes(SessionOptions)
    def compose(
        self,
        model: Model,
        names: Iterable[str] = (),
        *,
        max_documents: int = 0,
        cancel: Optional[Cancel] = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Creates a session over documents of the library, as Model.compose does.

        Documents that come or go later do not change the session.

        names: of the documents, in this order; none: all of this model, by name. Then documents
            that cannot be used are left out, and the log has the reason
        max_documents: that an answer attends; 0: up to 8. At least as many as there are
            documents: all, without a choice, if they fit
        cancel: a Cancel; fire() stops the call

        Raises NotFoundError (no document of this model, or of a name), and the errors of
        Model.compose.
        """
        owner, session, watch = self._live(), model._session(), Watch()
        lent = model._live()
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = control({"cancel": cancel} if cancel is not None else {}, watch)
        encoded = [as_string("name", name) for name in names]
        composed = sized(_abi.kv_compose_options)
        composed.max_documents = as_uint("max_documents", max_documents, 32)
        composed.session = pointer(filled)
        watch.run(
            lib.kv_library_compose, owner, lent, (c_char_p * len(encoded))(*encoded), len(encoded),
            byref(composed), byref(how), session._new(lent.keep, owner.keep, log_of(filled)),
        )
        return session

    def rename(self, old: str, new: str) -> None:
        """Renames a document, durably.

        Raises NotFoundError, BadStateError (a file has the new name), BadArgumentError, BusyError.
        """
        call(
            lib.kv_library_rename, self._live(), as_string("old", old), as_string("new", new)
        )

    def remove(self, name: str) -> None:
        """Removes a document, durably. Raises NotFoundError, BusyError (a session maps it)."""
        call(lib.kv_library_remove, self._live(), as_string("name", name))
