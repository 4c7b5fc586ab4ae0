"""Sessions: one sequence of tokens with its keys and values."""
from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_size_t, c_uint64
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Handle, Owner, Watch, address, as_bytes, as_string, as_tokens, as_uint, call, fill, json_of, lib, sized
from .enums import Phase, Status, StopReason, known
from .errors import Error
from .options import CallOptions, GenerateOptions, OnText, Path, PrefillOptions, SampleOptions, Text
from .results import Answer, Next, Read, Span
from .stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Session(Handle):
    """Made by Model.session, Model.load, Library.session and fork. Serves one call at a time, from any thread; a second one raises Busy."""

    _kind, _free = "session", "kv_session_close"

    _vocabulary: int

    def __init__(self) -> None:
        raise TypeError("a session is made by Model.session, Model.load or Library.session")

    @classmethod
    def _made(cls, vocabulary: int) -> Session:
        session = cls._empty()
        session._vocabulary = vocabulary
        return session

    def prefill(self, text: Text, **options: Unpack[PrefillOptions]) -> Read:
        """Adds document text at the end of the sequence, in the turn that the model's chat format has for it. Several calls continue one
        document. Where it is stopped it keeps whole chunks; a later call with the rest of the text, text.encode()[error.read.bytes:], goes on.

        Cancelled, ContextFull (nothing was added), BadState (a conversation has begun), NoMemory, Corrupt, Busy."""
        owner, watch, encoded = self._live(), Watch(), as_bytes(text)
        how = fill(_abi.kv_call_options, PrefillOptions, options, watch)
        tokens, size = c_uint64(), c_uint64()
        try:
            watch.run(lib.kv_prefill, owner, encoded, len(encoded), byref(how), byref(tokens), byref(size))
        except Error as error:
            error.read = Read(tokens.value, size.value)
            raise
        return Read(tokens.value, size.value)

    def prefill_tokens(self, tokens: npt.ArrayLike, **options: Unpack[CallOptions]) -> Read:
        """The same with tokens of your own: no turn is opened, no special token added."""
        owner, watch, ids, done = self._live(), Watch(), as_tokens(tokens), c_uint64()
        how = fill(_abi.kv_call_options, CallOptions, options, watch)
        try:
            watch.run(lib.kv_prefill_tokens, owner, address(ids), ids.size, byref(how), byref(done))
        except Error as error:
            error.read = Read(done.value, 0)
            raise
        return Read(done.value, 0)

    def prefill_logits(self, tokens: npt.ArrayLike, **options: Unpack[CallOptions]) -> npt.NDArray[np.float32]:
        """As prefill_tokens; the logits at each token, float32 [count][vocabulary], which the library writes into the array. When it fails midway
        whole chunks stay, as `tokens` tells."""
        owner, watch, ids = self._live(), Watch(), as_tokens(tokens)
        logits = np.empty((ids.size, self._vocabulary), np.float32)
        how = fill(_abi.kv_call_options, CallOptions, options, watch)
        watch.run(lib.kv_prefill_logits, owner, address(ids), ids.size, address(logits), byref(how))
        return logits

    def generate(self, question: Text, on_text: Optional[OnText] = None, **options: Unpack[GenerateOptions]) -> Answer:
        """Asks: puts the question in the model's turn and answers it. With `keep` a stopped or failed call leaves the whole tokens made so far;
        without, the sequence is as before.

        Cancelled (with the part that was made as `answer`), ContextFull, BadState, NoMemory, Limit, Corrupt, Busy."""
        return generate(self._live(), question, on_text, options)

    def stream(self, question: Text, **options: Unpack[GenerateOptions]) -> Stream:
        """The same as an iterator over the pieces of the answer. They are made in a thread of their own, which runs ahead of the iteration; until
        it is exhausted or closed the session is busy. In a `with` block it is closed, and stopped, at the end of that."""
        owner, told = self._live(), options.get("progress")

        def work(on_text: OnText, is_stopped: Callable[[], bool]) -> Answer:
            def report(phase: Phase, done: int, total: int) -> object:
                return is_stopped() or (told is not None and told(phase, done, total))

            return generate(owner, question, on_text, {**options, "progress": report})

        return Stream(work)

    def next(self, **options: Unpack[SampleOptions]) -> Next:
        """One more token after what is in the sequence (no turn is opened), appended to it. BadState on an empty sequence; ContextFull."""
        return self._next(self._live(), fill(_abi.kv_generate_options, SampleOptions, options))

    def continuation(self, **options: Unpack[SampleOptions]) -> Iterator[int]:
        """next(), again and again, up to and without the token that ends the turn. Each token is made when it is asked for."""
        how = fill(_abi.kv_generate_options, SampleOptions, options)
        while True:
            made = self._next(self._live(), how)
            if made.end:
                return
            yield made.token

    @staticmethod
    def _next(owner: Owner, how: _abi.kv_generate_options) -> Next:
        token, end = c_int32(), c_int32()
        call(lib.kv_next, owner, byref(how), byref(token), byref(end))
        return Next(token.value, bool(end.value))

    def score(self, tokens: npt.ArrayLike, **options: Unpack[CallOptions]) -> npt.NDArray[np.float32]:
        """The natural logarithm of the probability of each token after everything before it, float32 [count], read as decode reads. The sequence is
        afterwards where it was. exp(-mean) is the perplexity."""
        owner, watch, ids = self._live(), Watch(), as_tokens(tokens)
        result = np.empty(ids.size, np.float32)
        how = fill(_abi.kv_call_options, CallOptions, options, watch)
        watch.run(lib.kv_score, owner, address(ids), ids.size, address(result), byref(how))
        return result

    def prepare(self, **options: Unpack[CallOptions]) -> None:
        """Makes now what the strategy needs beside keys and values (an index, a sketch), which is otherwise made before the next question."""
        owner, watch = self._live(), Watch()
        watch.run(lib.kv_prepare, owner, byref(fill(_abi.kv_call_options, CallOptions, options, watch)))

    def set_strategy(self, strategy: str, *, budget_tokens: int = 0, budget_fraction: float = 0) -> None:
        """Changes what decode reads from now on. BadArgument leaves it as it was."""
        call(lib.kv_session_set_strategy, self._live(), as_string("strategy", strategy), as_uint("budget_tokens", budget_tokens, 64),
             float(budget_fraction))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Those in the sequence."""
        owner, count = self._live(), c_size_t(4096)
        while True:
            ids = np.empty(count.value, np.int32)
            try:
                call(lib.kv_session_tokens, owner, address(ids), ids.size, byref(count))
                return ids[: count.value]
            except Error as error:
                if error.status != Status.LIMIT or count.value <= ids.size:
                    raise

    def trace(self) -> List[Span]:
        """The passages of the document that the last answer attended, the largest share first: where the model looked, which is no proof of what it
        says. For answers with trace=True; BadState for others, and when the sequence has changed since."""
        owner, spans, count = self._live(), (_abi.kv_span * 64)(), c_size_t()  # the library tells no more
        call(lib.kv_trace, owner, spans, len(spans), byref(count))
        return [Span(span.first_token, span.tokens, span.share) for span in spans[: count.value]]

    def rewind(self, tokens: int) -> None:
        """Goes back to the first `tokens` tokens. BadArgument when there are fewer."""
        call(lib.kv_rewind, self._live(), as_uint("tokens", tokens, 64))

    def fork(self) -> Session:
        """A second sequence that begins as an exact copy, pages shared, with the same options."""
        owner, session = self._live(), Session._made(self._vocabulary)
        call(lib.kv_fork, owner, session._new(owner.keep))
        return session

    def stats(self) -> Dict[str, Any]:
        """About the sequence and the last decode: kv_stats."""
        return json_of(lib.kv_stats, self._live())

    def save(self, path: Path, **options: Unpack[CallOptions]) -> None:
        """Writes the sequence to a file, atomically and durably. NoSpace, Permission, IoError, Cancelled: the old file stays."""
        owner, watch = self._live(), Watch()
        how = fill(_abi.kv_call_options, CallOptions, options, watch)
        watch.run(lib.kv_save, owner, as_string("path", path), byref(how))


def generate(owner: Owner, question: Text, on_text: Optional[OnText], options: Mapping[str, Any]) -> Answer:
    watch, made, encoded = Watch(), sized(_abi.kv_answer), as_bytes(question)
    pieces: List[str] = []
    how = fill(_abi.kv_generate_options, GenerateOptions, options, watch)

    def take(text: int, size: int) -> object:
        piece = ctypes.string_at(text, size).decode("utf-8", "replace")
        pieces.append(piece)
        return on_text is not None and on_text(piece)

    def piece_made(text: int, size: int, _user: object) -> int:
        return watch.callback(take, text, size)

    def answer() -> Answer:
        reason = known(StopReason, made.stop_reason) if made.stop_reason else None
        return Answer("".join(pieces), reason, made.question_tokens, made.answer_tokens, made.first_token_ns, made.total_ns, made.tokens_read,
                      made.tokens_present)

    try:
        watch.run(lib.kv_generate, owner, encoded, len(encoded), byref(how), _abi.TEXT_FN(piece_made), None, byref(made))
    except Error as error:
        error.answer = answer()
        raise
    return answer()
