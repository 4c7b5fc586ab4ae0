"""Sessions: a sequence of tokens and its KV cache."""
from __future__ import annotations

import threading
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint64
from typing import (
    TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Union,
)

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Cancel, Handle, Owner, Watch, call, lib
from ._question import Question, detokenize, whole_characters
from ._values import (
    address, as_bytes, as_string, as_tokens, as_uint, check_names, control, fill, json_of,
    result_of, sized, strategy_owner,
)
from .enums import GpuUse, Status
from .errors import BusyError, Error
from .options import (
    ControlOptions, GenerateOptions, OnText, Path, PrefillOptions, SampleOptions, Text, takes,
)
from .results import Answer, ComposedDocument, Passage, PrefillResult, SessionStats, Token
from .strategy import Strategy
from .stream import AsyncStream, Item, Stream, Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_PASSAGES = 64  # that kv_session_passages lists


class Session(Handle):
    """Sequence of tokens and its KV cache.

    Model.session, Model.load, Library.session and fork create it. It serves one call at a time,
    from any thread; a second concurrent call raises BusyError.
    """

    _kind, _free = "session", "kv_session_close"

    _model: Owner
    _vocabulary: int
    _worker: Optional[Worker] = None  # of the newest stream

    def __init__(self) -> None:
        """Not for use: Model.session, Model.load and Library.session create sessions."""
        raise TypeError("use Model.session, Model.load or Library.session")

    @classmethod
    def _made(cls, model: Owner, vocabulary: int) -> Session:
        session = cls._empty()
        session._model, session._vocabulary = model, vocabulary
        return session

    def _live(self) -> Owner:
        """Stops a stream of this thread first: the thread calls, so it no longer iterates."""
        worker = self._worker
        if worker is not None and worker.consumer == threading.get_ident():
            self._worker = None
            worker.stop()
        return super()._live()

    def _about(self) -> str:
        if self._worker is not None and self._worker.running:
            return "busy"
        try:
            return f"{self._count()} tokens"
        except BusyError:
            return "busy"

    def close(self) -> None:
        """Closes the session. A second close does nothing.

        A stream of this thread is stopped. A call that runs in another thread ends first; then the
        memory is freed.
        """
        worker, self._worker = self._worker, None
        super().close()
        if worker is not None and worker.consumer == threading.get_ident():
            worker.stop()

    # -- Prefill --

    @takes(PrefillOptions)
    def prefill(self, text: Text, **options: Unpack[PrefillOptions]) -> PrefillResult:
        """Appends document text to the sequence, in the turn of the chat format.

        Several calls continue one document. After a failure the complete chunks stay. A later call
        with the rest of the text, text.encode()[error.prefilled.bytes:], continues there.

        Raises Cancelled, ContextFullError (nothing was appended), BadStateError (a conversation has
        begun), NoMemoryError, CorruptError, BusyError; with a memory_limit LimitError and IoError.
        """
        owner, watch, encoded = self._live(), Watch(), as_bytes(text)
        check_names(PrefillOptions, options)
        flags = _abi.TOKENIZE_SPECIAL if options.get("special") else 0
        how, tokens, size = control(options, watch, flags), c_uint64(), c_uint64()
        try:
            watch.run(
                lib.kv_prefill, owner, encoded, len(encoded), byref(how), byref(tokens), byref(size)
            )
        except Error as error:
            error.prefilled = PrefillResult(tokens.value, size.value)
            raise
        return PrefillResult(tokens.value, size.value)

    @takes(ControlOptions)
    def prefill_tokens(
        self, tokens: npt.ArrayLike, **options: Unpack[ControlOptions]
    ) -> PrefillResult:
        """Appends the caller's own tokens, without a turn or special tokens.

        Raises the errors of prefill; BadArgumentError (an id outside the vocabulary).
        """
        owner, watch, ids, done = self._live(), Watch(), as_tokens(tokens), c_uint64()
        check_names(ControlOptions, options)
        how = control(options, watch)
        try:
            watch.run(
                lib.kv_prefill_tokens, owner, address(ids), ids.size, byref(how), byref(done)
            )
        except Error as error:
            error.prefilled = PrefillResult(done.value, 0)
            raise
        return PrefillResult(done.value, 0)

    # -- Answers --

    @takes(GenerateOptions)
    def ask(
        self, question: Text, on_text: Optional[OnText] = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Appends the question as a turn of the chat format and returns the whole answer.

        on_text receives the pieces as decode produces them. Afterwards the sequence is as before,
        unless keep_turn is True. With it a stopped or failed call keeps the tokens decoded so far.

        Raises Cancelled (`error.answer` has the part), ContextFullError (the question does not
        fit), BadStateError (sequence and question are empty), NoMemoryError, LimitError,
        CorruptError, BusyError.
        """
        return Question(self._live(), question, options).ask(on_text)

    @takes(GenerateOptions)
    def stream(self, question: Text, **options: Unpack[GenerateOptions]) -> Stream:
        """Returns an iterator over the pieces of the answer that `ask` returns whole.

        The session is busy until the stream is exhausted, closed or dropped. The next call of the
        thread that iterates stops a stream that is none of these; the stream then raises Cancelled.
        """
        asked = Question(self._live(), question, options)
        return Stream(lambda put: self._start(asked, put))

    @takes(GenerateOptions)
    def astream(self, question: Text, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Does what `stream` does, for asyncio: `async for piece in session.astream(question)`.

        A thread of its own computes the answer. A cancelled task stops it.
        """
        asked = Question(self._live(), question, options)
        return AsyncStream(lambda put: self._start(asked, put))

    @takes(GenerateOptions)
    async def aask(self, question: Text, **options: Unpack[GenerateOptions]) -> Answer:
        """Does what `ask` does, for asyncio: a thread of its own computes the answer.

        A cancelled task stops it.
        """
        async with self.astream(question, **options) as stream:
            async for _ in stream:
                pass
        assert stream.answer is not None
        return stream.answer

    def _start(self, asked: Question, put: Callable[[Item], object]) -> Worker:
        self._worker = Worker(asked.ask, put)
        return self._worker

    @takes(SampleOptions)
    def next(self, **options: Unpack[SampleOptions]) -> Token:
        """Samples one token after the end of the sequence and appends it, without turns.

        Raises BadStateError (the sequence is empty), ContextFullError, Cancelled, NoMemoryError,
        LimitError, CorruptError, BusyError.
        """
        owner = self._live()
        return _next(owner, fill(_abi.kv_generate_options, SampleOptions, options), options)

    @takes(SampleOptions)
    def continuation(self, **options: Unpack[SampleOptions]) -> Iterator[int]:
        """Returns an iterator over the tokens of a raw continuation, without turns.

        Each step calls next(). The token that ends the turn ends the iteration and is not in it.
        """
        how = fill(_abi.kv_generate_options, SampleOptions, options)
        while True:
            token = _next(self._live(), how, options)
            if token.ends_turn:
                return
            yield token.id

    @takes(ControlOptions)
    def score(
        self, tokens: npt.ArrayLike, **options: Unpack[ControlOptions]
    ) -> npt.NDArray[np.float32]:
        """Returns the natural logarithm of the probability of each token of a continuation.

        float32 [count]; exp(-mean) is the perplexity. Each token is decoded with the strategy.
        Afterwards the sequence is as before.

        Raises Cancelled, BadStateError (the sequence is empty), ContextFullError, NoMemoryError,
        LimitError, CorruptError, BusyError.
        """
        owner, watch, ids = self._live(), Watch(), as_tokens(tokens)
        check_names(ControlOptions, options)
        result, how = np.empty(ids.size, np.float32), control(options, watch)
        watch.run(
            lib.kv_session_score, owner, address(ids), ids.size, address(result), byref(how)
        )
        return result

    def passages(self) -> List[Passage]:
        """Lists the passages that the last answer attended, the largest share first.

        They show where the model looked and prove nothing about the answer.

        Raises BadStateError: the answer had no trace_passages, or the sequence has changed since.
        """
        owner, found, count = self._live(), (_abi.kv_passage * MAX_PASSAGES)(), c_size_t()
        call(lib.kv_session_passages, owner, found, len(found), byref(count))
        passages = found[: count.value]
        composed = self._is_composed()
        ids = {p.document: self._document_tokens(p.document) for p in passages} if composed else {}
        own = self.tokens
        return [self._passage(p, ids.get(p.document, own)) for p in passages]

    def documents(self) -> List[ComposedDocument]:
        """Lists the documents of Model.compose, in its order; empty for other sessions."""
        owner = self._live()
        found: List[ComposedDocument] = []
        while True:
            document = sized(_abi.kv_session_document)
            try:
                call(lib.kv_session_get_document, owner, len(found), byref(document))
            except Error as error:
                if error.status in (Status.NOT_FOUND, Status.BAD_STATE):
                    return found
                raise
            found.append(
                ComposedDocument(
                    path=(document.path or b"").decode("utf-8", "surrogateescape"),
                    tokens=document.tokens,
                    score=None if document.score < 0 else document.score,
                    is_candidate=bool(document.flags & _abi.DOCUMENT_CANDIDATE),
                    is_attended=bool(document.flags & _abi.DOCUMENT_ATTENDED),
                )
            )

    def set_documents(self, paths: Iterable[Path], *, cancel: Optional[Cancel] = None) -> None:
        """Replaces the documents of a session of Model.compose. Questions and answers stay.

        The limit of limit_documents ends. After a failure the session has the old documents.

        Raises BadStateError (not over several documents), ModelMismatchError (other instructions or
        another chat format), and the errors of Model.compose.
        """
        owner, watch = self._live(), Watch()
        names = [as_string("path", path) for path in paths]
        how = control({"cancel": cancel}, watch)
        watch.run(
            lib.kv_session_set_documents, owner, (c_char_p * len(names))(*names), len(names),
            byref(how),
        )

    def limit_documents(self, indexes: Iterable[int] = ()) -> None:
        """Limits later answers to these of documents(), ascending; none: all are candidates.

        Raises BadStateError (not of Model.compose), BadArgumentError.
        """
        limits = np.array([as_uint("index", i, 32) for i in indexes], np.uint32)
        call(lib.kv_session_limit_documents, self._live(), address(limits), limits.size)

    def _is_composed(self) -> bool:
        try:
            document = sized(_abi.kv_session_document)
            call(lib.kv_session_get_document, self._live(), 0, byref(document))
        except Error:
            return False
        return True

    def _document_tokens(self, index: int) -> npt.NDArray[np.int32]:
        document, count = sized(_abi.kv_session_document), c_size_t()
        owner = self._live()
        call(lib.kv_session_get_document, owner, index, byref(document))
        ids = np.empty(document.tokens, np.int32)
        call(lib.kv_session_document_tokens, owner, index, address(ids), ids.size, byref(count))
        return ids

    def _passage(self, passage: _abi.kv_passage, ids: npt.NDArray[np.int32]) -> Passage:
        part = ids[passage.first_token : passage.first_token + passage.tokens]
        return result_of(
            Passage,
            passage,
            text=whole_characters(detokenize(self._model, part, 0)),
            first_byte=None if passage.first_byte == _abi.NO_BYTE else passage.first_byte,
        )

    # -- Sequence --

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Ids of the sequence, int32 [count]."""
        owner, count = self._live(), c_size_t(4096)
        while True:
            ids = np.empty(count.value, np.int32)
            try:
                call(lib.kv_session_tokens, owner, address(ids), ids.size, byref(count))
                return ids[: count.value]
            except Error as error:
                if error.status != Status.LIMIT or count.value <= ids.size:
                    raise

    def _count(self) -> int:
        count = c_size_t()
        try:
            call(lib.kv_session_tokens, super()._live(), None, 0, byref(count))
        except Error as error:
            if error.status != Status.LIMIT:
                raise
        return count.value

    def rewind(self, tokens: int) -> None:
        """Truncates the sequence to its first `tokens` tokens.

        Raises BadArgumentError (the sequence is shorter), CorruptError, NoMemoryError, BusyError.
        """
        call(lib.kv_session_rewind, self._live(), as_uint("tokens", tokens, 64))

    def fork(self) -> Session:
        """Creates a session with an exact copy of the sequence and the same options.

        Both share the pages. Raises NoMemoryError, LimitError, BusyError.
        """
        owner, session = self._live(), Session._made(self._model, self._vocabulary)
        call(lib.kv_session_fork, owner, session._new(owner.keep))
        return session

    @takes(ControlOptions)
    def prepare(self, **options: Unpack[ControlOptions]) -> None:
        """Builds now what the strategy needs besides the KV cache: an index, a sketch.

        Otherwise the next question or save builds it.

        Raises Cancelled, NoMemoryError, LimitError, CorruptError, BusyError.
        """
        owner, watch = self._live(), Watch()
        check_names(ControlOptions, options)
        watch.run(lib.kv_session_prepare, owner, byref(control(options, watch)))

    def set_strategy(self, decode: Union[Strategy, str, None]) -> None:
        """Replaces the decode strategy; None: "auto". Other options stay.

        Raises BadArgumentError (a parameter that does not fit), NoMemoryError, BusyError.
        """
        native = strategy_owner(decode) if isinstance(decode, str) else decode and decode._owner()
        call(lib.kv_session_set_strategy, self._live(), native)

    def stats(self) -> SessionStats:
        """Returns the state of the session and its last decode. NoMemoryError, BusyError."""
        stats = sized(_abi.kv_session_stats)
        call(lib.kv_session_get_stats, self._live(), byref(stats))
        return result_of(SessionStats, stats, gpu_flags=GpuUse(stats.gpu_flags))

    def stats_json(self) -> Dict[str, Any]:
        """Returns the statistics for people: why a strategy or a device was chosen, and more."""
        return json_of(lib.kv_session_stats_json, self._live())

    @takes(ControlOptions)
    def save(self, path: Path, **options: Unpack[ControlOptions]) -> None:
        """Writes the sequence to a cache file, atomically and durably.

        Raises NoSpaceError, PermissionDeniedError, IoError, Cancelled, BadArgumentError,
        NoMemoryError, BusyError: the old file stays.
        """
        owner, watch = self._live(), Watch()
        check_names(ControlOptions, options)
        how = control(options, watch)
        watch.run(lib.kv_save, owner, as_string("path", path), byref(how))


def _next(owner: Owner, how: _abi.kv_generate_options, options: Mapping[str, Any]) -> Token:
    token, end = c_int32(), c_int32()
    call(
        lib.kv_session_next, owner, byref(how), byref(control(options)), byref(token), byref(end)
    )
    return Token(token.value, bool(end.value))
