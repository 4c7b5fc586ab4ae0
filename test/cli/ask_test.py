"""ask, prefill, inspect and verify on real documents: prefill, save, continue, map."""

import os
import signal
import threading
import unittest

import tool
from tool import BOOK, CODE, FACT, MODEL, QUESTION, SHORT, run

LONG = BOOK[:30000] + " " + FACT + " " + BOOK[30000:36000]


class Documents(tool.InFolder):
    def ask(self, document, *more, code=0):
        return self.expect(run("ask", "-m", MODEL, "-f", document, *more, QUESTION), code)

    def ask_json(self, document, *more, questions=(QUESTION,)):
        return self.expect_json(
            run("ask", "--json", "-m", MODEL, "-f", document, *more, *questions)
        )

    def expect_refused(self, code, text, document, *more):
        self.expect_error(run("ask", "-m", MODEL, "-f", document, *more, QUESTION), code, text)

    def prefill(self, document, cache, *more):
        return run("prefill", "-m", MODEL, "-f", document, "-o", cache, *more)

    def test_a_fact_in_a_document_is_found(self):
        result = self.ask(self.file("short.txt", SHORT))
        self.assertIn(f"> {QUESTION}\n", result.stdout)
        self.assertIn(CODE, result.stdout)
        self.assertRegex(result.stderr, r"Prefilled [\d,]+ tokens of short.txt")
        self.assertRegex(
            result.stderr, r"\d+ tokens, first after .* tokens/s; \w+ read .*% of the tokens"
        )
        self.assertNotIn("\x1b", result.stderr + result.stdout)

    def test_quiet_leaves_the_answer_alone(self):
        result = self.ask(self.file("short.txt", SHORT), "--quiet")
        self.assertEqual(result.stderr, "")
        self.assertEqual(result.stdout, f"The access code of the north gate is {CODE}.\n")

    def test_a_thought_is_shown_only_on_request_and_limited(self):
        # A custom format makes the model think, which was not trained to: a thought ends at its
        # limit or with the turn.
        turns = "<|im_start|>system\n{document}<|im_end|>\n{user}<|im_start|>user\n{question}"
        turns += "<|im_end|>\n<|im_start|>assistant\n<T>{thought}</T>\n{answer}<|im_end|>\n"
        chat_format = self.file("format.txt", turns)
        asked = ["ask", "-m", MODEL, "-f", self.file("short.txt", SHORT), "--chat-format-file"]
        asked += [chat_format, "-n", "6", "--thinking-tokens", "5"]
        self.expect_error(run(*asked, QUESTION), 2, "thinking")
        hidden = self.expect(run(*asked, "--thinking", "on", QUESTION), 0)
        self.assertNotIn("[thinking]", hidden.stdout)
        self.assertRegex(hidden.stderr, r"\d tokens? after [1-5] of thought")
        shown = self.expect(run(*asked, "-q", "--thinking", "show", QUESTION), 0)
        self.assertRegex(shown.stdout, r"(?s)^\[thinking\]\n.+\n\[answer\]\n.+\n$")
        entry = self.expect_json(run(*asked, "--json", "--thinking", "on", QUESTION))["answers"][0]
        self.assertIn(entry["thinking_tokens"], range(1, 6))
        self.assertIn(entry["thought"], shown.stdout)
        self.expect_error(
            run("ask", "-m", MODEL, "-f", self.file("s.txt", SHORT), "--thinking", "on", QUESTION),
            3,
            "does not think",
        )

    def test_the_document_and_the_questions_come_from_pipes(self):
        result = self.expect(run("ask", "-q", "-m", MODEL, "-f", "-", QUESTION, stdin=SHORT), 0)
        self.assertIn(CODE, result.stdout)
        document = self.file("short.txt", SHORT)
        result = self.expect(
            run("ask", "-q", "-m", MODEL, "-f", document, stdin=f"{QUESTION}\n\n{QUESTION}\n"), 0
        )
        self.assertEqual(result.stdout.count(CODE), 2)

    def test_a_saved_document_is_mapped_and_not_prefilled_again(self):
        document, cache = self.file("short.txt", SHORT), self.folder / "short.kv"
        first = self.ask(document, "--save", cache)
        self.assertIn("Saved", first.stderr)
        second = self.ask(document, "--save", cache)
        self.assertRegex(second.stderr, r"short.kv: mapped [\d,]+ tokens in .*; nothing to prefill")
        self.assertNotIn("Prefilled ", second.stderr)
        self.assertEqual(second.stdout, first.stdout)
        third = self.expect(run("ask", "-m", MODEL, "-c", cache, QUESTION), 0)
        self.assertEqual(third.stdout, first.stdout)

    def test_with_a_memory_budget_the_answer_is_the_same_and_nothing_is_left(self):
        document, spilled = self.file("short.txt", SHORT), self.folder / "spilled"
        spilled.mkdir()
        wanted = self.ask(document, "-q").stdout
        self.assertEqual(
            self.ask(document, "-q", "--memory-limit", "20M", "--spill-directory", spilled).stdout,
            wanted,
        )
        self.assertEqual(list(spilled.iterdir()), [])
        self.expect_refused(5, "memory", document, "--memory-limit", "1M")
        limited = ("--memory-limit", "20M", "--spill-directory")
        self.expect_refused(3, "nowhere", document, *limited, spilled / "nowhere")

    def test_passages_that_an_answer_attended_are_quoted(self):
        document = self.file("short.txt", SHORT)
        result = self.expect(
            run("ask", "-q", "-m", MODEL, "-f", document, "--passages", 2, QUESTION), 0
        )
        answer, first, *more = result.stdout.splitlines()
        self.assertIn(CODE, answer)
        self.assertRegex(
            first, r'^  [0-9.]+% at (4|5)[0-9.]+%: ".*' + FACT.replace(".", r"\.") + '.*"$'
        )
        self.assertLessEqual(len(more), 1)
        plain = self.expect(run("ask", "-q", "-m", MODEL, "-f", document, QUESTION), 0)
        self.assertEqual(plain.stdout, answer + "\n")

    def test_passages_are_in_json_and_of_a_library_too(self):
        document = self.file("short.txt", SHORT)
        asked = [
            run("ask", "-m", MODEL, "-f", document, "--json", "--passages", 3, QUESTION),
            run(
                "library",
                "ask",
                self.folder / "books",
                "-m",
                MODEL,
                "-f",
                document,
                "--json",
                "--passages",
                3,
                QUESTION,
            ),
        ]
        for answer in [self.expect_json(result)["answers"][0] for result in asked]:
            passages = answer["passages"]
            self.assertIn(len(passages), [1, 2, 3])
            self.assertIn(FACT, passages[0]["text"])
            self.assertGreater(passages[0]["share"], 0.2)
            self.assertAlmostEqual(passages[0]["at"], 0.5, delta=0.1)
            self.assertEqual(passages, sorted(passages, key=lambda p: -p["share"]))
        self.assertNotIn(
            "passages",
            self.ask_json(document)["answers"][0],
        )

    def test_json_holds_source_and_answers(self):
        document, cache = self.file("short.txt", SHORT), self.folder / "short.kv"
        first = self.ask_json(document, "-s", cache, questions=(QUESTION, "And the south gate?"))
        self.assertEqual(
            [a["question"] for a in first["answers"]], [QUESTION, "And the south gate?"]
        )
        self.assertIn(CODE, first["answers"][0]["answer"])
        self.assertEqual(first["answers"][0]["stop"], "end_of_turn")
        self.assertGreater(first["source"]["prefill_tokens"], 1000)
        self.assertNotIn("mapped_tokens", first["source"])
        second = self.ask_json(document, "-s", cache)
        self.assertEqual(second["source"]["mapped_tokens"], first["source"]["tokens"])
        self.assertNotIn("prefill_tokens", second["source"])

    def test_a_cache_of_another_document_is_never_used(self):
        cache = self.folder / "a.kv"
        self.expect(self.prefill(self.file("a.txt", "Well. " + SHORT), cache), 0)
        content = cache.read_bytes()
        # The same tokens but for the beginning: the end of a document is not the document.
        other = self.file("b.txt", SHORT)
        self.expect_error(self.prefill(other, cache), 3, "a.kv holds another document", "--force")
        self.expect_error(
            self.ask(other, "--save", cache, code=3), 3, "a.kv holds another document", "--force"
        )
        self.assertEqual(cache.read_bytes(), content)
        result = self.ask(other, "--save", cache, "--force")
        self.assertIn("holds another document", result.stderr)
        self.assertIn("Prefilled ", result.stderr)
        self.assertIn("nothing to prefill", self.ask(other, "--save", cache).stderr)

    def test_a_document_that_has_grown_is_read_from_where_it_ended(self):
        document, cache = self.file("log.txt", SHORT), self.folder / "log.kv"
        self.expect(self.prefill(document, cache), 0)
        document.write_text(SHORT + " The access code of the south gate is 1029384.")
        result = run(
            "ask",
            "-m",
            MODEL,
            "-f",
            document,
            "-s",
            cache,
            "What is the access code of the south gate?",
        )
        self.expect(result, 0)
        self.assertIn("1029384", result.stdout)
        self.assertIn("prefilling the rest", result.stderr)
        self.assertRegex(result.stderr, r"Prefilled \d\d tokens")

    def test_a_file_that_is_no_cache_is_not_overwritten(self):
        document, precious = self.file("short.txt", SHORT), self.file("letter.txt", "Dear Irene")
        self.expect_error(self.prefill(document, precious), 3, "letter.txt", "--force")
        self.assertEqual(precious.read_text(), "Dear Irene")
        self.expect(self.prefill(document, precious, "--force"), 0)
        self.expect(run("verify", precious), 0)

    def test_a_damaged_cache_is_reported_and_rebuilt(self):
        document, cache = self.file("short.txt", SHORT), self.folder / "short.kv"
        self.expect(self.prefill(document, cache), 0)
        sound = cache.read_bytes()
        cache.write_bytes(sound[:-5000])
        self.expect_error(run("verify", cache), 3, "short.kv")
        self.expect_error(run("ask", "-m", MODEL, "-c", cache, QUESTION), 3, "short.kv")
        damaged = cache.read_bytes()
        self.expect_error(
            self.prefill(document, cache), 3, "damaged", "--force"
        )  # its document cannot be identified
        self.assertEqual(cache.read_bytes(), damaged)
        result = self.ask(document, "--save", cache, "--force")
        self.assertIn("damaged", result.stderr)
        self.assertIn(CODE, result.stdout)
        self.expect(run("verify", cache), 0)

    def test_a_cache_of_another_model_is_stale(self):
        other = tool.FIXTURES / "models" / "llama-q8_0.gguf"
        cache = self.folder / "other.kv"
        self.expect(
            run("prefill", "-m", other, "-f", self.file("tiny.txt", "a b c"), "-o", cache), 0
        )
        error = self.expect_json(run("ask", "--json", "-m", MODEL, "-c", cache, QUESTION), 4)[
            "error"
        ]
        self.assertEqual(error["status"], 14)
        content = cache.read_bytes()
        self.expect_error(self.prefill(self.file("short.txt", SHORT), cache), 3, "stale", "--force")
        self.assertEqual(cache.read_bytes(), content)
        result = self.ask(self.file("short.txt", SHORT), "--save", cache, "--force")
        self.assertIn("stale", result.stderr)
        self.assertIn(CODE, result.stdout)

    def test_a_cache_says_what_it_is(self):
        cache = self.folder / "short.kv"
        self.expect(self.prefill(self.file("short.txt", SHORT), cache), 0)
        facts = self.expect_json(run("inspect", cache, "--json"))
        self.assertEqual(
            (facts["kind"], facts["layers"], facts["precision"]), ("cache", 10, "int8")
        )
        self.assertEqual(
            (facts["file_bytes"], facts["chat_format"]), (cache.stat().st_size, "chatml")
        )
        self.assertRegex(self.expect(run("inspect", cache), 0).stdout, r"\nchat format +chatml\n")
        self.assertIn("every byte", self.expect(run("verify", cache), 0).stdout)

    def test_a_document_is_asked_in_the_chat_format_that_it_was_saved_in(self):
        document, cache = self.file("short.txt", SHORT), self.folder / "short.kv"
        self.expect(self.prefill(document, cache, "--chat-format", "llama3"), 0)
        self.expect_error(
            run("ask", "-m", MODEL, "-c", cache, "--chat-format", "chatml", QUESTION),
            4,
            "'llama3'",
            "'chatml'",
        )
        with_it = self.expect_json(
            run("ask", "--json", "-m", MODEL, "-c", cache, "--chat-format", "llama3", QUESTION)
        )["answers"][0]
        without = self.expect_json(run("ask", "--json", "-m", MODEL, "-c", cache, QUESTION))[
            "answers"
        ][0]
        self.assertEqual(without["stats"]["chat_format"], "llama3")
        self.assertEqual(
            (without["answer"], without["question_tokens"]),
            (with_it["answer"], with_it["question_tokens"]),
        )

    def test_what_another_program_saves_meanwhile_stays(self):
        document, cache = self.file("long.txt", LONG), self.folder / "long.kv"
        other = self.folder / "other.kv"
        self.expect(self.prefill(self.file("short.txt", SHORT), other), 0)
        reading = tool.OnTerminal(
            "prefill", "-m", MODEL, "-f", document, "-o", cache, "--chunk", 256
        )
        self.assertTrue(reading.read_until("% "), reading.seen)
        os.replace(other, cache)
        content = cache.read_bytes()
        reading.interrupt()
        self.assertEqual(reading.finish(), 3, reading.seen)
        self.assertIn("was written by another program meanwhile", reading.seen)
        self.assertEqual(cache.read_bytes(), content)

    def test_a_text_comes_from_a_named_pipe_and_an_interrupt_ends_the_wait_for_it(self):
        fifo = self.folder / "text"
        os.mkfifo(fifo)
        writer = threading.Thread(target=lambda: fifo.write_text(SHORT))
        writer.start()
        self.assertIn(CODE, self.ask(fifo, "-q").stdout)
        writer.join()
        waiting = tool.OnTerminal("ask", "-m", MODEL, "-f", fifo, QUESTION)
        reader = os.open(
            fifo, os.O_RDWR
        )  # it is past the opening, and waits for a text that never comes
        try:
            self.assertFalse(waiting.read_until("kvasir", 3), waiting.seen)
            waiting.interrupt()
            self.assertEqual(waiting.finish(), 130, waiting.seen)
            self.assertIn("stopped; nothing was read", waiting.seen)
        finally:
            os.close(reader)

    def test_pdf_and_binary_files_cause_a_warning(self):
        pdf = self.file("report.pdf", b"%PDF-1.7\n" + SHORT.encode())
        self.assertIn("warning: report.pdf is a PDF file, not text", self.ask(pdf, "-n", 1).stderr)
        binary = self.file("data.bin", SHORT.encode() + b"\0\1")
        report = self.ask_json(binary, "-n", 1)
        self.assertIn("NUL", report["warnings"][0])
        added = run("library", "add", self.folder / "lib", "-m", MODEL, "-f", pdf)
        self.assertIn("warning: report.pdf", self.expect(added, 0).stderr)
        self.assertNotIn("warning", self.ask(self.file("short.txt", SHORT), "-n", 1).stderr)

    def test_instructions_stand_before_the_document_and_stay_in_the_file(self):
        document, cache = self.file("short.txt", SHORT), self.folder / "a.kv"
        instructions = "Answer in one sentence."
        plain = self.ask_json(document)["source"]["tokens"]
        first = self.ask_json(document, "-s", cache, "--instructions", instructions)
        self.assertGreater(first["source"]["tokens"], plain)
        file = self.file("instructions.txt", instructions + "\n")
        again = self.ask_json(document, "-s", cache, "--instructions-file", file)
        self.assertEqual(again["source"]["mapped_tokens"], first["source"]["tokens"])
        self.assertNotIn("prefill_tokens", again["source"])
        self.assertEqual(again["answers"][0]["answer"], first["answers"][0]["answer"])
        self.expect(run("ask", "-m", MODEL, "-c", cache, QUESTION), 0)
        self.expect_error(
            run("ask", "-m", MODEL, "-c", cache, "--instructions", "Answer in French.", QUESTION),
            4,
            "instructions",
        )
        self.expect_refused(3, "--force", document, "-s", cache)
        both = ("--instructions", "a", "--instructions-file", file)
        self.expect_refused(2, "--instructions", document, *both)
        self.expect_refused(3, "none", document, "--instructions-file", self.folder / "none")

    def test_a_folder_is_no_text(self):
        self.expect_refused(3, "directory", self.folder)

    def test_a_closed_disk_does_not_cost_the_answer(self):
        if os.geteuid() == 0:
            self.skipTest("root writes anywhere")
        document = self.file("short.txt", SHORT)
        os.chmod(self.folder, 0o500)
        self.addCleanup(os.chmod, self.folder, 0o700)
        self.expect_refused(3, "folder", document, "-s", self.folder / "a.kv")


