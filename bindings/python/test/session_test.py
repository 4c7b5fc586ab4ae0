"""Sessions of a real model: prefill, answers, cache files, and what is refused."""
import os
import pathlib
import pickle
import subprocess
import unittest

from support import FACT, MODEL, QUESTION, Case, document  # first: skips where there is no numpy
import numpy as np

import kvasir
from kvasir import Status, Strategy, experimental


class Sessions(Case):
    def test_composes_saved_documents(self):
        paths = [self.folder / "one.kv", self.folder / "two.kv"]
        for path, text in zip(paths, [document(), "The password of the cellar is 5520914."]):
            with self.model.session() as session:
                session.prefill(text)
                session.save(path)
        with self.model.compose(paths, threads=2) as session:
            self.assertEqual([d.path for d in session.documents()], [str(p) for p in paths])
            answer = session.ask(QUESTION, trace_passages=True, max_tokens=32)
            self.assertIn("4821907", answer.text)
            passage = session.passages()[0]
            self.assertEqual(passage.document, 0)
            self.assertIn("4821907", passage.text)
            cellar = "What is the password of the cellar?"
            self.assertIn("5520914", session.ask(cellar, trace_passages=True, max_tokens=32).text)
            passage = session.passages()[0]
            self.assertEqual(passage.document, 1)
            self.assertIn("5520914", passage.text)
            self.assertTrue(session.documents()[1].is_attended)
            session.set_documents(reversed(paths))
            self.assertEqual([d.path for d in session.documents()], [str(p) for p in paths][::-1])
            session.set_documents(paths)
            self.assertRaises(kvasir.NotFoundError, session.set_documents, [self.folder / "none"])
            session.limit_documents([1])
            session.ask(QUESTION, max_tokens=4)
            self.assertEqual([d.is_attended for d in session.documents()], [False, True])
            self.assertRaises(kvasir.BadArgumentError, session.limit_documents, [2])
            over = self.folder / "over.kv"
            session.ask(cellar, keep_turn=True, max_tokens=4)
            session.save(over)
            tokens = session.tokens
        self.assertEqual(kvasir.inspect(over).documents, 2)
        with self.model.load(over) as session:
            np.testing.assert_array_equal(session.tokens, tokens)
            self.assertEqual([d.is_candidate for d in session.documents()], [False, True])
        paths[0].unlink()
        found = kvasir.file_documents(over)
        self.assertEqual([d.path for d in found], [str(p) for p in paths])
        self.assertEqual([d.status for d in found], [kvasir.Status.NOT_FOUND, kvasir.Status.OK])
        self.assertEqual([d.is_attended for d in found], [False, True])
        with self.assertRaisesRegex(kvasir.NotFoundError, "one.kv"):
            self.model.load(over)
        with self.model.load(paths[1]) as session:
            self.assertEqual(session.documents(), [])

    def test_composes_documents_of_a_library(self):
        with kvasir.Library(self.folder / "library") as library:
            self.assertRaises(kvasir.NotFoundError, library.compose, self.model)
            for name, text in (("two", "The password is 5520914."), ("one", document())):
                library.session(self.model, text, name=name)[0].close()

            def names(*given, **options):
                with library.compose(self.model, given, threads=2, **options) as session:
                    return [pathlib.Path(d.path).stem for d in session.documents()]

            self.assertEqual(names(), ["one", "two"])
            self.assertEqual(names("two", "one", max_documents=1), ["two", "one"])
            self.assertRaises(kvasir.NotFoundError, names, "three")
            fired = kvasir.Cancel()
            fired.fire()
            self.assertRaises(kvasir.Cancelled, names, cancel=fired)

    def test_the_fact_is_found_and_a_loaded_document_has_the_same_answer(self):
        session = self.prefilled()
        before = session.tokens
        answer = session.ask(QUESTION)
        self.assertEqual(answer.text, FACT)
        self.assertEqual(answer.stop_reason, kvasir.StopReason.END_OF_TURN)
        self.assertGreater(answer.tokens_present, 0)
        self.assertTrue(0 < answer.first_token_seconds <= answer.total_seconds < 600)
        np.testing.assert_array_equal(session.tokens, before)
        path = self.folder / "saved.kv"
        session.save(path)
        with self.model.load(path, verify=True) as loaded:
            self.assertEqual(loaded.ask(QUESTION).text, answer.text)
            self.assertGreater(loaded.stats().load_seconds, 0)

    def test_a_thought_is_no_part_of_the_answer(self):
        # The model was not trained to think: a thought ends at its limit or with the turn.
        turns = "<|im_start|>system\n{document}<|im_end|>\n{user}<|im_start|>user\n{question}"
        turns += "<|im_end|>\n<|im_start|>assistant\n<T>{thought}</T>\n{answer}<|im_end|>\n"
        asked = {"thinking": True, "thinking_tokens": 5, "max_tokens": 4}
        with kvasir.Model(MODEL, chat_format=turns) as model, model.session() as session:
            self.assertTrue(model.info.thinks)
            session.prefill(document())
            pieces = []
            answer = session.ask(QUESTION, on_thinking=pieces.append, **asked)
            self.assertEqual(answer.thought, "".join(pieces))
            self.assertTrue(0 < answer.thinking_tokens <= 5)
            self.assertTrue(answer.thought and answer.thought not in answer.text)
            self.assert_status(Status.CANCELLED, session.ask, QUESTION, on_thinking=bool, **asked)
            with self.assertRaises(ZeroDivisionError):
                session.ask(QUESTION, on_thinking=lambda _: 1 / 0, **asked)
            with session.stream(QUESTION, **asked) as stream:
                self.assertEqual("".join(stream), answer.text)
            self.assertEqual(stream.answer.thought, answer.thought)
        self.assert_status(Status.UNSUPPORTED, self.prefilled().ask, QUESTION, thinking=True)

    def test_a_vocabulary_tokenizes_without_weights(self):
        with kvasir.Model(MODEL, vocabulary_only=True) as vocabulary:
            tokens = vocabulary.tokenize(QUESTION)
            np.testing.assert_array_equal(tokens, self.model.tokenize(QUESTION))
            self.assert_status(Status.BAD_STATE, vocabulary.session)

    def test_the_command_line_has_the_same_answer(self):
        session, path = self.prefilled(), self.folder / "saved.kv"
        session.save(path)
        command = [os.environ["KVASIR_TOOL"], "ask", "-m", MODEL, "-c", path, QUESTION]
        tool = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        self.assertEqual(tool.stdout.splitlines()[-1:], [FACT], tool.stderr)

    def test_a_passage_has_its_text(self):
        session = self.prefilled()
        self.assert_status(Status.BAD_STATE, session.passages)
        session.ask(QUESTION, trace_passages=True)
        passages = session.passages()
        shares = [passage.share for passage in passages]
        self.assertEqual(shares, sorted(shares, reverse=True))
        best = passages[0]
        self.assertIn("482", best.text)
        tokens = session.tokens[best.first_token : best.first_token + best.tokens]
        self.assertIn(best.text.encode(), self.model.detokenize(tokens))

    def test_a_passage_has_its_bytes_in_the_document(self):
        session = self.prefilled()
        session.ask(QUESTION, trace_passages=True)
        whole = document().encode()
        for passage in session.passages():
            part = whole[passage.first_byte : passage.first_byte + passage.bytes].decode()
            self.assertIn(passage.text.strip(), part)

    def test_own_tokens_have_no_place_in_the_document(self):
        session = self.model.session()
        session.prefill_tokens(self.model.tokenize(document()))
        session.ask(QUESTION, trace_passages=True)
        self.assertTrue(all(p.first_byte is None and p.bytes == 0 for p in session.passages()))

    def test_instructions_precede_the_document(self):
        instructions = "Answer in one word: größe."
        session, path = self.prefilled(instructions=instructions), self.folder / "saved.kv"
        text = self.model.detokenize(session.tokens).decode()
        self.assertLess(text.index(instructions), text.index(document()[:40]))
        session.save(path)
        self.model.load(path).close()
        self.model.load(path, instructions=instructions).close()
        error = self.assert_status(
            Status.MODEL_MISMATCH, self.model.load, path, instructions="Other."
        )
        self.assertTrue(error.is_stale)

    def test_a_continuation_decodes_each_token_on_demand(self):
        session = self.prefilled()
        at = len(session.tokens)
        session.next()
        session.rewind(at)  # from here on the last token was decoded by itself
        tokens = session.continuation()
        made = [next(tokens), next(tokens)]
        np.testing.assert_array_equal(session.tokens[at:], made)
        session.rewind(at)
        self.assertEqual([session.next().id, session.next().id], made)
        session.rewind(at)
        self.assertEqual(len(session.tokens), at)
        self.assert_status(Status.BAD_ARGUMENT, session.rewind, at + 1)
        with kvasir.Cancel() as token:
            token.fire()
            self.assert_status(Status.CANCELLED, session.next, cancel=token)

    def test_kept_turns_stay_and_sampling_follows_its_seed(self):
        session = self.prefilled()
        at = len(session.tokens)
        options = {
            "temperature": 1.5,
            "top_k": 50,
            "top_p": 0.99,
            "min_p": 0.001,
            "repetition_penalty": 1.1,
            "max_tokens": 12,
        }
        with session.fork() as fork:
            first = fork.ask("Tell me more.", seed=7, keep_turn=True, **options)
            self.assertEqual(len(fork.tokens), at + first.question_tokens + first.answer_tokens)
        self.assertEqual(session.ask("Tell me more.", seed=7, **options).text, first.text)
        self.assertNotEqual(session.ask("Tell me more.", seed=8, **options).text, first.text)
        self.assertEqual(len(session.tokens), at)

    def test_logits_and_scores_agree(self):
        ids = self.model.tokenize(FACT)
        with self.model.session(precision=kvasir.Precision.F32) as session:
            logits = experimental.prefill_logits(session, ids)
            self.assertEqual(logits.shape, (len(ids), self.model.info.vocabulary))
            session.rewind(3)
            scores = session.score(ids[3:])
        rows = logits[2:-1].astype(np.float64)
        expected = rows[np.arange(len(ids) - 3), ids[3:]] - np.log(np.exp(rows).sum(1))
        # Scores are by products in int8, logits by others, in bf16 where the CPU has AMX.
        np.testing.assert_allclose(scores, expected, atol=0.4)

    def test_text_and_tokens_survive_the_round_trip(self):
        invalid = b"\xff\xfe not UTF-8 \x80"
        for text in ["", "north gate", "\0 zero \0", "größer 漢字 🙂 " * 50, invalid]:
            ids = self.model.tokenize(text)
            self.assertEqual(ids.dtype, np.int32)
            encoded = text if isinstance(text, bytes) else text.encode()
            self.assertEqual(self.model.detokenize(ids), encoded)
        self.assertEqual(self.model.tokenize("<|im_end|>", special=True).tolist(), [2])
        self.assertEqual(self.model.detokenize([2]), b"")
        narrow = np.array([2], np.uint8)
        self.assertEqual(self.model.detokenize(narrow, special=True), b"<|im_end|>")
        decoded = b"caf\xe9".decode("utf-8", "surrogateescape")
        same = self.model.tokenize(decoded).tolist()
        self.assertEqual(same, self.model.tokenize(b"caf\xe9").tolist())

    def test_tokens_of_other_widths_are_not_cut(self):
        with self.model.session() as session:
            wide = np.array([10, 11], np.int64)
            self.assertEqual(session.prefill_tokens(wide).tokens, 2)
            self.assertEqual(session.prefill_tokens(np.arange(40, 60)[::2]).tokens, 10)
            for tokens in (np.array([2**32 + 10]), [1.5], [[1, 2]], "text", [10**6]):
                self.assert_status(Status.BAD_ARGUMENT, session.prefill_tokens, tokens)
            self.assertEqual(len(session.tokens), 12)

    def test_a_prefix_is_loaded_as_if_no_more_had_been_prefilled(self):
        session, path = self.prefilled(), self.folder / "saved.kv"
        session.save(path)
        with self.model.load(path, tokens=300) as prefix:
            np.testing.assert_array_equal(prefix.tokens, session.tokens[:300])
        self.assert_status(Status.BAD_ARGUMENT, self.model.load, path, tokens=10**6)

    def test_a_failure_has_the_library_s_message_and_its_status(self):
        missing = self.folder / "größe.kv"
        error = self.assert_status(Status.NOT_FOUND, self.model.load, missing)
        self.assertIn("größe.kv", str(error))
        self.assertIsInstance(error, FileNotFoundError)
        self.assertEqual(error.errno, 2)
        copy = pickle.loads(pickle.dumps(error))
        for name in ("__class__", "status", "args", "errno", "offset"):
            self.assertEqual(getattr(copy, name), getattr(error, name))
        self.assert_status(Status.BAD_ARGUMENT, self.model.load, "a\0b")
        missing.write_bytes(b"not a cache" * 1000)
        self.assert_status(Status.NOT_A_CACHE, self.model.load, missing)
        error = self.assert_status(Status.UNSUPPORTED, kvasir.Model, missing)
        self.assertIsInstance(error, kvasir.UnsupportedError)
        self.assert_status(Status.BAD_ARGUMENT, kvasir.Model, MODEL, chat_format="no such")

    def test_damage_is_found_with_its_place(self):
        session, path = self.prefilled(), self.folder / "saved.kv"
        session.save(path)
        damaged = bytearray(path.read_bytes())
        damaged[70_000] ^= 1
        path.write_bytes(damaged)
        error = self.assert_status(Status.CORRUPT, self.model.load, path, verify=True)
        self.assertTrue(65536 <= error.offset <= 70_000)
        self.assertFalse(error.is_stale)

    def test_a_failed_prefill_says_how_far_it_came(self):
        with self.model.session(context_tokens=64) as small:
            error = self.assert_status(Status.CONTEXT_FULL, small.prefill, document())
            self.assertEqual(error.prefilled, kvasir.PrefillResult(0, 0))

    def test_the_library_describes_itself(self):
        self.assertEqual(kvasir.version(), 200)
        self.assertIn("cpu", kvasir.build_info()["backends"])
        self.assertEqual(kvasir.status_text(0), "ok")
        self.assertEqual(kvasir.status_text(999), "unknown status")
        self.assertEqual(kvasir.inspect_model(MODEL), self.model.info)
        with kvasir.Model(MODEL) as hashed:
            found = hashed.hash()
            self.assertEqual((len(found), hashed.info.hash), (32, found))
        self.assertEqual(self.model.info.context_tokens, 131072)


