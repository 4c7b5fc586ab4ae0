"""Options as keyword arguments.

They are dictionaries for the type checker: `options: SessionOptions = {"threads": 2}`, then
`model.session(**options)`. An option that is left out has the library's default. An unknown name
is a TypeError. A value that does not fit its field is BadArgumentError.
"""
from __future__ import annotations

import inspect
import os
from typing import Any, Callable, Optional, Sequence, TypedDict, TypeVar, Union

from ._core import Cancel
from .enums import LogLevel, Phase
from .strategy import Strategy

Function = TypeVar("Function", bound=Callable[..., object])

Log = Callable[[LogLevel, str], object]
"""Receives a line. Any thread that calls the library may call it, several at once. What it raises
goes to sys.unraisablehook."""

Progress = Callable[[Phase, int, int], object]
"""Receives phase, done and total (0 while unknown), at most ten times a second and once at the end.
Something true stops the call. So does an exception, which comes out of the call."""

OnText = Callable[[str], object]
"""Receives whole characters of an answer as decode produces them. Something true stops the answer.
So does an exception, which comes out of the call."""

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Text = Union[str, bytes]
"""Bytes that are not UTF-8 are tokenized as bytes."""


class ControlOptions(TypedDict, total=False):
    """Options of a long call.

    cancel: a Cancel; fire() stops the call, which raises Cancelled
    progress: function of phase, done and total; something true or an exception stops the call
    """

    cancel: Optional[Cancel]
    progress: Optional[Progress]


class ModelOptions(TypedDict, total=False):
    """Options of Model.

    log: function of level and line; without one the library is silent
    chat_format: a name of docs/models.md, such as "chatml", or the text of a custom format: one
        conversation with {document}, {question} and {answer}. Left out: recognised from the file.
        Model.load then refuses a file of another format
    device: "cpu" (default), "auto", "cuda", "cuda:1", "cuda:0,cuda:1" or "cuda:all"
    device_memory: bytes of GPU memory per entry in device; 0 (default): all free memory
    hash_directory: directory for hashes of whole model files, computed by a background thread.
        Left out: no hash
    vocabulary_only: True: only tokenizer and chat format, no weights. The architecture need not be
        supported, and the file may have no tensors. The model serves info, tokenize and detokenize
    plan_drafts: True: GPUs leave room for the MTP layer, for sessions with draft_tokens
    """

    log: Optional[Log]
    chat_format: str
    vocabulary_only: bool
    plan_drafts: bool
    device: str
    device_memory: int
    hash_directory: Path


class CacheOptions(TypedDict, total=False):
    """Options of Cache.

    threads: including the caller's; 0 (default): one per CPU of the process
    window_tokens: newest tokens in full precision, always attended; 0 (default): 64
    precision: a Precision
    decode: the Strategy of decode, or its name; left out: "auto"
    memory_limit: bytes of host memory for the KV cache and everything stored with it; 0 (default):
        no limit. Pages beyond the limit go to an unnamed file, or stay in the loaded file
    spill_directory: directory of that file, on a local disk. Left out: /var/tmp
    """

    threads: int
    window_tokens: int
    precision: int
    decode: Union[Strategy, str, None]
    memory_limit: int
    spill_directory: Path


class SessionOptions(CacheOptions, total=False):
    """Options of a session.

    context_tokens: maximum length of the sequence; 0 (default): the model's, the largest value
    prefill_chunk: tokens per prefill step, 1 to 4096; 0 (default): 512, on a GPU more
    prefill: the Strategy of prefill, or its name; left out: "full", exact attention
    instructions: system text before the document, at most 1,000,000 bytes. For a loaded file: left
        out, the file's; another text raises ModelMismatchError
    draft_tokens: tokens that the model's MTP layer drafts for each step of an answer, 1 to 3; 0
        (default): none. Answers are the same. UnsupportedError unless ModelInfo.mtp_layers
    no_lookup: True: answers have no drafts from the sequence's own text. Answers are the same
    log: function of level and line; without one the session is silent
    """

    context_tokens: int
    prefill_chunk: int
    prefill: Union[Strategy, str, None]
    instructions: Optional[Text]
    draft_tokens: int
    no_lookup: bool
    log: Optional[Log]


