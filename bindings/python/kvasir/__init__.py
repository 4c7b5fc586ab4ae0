"""Prefill a long document once, save its KV cache, and query it any number of times.

    with kvasir.Model("model.gguf") as model:
        with model.session() as session:
            session.prefill(text)                      # minutes, once
            session.save("book.kv")                    # atomic, checksummed
        with model.load("book.kv") as session:         # milliseconds: it maps the file
            print(session.ask("Who ...?").text)

Calls release the interpreter's lock. A model and a library serve any number of threads. A session
and a cache serve one call at a time; a second concurrent call raises BusyError. Callbacks run on
the calling thread and may not use the handle of their call. Times are seconds, sizes bytes.
kvasir.experimental and kvasir.transformers are imported by name.
"""
from __future__ import annotations

import json
from typing import Any, Dict

from ._core import Cancel, lib
from .cache import Cache, CacheShape
from .checkpoint import Checkpoint, LayerState
from .enums import (
    GpuUse, LogLevel, NumberType, Phase, Precision, StateLayout, Status, StopReason,
    Thinking,
)
from .errors import (
    BadArgumentError, BadStateError, BusyError, Cancelled, ContextFullError, CorruptError,
    DeviceError, Error, InternalError, IoError, LimitError, ModelMismatchError, NoMemoryError,
    NoSpaceError, NotACacheError, NotFoundError, PermissionDeniedError, UnsupportedError,
    VersionError, status_text,
)
from .files import (
    FileDocument, FileInfo, PackedInfo, file_documents, inspect, inspect_packed, pack, unpack,
    verify,
)
from .library import Document, Library, LibraryResult
from .model import Model, ModelInfo, inspect_model
from .options import (
    AttentionOptions, CacheOptions, ControlOptions, GenerateOptions, LibraryOptions, ModelOptions,
    PackOptions, PrefillOptions, SampleOptions, SessionOptions,
)
from .results import (
    Answer, CacheStats, ComposedDocument, Passage, PrefillResult, SessionStats, Token,
)
from .session import Session
from .strategy import Strategy, StrategyInfo, strategies
from .stream import AsyncStream, Stream

__version__ = "0.2.0"


def version() -> int:
    """Returns the version of the loaded library: major * 10000 + minor * 100 + patch."""
    number: int = lib.kv_version()
    return number


def build_info() -> Dict[str, Any]:
    """Describes the library: version, cache format, compiler, kernels, backends, third parties."""
    info: Dict[str, Any] = json.loads(lib.kv_build_info())
    return info


__all__ = [
    "Answer", "AsyncStream", "AttentionOptions", "BadArgumentError", "BadStateError",
    "BusyError", "Cache", "CacheOptions", "CacheShape", "CacheStats", "Cancel", "Cancelled",
    "Checkpoint", "ComposedDocument", "ContextFullError", "ControlOptions", "CorruptError",
    "DeviceError", "Document", "Error", "FileDocument", "FileInfo", "GenerateOptions", "GpuUse",
    "InternalError", "IoError", "LayerState", "Library", "LibraryOptions", "LibraryResult",
    "LimitError", "LogLevel", "Model", "ModelInfo", "ModelMismatchError", "ModelOptions",
    "NoMemoryError", "NoSpaceError", "NotACacheError", "NotFoundError", "NumberType",
    "PackOptions", "PackedInfo", "Passage", "PermissionDeniedError", "Phase", "Precision",
    "PrefillOptions", "PrefillResult", "SampleOptions", "Session", "SessionOptions",
    "SessionStats", "StateLayout", "Status", "StopReason", "Strategy", "StrategyInfo", "Stream",
    "Thinking", "Token", "UnsupportedError", "VersionError", "build_info", "file_documents",
    "inspect", "inspect_model", "inspect_packed", "pack", "status_text", "strategies", "unpack",
    "verify", "version",
]
