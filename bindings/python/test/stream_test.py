"""Answers as iterators: a stream that is closed, dropped or left leaves its session free."""
import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from support import FACT, MODEL, QUESTION, Case, long_text

import kvasir
from kvasir import Status

# A flat distribution: the answer has thousands of tokens before it happens to end.
STORY = {"question": "Tell me a story.", "max_tokens": 100_000, "temperature": 4, "seed": 1}


LEFT = """
import sys, kvasir
session = kvasir.Model(sys.argv[1]).load(sys.argv[2])
stream = session.stream("Tell me a story.", max_tokens=100_000, temperature=4, seed=1)
next(stream)
"""


class Trouble(Exception):
    pass


def answer_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvasir-answer"]


class Streams(Case):
    def setUp(self):
        super().setUp()
        self.addCleanup(lambda: self.assertEqual(answer_threads(), []))

    def test_a_stream_has_the_pieces_of_the_answer(self):
        session, pieces = self.prefilled(), []
        answer = session.ask(QUESTION, pieces.append, stop=["907"])
        self.assertEqual(answer.stop_reason, kvasir.StopReason.STRING)
        self.assertEqual("".join(pieces), answer.text)
        with session.stream(QUESTION, stop=["907"]) as stream:
            self.assertEqual(list(stream), pieces)
        self.assertEqual(stream.answer.text, answer.text)
        self.assertEqual(list(stream), [])

    def test_a_loop_that_breaks_leaves_the_session_free(self):
        session = self.prefilled()
        for _ in session.stream(**STORY):
            break
        self.assertEqual(answer_threads(), [])
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_an_exception_in_the_loop_leaves_the_session_free(self):
        session = self.prefilled()

        def fail():
            stream = session.stream(**STORY)
            for _ in stream:
                raise Trouble

        try:
            fail()
        except Trouble as error:  # whose traceback keeps the stream
            self.assertEqual(session.ask(QUESTION).text, FACT)
            del error
        with contextlib.suppress(Trouble):
            for _ in session.stream(**STORY):
                raise Trouble
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_a_stream_in_a_reference_cycle_leaves_the_session_free(self):
        session, cycle = self.prefilled(), []
        gc.disable()
        try:
            cycle.append((cycle, session.stream(**STORY)))
            next(cycle[0][1])
            del cycle
            self.assertEqual(session.ask(QUESTION).text, FACT)
        finally:
            gc.enable()
            gc.collect()

    def test_a_call_of_the_same_thread_stops_the_stream_which_then_fails(self):
        session = self.prefilled()
        stream = session.stream(**STORY)
        next(stream)
        self.assertIn("busy", repr(session))
        self.assertEqual(session.ask(QUESTION).text, FACT)
        with self.assertRaises(kvasir.Cancelled) as caught:
            list(stream)
        self.assertEqual(caught.exception.answer.stop_reason, kvasir.StopReason.CANCELLED)
        second = session.stream(QUESTION)
        third = session.stream(QUESTION)
        self.assertEqual("".join(third), FACT)
        with contextlib.suppress(kvasir.Cancelled):
            list(second)

    def test_a_call_of_another_thread_is_busy(self):
        session, failures = self.prefilled(), []

        def call():
            failures.append(self.assert_status(Status.BUSY, session.stats))

        with session.stream(**STORY) as stream:
            next(stream)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            next(stream)
        self.assertIsInstance(failures[0], kvasir.BusyError)

    def test_closing_the_session_stops_the_stream(self):
        session = self.prefilled()
        stream = session.stream(**STORY)
        session.close()
        self.assertEqual(answer_threads(), [])
        with self.assertRaises(kvasir.Cancelled):
            list(stream)

    def test_a_stream_stops_while_the_question_is_prefilled(self):
        session = self.prefilled()
        stream = session.stream(long_text())
        del stream
        self.assertEqual(answer_threads(), [])
        with session.stream(long_text()):
            pass
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_a_failure_comes_out_of_the_iteration(self):
        session = self.model.session(context_tokens=64)
        self.assert_status(Status.CONTEXT_FULL, list, session.stream(QUESTION * 10))
        self.assert_status(Status.BAD_ARGUMENT, session.stream, QUESTION, max_tokens=-1)

    def test_control_c_stops_a_stream(self):
        session = self.prefilled()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            list(session.stream(long_text()))
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_a_program_that_ends_does_not_wait_for_its_stream(self):
        path = self.folder / "saved.kv"
        self.prefilled().save(path)
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", LEFT, MODEL, path], check=True)
        self.assertLess(time.monotonic() - begin, 60)  # the whole answer takes many minutes

    def test_a_stream_has_a_short_representation(self):
        stream = self.prefilled().stream(QUESTION)
        self.assertEqual(repr(stream), "<kvasir.Stream: open>")
        list(stream)
        self.assertEqual(repr(stream), "<kvasir.Stream: exhausted>")


class Asyncio(Case):
    def setUp(self):
        super().setUp()
        self.addCleanup(lambda: self.assertEqual(answer_threads(), []))

    def test_an_answer_does_not_block_the_loop(self):
        session, turns = self.prefilled(), []

        async def count():
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        async def main():
            counting = asyncio.create_task(count())
            answer = await session.aask(QUESTION)
            counting.cancel()
            return answer

        self.assertEqual(asyncio.run(main()).text, FACT)
        self.assertGreater(len(turns), 10)

    def test_a_stream_has_the_pieces_of_the_answer(self):
        session = self.prefilled()

        async def main():
            async with session.astream(QUESTION) as stream:
                pieces = [piece async for piece in stream]
            return pieces, stream.answer, [piece async for piece in stream]

        pieces, answer, after = asyncio.run(main())
        self.assertEqual(("".join(pieces), answer.text, after), (FACT, FACT, []))
        self.assertGreater(len(pieces), 3)

    def test_a_cancelled_task_stops_the_answer(self):
        session = self.prefilled()

        async def main():
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(session.aask(**STORY), 0.3)
            self.assertEqual(answer_threads(), [])
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(session.aask(long_text()), 0.3)
            return await session.aask(QUESTION)

        self.assertEqual(asyncio.run(main()).text, FACT)

    def test_a_loop_that_breaks_or_fails_leaves_the_session_free(self):
        session = self.prefilled()

        async def main():
            async for _ in session.astream(**STORY):
                break
            self.assertEqual((await session.aask(QUESTION)).text, FACT)
            with contextlib.suppress(Trouble):
                async for _ in session.astream(**STORY):
                    raise Trouble
            return await session.aask(QUESTION)

        self.assertEqual(asyncio.run(main()).text, FACT)

    def test_a_stream_that_outlives_its_loop_ends(self):
        session = self.prefilled()

        async def main():
            stream = session.astream(**STORY)
            await stream.__anext__()
            return stream

        stream = asyncio.run(main())
        self.assertEqual(session.ask(QUESTION).text, FACT)
        del stream

    def test_a_failure_comes_out_of_the_task(self):
        session = self.model.session(context_tokens=64)
        with self.assertRaises(kvasir.ContextFullError):
            asyncio.run(session.aask(QUESTION * 10))


unittest.main()
