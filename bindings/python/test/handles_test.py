"""Closing, threads, cancelling and callbacks: nothing crashes, nothing is lost."""
import gc
import itertools
import os
import signal
import sys
import threading
import time
import unittest

from support import FACT, MODEL, QUESTION, Case, document

import kvasir
from kvasir import Status


class Trouble(Exception):
    pass


def long_text():
    return (MODEL.parent / "sherlock-holmes.txt").read_text(encoding="utf-8")[:200_000]


class Closing(Case):
    def test_everything_is_an_error_after_close(self):
        path = self.folder / "saved.kv"
        session = self.reader()
        session.save(path)
        model, library, token = kvasir.Model(MODEL), kvasir.Library(self.folder / "library"), kvasir.Cancel()
        for handle in (session, model, library, token):
            handle.close()
            handle.close()
            self.assertTrue(handle.closed)
        for function, *arguments in (
            (session.prefill, "a"), (session.prefill_tokens, [1]), (session.prefill_logits, [1]), (session.generate, "a"), (session.stream, "a"),
            (session.next,), (lambda: list(session.continuation()),), (session.score, [1]), (session.prepare,), (session.set_strategy, "full"),
            (lambda: session.tokens,), (session.rewind, 0), (session.fork,), (session.stats,), (session.save, path), (session.__enter__,),
            (model.tokenize, "a"), (model.detokenize, [1]), (model.session,), (model.load, path), (lambda: model.info,), (model.retain,),
            (list, library), (library.session, self.model, "a"), (library.rename, "a", "b"), (library.remove, "a"), (token.fire,), (token.reset,),
            (lambda: kvasir.Library(self.folder / "library").session(model, "a"),), (lambda: self.model.session().prefill("a", cancel=token),),
        ):
            self.assertStatus(Status.BAD_ARGUMENT, "is closed", function, *arguments)

    def test_handles_close_in_any_order(self):
        for order in itertools.permutations(range(4)):
            model = kvasir.Model(MODEL)
            other = model.retain()
            session = model.session()
            handles = [model, other, session, session.fork()]
            for i in order[:2]:
                handles[i].close()
            for handle in handles[2:]:
                if not handle.closed:
                    handle.prefill("north gate")
            for i in order[2:]:
                handles[i].close()

    def test_a_handle_closed_under_a_call_is_freed_after_it(self):
        model = kvasir.Model(MODEL)
        session = model.session()
        entered = threading.Event()
        result = []
        thread = threading.Thread(target=lambda: result.append(session.prefill(document(4000), progress=lambda *_: entered.set() and False)))
        thread.start()
        entered.wait(60)
        session.close()
        model.close()
        thread.join()
        self.assertGreater(result[0].tokens, 1000)

    def test_a_session_closed_by_its_own_callback_ends_its_call(self):
        session = self.reader()
        self.assertEqual(session.generate(QUESTION, lambda _: session.close()).text, FACT)
        self.assertTrue(session.closed)

    def test_a_fork_of_the_process_cannot_use_a_handle(self):
        session = self.reader()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                session.stats()
            except kvasir.BadArgument as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(session.generate(QUESTION).text, FACT)


class Threads(Case):
    def test_a_second_call_is_busy_and_changes_nothing(self):
        session = self.reader()
        with session.stream(QUESTION) as stream:
            next(stream)
            busy = []

            def take(_):
                try:
                    session.stats()
                except kvasir.Busy as error:
                    busy.append(str(error))

            self.assertEqual("".join(stream)[-8:], FACT[-8:])
        self.assertEqual(session.generate(QUESTION, take).text, FACT)
        self.assertIn("another call on this session", busy[0])

    def test_threads_share_a_model(self):
        answers = []

        def ask():
            with self.model.session(threads=1) as session:
                session.prefill(document(600))
                answers.append(session.generate(QUESTION).text)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual(answers, [FACT] * 3)

    def test_the_interpreter_s_lock_is_released(self):
        turns, session = 0, self.model.session()
        thread = threading.Thread(target=session.prefill, args=(document(6000),))
        thread.start()
        while thread.is_alive():
            turns += 1
        self.assertGreater(turns, 1000)


