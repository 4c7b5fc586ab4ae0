"""Results of calls on sessions and caches."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from .enums import GpuUse, StopReason


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill appended. An Error of a prefill has it as `prefilled`."""

    tokens: int  # appended
    bytes: int  # the byte of the text where they end; 0 after prefill_tokens


@dataclass(frozen=True)
class Answer:
    """Result of Session.ask. An Error of it has what was decoded before as `answer`."""

    text: str
    thought: str  # what the model wrote before it; empty unless the option thinking is set
    stop_reason: Union[StopReason, int, None]  # None: the decode never began
    question_tokens: int  # with the marks of the turn
    thinking_tokens: int  # of the thought, without its marks
    answer_tokens: int  # without the end-of-turn token
    first_token_seconds: float  # from the call to the first token
    total_seconds: float  # from the call to its return
    tokens_read: int  # tokens whose K and V were read: sum over steps, layers, KV heads
    tokens_present: int  # the same sum for full attention


@dataclass(frozen=True)
class Passage:
    """Passage of the document: neighbouring tokens, their text, and their bytes in the document."""

    text: str  # of the tokens, without characters that they cut
    first_token: int  # index in Session.tokens, or in the document
    tokens: int  # 1 or more
    first_byte: Optional[int]  # in all texts of prefill, in order; None: unknown, own tokens
    bytes: int  # widened to whole UTF-8 characters; 0 where first_byte is unknown
    share: float  # of all recorded attention, 0 to 1
    document: int  # of Model.compose: index in Session.documents; otherwise 0


@dataclass(frozen=True)
class ComposedDocument:
    """Document of a session of Model.compose."""

    path: str
    tokens: int
    score: Optional[float]  # of the last choice; None: there was none to make
    is_candidate: bool  # answers may attend it
    is_attended: bool  # by the last answer


@dataclass(frozen=True)
class Token:
    """Result of Session.next."""

    id: int
    ends_turn: bool


@dataclass(frozen=True)
class SessionStats:
    """State of a session and its last decode (ask, next or score)."""

    threads: int  # including the caller's
    tokens: int  # of the sequence
    context_tokens: int  # maximum
    sealed_tokens: int  # in pages
    page_tokens: int  # tokens per page
    sink_tokens: int  # first tokens, always attended
    window_tokens: int  # newest tokens, not sealed
    prefill_chunk: int  # tokens per prefill step
    kv_bytes_per_token: int  # with scales and page summaries
    private_bytes: int  # of the KV cache and what is stored with it, in host memory
    mapped_bytes: int  # in the loaded file
    spilled_bytes: int  # in the spill file
    memory_limit: int  # bytes; 0: none
    prefill_tokens: int  # appended by prefill in this session
    prefill_seconds: float  # of these prefills
    sparse_tokens: int  # tokens up to the last one of a sparse prefill; 0: all are exact
    load_seconds: float  # of Model.load; 0: not loaded
    budget_tokens: int  # mean per layer and head
    index_tokens: int  # in the strategy's index; 0: none
    index_bytes: int  # of that index
    index_seconds: float  # of the last build in this session
    last_steps: int  # tokens decoded by the last decode
    last_decode_seconds: float  # without prefill and first token
    last_tokens_read: int  # as Answer.tokens_read
    last_tokens_present: int  # as Answer.tokens_present
    last_pages_touched: int  # pages read: sum over steps, layers, KV heads
    last_mass_read: float  # estimated share of attention that was read and not sampled, 0 to 1;
    # -1: the strategy does not estimate it
    gpu_layers: int  # layers on GPUs
    gpu_flags: GpuUse
    gpu_weight_bytes: int  # of weights on GPUs
    gpu_bytes: int  # in use, weights included, sum of all GPUs
    gpu_memory_limit: int  # bytes that they may use
    decode_strategy: str  # chosen for the next token; "auto" is resolved
    chat_format: str  # of the turns
    device: str  # "cpu", "cuda:0", "cuda:0,cuda:1", truncated
    prefilled_again: int  # tokens prefilled again, after a rewind or for a prefix
    windows_bytes: int  # of layers with a sliding window, in memory and in the loaded file
    last_drafted: int  # tokens that were drafted for the last answer
    last_accepted: int  # those of them that the answer has
    last_looked_up: int  # those of last_drafted from the sequence's own text
    last_lookup_accepted: int  # those of them that the answer has


@dataclass(frozen=True)
class CacheStats:
    """State of a cache. The counts of attention are sums over all calls so far."""

    threads: int  # including the caller's
    tokens: int  # of complete steps
    max_tokens: int  # of the shape
    sealed_tokens: int  # in pages
    page_tokens: int  # tokens per page
    sink_tokens: int  # first tokens, always attended
    window_tokens: int  # newest tokens, not sealed
    step_tokens: int  # of the current step
    private_bytes: int  # as in SessionStats
    mapped_bytes: int  # in the loaded file
    spilled_bytes: int  # in the spill file
    memory_limit: int  # bytes; 0: none
    budget_tokens: int  # mean per layer and head
    tokens_read: int  # as in Answer
    tokens_present: int  # the same sum for full attention
    pages_touched: int  # pages read
    decode_strategy: str  # chosen for the next token; "auto" is resolved
