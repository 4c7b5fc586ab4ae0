"""A folder of documents: added once, found by any process, whatever becomes of those that write."""

import os
import random
import signal
import subprocess
import sys
import time

import tool
from tool import BOOK, CODE, FIXTURES, MODEL, QUESTION, SHORT, run

KILLS = int(os.environ.get("KVASIR_KILLS", "30"))
TINY = str(FIXTURES / "models" / "llama-q8_0.gguf")  # a token a byte; reads thousands a second


class Library(tool.InFolder):
    def setUp(self):
        super().setUp()
        self.library = self.folder / "lib"

    def documents(self):
        return self.expect_json(run("library", "list", self.library, "--json"))["documents"]

    def names(self):
        return [d["name"] for d in self.documents()]

    def add(self, document, *more, model=MODEL, code=0):
        return self.expect_json(
            run("library", "add", self.library, "-m", model, "-f", document, "--json", *more), code
        )["source"]

    def test_a_document_is_read_once_and_found_by_the_next_process(self):
        document = self.file("short.txt", SHORT)
        first = self.expect(
            run("library", "ask", self.library, "-m", MODEL, "-f", document, QUESTION), 0
        )
        self.assertIn(CODE, first.stdout)
        self.assertRegex(first.stderr, r"short.txt: found 0 tokens, prefilled [\d,]+ in .*; saved")
        second = self.expect(
            run("library", "ask", self.library, "-m", MODEL, "-f", document, QUESTION), 0
        )
        self.assertEqual(second.stdout, first.stdout)
        self.assertRegex(second.stderr, r"short.txt: found [\d,]+ tokens, prefilled 0 in ")
        beginning = self.add(self.file("beginning.txt", SHORT[: SHORT.rindex(" and ", 0, 4000)]))
        self.assertFalse(beginning["saved"])
        self.assertEqual(beginning["name"], "short.txt")
        self.assertEqual(beginning["tokens"], beginning["found_tokens"])
        longer = self.add(self.file("longer.txt", SHORT + BOOK[8000:10000]))
        self.assertTrue(longer["saved"])
        self.assertGreater(longer["found_tokens"], beginning["tokens"])
        self.assertEqual(sorted(self.names()), ["longer.txt", "short.txt"])
        listed = self.expect(run("library", "list", self.library), 0).stdout
        self.assertRegex(listed, r"longer.txt +[\d.]+ MB  \d{4}-\d\d-\d\d \d\d:\d\d  [\d,]+ tokens")

    def test_all_documents_are_asked_at_once_and_answers_name_their_sources(self):
        cellar = "The password of the cellar is 5520914."
        self.add(self.file("gate.txt", SHORT))
        self.add(self.file("cellar.txt", f"{BOOK[20000:23000]} {cellar} {BOOK[23000:26000]}"))
        asked = ["What is the password of the cellar?", QUESTION]
        command = ["ask", "-m", MODEL, "--library", self.library, *asked]
        shown = self.expect(run(*command), 0)
        self.assertRegex(shown.stderr, r"mapped 2 documents of [\d,]+ tokens in ")
        self.assertRegex(shown.stdout, r"% cellar.txt at [\d.]+%: .*5520914")
        self.assertRegex(shown.stdout, rf"% gate.txt at [\d.]+%: .*{CODE}")
        answers = self.expect_json(run(*command, "--documents", "1", "--json"))["answers"]
        self.assertEqual(
            [a["passages"][0]["document"] for a in answers], ["cellar.txt", "gate.txt"]
        )
        # a question about nothing here attends as many as it may
        for most, attended in ((1, 1), (2, 2)):
            talk = ("chat", "-q", "-m", MODEL, "--library", self.library, "--documents", most)
            shown = self.expect(run(*talk, stdin="Who won the race?\n/stats\n"), 0).stdout
            self.assertEqual(shown.count('"chosen": true'), attended, shown)
        for option in (["-c", "x.kv"], ["--save", "x.kv"], ["--force"]):
            self.expect(run("ask", "-m", MODEL, *option, "--library", self.library, "?"), 2)
        self.expect(run("ask", "-m", MODEL, "-c", "x.kv", "--documents", "2", "?"), 2)

    def test_documents_are_renamed_and_removed(self):
        document = self.file("a.txt", "Some text. " * 80)
        self.assertEqual(self.add(document, model=TINY)["name"], "a.txt")
        self.expect(run("library", "rename", self.library, "a.txt", "Tagebuch"), 0)
        self.assertEqual(self.names(), ["Tagebuch"])
        self.expect_error(run("library", "rename", self.library, "a.txt", "b"), 3, "a.txt")
        self.expect_error(run("library", "rename", self.library, "Tagebuch", "x/y"), 2, "slash")
        self.expect_error(
            run("library", "remove", self.library, "none"), 3, "has no document 'none'"
        )
        self.expect(run("library", "remove", self.library, "Tagebuch"), 0)
        self.assertEqual(self.names(), [])
        self.assertIn("no documents", self.expect(run("library", "list", self.library), 0).stderr)
        self.expect_error(run("library"), 2)
        self.expect_error(
            run("library", "add", self.library, "-m", TINY),
            2,
            "--file",
            "kvasir library add --help",
        )

    def test_a_document_is_asked_by_its_name(self):
        document = self.file("short.txt", SHORT)
        ask = ["library", "ask", self.library, "-m", MODEL]
        first = self.expect(run(*ask, "-q", "-f", document, QUESTION), 0).stdout
        document.unlink()
        self.assertEqual(self.expect(run(*ask, "-q", "short.txt", QUESTION), 0).stdout, first)
        report = self.expect_json(run(*ask, "--json", "short.txt", "--verify", QUESTION))
        self.assertEqual((report["source"]["name"], len(report["answers"])), ("short.txt", 1))
        self.assertEqual(
            self.expect(run(*ask, "-q", "short.txt", stdin=QUESTION + "\n"), 0).stdout, first
        )
        talk = run(
            "library", "chat", self.library, "-q", "-m", MODEL, "short.txt", stdin=QUESTION + "\n"
        )
        self.assertIn(CODE, self.expect(talk, 0).stdout)
        self.expect_error(
            run(*ask, "shrt.txt", QUESTION),
            3,
            "has no document 'shrt.txt' (did you mean 'short.txt'?)",
        )
        self.expect_error(run(*ask), 2, "no document")
        self.expect_error(run(*ask, "--name", "x", "short.txt", QUESTION), 2, "--name")
        self.expect_error(run("library", "chat", self.library, "-m", MODEL), 2, "no document")
        self.expect_error(
            run("library", "chat", self.library, "-m", MODEL, "short.txt", "--json"), 2, "--json"
        )

    def test_a_folder_that_is_not_there_is_not_created(self):
        for arguments in (
            ["list"],
            ["ask", "-m", MODEL, "x", "q"],
            ["rename", "a", "b"],
            ["remove", "a"],
        ):
            self.expect_error(
                run("library", arguments[0], self.library, *arguments[1:]), 3, "has no documents"
            )
        self.assertFalse(self.library.exists())

    def test_documents_of_one_file_name_are_kept_apart_and_replaced_when_asked(self):
        texts = []
        for i in range(3):
            (self.folder / str(i)).mkdir()
            texts.append(self.file(f"{i}/notes.txt", f"Text {i}. " * 80))
        first, second = (self.add(text, model=TINY) for text in texts[:2])
        self.assertEqual(first["name"], "notes.txt")
        self.assertRegex(second["name"], r"^notes\.txt-[0-9a-f]{8}$")
        for text, name in zip(texts[:2], [first["name"], second["name"]]):
            again = self.add(text, model=TINY)
            self.assertEqual((again["saved"], again["name"]), (False, name))
            self.assertEqual(again["found_tokens"], again["tokens"])
        self.assertEqual(self.add(texts[2], "--replace", model=TINY)["name"], "notes.txt")
        self.assertEqual(sorted(self.names()), sorted(["notes.txt", second["name"]]))

    def test_two_models_read_a_document_once_each(self):
        document = self.file("a.txt", "Some text. " * 80)
        for turn in range(2):
            for model in [TINY, str(FIXTURES / "models" / "llama-f32.gguf")]:
                added = self.add(document, model=model)
                self.assertEqual((added["saved"], added["found_tokens"] > 0), (turn == 0, turn > 0))
        self.assertEqual(len(self.names()), 2)

    def test_a_file_of_any_name_becomes_a_document_that_can_be_removed(self):
        cases = [
            (".hidden.txt", "hidden.txt"),
            ("a\\b\n.txt", "a_b_.txt"),
            ("é" * 120, "é" * 100),
            (b"\xff\xc3.txt", "__.txt"),
        ]
        for i, (file, name) in enumerate(cases):
            path = os.path.join(os.fsencode(self.folder), os.fsencode(file))
            with open(path, "wb") as out:
                out.write(b"Text %d. " % i * 80)
            added = self.add(os.fsdecode(path), model=TINY)
            self.assertEqual((added["saved"], added["name"]), (True, name))
            self.expect(run("library", "remove", self.library, name), 0)

    def test_files_of_other_programs_stay(self):
        self.library.mkdir()
        others = {name: self.library / name for name in ["layout.kv", "x.kv.0123456789abcdef.tmp"]}
        for path in others.values():
            path.write_text("<Widget>:\n" * 5000)
        document = self.file("layout", "Some text. " * 80)
        added = self.add(document, "--max-bytes", 40_000_000, model=TINY)
        self.assertRegex(added["name"], "^layout-")
        self.expect(run("library", "list", self.library), 0)
        document.write_text("Other text. " * 80)
        self.expect(
            run("library", "add", self.library, "-m", TINY, "-f", document, "--max-bytes", 1), 5
        )
        self.assertEqual(self.names(), [])  # what is too much goes, what is another's does not
        self.expect_error(run("library", "remove", self.library, "layout"), 3, "layout")
        for path in others.values():
            self.assertEqual(path.stat().st_size, 10 * 5000)

    def test_what_another_process_has_open_is_neither_removed_nor_evicted(self):
        document = self.file("short.txt", SHORT)
        size = (self.add(document), self.documents()[0]["file_bytes"])[1]
        cache = self.library / "short.txt.kv"
        chat = subprocess.Popen(
            [tool.PROGRAM, "chat", "-m", MODEL, "-c", str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            chat.stdin.write(QUESTION + "\n")
            chat.stdin.flush()
            self.assertNotEqual(chat.stdout.readline(), "")  # it has the file open
            self.expect_error(
                run("library", "remove", self.library, "short.txt"), 1, "open in a session"
            )
            other = self.file("other.txt", BOOK[9000:15000])
            limited = (self.library, "-m", MODEL, "-f", other, "--max-bytes", int(size * 1.7))
            full = run("library", "add", *limited)
            self.expect_error(full, 5, "not added")
            self.assertEqual(self.names(), ["short.txt"])
        finally:
            chat.kill()
            chat.communicate()
        added = self.expect_json(run("library", "add", *limited, "--json"))
        self.assertTrue(added["source"]["saved"])
        self.assertEqual(self.names(), ["other.txt"])

    def test_many_processes_at_once(self):
        texts = [
            self.file(f"{i}.txt", BOOK[i * 1000 : i * 1000 + 1500 + 300 * i]) for i in range(4)
        ]
        for _ in range(3):
            running = [
                subprocess.Popen(
                    [
                        tool.PROGRAM,
                        "library",
                        "add",
                        str(self.library),
                        "-m",
                        TINY,
                        "-f",
                        str(text),
                        "--json",
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for text in texts * 2
            ]
            for process in running:
                message = process.communicate(timeout=300)[1]
                self.assertEqual(process.returncode, 0, message)
        self.assertEqual(sorted(self.names()), ["0.txt", "1.txt", "2.txt", "3.txt"])
        for document in self.documents():
            self.expect(run("verify", self.library / (document["name"] + ".kv")), 0)

    def test_processes_that_write_their_own_ends_behind_one_document(self):
        document = self.file("short.txt", SHORT)
        self.add(document)
        cache = self.library / "short.txt.kv"
        content = cache.read_bytes()
        alone = self.expect(run("ask", "-q", "-m", MODEL, "-c", cache, QUESTION), 0).stdout
        chats = [
            subprocess.Popen(
                [tool.PROGRAM, "chat", "-q", "-m", MODEL, "-c", str(cache)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for i, chat in enumerate(chats):
            output = chat.communicate(f"{QUESTION}\n" * (i + 1), timeout=300)[0]
            self.assertEqual(chat.returncode, 0)
            self.assertTrue(output.startswith(alone), output)
        self.assertEqual(cache.read_bytes(), content)

    def test_processes_killed_in_the_middle_of_anything(self):
        chance = random.Random(7)
        texts = [
            self.file(f"{i}.txt", BOOK[i * 900 : i * 900 + 1200 + 400 * (i % 4)]) for i in range(8)
        ]
        begin = time.monotonic()
        self.add(texts[0], model=TINY)
        whole = time.monotonic() - begin  # what a process takes from its start to its end
        for i in range(KILLS):
            if i % 5 == 4 and self.names():
                command = ["rename", chance.choice(self.names()), f"r{i}"]
            else:
                command = [
                    "add",
                    "-m",
                    TINY,
                    "-f",
                    str(chance.choice(texts)),
                    "--max-bytes",
                    str(1_500_000 + 300_000 * (i % 3)),
                ]
                if i % 3 == 0:
                    command += ["--name", f"n{i % 4}", "--replace"]
            process = subprocess.Popen(
                [tool.PROGRAM, "library", command[0], str(self.library), *command[1:]],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(chance.uniform(0, 1.1 * whole))
            process.send_signal(signal.SIGKILL)
            process.wait()
            tool.count_faults("process killed")
            if i % 10 == 9 or i == KILLS - 1:
                for (
                    document
                ) in self.documents():  # opens the library: what the killed have left is removed
                    self.assertEqual(document["status"], 0, document)
                    self.expect(run("verify", self.library / (document["name"] + ".kv")), 0)
                self.assertEqual(
                    [n for n in os.listdir(self.library) if not n.endswith(".kv") and n != ".lock"],
                    [],
                )
        for text in texts:
            again = self.add(text, model=TINY)
            self.assertEqual(self.add(text, model=TINY)["found_tokens"], again["tokens"])


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[3].isdigit():
        KILLS = int(sys.argv.pop(3))
    tool.main()
