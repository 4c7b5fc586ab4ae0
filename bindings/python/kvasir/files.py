"""Cache files and packed files."""
from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Tuple, Union

from . import _abi
from ._core import Watch, call, lib
from ._values import as_string, as_uint, check_names, control, result_of, sized
from .enums import Precision, Status, known
from .options import ControlOptions, PackOptions, Path, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class FileInfo:
    """Description of a cache file."""

    format_version: int
    file_bytes: int
    tokens: int  # of the sequence
    sealed_tokens: int  # the first of these, in pages
    kv_bytes: int  # pages, scales and page summaries
    layers: int
    kv_heads: int  # per layer
    head_dim: int  # elements per head
    precision: Union[Precision, int]
    model_name: str  # of the model that wrote it, truncated
    chat_format: str  # of its turns; empty: none, or written by an older library
    recurrent_layers: int  # layers with a state; 0: none
    states: int  # that the file has: of the end, and of checkpoints before it
    state_bytes: int  # of all of them
    # tokens before each earlier position at which windows and states can go on
    checkpoints: Tuple[int, ...]
    mtp_tokens: int  # whose keys and values of the MTP layer it has; 0: saved without drafts
    documents: int  # of Model.compose, to which it refers: file_documents; 0: none


@dataclass(frozen=True)
class FileDocument:
    """A document to which a file of a session of Model.compose refers."""

    path: str  # where it must be
    tokens: int  # of the document
    file_bytes: int  # of its file when it was mapped
    status: Union[Status, int]  # OK, NOT_FOUND (missing), MODEL_MISMATCH (changed) and others
    is_candidate: bool  # answers may attend it
    is_attended: bool  # by the last answer


@dataclass(frozen=True)
class PackedInfo:
    """Description of a packed file."""

    packed_version: int
    file_bytes: int  # packed
    document_bytes: int  # unpacked
    tokens: int  # of the sequence
    format_version: int  # of the unpacked file
    level: int  # of compression
    layers: int
    kv_heads: int  # per layer
    head_dim: int  # elements per head
    model_name: str  # of the model that wrote it, truncated


def inspect(path: Path) -> FileInfo:
    """Describes a cache file. Checks header and tables only.

    Raises NotFoundError, NotACacheError (also a packed file), VersionError, CorruptError, IoError,
    NoMemoryError.
    """
    info = sized(_abi.kv_file_info)
    call(lib.kv_file_inspect, as_string("path", path), byref(info))
    checkpoints = tuple(info.checkpoint_tokens[: info.checkpoints])
    return result_of(
        FileInfo, info, precision=known(Precision, info.precision), checkpoints=checkpoints
    )


def inspect_packed(path: Path) -> PackedInfo:
    """Describes a packed file. Checks its header and size only. Raises the errors of inspect."""
    info = sized(_abi.kv_packed_info)
    call(lib.kv_packed_inspect, as_string("path", path), byref(info))
    return result_of(PackedInfo, info)


def file_documents(path: Path) -> List[FileDocument]:
    """Lists the documents to which a file refers. Checks the headers of their files.

    Raises the errors of inspect.
    """
    file, found = as_string("path", path), []
    for index in range(inspect(path).documents):
        document = sized(_abi.kv_file_document)
        call(lib.kv_file_get_document, file, index, byref(document))
        found.append(
            FileDocument(
                path=document.path.decode("utf-8", "surrogateescape"),
                tokens=document.tokens,
                file_bytes=document.file_bytes,
                status=known(Status, document.status),
                is_candidate=bool(document.flags & _abi.DOCUMENT_CANDIDATE),
                is_attended=bool(document.flags & _abi.DOCUMENT_ATTENDED),
            )
        )
    return found


@takes(ControlOptions)
def verify(path: Path, **options: Unpack[ControlOptions]) -> None:
    """Reads and verifies every byte of a cache file.

    Raises CorruptError (with section and offset), Cancelled, and the errors of inspect.
    """
    watch = Watch()
    check_names(ControlOptions, options)
    watch.run(lib.kv_file_verify, as_string("path", path), byref(control(options, watch)))


@takes(PackOptions)
def pack(path: Path, packed_path: Path, **options: Unpack[PackOptions]) -> None:
    """Writes a packed copy of a cache file, to send or archive. unpack restores it bit for bit.

    packed_path is replaced atomically. Raises BadArgumentError (level; both paths are one file),
    Cancelled, NoSpaceError, PermissionDeniedError, and the errors of inspect.
    """
    watch = Watch()
    check_names(PackOptions, options)
    level = as_uint("level", options.get("level", 0), 32)
    watch.run(
        lib.kv_pack, as_string("path", path), as_string("packed_path", packed_path), level,
        byref(control(options, watch)),
    )


@takes(ControlOptions)
def unpack(packed_path: Path, path: Path, **options: Unpack[ControlOptions]) -> None:
    """Restores at `path` the cache file that pack packed.

    Raises CorruptError (any byte differs from what was written), and the errors of pack.
    """
    watch = Watch()
    check_names(ControlOptions, options)
    watch.run(
        lib.kv_unpack, as_string("packed_path", packed_path), as_string("path", path),
        byref(control(options, watch)),
    )
