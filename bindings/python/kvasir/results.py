"""What calls on a session give."""
from __future__ import annotations

from typing import NamedTuple, Union

from .enums import StopReason


class Read(NamedTuple):
    """How far a reading came. An Error of prefill has it as `read`."""

    tokens: int  # that were added
    bytes: int  # at which the read part of the text ends; 0 of prefill_tokens


class Answer(NamedTuple):
    """An Error of generate has one as `answer`, of what was made before it."""

    text: str
    stop_reason: Union[StopReason, int, None]  # None: it never began
    question_tokens: int  # with the marks of the turn
    answer_tokens: int
    first_token_ns: int  # from the call to the first token
    total_ns: int
    tokens_read: int  # store tokens whose keys and values were read, summed over steps, layers and heads
    tokens_present: int  # and how many full attention would have read


class Span(NamedTuple):
    """A passage of the document; Model.detokenize of its tokens is its text."""

    first_token: int  # of Session.tokens
    tokens: int
    share: float  # of all that was noted, 0 to 1


class Next(NamedTuple):
    token: int
    end: bool  # this token ends the turn
