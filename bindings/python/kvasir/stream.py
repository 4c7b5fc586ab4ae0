"""An answer as an iterator."""
from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Callable, Iterator, Optional, Type, Union

from .results import Answer

Work = Callable[[Callable[[str], object], Callable[[], bool]], Answer]


class _Thread:
    """What the thread and the iterator share; not the iterator itself, so that one that is dropped can stop the thread."""

    def __init__(self, work: Work) -> None:
        self.pieces: queue.SimpleQueue[Union[str, Answer, BaseException]] = queue.SimpleQueue()
        self.stopped = False
        self.work = work

    def run(self) -> None:
        try:
            self.pieces.put(self.work(self.take, lambda: self.stopped))
        except BaseException as error:
            self.pieces.put(error.with_traceback(None))  # whose frames have the queue that would have them

    def take(self, piece: str) -> bool:
        self.pieces.put(piece)
        return self.stopped


class Stream(Iterator[str]):
    """The pieces of an answer, whole characters each, as they are made. What went wrong is raised after the pieces before it. `answer` is there
    after the last piece. Closed, it stops the answer, or the reading of the question, within about 100 ms and waits for that."""

    answer: Optional[Answer] = None

    def __init__(self, work: Work) -> None:
        self._shared: Optional[_Thread] = _Thread(work)
        self._thread = threading.Thread(target=self._shared.run, name="kvasir-answer")
        self._thread.start()

    def __next__(self) -> str:
        shared = self._shared
        if shared is None:
            raise StopIteration
        try:
            piece = shared.pieces.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(piece, str):
            return piece
        shared.pieces.put(piece)  # for another thread that waits here
        self._shared = None
        self._thread.join()
        if isinstance(piece, BaseException):
            try:
                raise piece
            finally:
                del piece
        self.answer = piece
        raise StopIteration

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.stopped = True
            self._thread.join()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        if shared is not None:
            shared.stopped = True