class Options(Case):
    def test_options_that_do_not_fit_are_refused(self):
        for options in (
            {"window_tokens": -1},
            {"window_tokens": 2**32},
            {"memory_limit": 2**64},
            {"decode": "full\0"},
            {"decode": "no such"},
            {"prefill": "hnsw"},
            {"instructions": "a\0b"},
        ):
            self.assert_status(Status.BAD_ARGUMENT, self.model.session, **options)
        for options in (
            {"windows": 64},
            {"struct_size": 4},
            {"log_user": 0},
            {"window_tokens": 1.5},
            {"spill_directory": 5},
        ):
            with self.assertRaises(TypeError):
                self.model.session(**options)
        with self.model.session() as session:
            for options in ({"stop": "one string"}, {"no_such": 1}):
                for function in (session.ask, session.stream):
                    with self.assertRaises(TypeError):
                        function("Who?", **options)
            self.assert_status(Status.BAD_ARGUMENT, session.ask, "Who?", stop=["a\0b"])
            self.assert_status(Status.BAD_STATE, session.next)

    def test_options_change_what_is_read(self):
        session = self.prefilled(
            threads=1,
            context_tokens=4096,
            window_tokens=32,
            prefill_chunk=64,
            precision=kvasir.Precision.INT8,
            decode=Strategy("quest", budget_tokens=128, dense_layers=1, select_tokens=32),
            prefill=Strategy("quest", budget_fraction=0.1, exact_tokens=10),
            memory_limit=40_000_000,
            spill_directory=self.folder,
        )
        experimental.measure(session, experimental.Measure.COMPARE)
        self.assertEqual(session.ask(QUESTION).text, FACT)
        stats = session.stats()
        self.assertEqual((stats.decode_strategy, stats.memory_limit), ("quest", 40_000_000))
        self.assertEqual((stats.threads, stats.context_tokens), (1, 4096))
        self.assertEqual(stats.tokens, len(session.tokens))
        self.assertGreater(stats.prefill_seconds, 0)
        self.assertIn("compared", session.stats_json())
        session.set_strategy(Strategy("bounded", budget_fraction=0.5))
        session.prepare()
        self.assertEqual(session.ask(QUESTION).text, FACT)
        self.assertEqual(session.stats().decode_strategy, "bounded")
        session.set_strategy("full")
        session.ask(QUESTION, max_tokens=1)
        self.assertEqual(session.stats().decode_strategy, "full")
        session.set_strategy(None)
        self.assert_status(Status.BAD_ARGUMENT, session.set_strategy, "no such")