class Stopping(Case):
    def test_a_token_cancels_from_another_thread_within_100_ms(self):
        session, token, fired = self.model.session(), kvasir.Cancel(), []

        def fire():
            fired.append(time.monotonic())
            token.fire()

        threading.Timer(0.5, fire).start()
        with self.assertRaises(kvasir.Cancelled) as caught:
            session.prefill(long_text(), cancel=token)
        self.assertLess(time.monotonic() - fired[0], 10)  # 100 ms, on a machine that may do other things; all of it takes minutes
        read = caught.exception.read
        self.assertEqual(read.tokens > 0, len(session.tokens) > 0)
        token.reset()
        session.prefill(long_text().encode()[read.bytes : read.bytes + 500], cancel=token)

    def test_a_token_that_was_fired_cancels_opening_and_tokenizing(self):
        with kvasir.Cancel() as token:
            self.assertEqual(self.model.tokenize(FACT, cancel=token).tolist(), self.model.tokenize(FACT).tolist())
            token.fire()
            with self.assertRaises(kvasir.Cancelled):
                self.model.tokenize(FACT, cancel=token)
            with self.assertRaises(kvasir.Cancelled):
                kvasir.Model(MODEL, cancel=token)

    def test_what_a_callback_raises_comes_out_of_the_call(self):
        session = self.reader()
        at = len(session.tokens)

        def fail(*_):
            raise Trouble("here")

        with self.assertRaisesRegex(Trouble, "here"):
            session.generate(QUESTION, fail)
        with self.assertRaisesRegex(Trouble, "here"):
            session.save(self.folder / "never.kv", progress=fail)
        with self.assertRaises(SystemExit):
            session.generate(QUESTION, lambda _: sys.exit(3))
        self.assertEqual(len(session.tokens), at)
        self.assertEqual(session.generate(QUESTION).text, FACT)

    def test_something_true_stops_and_the_part_is_kept(self):
        session = self.reader()
        with self.assertRaises(kvasir.Cancelled) as caught:
            session.generate(QUESTION, lambda _: True)
        self.assertEqual(caught.exception.answer.text, "The")
        self.assertEqual(caught.exception.answer.stop_reason, kvasir.StopReason.CANCELLED)
        phases = []
        with self.model.session() as other, self.assertRaises(kvasir.Cancelled):
            other.prefill(long_text(), progress=lambda phase, done, total: phases.append((phase, total)) or 1)
        self.assertEqual(phases[0][0], kvasir.Phase.PREFILL)
        self.assertGreater(phases[0][1], 10_000)

    def test_a_stream_that_is_left_stops(self):
        session = self.reader()
        with session.stream("Tell me a very long story.", max_tokens=100_000) as stream:
            next(stream)
        self.assertEqual(session.generate(QUESTION).text, FACT)  # not busy
        stream = session.stream(long_text())
        thread = stream._thread
        del stream
        thread.join(60)
        self.assertFalse(thread.is_alive())
        with self.assertRaises(kvasir.BadArgument):
            list(session.stream(QUESTION, max_tokens=-1))
        self.assertEqual("".join(session.stream(QUESTION)), FACT)

    def test_control_c_stops_a_call_and_python_s_handler_is_back(self):
        for progress in (None, lambda *_: None):
            with self.model.session() as session:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                begin = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    session.prefill(long_text(), progress=progress)
                self.assertLess(time.monotonic() - begin, 10)
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        session = self.reader()
        with self.assertRaises(KeyboardInterrupt):
            session.generate(QUESTION, lambda _: os.kill(os.getpid(), signal.SIGINT))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            list(session.stream(long_text()))
        self.assertEqual(session.generate(QUESTION).text, FACT)

    def test_logs_arrive_as_long_as_a_session_lives_and_may_fail(self):
        lines, failures = [], []

        def log(level, line):
            lines.append((level, line))
            raise Trouble("in a log")

        before, sys.unraisablehook = sys.unraisablehook, lambda args: failures.append(str(args.exc_value))
        try:
            with kvasir.Model(MODEL, log=log) as model:
                session = model.session(log=log, strategy="quest")
            gc.collect()
            session.prefill(document())
            with session.fork() as fork:
                session.close()
                self.assertEqual(fork.generate(QUESTION).text, FACT)
            with kvasir.Library(self.folder, max_bytes=1, log=log) as library:
                library.session(self.model, document(600))[0].close()
                library.session(self.model, document(700))[0].close()
        finally:
            sys.unraisablehook = before
        self.assertTrue(lines)
        self.assertIsInstance(lines[0][0], kvasir.LogLevel)
        self.assertEqual(failures, ["in a log"] * len(lines))


unittest.main()
