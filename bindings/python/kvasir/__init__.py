"""Read a long document once with a local language model, keep it, question it from then on.

    with kvasir.Model("model.gguf") as model:
        with model.session() as session:
            session.prefill(text)                      # minutes, once
            session.save("book.kv")                    # atomic, checksummed
        with model.load("book.kv") as session:         # milliseconds, mapped
            print(session.generate("Who ...?").text)

The interface is that of kvasir.h in Python: each entry says what it raises, and the header says the rest. Calls release the interpreter's lock; a
model and a library may be used by any number of threads, a session and a cache serve one call at a time and raise Busy for a second one. Callbacks run
on the thread that calls; they may not use the handle that is calling them.
"""
from __future__ import annotations

import json
from ctypes import byref
from typing import Any, Dict, List, NamedTuple

from . import _abi
from ._core import Cancel, call, lib, sized, values
from .cache import Cache, CacheShape
from .enums import BudgetSchedule, FilterWindow, KvType, LogLevel, NumberType, Phase, Status, StopReason
from .errors import (BadArgument, BadState, Busy, Cancelled, ContextFull, Corrupt, DeviceError, Error, Internal, IoError, Limit, ModelMismatch,
                     NoMemory, NoSpace, NotACache, NotFound, Permission, Unsupported, Version, status_text)
from .files import FileInformation, PackedInformation, inspect, inspect_packed, pack, unpack, verify
from .library import Document, Library, LibraryResult
from .model import Model, ModelInformation, inspect_model
from .options import (AttentionOptions, CallOptions, GenerateOptions, LibraryOptions, ModelOptions, PackOptions, PrefillOptions,
                      SampleOptions, SessionOptions, StoreOptions)
from .results import Answer, Next, Read, Span
from .session import Session
from .stream import Stream

__version__ = "0.1.0"


class Strategy(NamedTuple):
    dense_layers: int  # the default of that option; 2**32 - 1: all
    budget_fraction: float  # likewise
    budget_floor: int  # tokens that the default fraction is at least
    takes_budget: bool  # otherwise it reads the same whatever the budget
    takes_select_tokens: bool
    name: str
    takes_coverage: bool
    takes_head_graphs: bool


def strategies() -> List[Strategy]:
    """Those of the library. "auto" is not among them: it is a choice of one."""
    found: List[Strategy] = []
    while True:
        info = sized(_abi.kv_strategy_information)
        try:
            call(lib.kv_strategy_info, len(found), byref(info))
        except NotFound:
            return found
        told = values(info)
        for name in Strategy._fields:
            told[name] = bool(told[name]) if name.startswith("takes") else told[name]
        found.append(Strategy(**told))


def version() -> int:
    """Of the loaded library: major * 10000 + minor * 100 + patch."""
    number: int = lib.kv_version()
    return number


def build_info() -> Dict[str, Any]:
    """Version, cache format, compiler, kernels that this processor gets, backends, versions of third parties."""
    info: Dict[str, Any] = json.loads(lib.kv_build_info())
    return info


__all__ = [
    "Answer", "AttentionOptions", "BadArgument", "BadState", "BudgetSchedule", "Busy", "Cache", "CacheShape", "CallOptions", "Cancel",
    "Cancelled", "ContextFull", "Corrupt", "DeviceError", "Document", "Error", "FileInformation", "FilterWindow", "GenerateOptions",
    "Internal", "IoError", "KvType", "Library", "LibraryOptions", "LibraryResult", "Limit", "LogLevel", "Model", "ModelInformation",
    "ModelMismatch", "ModelOptions", "Next", "NoMemory", "NoSpace", "NotACache", "NotFound", "NumberType", "PackOptions",
    "PackedInformation", "Permission", "Phase", "PrefillOptions", "Read", "SampleOptions", "Session", "SessionOptions", "Span", "Status",
    "StopReason", "StoreOptions", "Strategy", "Stream", "Unsupported", "Version", "build_info", "inspect", "inspect_model",
    "inspect_packed", "pack", "status_text", "strategies", "unpack", "verify", "version",
]
