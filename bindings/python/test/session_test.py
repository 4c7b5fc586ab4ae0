"""Sessions of a real model: reading, asking, saving, and what is refused."""
import os
import pickle
import subprocess
import unittest

from support import FACT, MODEL, QUESTION, Case, document  # first: skips where there is no numpy
import numpy as np

import kvasir
from kvasir import Status


class Sessions(Case):
    def test_the_fact_is_found_and_a_saved_document_answers_alike(self):
        session = self.reader()
        before = session.tokens
        answer = session.generate(QUESTION)
        self.assertEqual(answer.text, FACT)
        self.assertEqual(answer.stop_reason, kvasir.StopReason.END_OF_TURN)
        self.assertGreater(answer.tokens_present, 0)
        np.testing.assert_array_equal(session.tokens, before)
        path = self.folder / "saved.kv"
        session.save(path)
        with self.model.load(path, verify=True) as loaded:
            self.assertEqual(loaded.generate(QUESTION).text, answer.text)
        tool = subprocess.run([os.environ["KVASIR_TOOL"], "ask", "-m", MODEL, "-c", path, QUESTION], capture_output=True, text=True, timeout=100)
        self.assertEqual(tool.stdout.splitlines()[-1:], [answer.text], tool.stderr)

    def test_an_answer_tells_where_it_looked(self):
        session = self.reader()
        self.assertStatus(Status.BAD_STATE, "", session.trace)
        session.generate(QUESTION, trace=True)
        spans = session.trace()
        at = spans[0].first_token
        self.assertIn(b"482", self.model.detokenize(session.tokens[at : at + spans[0].tokens]))
        self.assertEqual([span.share for span in spans], sorted((span.share for span in spans), reverse=True))

    def test_a_stream_has_the_pieces_of_the_answer(self):
        session, pieces = self.reader(), []
        answer = session.generate(QUESTION, lambda piece: pieces.append(piece), stop=["907"])
        self.assertEqual(answer.stop_reason, kvasir.StopReason.STRING)
        self.assertEqual("".join(pieces), answer.text)
        with session.stream(QUESTION, stop=["907"]) as stream:
            self.assertEqual(list(stream), pieces)
        self.assertEqual(stream.answer.text, answer.text)
        self.assertEqual(list(stream), [])

    def test_a_continuation_makes_each_token_when_it_is_asked_for(self):
        session = self.reader()
        at = len(session.tokens)
        session.next()
        session.rewind(at)  # from here on the last token has been read by itself
        tokens = session.continuation()
        made = [next(tokens), next(tokens)]
        np.testing.assert_array_equal(session.tokens[at:], made)
        session.rewind(at)
        self.assertEqual([session.next().token, session.next().token], made)
        session.rewind(at)
        self.assertEqual(len(session.tokens), at)
        self.assertStatus(Status.BAD_ARGUMENT, "", session.rewind, at + 1)

    def test_kept_turns_stay_and_sampling_follows_its_seed(self):
        session = self.reader()
        at = len(session.tokens)
        options = {"temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 0.001, "repetition_penalty": 1.1, "max_tokens": 12}
        with session.fork() as fork:
            first = fork.generate("Tell me more.", seed=7, keep=True, **options)
            self.assertEqual(len(fork.tokens), at + first.question_tokens + first.answer_tokens)
        self.assertEqual(session.generate("Tell me more.", seed=7, **options).text, first.text)
        self.assertNotEqual(session.generate("Tell me more.", seed=8, **options).text, first.text)
        self.assertEqual(len(session.tokens), at)

    def test_logits_are_written_into_one_array_and_agree_with_scores(self):
        ids = self.model.tokenize(FACT)
        with self.model.session(kv_type=kvasir.KvType.F32) as session:
            logits = session.prefill_logits(ids)
            self.assertEqual(logits.shape, (len(ids), self.model.info.vocabulary))
            session.rewind(3)
            scores = session.score(ids[3:])
        rows = logits[2:-1].astype(np.float64)
        expected = rows[np.arange(len(ids) - 3), ids[3:]] - np.log(np.exp(rows).sum(1))
        np.testing.assert_allclose(scores, expected, atol=0.3)  # weights are multiplied in int8, in other batches

    def test_text_and_tokens_come_back_as_they_were(self):
        for text in ["", "north gate", "\0 zero \0", "größer 漢字 🙂 " * 50, b"\xff\xfe not UTF-8 \x80"]:
            ids = self.model.tokenize(text)
            self.assertEqual(ids.dtype, np.int32)
            self.assertEqual(self.model.detokenize(ids), text if isinstance(text, bytes) else text.encode())
        self.assertEqual(self.model.tokenize("<|im_end|>", special=True).tolist(), [2])
        self.assertEqual(self.model.detokenize([2]), b"")
        self.assertEqual(self.model.detokenize(np.array([2], np.uint8), special=True), b"<|im_end|>")
        self.assertEqual(self.model.tokenize(b"caf\xe9".decode("utf-8", "surrogateescape")).tolist(), self.model.tokenize(b"caf\xe9").tolist())

    def test_tokens_of_other_widths_are_not_cut(self):
        with self.model.session() as session:
            self.assertEqual(session.prefill_tokens(np.array([10, 11], np.int64)).tokens, 2)
            self.assertEqual(session.prefill_tokens(np.arange(40, 60)[::2]).tokens, 10)
            for tokens in (np.array([2**32 + 10]), [1.5], [[1, 2]], "text"):
                self.assertStatus(Status.BAD_ARGUMENT, "token", session.prefill_tokens, tokens)
            self.assertStatus(Status.BAD_ARGUMENT, "", session.prefill_tokens, [10**6])
            self.assertEqual(len(session.tokens), 12)

    def test_options_that_do_not_fit_are_refused_before_the_library_sees_them(self):
        for options in ({"window": -1}, {"window": 2**32}, {"memory_budget": 2**64}, {"strategy": "full\0"}, {"strategy": "no such"}, {"alpha": 2}):
            self.assertStatus(Status.BAD_ARGUMENT, "", self.model.session, **options)
        for options in ({"windows": 64}, {"struct_size": 4}, {"log_user": 0}, {"window": 1.5}, {"strategy": 5}):
            with self.assertRaises(TypeError):
                self.model.session(**options)
        with self.model.session() as session:
            with self.assertRaises(TypeError):
                session.generate("Who?", stop="one string")
            self.assertStatus(Status.BAD_ARGUMENT, "zero byte", session.generate, "Who?", stop=["a\0b"])
            self.assertStatus(Status.BAD_STATE, "", session.next)

    def test_options_change_what_is_read(self):
        options = {"threads": 1, "context": 4096, "window": 32, "prefill_chunk": 64, "dense_layers": 1, "strategy": "quest", "budget_tokens": 128,
                   "budget_fraction": 0, "share_heads": False, "select_tokens": 32, "compare": 1, "certify": True, "prefill_strategy": "quest",
                   "prefill_budget_fraction": 0.1, "prefill_exact_tokens": 10, "search_breadth": 64, "head_graphs": False,
                   "memory_budget": 40_000_000, "spill_folder": self.folder, "filter_window": 1, "alpha": 0.01, "kv_type": 0}
        session = self.reader(**options)
        self.assertEqual(session.generate(QUESTION).text, FACT)
        stats = session.stats()
        self.assertEqual(stats["strategy_planned"], "quest")
        self.assertEqual(stats["memory_budget"], 40_000_000)
        self.assertIn("compared", stats)
        session.set_strategy("bounded", budget_fraction=0.5)
        session.prepare()
        self.assertEqual(session.generate(QUESTION).text, FACT)
        self.assertEqual(session.stats()["strategy_planned"], "bounded")
        self.assertStatus(Status.BAD_ARGUMENT, "", session.set_strategy, "no such")
        self.assertStatus(Status.BAD_ARGUMENT, "", self.model.session, strategy="full", coverage=0.5)
        self.assertStatus(Status.BAD_ARGUMENT, "", self.model.session, strategy="filter-layers", filter_layers="8,2")

    def test_a_prefix_is_loaded_as_if_no_more_had_been_read(self):
        session, path = self.reader(), self.folder / "saved.kv"
        session.save(path)
        with self.model.load(path, tokens=300) as prefix:
            np.testing.assert_array_equal(prefix.tokens, session.tokens[:300])
        self.assertStatus(Status.BAD_ARGUMENT, "", self.model.load, path, tokens=10**6)

    def test_the_library_s_message_arrives_whole_with_its_status(self):
        missing = self.folder / "größe.kv"
        error = self.assertStatus(Status.NOT_FOUND, "größe.kv", self.model.load, missing)
        self.assertIsInstance(error, FileNotFoundError)
        self.assertEqual(error.errno, 2)
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), copy.status, str(copy), copy.errno), (type(error), error.status, str(error), error.errno))
        self.assertStatus(Status.BAD_ARGUMENT, "zero byte", self.model.load, "a\0b")
        missing.write_bytes(b"not a cache" * 1000)
        self.assertStatus(Status.NOT_A_CACHE, "", self.model.load, missing)
        self.assertIsInstance(self.assertStatus(Status.UNSUPPORTED, "", kvasir.Model, missing), kvasir.Unsupported)
        self.assertStatus(Status.BAD_ARGUMENT, "", kvasir.Model, MODEL, chat_format="no such")
        session = self.reader()
        session.save(missing)
        damaged = bytearray(missing.read_bytes())
        damaged[70_000] ^= 1
        missing.write_bytes(damaged)
        error = self.assertStatus(Status.CORRUPT, "", self.model.load, missing, verify=True)
        self.assertTrue(65536 <= error.offset <= 70_000)
        self.assertFalse(error.is_stale)
        with self.model.session(context=64) as small:
            error = self.assertStatus(Status.CONTEXT_FULL, "", small.prefill, document())
            self.assertEqual(error.read.tokens, 0)

    def test_what_the_library_says_of_itself(self):
        self.assertEqual(kvasir.version(), 100)
        self.assertIn("cpu", str(kvasir.build_info()))
        self.assertIn("bounded", [s.name for s in kvasir.strategies() if s.takes_coverage])
        self.assertEqual(kvasir.status_text(0), "ok")
        self.assertEqual(kvasir.status_text(999), "unknown status")
        self.assertEqual(kvasir.inspect_model(MODEL), self.model.info)
        with kvasir.Model(MODEL) as hashed:
            hashed.hash()
            self.assertEqual(len(hashed.info.hash), 32)
        self.assertEqual(self.model.info.context, 131072)


unittest.main()
