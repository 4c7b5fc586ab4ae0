"""kvasir chat, from a pipe and at a terminal."""

import json
import subprocess
import unittest

import tool
from tool import CODE, MODEL, QUESTION, SHORT, run


class Talking(tool.InFolder):
    def setUp(self):
        super().setUp()
        self.cache = self.folder / "short.kv"
        document = self.file("short.txt", SHORT)
        self.expect(run("prefill", "-q", "-m", MODEL, "-f", document, "-o", self.cache), 0)

    def test_a_document_that_is_saved_again_is_read_again_and_a_reset_keeps_what_is_there(self):
        library = self.folder / "lib"

        def add(name, text):
            document = self.file(f"{name}.txt", text)
            command = ("library", "add", library, "-q", "-m", MODEL, "-f", document, "--replace")
            self.expect(run(*command), 0)

        add("north", SHORT)
        add("south", SHORT.replace("north", "south"))
        talk = tool.OnTerminal("chat", "-m", MODEL, "--library", library, whole=True)
        self.expect_prompt(talk)
        talk.write(QUESTION + "\n")
        self.assertTrue(talk.read_until(CODE), talk.seen)
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.expect_prompt(talk)
        add("north", SHORT.replace(CODE, "5530914"))
        talk.write("/reset\n")
        self.expect_prompt(talk)
        talk.write(QUESTION + "\n")
        self.assertTrue(talk.read_until("now over 2 documents"), talk.seen)
        self.assertTrue(talk.read_until("5530914"), talk.seen)
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.expect_prompt(talk)
        (library / "south.txt.kv").unlink()
        talk.write(QUESTION + "\n")
        self.assertTrue(talk.read_until("now over 1 document"), talk.seen)
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.expect_prompt(talk)
        talk.write("/reset\n")
        self.expect_prompt(talk)
        before = len(talk.seen)
        talk.write("/stats\n")
        self.assertTrue(talk.read_until("north.txt.kv"), talk.seen)
        self.assertNotIn("south.txt.kv", talk.seen[before:])
        self.expect_prompt(talk)
        self.expect_end(talk)

    def converse(self, cache, *lines, code=0):
        """Lines from a pipe, in a conversation over a cache file."""
        return self.expect(
            run("chat", "-q", "-m", MODEL, "-c", cache, stdin="\n".join(lines) + "\n"), code
        )

    def chat(self, *lines):
        return self.converse(self.cache, *lines).stdout

    def at_terminal(self, *options):
        """A conversation at a terminal, at its first prompt."""
        talk = tool.OnTerminal("chat", "-m", MODEL, "-c", self.cache, *options, whole=True)
        self.expect_prompt(talk)
        return talk

    def expect_prompt(self, talk):
        self.assertTrue(talk.read_until("> "), talk.seen)

    def interrupt_an_answer(self, talk, question):
        talk.write(question + "\n")
        self.assertTrue(talk.read_until("\n"))
        talk.read_until("e", 5)
        talk.interrupt()
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.expect_prompt(talk)

    def expect_end(self, talk):
        """Ctrl-D at the prompt."""
        talk.write("\x04")
        self.assertEqual(talk.finish(), 0, talk.seen)

    def test_all_documents_of_a_library_are_talked_about_with_sources_and_saved(self):
        library = self.folder / "lib"
        for name, code in (("north", "4821907"), ("south", "5530914")):
            text = SHORT.replace("north", name).replace(CODE, code)
            document = self.file(f"{name}.txt", text)
            self.expect(run("library", "add", library, "-q", "-m", MODEL, "-f", document), 0)
        asked = "What is the access code of the {} gate?"
        saved = self.folder / "talk.kv"
        talk = self.expect(
            run(
                *("chat", "-q", "-m", MODEL, "--library", library),
                stdin="\n".join(
                    [asked.format("south"), asked.format("north"), f"/save {saved}", "/stats"]
                ),
            ),
            0,
        )
        south, north = talk.stdout.index("5530914"), talk.stdout.index(CODE)
        self.assertLess(south, north)
        # the sources of each answer follow it
        self.assertRegex(talk.stdout[south:north], r"\n +\d+(\.\d+)?% south\.txt at ")
        self.assertRegex(talk.stdout[north:], r"\n +\d+(\.\d+)?% north\.txt at ")
        info = self.expect_json(run("inspect", "--json", saved))
        self.assertEqual([d["status"] for d in info["documents"]], [0, 0])
        self.assertGreater(info["tokens"], 20)
        # it goes on, and is replaced only by what continues it
        again = self.converse(saved, asked.format("south"), f"/save {saved}").stdout
        self.assertRegex(again, r"5530914(.|\n)*% south\.txt at ")
        self.converse(self.cache, f"/save {saved}", code=3)
        asked_once = run("ask", "-q", "-m", MODEL, "-c", saved, asked.format("north"))
        self.assertRegex(self.expect(asked_once, 0).stdout, CODE + r"(.|\n)*% north\.txt at ")
        # some of the documents, by name or by its beginning
        for only, known in (("south.txt", False), ("no*", True), ("south.txt,n*", True)):
            told = run(
                *("ask", "--json", "-m", MODEL, "--library", library, "--only", only),
                asked.format("north"),
            )
            answers = self.expect_json(told)
            self.assertEqual(answers["source"]["documents"], only.count(",") + 1)
            self.assertEqual(CODE in answers["answers"][0]["answer"], known)
        self.expect_error(
            run("ask", "-m", MODEL, "--library", library, "--only", "west", "x"), 3, "'west'"
        )
        self.expect_error(
            run("ask", "-m", MODEL, "--library", library, "--only", "w*", "x"), 3, "'w'"
        )
        (library / "south.txt.kv").unlink()
        self.expect_error(run("chat", "-m", MODEL, "-c", saved, stdin=""), 3, "south.txt.kv")
        # it is still what it was, though its documents are lost
        refused = self.converse(self.cache, f"/save {saved}", code=3)
        self.assertIn("holds another conversation or document", refused.stderr)
        shown = self.expect(run("inspect", saved), 0).stdout
        self.assertRegex(shown, r"south\.txt\.kv, [\d,]+ tokens: missing")
        self.expect_error(
            run("chat", "-m", MODEL, "--library", library, "-c", saved, stdin=""), 2, "leave -f"
        )
        self.expect_error(run("chat", "-m", MODEL, "--documents", 2, stdin=""), 2, "--library")

    def test_documents_come_to_a_conversation_and_go(self):
        library = self.folder / "lib"
        for name in ("north", "south", "west"):
            document = self.file(f"{name}.txt", SHORT.replace("north", name))
            self.expect(run("library", "add", library, "-q", "-m", MODEL, "-f", document), 0)
        late = (library / "west.txt.kv").rename(self.folder / "late.kv")
        talk = tool.OnTerminal("chat", "-m", MODEL, "--library", library, whole=True)
        self.expect_prompt(talk)
        asked = "What is the access code of the west gate?\n"
        talk.write(asked)
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.expect_prompt(talk)
        self.assertNotIn("now over", talk.seen)
        late.rename(library / "west.txt.kv")
        (library / "north.txt.kv").unlink()
        (library / "south.txt.kv").rename(library / "east.txt.kv")
        talk.write(asked)
        self.assertTrue(talk.read_until("now over 2 documents"), talk.seen)
        self.assertTrue(talk.read_until("west.txt at"), talk.seen)
        self.expect_prompt(talk)
        self.expect_end(talk)

    def test_lines_from_a_pipe_are_answered(self):
        self.assertEqual(self.chat(QUESTION, QUESTION).count(CODE), 2)

    def test_turns_stay_until_they_are_dropped(self):
        def tokens(text):
            return [
                json.loads("{" + part.split("\n}")[0] + "}")["tokens"]
                for part in text.split("{")[1:]
            ]

        before, after, forgotten = tokens(
            self.chat("/stats", QUESTION, "/stats", "/reset", "/stats")
        )
        self.assertGreater(after, before)
        self.assertEqual(forgotten, before)

    def test_a_conversation_is_saved_and_gone_on_with(self):
        saved, text = self.folder / "talk.kv", self.folder / "short.txt"

        def tokens():
            return self.expect_json(run("inspect", "--json", saved))["tokens"]

        self.chat(QUESTION, f"/save {saved}")
        self.expect(run("verify", saved), 0)
        self.assertIn(CODE, self.converse(saved, QUESTION).stdout)
        # What is in a file stays, but for a beginning of this conversation.
        content = saved.read_bytes()
        refused = self.converse(self.cache, f"/save {saved}", f"/save {text}", code=3)
        self.assertIn("talk.kv holds another conversation", refused.stderr)
        refused = self.converse(self.cache, f"/save {text}", code=3)
        self.assertIn("short.txt is not a cache file", refused.stderr)
        self.assertEqual((saved.read_bytes(), text.read_text()), (content, SHORT))
        for path in (self.folder, self.folder / "none" / "a.kv", "/dev/null"):
            self.converse(self.cache, f"/save {path}", code=3)
        before = tokens()
        self.converse(saved, QUESTION, f"/save {saved}", f"/save {saved}")
        self.assertGreater(tokens(), before)
        self.chat(f"/save --force {saved}")
        self.assertLess(tokens(), before)
        self.chat(QUESTION, f"/save --force {saved}")
        # A conversation is worth more than a cache: a second prefill must not destroy it.
        self.expect_error(
            run("ask", "-m", MODEL, "-f", self.folder / "short.txt", "-s", saved, QUESTION),
            3,
            "conversation",
        )

    def test_a_device_that_is_chosen_is_named(self):
        result = self.expect(
            run("chat", "-m", MODEL, "-c", self.cache, "--device", "auto", stdin="/stats\n"), 0
        )
        stats = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
        if stats["device"] == "cpu":
            self.assertIn("the CPU computes the model: " + stats["device_because"], result.stderr)
        else:
            self.assertIn(f"{stats['devices'][0]['device']} (", result.stderr)
        quiet = self.expect(
            run("chat", "-q", "-m", MODEL, "-c", self.cache, "--device", "auto", stdin=""), 0
        )
        self.assertEqual(quiet.stderr, "")
        self.expect_error(
            run("chat", "-m", MODEL, "-c", self.cache, "--device", "cuda:0,", stdin=""),
            2,
            "device 'cuda:0,' is not known",
        )

    def test_help_and_unknown_commands(self):
        self.assertIn("/reset", self.chat("/help"))
        result = run("chat", "-q", "-m", MODEL, "-c", self.cache, stdin="/nonsense\n/stat\n")
        self.assertIn("/help", self.expect(result, 0).stderr)
        self.assertIn("did you mean '/stats'?)", result.stderr)

    @unittest.skipUnless(
        "libedit" in subprocess.run(["ldd", tool.PROGRAM], capture_output=True, text=True).stdout,
        "built without libedit",
    )
    def test_lines_are_edited_and_recalled(self):
        talk = self.at_terminal()
        talk.write(QUESTION[:-3] + "xx" + "\x7f\x7f" + QUESTION[-3:] + "\r")
        self.assertTrue(talk.read_until(CODE), talk.seen)
        self.expect_prompt(talk)
        talk.write("\x1b[A\r")
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.assertGreaterEqual(talk.seen.count(f"is {CODE}"), 2)
        self.expect_prompt(talk)
        self.expect_end(talk)

    # At this temperature an answer might not end by itself.
    ENDLESS = ("--max-tokens", 100000, "--temperature", 3, "--stop", "never said")

    def test_at_a_terminal_an_interrupt_stops_the_answer_only(self):
        talk = self.at_terminal(*self.ENDLESS)
        self.interrupt_an_answer(talk, "Go on for ever")
        self.interrupt_an_answer(talk, QUESTION)
        self.expect_end(talk)

    def test_at_a_terminal_an_interrupt_at_the_prompt_starts_the_line_again(self):
        talk = self.at_terminal()
        talk.interrupt()
        self.assertTrue(talk.read_until("ends the conversation"), talk.seen)
        self.expect_prompt(talk)
        self.expect_end(talk)

    def test_at_a_terminal_an_end_that_is_typed_during_an_answer_harms_nothing(self):
        talk = self.at_terminal("--max-tokens", 200, "--temperature", 3)
        talk.write("Go on\n")
        self.assertTrue(talk.read_until("\n"))
        self.assertTrue(talk.read_until("e", 5), talk.seen)
        talk.write("\x04")
        self.assertTrue(talk.read_until("first after"), talk.seen)
        if talk.read_until("> ", 5):  # without an editor the conversation has ended
            talk.write("\x04")
        self.assertEqual(talk.finish(), 0, talk.seen)


tool.main()
