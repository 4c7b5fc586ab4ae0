"""Answers as iterators: one thread computes an answer, another iterates over its pieces."""
from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from types import TracebackType
from typing import AsyncIterator, Callable, Iterator, Optional, Type, TypeVar, Union

from .results import Answer

Item = Union[str, Answer, BaseException]
Work = Callable[[Callable[[str], object], Callable[[], bool]], Answer]
Self = TypeVar("Self", bound="_Pieces")


class Worker:
    """Thread that computes one answer.

    It does not refer to the iterator, so a dropped iterator can stop it.
    """

    def __init__(self, work: Work, put: Callable[[Item], object]) -> None:
        self.stopped = False
        self.consumer = threading.get_ident()  # the thread that iterates
        self._work, self._put = work, put
        self._thread = threading.Thread(target=self._run, name="kvasir-answer")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._put(self._work(self._take, self._is_over))
        except BaseException as error:
            self._put(error.with_traceback(None))  # whose frames refer to the queue

    def _take(self, piece: str) -> bool:
        self._put(piece)
        return self._is_over()

    def _is_over(self) -> bool:
        """True if nobody needs the answer. The interpreter waits for this thread when it ends."""
        return self.stopped or not threading.main_thread().is_alive()

    @property
    def running(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stops the answer within about 100 ms and waits for the end of the thread."""
        self.stopped = True
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Pieces:
    """What Stream and AsyncStream share."""

    answer: Optional[Answer] = None

    _worker: Optional[Worker] = None  # None: exhausted or closed

    def _end(self, item: Union[Answer, BaseException], over: BaseException) -> BaseException:
        """Ends the iteration. Returns the exception that says so."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
        if isinstance(item, BaseException):
            return item
        self.answer = item
        return over

    def close(self) -> None:
        """Stops the answer within about 100 ms and waits for that. A second close does nothing."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def __repr__(self) -> str:
        about = "open" if self._worker is not None else "exhausted" if self.answer else "closed"
        return f"<kvasir.{type(self).__name__}: {about}>"

    def __del__(self) -> None:
        self.close()


class Stream(_Pieces, Iterator[str]):
    """Iterator over the pieces of an answer, whole characters each, as decode produces them.

    A failure is raised after the pieces before it. `answer` has the Answer after the last piece.
    A thread of its own computes the answer and runs ahead of the iteration. A stream that is closed
    or dropped stops, and so does one at the end of its `with` block.
    """

    def __init__(self, start: Callable[[Callable[[Item], object]], Worker]) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._worker = start(self._queue.put)

    def __next__(self) -> str:
        worker = self._worker
        if worker is None:
            raise StopIteration
        worker.consumer = threading.get_ident()
        try:
            item = self._queue.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, str):
            return item
        self._queue.put(item)  # for another thread that waits here
        error = self._end(item, StopIteration())
        del item
        try:
            raise error
        finally:
            del error  # or its traceback and this frame would keep each other

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


class AsyncStream(_Pieces, AsyncIterator[str]):
    """Asynchronous iterator over the pieces of an answer: Stream for asyncio.

    A cancelled task stops the answer. `async with` stops it at the end of the block, without
    blocking the event loop. A dropped stream stops too, and blocks the loop until then.
    """

    def __init__(self, start: Callable[[Callable[[Item], object]], Worker]) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Item] = asyncio.Queue()

        def put(item: Item) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(pieces.put_nowait, item)

        self._queue = pieces
        self._worker = start(put)

    async def __anext__(self) -> str:
        if self._worker is None:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except BaseException:  # the task is cancelled
            await self.aclose()
            raise
        if isinstance(item, str):
            return item
        self._queue.put_nowait(item)  # for another task that waits here
        error = self._end(item, StopAsyncIteration())
        del item
        try:
            raise error
        finally:
            del error

    async def aclose(self) -> None:
        """Stops the answer within about 100 ms and waits for that without blocking the loop."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stopped = True
            await asyncio.get_running_loop().run_in_executor(None, worker.stop)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.aclose()
