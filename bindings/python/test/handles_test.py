"""Handles: closing, threads, cancel tokens and callbacks. Nothing crashes, nothing is lost."""
import gc
import itertools
import os
import signal
import sys
import threading
import time
import unittest

from support import FACT, MODEL, QUESTION, Case, document, long_text

import kvasir
from kvasir import Status, experimental


class Trouble(Exception):
    pass


class Closing(Case):
    def test_every_call_on_a_closed_handle_is_refused(self):
        path = self.folder / "saved.kv"
        session = self.prefilled()
        session.save(path)
        model, library = kvasir.Model(MODEL), kvasir.Library(self.folder / "library")
        token = kvasir.Cancel()
        for handle in (session, model, library, token):
            handle.close()
            handle.close()
            self.assertTrue(handle.closed)
            self.assertRegex(repr(handle), r"^<kvasir\.\w+: closed>$")
        other = kvasir.Library(self.folder / "library")
        for function, *arguments in (
            (session.prefill, "a"),
            (session.prefill_tokens, [1]),
            (experimental.prefill_logits, session, [1]),
            (experimental.measure, session, experimental.Measure.COMPARE),
            (session.ask, "a"),
            (session.stream, "a"),
            (session.astream, "a"),
            (session.next,),
            (lambda: list(session.continuation()),),
            (session.passages,),
            (session.score, [1]),
            (session.prepare,),
            (session.set_strategy, "full"),
            (lambda: session.tokens,),
            (session.rewind, 0),
            (session.fork,),
            (session.stats,),
            (session.stats_json,),
            (session.save, path),
            (session.__enter__,),
            (model.tokenize, "a"),
            (model.detokenize, [1]),
            (model.session,),
            (model.load, path),
            (lambda: model.info,),
            (model.hash,),
            (model.retain,),
            (list, library),
            (library.session, self.model, "a"),
            (library.rename, "a", "b"),
            (library.remove, "a"),
            (token.fire,),
            (token.reset,),
            (other.session, model, "a"),
            (lambda: self.model.session().prefill("a", cancel=token),),
            (lambda: self.model.session().stream("a", cancel=token),),
        ):
            self.assert_closed(function, *arguments)

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

    def test_a_handle_that_is_closed_during_a_call_is_freed_after_it(self):
        model = kvasir.Model(MODEL)
        session = model.session()
        entered = threading.Event()
        result = []

        def prefill():
            progress = lambda *_: entered.set() and False  # noqa: E731
            result.append(session.prefill(document(4000), progress=progress))

        thread = threading.Thread(target=prefill)
        thread.start()
        entered.wait(60)
        session.close()
        model.close()
        thread.join()
        self.assertGreater(result[0].tokens, 1000)

    def test_a_session_that_its_own_callback_closes_ends_its_call(self):
        session = self.prefilled()
        self.assertEqual(session.ask(QUESTION, lambda _: session.close()).text, FACT)
        self.assertTrue(session.closed)

    def test_a_fork_of_the_process_cannot_use_a_handle(self):
        session = self.prefilled()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                session.stats()
            except kvasir.BadArgumentError as error:
                status = 0 if "parent of this process" in str(error) else 2
                status = status if "another process" in repr(session) else 3
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_representations_describe_open_handles(self):
        session = self.prefilled()
        tokens = len(session.tokens)
        self.assertEqual(repr(session), f"<kvasir.Session: {tokens} tokens>")
        self.assertRegex(repr(self.model), r"^<kvasir.Model: 'mini-reader.*', llama, \d+ param")
        with kvasir.Library(self.folder) as library, kvasir.Cancel() as token:
            self.assertEqual(repr(library), f"<kvasir.Library: {str(self.folder)!r}>")
            self.assertEqual(repr(token), "<kvasir.Cancel: open>")
        seen = []
        session.ask(QUESTION, lambda _: seen.append(repr(session)))
        self.assertEqual(set(seen), {"<kvasir.Session: busy>"})


