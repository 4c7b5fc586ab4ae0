"""Saved documents as files."""
from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, NamedTuple, Union

from . import _abi
from ._core import Watch, as_string, call, fill, lib, sized, values
from .enums import KvType, known
from .options import CallOptions, PackOptions, Path

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FileInformation(NamedTuple):
    format_version: int
    file_bytes: int
    tokens: int
    sealed_tokens: int
    kv_bytes: int  # pages, scales and summaries
    layers: int
    kv_heads: int
    head_dim: int
    kv_type: Union[KvType, int]
    model_name: str
    chat_format: str  # of its turns; empty: it has none, or an older library wrote it


class PackedInformation(NamedTuple):
    packed_version: int
    file_bytes: int
    document_bytes: int  # when it is unpacked
    tokens: int
    format_version: int  # of the document
    level: int
    layers: int
    kv_heads: int
    head_dim: int
    model_name: str


def inspect(path: Path) -> FileInformation:
    """What a saved document says of itself; checks the header and the sequence's facts only. NotACache (also a packed one), Version, Corrupt and others."""
    info = sized(_abi.kv_file_information)
    call(lib.kv_file_inspect, as_string("path", path), byref(info))
    found = values(info)
    found["kv_type"] = known(KvType, info.kv_type)
    return FileInformation(**found)


def inspect_packed(path: Path) -> PackedInformation:
    """What a packed document says of itself; checks its header and size only."""
    info = sized(_abi.kv_packed_information)
    call(lib.kv_packed_inspect, as_string("path", path), byref(info))
    return PackedInformation(**values(info))


def verify(path: Path, **options: Unpack[CallOptions]) -> None:
    """Reads and checks every byte. Corrupt names section and offset."""
    watch = Watch()
    watch.run(lib.kv_file_verify, as_string("path", path), byref(fill(_abi.kv_call_options, CallOptions, options, watch)))


def pack(path: Path, packed_path: Path, **options: Unpack[PackOptions]) -> None:
    """Makes a smaller copy, for sending or keeping away; unpack restores it. The packed file is replaced atomically."""
    watch = Watch()
    how = fill(_abi.kv_pack_options, PackOptions, options, watch)
    watch.run(lib.kv_pack, as_string("path", path), as_string("path", packed_path), byref(how))


def unpack(packed_path: Path, path: Path, **options: Unpack[CallOptions]) -> None:
    """Restores at `path` what pack packed, bit for bit. Corrupt when anything in the file is not as it was written."""
    watch = Watch()
    how = fill(_abi.kv_pack_options, CallOptions, options, watch)
    watch.run(lib.kv_unpack, as_string("path", packed_path), as_string("path", path), byref(how))