class PrefillOptions(ControlOptions, total=False):
    """Options of Session.prefill.

    special: True: text that spells a control token becomes that token
    """

    special: bool


class PackOptions(ControlOptions, total=False):
    """Options of pack.

    level: of compression, 1 to 19, slower and slightly smaller; 0 (default): 1
    """

    level: int


class SampleOptions(TypedDict, total=False):
    """Options of Session.next and Session.continuation.

    temperature: 0 (default): greedy
    top_k: number of likeliest tokens to sample from; 0 (default): off
    top_p: probability of the likeliest tokens to sample from; 0 or 1: off (default)
    min_p: smallest probability, as a part of the largest; 0 (default): off
    repetition_penalty: over the last 256 tokens; 0 or 1: off (default)
    seed: of the random numbers
    cancel: a Cancel; fire() stops the call, which raises Cancelled
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    cancel: Optional[Cancel]


class GenerateOptions(SampleOptions, total=False):
    """Options of Session.ask, stream, aask and astream.

    max_tokens: limit of the answer; 0 (default): 512
    keep_turn: True: question and answer stay in the sequence
    stop: non-empty strings. Each ends the answer and is not part of it
    special: True: a question that spells a control token has that token
    trace_passages: True: record what Session.passages lists. The answer is the same, but slower
    thinking: True: the model thinks before it answers; UnsupportedError unless ModelInfo.thinks.
        False (default): marks before the answer skip the thought
    thinking_tokens: limit of the thought, after which the model answers; 0 (default): 2048
    keep_thinking: True: with keep_turn, the thought stays too
    on_thinking: function that receives whole characters of the thought, in the thread that
        computes the answer; something true or an exception stops the call
    progress: function of phase, done and total, while the question is prefilled
    """

    max_tokens: int
    keep_turn: bool
    stop: Sequence[str]
    special: bool
    trace_passages: bool
    thinking: bool
    thinking_tokens: int
    keep_thinking: bool
    on_thinking: Optional[OnText]
    progress: Optional[Progress]


class LibraryOptions(TypedDict, total=False):
    """Options of Library.

    max_bytes: of all documents; 0 (default): no limit. The least recently used are evicted
    log: function of level and line: evictions, and documents that cannot be used
    """

    max_bytes: int
    log: Optional[Log]


class AttentionOptions(TypedDict, total=False):
    """Options of Cache.attention.

    scale: of q . k; 0 (default): 1 / sqrt(head_dim)
    softcap: scores become softcap * tanh(score / softcap); 0 (default): off
    cancel: a Cancel; fire() stops the call, which raises Cancelled
    """

    scale: float
    softcap: float
    cancel: Optional[Cancel]


def _lines(kind: Any) -> str:
    """The options in the docstring of a class."""
    return inspect.cleandoc(kind.__doc__ or "\n\n").partition("\n\n")[2]


def _inherit(kind: Any, base: Any) -> None:
    if kind.__doc__:
        kind.__doc__ = f"{inspect.cleandoc(kind.__doc__)}\n{_lines(base)}\n"


_inherit(SessionOptions, CacheOptions)
_inherit(PrefillOptions, ControlOptions)
_inherit(PackOptions, ControlOptions)
_inherit(GenerateOptions, SampleOptions)


def takes(kind: Any) -> Callable[[Function], Function]:
    """Decorates a function that takes `**options`: adds their list to its docstring."""

    def add(function: Function) -> Function:
        if function.__doc__:
            text = inspect.cleandoc(function.__doc__)
            function.__doc__ = f"{text}\n\nOptions ({kind.__name__}):\n\n{_lines(kind)}\n"
        return function

    return add
