"""Help, exit codes, errors, pipes: what every command has in common."""

import json
import os
import stat
import subprocess
import unittest

import tool
from tool import MODEL, QUESTION, run

COMMANDS = [
    "ask",
    "prefill",
    "chat",
    "inspect",
    "verify",
    "bench",
    "eval",
    "recall",
    "calibrate",
    "tokenize",
    "logits",
]


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

    def test_the_version_is_printed(self):
        self.assertRegex(self.expect(run("--version"), 0).stdout, r"^kvasir \d+\.\d+\.\d+\n")

    def test_senseless_command_lines_are_refused_before_any_work(self):
        self.expect_error(run(), 2, "no command")
        self.expect_error(run("frobnicate"), 2, "unknown command 'frobnicate'", "kvasir --help")
        self.expect_error(run("ask", "question"), 2, "--model")
        self.expect_error(run("ask", "-m", MODEL, "question"), 2, "-f FILE")
        self.expect_error(run("ask", "-m", MODEL, "-f", "a", "-c", "b", "question"), 2, "-c")
        self.expect_error(run("ask", "-m", MODEL, "-c", "b"), 2, "no question")
        self.expect_error(
            run("ask", "-m", MODEL, "-c", "b", "--budget", "200%", "q"), 2, "--budget", "200"
        )
        self.expect_error(
            run("ask", "-m", MODEL, "-c", "b", "--budget", "many", "q"), 2, "--budget", "many"
        )
        for budget in ["nan%", " 1%", "1 %", "%", "1e999%"]:
            self.expect_error(
                run("ask", "-m", MODEL, "-c", "b", "--budget", budget, "q"),
                2,
                "is not a number from 0.001 to 100",
            )
        self.expect_error(run("ask", "-m", MODEL, "-c", "b", "--max-tokens", "-1", "q"), 2, "-1")
        self.expect_error(run("bench", "-m", MODEL, "--depth", "0,,5"), 2, "--depth")
        self.expect_error(run("bench", "-m", MODEL, "--depth", ""), 2, "--depth", "empty")
        self.expect_error(run("bench", "-m", MODEL, "--strategy", ""), 2, "--strategy", "empty")
        self.expect_error(
            run("logits", "-m", MODEL, "--tokens", "x", "-o", "y", "--precision", "f64"), 2, "f64"
        )
        self.expect_error(run("chat", "-m", MODEL, "--json"), 2, "--json")

    def test_a_mistyped_name_is_recognised(self):
        self.expect_error(run("asks"), 2, "unknown command 'asks' (did you mean 'ask'?)")
        self.expect_error(
            run("library", "lst"),
            2,
            "unknown command 'lst' (did you mean 'list'?)",
            "kvasir library --help",
        )
        self.expect_error(
            run("ask", "-m", MODEL, "-f", "x", "--max-token", "5", "q"),
            2,
            "unknown option '--max-token' (did you mean '--max-tokens'?)",
        )
        self.expect_error(
            run("ask", "--modell", MODEL, "q"),
            2,
            "unknown option '--modell' (did you mean '--model'?)",
        )
        self.expect_error(
            run("bench", "-m", MODEL, "--stratgy=full"), 2, "did you mean '--strategy'?)"
        )
        self.expect_error(run("inspect", MODEL, "more"), 2, "unexpected argument 'more'")
        self.assertNotIn("did you mean", run("ask", "--completely-else", "q").stderr)

    def test_an_empty_question_is_refused(self):
        document = self.file("a.txt", tool.SHORT)
        for arguments in (
            ["ask", "-m", MODEL, "-f", document],
            ["recall", "-m", MODEL, "-f", document],
            ["library", "ask", self.folder / "lib", "-m", MODEL, "-f", document],
        ):
            for question in ("", " \n"):
                self.expect_error(
                    run(*arguments, question, cwd=self.folder), 2, "a question is empty"
                )
        self.assertEqual([path.name for path in self.folder.iterdir()], ["a.txt"])

    def test_a_parameter_that_the_strategy_lacks_is_refused(self):
        document = self.file("a.txt", tool.SHORT)
        ask = ["ask", "-m", MODEL, "-f", document, "--strategy"]
        self.expect_error(
            run(*ask, "quest", "--coverage", "95%", "q"),
            2,
            "--coverage is not a parameter of the strategy 'quest'",
        )
        self.expect_error(run(*ask, "full", "--budget", "5%", "q"), 2, "--budget")
        self.expect_error(run(*ask, "bounded", "--filter-layers", "3", "q"), 2, "--filter-layers")
        self.expect_error(
            run("bench", "-m", MODEL, "--strategy", "full,quest", "--coverage", "95%"),
            2,
            "--coverage",
        )
        self.expect_error(
            run("ask", "-m", MODEL, "-f", document, "--prefill-budget", "5%", "q"), 2, "--prefill"
        )

    def test_a_device_that_is_not_there_is_a_resource(self):
        document = self.file("a.txt", tool.SHORT)
        self.expect_error(
            run("ask", "-m", MODEL, "-f", document, "--device", "cuda:77", "q"), 5, "cuda"
        )
        self.expect_error(
            run("ask", "-m", self.folder / "missing", "-f", document, "--device", "cuda:77", "q"),
            3,
            "missing",
        )

    def test_an_empty_path_or_name_is_refused_before_any_work(self):
        text = self.file("text.txt", tool.SHORT)
        read = ["-m", MODEL, "-f", text]
        for arguments in (
            ["prefill", *read, "-o", ""],
            ["ask", *read, "--save", "", "q"],
            ["ask", "-m", MODEL, "-f", "", "q"],
            ["ask", "-m", "", "-f", text, "q"],
            ["ask", "-m", MODEL, "-c", "", "q"],
            ["chat", *read, "-s", ""],
            ["pack", text, "-o", ""],
            ["pack", "", "-o", "x"],
            ["unpack", text, "-o", ""],
            ["inspect", ""],
            ["verify", ""],
            ["recall", *read, "-o", ""],
            ["recall", *read, "--save", ""],
            ["calibrate", "-m", MODEL, "-o", ""],
            ["calibrate", "-m", MODEL, "-f", ""],
            ["eval", *read, "--work", ""],
            ["eval", *read, "-o", ""],
            ["eval", "-m", MODEL, "-f", ""],
            ["bench", "-m", MODEL, "--mapped", "--folder", ""],
            ["bench", "-m", MODEL, "--text", ""],
            ["logits", "-m", MODEL, "--tokens", text, "-o", ""],
            ["logits", "-m", MODEL, "--tokens", "", "-o", "x"],
            ["tokenize", "-m", MODEL, "-f", ""],
            ["library", "add", "", *read],
            ["library", "add", "lib", *read, "--name", ""],
            ["library", "rename", "lib", "", "b"],
            ["library", "remove", "lib", ""],
            ["ask", *read, "--spill-directory", "", "q"],
        ):
            self.expect_error(run(*arguments, cwd=self.folder), 2, "empty")
        self.assertEqual([path.name for path in self.folder.iterdir()], ["text.txt"])

    def test_an_output_that_cannot_be_written_is_refused_before_any_work(self):
        text, fifo = self.file("text.txt", tool.SHORT), self.folder / "fifo"
        os.mkfifo(fifo)
        file = self.file("file", "a file")
        for output, word in (
            (self.folder, self.folder),
            (fifo, fifo),
            ("/dev/null", "/dev/null"),
            (self.folder / "none" / "a", "/none"),
            (f"{self.folder}/none/", "/none"),
            (file / "a", file),
        ):
            for arguments in (
                ["prefill", "-m", MODEL, "-f", text, "-o"],
                ["ask", "-m", MODEL, "-f", text, "q", "--save"],
                ["chat", "-m", MODEL, "-f", text, "-s"],
                ["pack", text, "-o"],
                ["unpack", text, "-o"],
                ["recall", "-m", MODEL, "-f", text, "-o"],
                ["recall", "-m", MODEL, "-f", text, "--save"],
                ["calibrate", "-m", MODEL, "-o"],
                ["eval", "-m", MODEL, "-f", text, "--work", self.folder / "work", "-o"],
                ["logits", "-m", MODEL, "--tokens", text, "-o"],
            ):
                for more in ([], ["--force"]):
                    self.expect_error(
                        run(*arguments, output, *more, cwd=self.folder, timeout=60), 3, str(word)
                    )
        self.expect_error(
            run("bench", "-m", MODEL, "--mapped", "--folder", self.folder / "none"), 3, "none"
        )
        self.expect_error(run("eval", "-m", MODEL, "-f", text, "--work", file), 3, "file")
        self.expect_error(run("library", "add", file, "-m", MODEL, "-f", text), 3, "file")
        self.assertEqual(file.read_text(), "a file")
        self.assertTrue(stat.S_ISFIFO(fifo.stat().st_mode))

    def test_a_pipe_a_device_and_a_folder_are_refused_where_a_file_belongs(self):
        text, fifo = self.file("text.txt", tool.SHORT), self.folder / "fifo"
        os.mkfifo(fifo)
        for path in (fifo, "/dev/zero", "/dev/null", self.folder):
            for arguments in (
                ["inspect", path],
                ["verify", path],
                ["ask", "-m", path, "-f", text, "q"],
                ["ask", "-m", MODEL, "-c", path, "q"],
                ["pack", path, "-o", self.folder / "x"],
                ["unpack", path, "-o", self.folder / "x"],
                ["eval", "-m", path, "-f", text, "--work", self.folder],
                ["calibrate", "-m", path, "-o", self.folder / "x"],
            ):
                result = run(*arguments, timeout=60)
                self.assertIn(result.returncode, (2, 3), result.args)
                self.expect_error(result, result.returncode, str(path))

    def test_a_name_cannot_steer_the_terminal(self):
        name = "a\x1b[2J\x9b31m\u202e\udcc2\x07\udc9b.txt"
        document = self.file("plain.txt", "Some text. " * 20).rename(self.folder / name)
        question = "\udcc2\x07\udc9b2J what?\u2066"
        for arguments in (
            ["ask", "-m", MODEL, "-f", document, "-n", 2, question],
            ["inspect", document],
            ["verify", document],
            ["prefill", "-m", MODEL, "-f", document, "-o", document],
            ["ask", "--json", "-m", MODEL, "-f", document, "-n", 2, question],
            ["ask", "-m", MODEL, "-f", document, "--strategy", name, "q"],
            [
                "library",
                "add",
                self.folder / "lib",
                "-m",
                MODEL,
                "-f",
                document,
                "--name",
                "a\u202e\x85",
            ],
            ["library", "list", self.folder / "lib"],
        ):
            terminal = tool.OnTerminal(*arguments, whole=True)
            terminal.finish()
            left = terminal.seen.replace("\r\n", "\n").replace("\r", "").replace("\x1b[K", "")
            for character in left:
                self.assertFalse(
                    character != "\n"
                    and character != "\t"
                    and (ord(character) < 32 or 0x7F <= ord(character) < 0xA0),
                    (arguments, left),
                )
                self.assertNotIn(
                    character,
                    "\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
                    (arguments, left),
                )
        result = run("inspect", "--json", self.folder / "none\x9b\u202e")
        self.expect(result, 3)
        # The library spells out what steers a terminal.
        self.assertIn("none\\u{9B}\\u{202E}", json.loads(result.stdout)["error"]["message"])

    def test_an_unknown_strategy_is_named(self):
        document = self.file("short.txt", "Text.")
        self.expect_error(
            run("ask", "-m", MODEL, "-f", document, "--strategy", "psychic", "q"), 2, "psychic"
        )

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
        self.expect_error(
            run("ask", "-m", MODEL, "-f", self.file("empty.txt", ""), "q"), 3, "empty"
        )
        self.expect_error(
            run("logits", "-m", MODEL, "--tokens", text, "-o", self.folder / "l"), 3, "JSON"
        )
        self.expect_error(
            run("prefill", "-m", MODEL, "-f", text, "-o", self.folder / "no" / "a.kv"), 3, "no"
        )

    def test_a_document_longer_than_the_context_is_refused(self):
        document = self.file("long.txt", "many words " * 500)
        self.expect_error(
            run("ask", "-m", MODEL, "-f", document, "--context", 100, "q"),
            1,
            "long.txt is too long for --context",
            "of 100 tokens",
        )
        book = self.file("book.txt", tool.BOOK)
        for arguments in (
            ["ask", "-m", MODEL, "-f", book, "q"],
            ["library", "add", self.folder / "lib", "-m", MODEL, "-f", book],
        ):
            self.expect_error(
                run(*arguments),
                1,
                "book.txt is too long for the model (150,6",
                "of 131,072 tokens)",
                "longer context",
            )

    def test_errors_are_json_where_json_is_wanted(self):
        error = self.expect_json(
            run("ask", "--json", "-m", MODEL, "-c", self.folder / "missing", "q"), 3
        )["error"]
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
        process = subprocess.Popen(
            [tool.PROGRAM, "ask", "-m", MODEL, "-f", document, QUESTION],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write_end)
        self.assertNotIn("kvasir:", process.communicate(timeout=60)[1])
        self.assertEqual(process.returncode, 141)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_behind_the_output_is_reported(self):
        with open("/dev/full", "w") as full:
            process = subprocess.run(
                [tool.PROGRAM, "inspect", MODEL], stdout=full, stderr=subprocess.PIPE, text=True
            )
        self.assertEqual(process.returncode, 5)
        self.assertIn("standard output", process.stderr)


tool.main()