class Threads(Case):
    def test_a_second_call_is_busy_and_changes_nothing(self):
        session, busy = self.prefilled(), []

        def take(_):
            try:
                session.stats()
            except kvasir.BusyError as error:
                busy.append(error)

        self.assertEqual(session.ask(QUESTION, take).text, FACT)
        self.assertEqual(busy[0].status, Status.BUSY)

    def test_threads_share_a_model(self):
        answers = []

        def ask():
            with self.model.session(threads=1) as session:
                session.prefill(document(600))
                answers.append(session.ask(QUESTION).text)

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
    def test_a_token_cancels_from_another_thread(self):
        session, token, fired = self.model.session(), kvasir.Cancel(), []

        def fire():
            fired.append(time.monotonic())
            token.fire()

        threading.Timer(0.5, fire).start()
        with self.assertRaises(kvasir.Cancelled) as caught:
            session.prefill(long_text(), cancel=token)
        # 100 ms, on a machine that may do other work; the whole text takes minutes.
        self.assertLess(time.monotonic() - fired[0], 10)
        done = caught.exception.prefilled
        self.assertEqual(done.tokens > 0, len(session.tokens) > 0)
        token.reset()
        session.prefill(long_text().encode()[done.bytes : done.bytes + 500], cancel=token)

    def test_a_fired_token_cancels_opening_and_tokenizing(self):
        with kvasir.Cancel() as token:
            tokens = self.model.tokenize(FACT, cancel=token)
            self.assertEqual(tokens.tolist(), self.model.tokenize(FACT).tolist())
            token.fire()
            self.assert_status(Status.CANCELLED, self.model.tokenize, FACT, cancel=token)
            self.assert_status(Status.CANCELLED, kvasir.Model, MODEL, cancel=token)

    def test_an_exception_of_a_callback_comes_out_of_the_call(self):
        session = self.prefilled()
        at = len(session.tokens)

        def fail(*_):
            raise Trouble("here")

        with self.assertRaisesRegex(Trouble, "here"):
            session.ask(QUESTION, fail)
        with self.assertRaisesRegex(Trouble, "here"):
            session.save(self.folder / "never.kv", progress=fail)
        with self.assertRaises(SystemExit):
            session.ask(QUESTION, lambda _: sys.exit(3))
        self.assertEqual(len(session.tokens), at)
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_something_true_stops_and_the_part_is_kept(self):
        session = self.prefilled()
        with self.assertRaises(kvasir.Cancelled) as caught:
            session.ask(QUESTION, lambda _: True)
        self.assertEqual(caught.exception.answer.text, "The")
        self.assertEqual(caught.exception.answer.stop_reason, kvasir.StopReason.CANCELLED)
        phases = []

        def progress(phase, done, total):
            phases.append((phase, total))
            return 1

        with self.model.session() as other, self.assertRaises(kvasir.Cancelled):
            other.prefill(long_text(), progress=progress)
        self.assertEqual(phases[0][0], kvasir.Phase.PREFILL)
        self.assertGreater(phases[0][1], 10_000)

    def test_control_c_stops_a_call_and_python_s_handler_returns(self):
        for progress in (None, lambda *_: None):
            with self.model.session() as session:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                begin = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    session.prefill(long_text(), progress=progress)
                self.assertLess(time.monotonic() - begin, 10)
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        session = self.prefilled()
        with self.assertRaises(KeyboardInterrupt):
            session.ask(QUESTION, lambda _: os.kill(os.getpid(), signal.SIGINT))
        self.assertEqual(session.ask(QUESTION).text, FACT)

    def test_logs_arrive_while_a_session_lives_and_may_fail(self):
        lines, failures = [], []

        def log(level, line):
            lines.append((level, line))
            raise Trouble("in a log")

        before = sys.unraisablehook
        sys.unraisablehook = lambda args: failures.append(str(args.exc_value))
        try:
            with kvasir.Model(MODEL, log=log) as model:
                session = model.session(log=log, decode="quest")
            gc.collect()
            session.prefill(document())
            with session.fork() as fork:
                session.close()
                self.assertEqual(fork.ask(QUESTION).text, FACT)
            with kvasir.Library(self.folder, max_bytes=1, log=log) as library:
                library.session(self.model, document(600))[0].close()
                library.session(self.model, document(700))[0].close()
        finally:
            sys.unraisablehook = before
        self.assertTrue(lines)
        self.assertIsInstance(lines[0][0], kvasir.LogLevel)
        self.assertEqual(failures, ["in a log"] * len(lines))


unittest.main()
