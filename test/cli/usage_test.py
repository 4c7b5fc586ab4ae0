"""Help, exit codes, errors, pipes: what every command has in common."""
import os
import subprocess
import unittest

import tool
from tool import MODEL, QUESTION, run

COMMANDS = ["ask", "prefill", "chat", "inspect", "verify", "bench", "eval", "recall", "calibrate", "tokenize", "logits"]


class Usage(tool.InFolder):
    def test_every_command_has_help_with_an_example(self):
        text = self.expect(run("--help"), 0).stdout
        for command in COMMANDS:
            self.assertIn(f"\n  {command} ", text)
            help_text = self.expect(run(command, "--help"), 0).stdout
            self.assertIn(f"  kvasir {command} ", help_text.split("Examples:")[1])
            self.assertEqual([line for line in help_text.split("\n") if len(line) > 128], [])
        for code in ["0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "130 ", "141 "]:
            self.assertIn(f"\n  {code}", text.split("Exit codes:")[1])

    def test_the_version_is_told(self):
        self.assertRegex(self.expect(run("--version"), 0).stdout, r"^kvasir \d+\.\d+\.\d+\n")

    def test_senseless_command_lines_are_refused_before_any_work(self):
        self.expect_error(run(), 2, "no command")
        self.expect_error(run("frobnicate"), 2, "frobnicate")
        self.expect_error(run("ask", "question"), 2, "--model")
        self.expect_error(run("ask", "-m", MODEL, "question"), 2, "-f FILE")
        self.expect_error(run("ask", "-m", MODEL, "-f", "a", "-c", "b", "question"), 2, "-c")
        self.expect_error(run("ask", "-m", MODEL, "-c", "b"), 2, "no question")
        self.expect_error(run("ask", "-m", MODEL, "-c", "b", "--budget", "200%", "q"), 2, "--budget", "200")
        self.expect_error(run("ask", "-m", MODEL, "-c", "b", "--budget", "many", "q"), 2, "--budget", "many")
        for budget in ["nan%", " 1%", "1 %", "%", "1e999%"]:
            self.expect_error(run("ask", "-m", MODEL, "-c", "b", "--budget", budget, "q"), 2, "is not a number from 0.001 to 100")
        self.expect_error(run("ask", "-m", MODEL, "-c", "b", "--max-tokens", "-1", "q"), 2, "-1")
        self.expect_error(run("bench", "-m", MODEL, "--depth", "0,,5"), 2, "--depth")
        self.expect_error(run("logits", "-m", MODEL, "--tokens", "x", "-o", "y", "--kv", "f64"), 2, "f64")
        self.expect_error(run("chat", "-m", MODEL, "--json"), 2, "--json")

    def test_an_unknown_strategy_is_named(self):
        document = self.file("short.txt", "Text.")
        self.expect_error(run("ask", "-m", MODEL, "-f", document, "--strategy", "psychic", "q"), 2, "psychic")

    def test_files_that_are_not_what_they_should_be_have_their_code(self):
        text = self.file("text.txt", "neither model nor cache " * 500)
        missing = self.folder / "missing"
        self.expect_error(run("ask", "-m", missing, "-f", text, "q"), 3, "missing")
        self.expect_error(run("ask", "-m", text, "-f", text, "q"), 3, "text.txt")
        self.expect_error(run("ask", "-m", MODEL, "-f", missing, "q"), 3, "missing")
        self.expect_error(run("ask", "-m", MODEL, "-c", missing, "q"), 3, "missing")
        self.expect_error(run("ask", "-m", MODEL, "-c", text, "q"), 3, "text.txt")
        self.expect_error(run("inspect", text), 3, "text.txt")
        self.expect_error(run("verify", missing), 3, "missing")
        self.expect_error(run("ask", "-m", MODEL, "-f", self.file("empty.txt", ""), "q"), 3, "empty")
        self.expect_error(run("logits", "-m", MODEL, "--tokens", text, "-o", self.folder / "l"), 3, "JSON")
        self.expect_error(run("prefill", "-m", MODEL, "-f", text, "-o", self.folder / "no" / "a.kv"), 3, "no")

    def test_a_document_longer_than_the_context_is_refused(self):
        document = self.file("long.txt", "many words " * 500)
        self.expect_error(run("ask", "-m", MODEL, "-f", document, "--context", 100, "q"), 1, "100")

    def test_errors_are_json_where_json_is_wanted(self):
        error = self.expect_json(run("ask", "--json", "-m", MODEL, "-c", self.folder / "missing", "q"), 3)["error"]
        self.assertEqual((error["exit_code"], error["status"]), (3, 9))
        self.assertIn("missing", error["message"])
        self.assertEqual(self.expect_json(run("frobnicate", "--json"), 2)["error"]["exit_code"], 2)

    def test_a_model_is_inspected(self):
        facts = self.expect_json(run("inspect", "--json", MODEL))
        self.assertEqual((facts["kind"], facts["layers"], facts["vocabulary"]), ("model", 10, 6144))
        self.assertIn("131,072 tokens", self.expect(run("inspect", MODEL), 0).stdout)
        self.assertTrue(self.expect_json(run("verify", MODEL, "--json"))["sound"])

    def test_a_reader_that_goes_away_ends_the_work_quietly(self):
        document = self.file("short.txt", tool.SHORT)
        read_end, write_end = os.pipe()
        os.close(read_end)
        process = subprocess.Popen([tool.PROGRAM, "ask", "-m", MODEL, "-f", document, QUESTION], stdin=subprocess.DEVNULL,
                                   stdout=write_end, stderr=subprocess.PIPE, text=True)
        os.close(write_end)
        self.assertNotIn("kvasir:", process.communicate(timeout=60)[1])
        self.assertEqual(process.returncode, 141)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_behind_the_output_is_told(self):
        with open("/dev/full", "w") as full:
            process = subprocess.run([tool.PROGRAM, "inspect", MODEL], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(process.returncode, 5)
        self.assertIn("standard output", process.stderr)


tool.main()
