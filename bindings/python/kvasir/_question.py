"""One question to a session, and the text of tokens."""
from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t
from typing import Any, Callable, List, Mapping, Optional

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Owner, Watch, call, lib
from ._values import address, as_bytes, control, fill, result_of, sized
from .enums import Phase, Status, StopReason, known
from .errors import Error
from .options import GenerateOptions, OnText, Text
from .results import Answer


class Question:
    """Checked arguments of one kv_generate."""

    def __init__(self, owner: Owner, question: Text, options: Mapping[str, Any]) -> None:
        self.owner, self.question, self.options = owner, as_bytes(question), options
        self.how = fill(_abi.kv_generate_options, GenerateOptions, options)
        self.pieces: List[str] = []
        self.thoughts: List[str] = []
        control(options)  # a closed token is refused here and not in a thread

    def ask(
        self, on_text: Optional[OnText], is_stopped: Callable[[], bool] = lambda: False
    ) -> Answer:
        """Decodes the answer. on_text and is_stopped may stop it."""
        watch, answer = Watch(), sized(_abi.kv_answer)
        report = self.options.get("progress")

        def progress(phase: Phase, done: int, total: int) -> object:
            return is_stopped() or (report is not None and report(phase, done, total))

        def take(text: int, size: int) -> object:
            piece = ctypes.string_at(text, size).decode("utf-8", "replace")
            self.pieces.append(piece)
            return on_text is not None and on_text(piece)

        on_thinking = self.options.get("on_thinking")

        def think(text: int, size: int) -> object:
            piece = ctypes.string_at(text, size).decode("utf-8", "replace")
            self.thoughts.append(piece)
            return is_stopped() or (on_thinking is not None and on_thinking(piece))

        def c_take(text: int, size: int, _user: object) -> int:
            return watch.callback(take, text, size)

        def c_think(text: int, size: int, _user: object) -> int:
            return watch.callback(think, text, size)

        # Ctrl-C and the end of a stream need a callback, also where nobody reads the thought.
        self.how.on_thinking = _abi.TEXT_FN(c_think)
        try:
            watch.run(
                lib.kv_generate, self.owner, self.question, len(self.question), byref(self.how),
                byref(control({**self.options, "progress": progress}, watch)),
                _abi.TEXT_FN(c_take), None, byref(answer),
            )
        except Error as error:
            error.answer = self._answer(answer)
            raise
        finally:
            self.how.on_thinking = _abi.TEXT_FN()  # or it and this frame would keep each other
        return self._answer(answer)

    def _answer(self, answer: _abi.kv_answer) -> Answer:
        reason = known(StopReason, answer.stop_reason) if answer.stop_reason else None
        return result_of(
            Answer, answer, text="".join(self.pieces), thought="".join(self.thoughts),
            stop_reason=reason,
        )


def detokenize(model: Owner, ids: npt.NDArray[np.int32], flags: int) -> bytes:
    """Calls kv_detokenize with room for the whole text."""
    size = c_size_t(8 * ids.size + 16)
    while True:
        room = ctypes.create_string_buffer(size.value)
        try:
            call(
                lib.kv_detokenize, model, address(ids), ids.size, flags, room, len(room),
                byref(size),
            )
            return room.raw[: size.value]
        except Error as error:
            if error.status != Status.LIMIT or size.value <= len(room):
                raise


def whole_characters(text: bytes) -> str:
    """Decodes UTF-8 without the parts of characters at both ends."""
    begin = next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)
    for end in range(len(text), max(begin, len(text) - 4), -1):
        try:
            return text[begin:end].decode()
        except UnicodeDecodeError:
            continue
    return text[begin:].decode("utf-8", "replace")
