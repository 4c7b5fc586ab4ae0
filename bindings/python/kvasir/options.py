"""Options as keyword arguments: what each function takes besides its own parameters. What is left out has the library's default.

They are dictionaries for the type checker (`options: SessionOptions = {"strategy": "bounded"}`, then `model.session(**options)`).
A name that is not among them is a TypeError; a value that does not fit its field is BadArgument.
"""
from __future__ import annotations

import os
from typing import Callable, Optional, Sequence, TypedDict, Union

from ._core import Cancel
from .enums import LogLevel, Phase

Log = Callable[[LogLevel, str], object]
"""Gets a line. May be called from any thread that calls the library; what it raises goes to sys.unraisablehook."""

Progress = Callable[[Phase, int, int], object]
"""Gets phase, done and total (0 while unknown), at most ten times a second and once at the end. Something true stops the call, as does an
exception, which comes out of the call."""

OnText = Callable[[str], object]
"""Gets whole characters of an answer as they are made. Something true stops it, as does an exception, which comes out of the call."""

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Text = Union[str, bytes]
"""Bytes that are not UTF-8 are tokenized as bytes."""


class ModelOptions(TypedDict, total=False):
    log: Optional[Log]
    chat_format: str  # "raw" "chatml" "llama3" ...; left out: recognised from the file
    device: str  # "cpu" (default), "auto", "cuda", "cuda:1", "cuda:0,cuda:1", "cuda:all"
    device_memory: int  # bytes of each GPU's memory; 0: what is free
    cancel: Optional[Cancel]  # of opening the model
    hash_folder: Path  # of the hashes of whole model files, which a thread computes; left out: none


class StoreOptions(TypedDict, total=False):
    """What sessions and caches have in common. kvasir.h describes each."""

    threads: int  # 0: as many as the process has processors
    kv_type: int  # KvType
    window: int  # newest tokens kept in full precision
    dense_layers: int  # that attend everything
    share_heads: bool  # query heads of a group choose together (default)
    strategy: str  # "auto" (default), or a name of kvasir.strategies()
    budget_tokens: int  # a layer and head; 0: use the fraction
    budget_fraction: float  # of the sealed tokens, 0 to 1; 0: the strategy's default
    filter_layers: str  # "2,8,18"
    alpha: float
    coverage: float
    select_tokens: int
    memory_budget: int  # bytes for keys, values and what is kept with them; 0: no limit
    spill_folder: Path


class SessionOptions(StoreOptions, total=False):
    context: int  # tokens the sequence may hold; 0: what the model was trained for
    prefill_chunk: int  # tokens read together, 1 to 4096; 0: chosen
    log: Optional[Log]
    filter_window: int  # FilterWindow
    compare: int  # 0, 1 or 2
    certify: bool
    prefill_strategy: str
    prefill_budget_fraction: float
    prefill_exact_tokens: int
    search_breadth: int
    budget_schedule: int  # BudgetSchedule
    head_graphs: bool


class CallOptions(TypedDict, total=False):
    cancel: Optional[Cancel]
    progress: Optional[Progress]


class PrefillOptions(CallOptions, total=False):
    special: bool  # text that spells a control token becomes that token


class PackOptions(CallOptions, total=False):
    level: int  # of compression, 1 to 19


class SampleOptions(TypedDict, total=False):
    temperature: float  # 0 (default): greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    repetition_penalty: float  # 1: off
    seed: int
    cancel: Optional[Cancel]


class GenerateOptions(SampleOptions, total=False):
    max_tokens: int  # of the answer; 0: 512
    keep: bool  # the turn stays in the sequence; otherwise that is afterwards where it was
    stop: Sequence[str]  # end the answer and are not part of it
    special: bool  # of the question
    trace: bool  # what the answer attends of the document is noted, for Session.trace, at some cost
    progress: Optional[Progress]  # while the question is read


class LibraryOptions(TypedDict, total=False):
    max_bytes: int  # of all documents together; 0: no limit
    log: Optional[Log]


class AttentionOptions(TypedDict, total=False):
    scale: float  # of q . k; 0: 1 / sqrt(head_dim)
    softcap: float  # 0: none
    cancel: Optional[Cancel]