class Interrupted(tool.InFolder):
    def start(self, document, cache, **options):
        return tool.OnTerminal(
            "prefill", "-m", MODEL, "-f", document, "-o", cache, "--chunk", 256, **options
        )

    def test_a_first_interrupt_keeps_what_was_read_and_the_next_run_goes_on(self):
        document, cache = self.file("long.txt", LONG), self.folder / "long.kv"
        reading = self.start(document, cache)
        self.assertTrue(
            reading.read_until("% "), reading.seen
        )  # the progress line: it is under way
        reading.interrupt()
        self.assertEqual(reading.finish(), 130, reading.seen)
        self.assertRegex(
            reading.seen,
            r"stopped; saved [\d,]+ of [\d,]+ tokens in .*long.kv; run the same command again",
        )
        kept = self.expect_json(run("inspect", cache, "--json"))["tokens"]
        self.assertGreater(kept, 0)
        self.expect(run("verify", cache), 0)

        saving = ("-f", document, "-s", cache, "--strategy", "full")
        rest = self.expect_json(run("ask", "--json", "-m", MODEL, *saving, QUESTION))
        self.assertEqual(rest["source"]["mapped_tokens"], kept)
        self.assertEqual(
            rest["source"]["mapped_tokens"] + rest["source"]["prefill_tokens"],
            rest["source"]["tokens"],
        )
        self.assertIn(CODE, rest["answers"][0]["answer"])

    def test_a_second_interrupt_ends_at_once(self):
        process = tool.OnTerminal("chat", "-m", MODEL, whole=True)
        self.assertTrue(process.read_until("> "))
        process.interrupt()
        self.assertTrue(process.read_until("Ctrl-D ends the conversation"))
        process.interrupt()
        self.assertIn(process.finish(), (0, -signal.SIGINT))

    def test_without_a_file_to_keep_it_the_loss_is_reported(self):
        reading = tool.OnTerminal(
            "ask", "-m", MODEL, "-f", self.file("long.txt", LONG), "--chunk", 256, QUESTION
        )
        self.assertTrue(reading.read_until("% "), reading.seen)
        reading.interrupt()
        self.assertEqual(reading.finish(), 130, reading.seen)
        self.assertRegex(reading.seen, r"kvasir: stopped .*--save")

    def test_progress_is_drawn_on_a_terminal_and_erased(self):
        reading = self.start(
            self.file("long.txt", LONG[:12000]), self.folder / "long.kv", columns=100
        )
        self.assertEqual(reading.finish(), 0)
        self.assertRegex(reading.seen, r"Prefilling long.txt .*\d+%")
        drawn = [part for part in reading.seen.split("\r") if "%" in part]
        self.assertEqual([part for part in drawn if len(part.replace("\x1b[K", "")) >= 100], [])
        left = [line for line in tool.on_screen(reading.seen) if "%" in line]
        self.assertEqual(left, [])

    def test_progress_is_not_drawn_for_quiet_or_json(self):
        document = self.file("short.txt", SHORT)
        for flag in ("--quiet", "--json"):
            reading = tool.OnTerminal("ask", "-m", MODEL, "-f", document, flag, QUESTION)
            self.assertEqual(reading.finish(), 0)
            self.assertEqual(reading.seen, "")


tool.main()