class Strategies(Case):
    def test_a_strategy_is_a_value(self):
        strategy = Strategy("bounded", budget_fraction=0.05, share_heads=False)
        self.assertEqual(
            repr(strategy), "Strategy('bounded', budget_fraction=0.05, share_heads=False)"
        )
        copy = pickle.loads(pickle.dumps(strategy))
        self.assertEqual((copy, hash(copy)), (strategy, hash(strategy)))
        found = strategy.parameters()
        self.assertEqual((found["budget_fraction"], found["share_heads"]), (0.05, 0))
        self.assertAlmostEqual(Strategy("bounded").parameters()["coverage"], 0.96, 6)

    def test_a_parameter_that_does_not_fit_is_refused(self):
        for options in (
            {"name": "full", "coverage": 0.5},
            {"name": "quest", "alpha": 0.1},
            {"name": "dipr", "alpha": 2},
            {"name": "no such"},
            {"name": "bounded", "budget_fraction": 0.1, "budget_tokens": 5},
            {"name": "filter-layers", "layers": [8, 2]},
            {"name": "quest", "layers": [2]},
        ):
            self.assert_status(Status.BAD_ARGUMENT, Strategy, **options)
        decode = Strategy("filter-layers", layers=[10**6])
        self.assert_status(Status.BAD_ARGUMENT, self.model.session, decode=decode)

    def test_experimental_parameters_need_the_experimental_class(self):
        with self.assertRaises(TypeError):
            Strategy("ood", search_breadth=64)
        strategy = experimental.Strategy("ood", search_breadth=64, head_graphs=False)
        self.assertEqual(strategy.parameters()["search_breadth"], 64)
        window = experimental.Strategy(
            "filter-layers", layers=range(2, 4), filter_window=experimental.FilterWindow.UNIFORM
        )
        self.assertEqual(self.prefilled(decode=window).ask(QUESTION).text, FACT)

    def test_the_library_lists_its_strategies(self):
        found = {info.name: info for info in kvasir.strategies()}
        self.assertNotIn("auto", found)
        self.assertTrue(found["bounded"].for_prefill and found["bounded"].for_cache)
        self.assertTrue(found["hnsw"].has_index and not found["hnsw"].for_cache)
        self.assertTrue(found["snapkv"].is_experimental)
        self.assertEqual((found["quest"].budget_floor, found["full"].budget_floor), (512, 0))


unittest.main()
