"""kvasir chat, from a pipe and at a terminal."""

import contextlib
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

    def chat(self, *lines):
        return self.expect(
            run("chat", "-q", "-m", MODEL, "-c", self.cache, stdin="\n".join(lines) + "\n"), 0
        ).stdout

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
        saved = self.folder / "talk.kv"
        self.chat(QUESTION, f"/save {saved}")
        self.expect(run("verify", saved), 0)
        result = self.expect(run("chat", "-q", "-m", MODEL, "-c", saved, stdin=QUESTION + "\n"), 0)
        self.assertIn(CODE, result.stdout)
        # What is in a file stays, but for a beginning of this conversation.
        content = saved.read_bytes()
        refused = self.expect(
            run(
                "chat",
                "-q",
                "-m",
                MODEL,
                "-c",
                self.cache,
                stdin=f"/save {saved}\n/save {self.folder / 'short.txt'}\n",
            ),
            3,
        )
        self.assertIn("talk.kv holds another conversation", refused.stderr)
        refused = self.expect(
            run(
                "chat",
                "-q",
                "-m",
                MODEL,
                "-c",
                self.cache,
                stdin=f"/save {self.folder / 'short.txt'}\n",
            ),
            3,
        )
        self.assertIn("short.txt is not a cache file", refused.stderr)
        self.assertEqual(
            (saved.read_bytes(), (self.folder / "short.txt").read_text()), (content, SHORT)
        )
        for path in (self.folder, self.folder / "none" / "a.kv", "/dev/null"):
            self.expect(
                run("chat", "-q", "-m", MODEL, "-c", self.cache, stdin=f"/save {path}\n"), 3
            )
        before = self.expect_json(run("inspect", "--json", saved))["tokens"]
        self.expect(
            run(
                "chat",
                "-q",
                "-m",
                MODEL,
                "-c",
                saved,
                stdin=f"{QUESTION}\n/save {saved}\n/save {saved}\n",
            ),
            0,
        )
        self.assertGreater(self.expect_json(run("inspect", "--json", saved))["tokens"], before)
        self.chat(f"/save --force {saved}")
        self.assertLess(self.expect_json(run("inspect", "--json", saved))["tokens"], before)
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
        talk = tool.OnTerminal("chat", "-m", MODEL, "-c", self.cache, whole=True)
        self.assertTrue(talk.read_until("> "), talk.seen)
        talk.write(QUESTION[:-3] + "xx" + "\x7f\x7f" + QUESTION[-3:] + "\r")
        self.assertTrue(talk.read_until(CODE), talk.seen)
        self.assertTrue(talk.read_until("> "), talk.seen)
        talk.write("\x1b[A\r")
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.assertGreaterEqual(talk.seen.count(f"is {CODE}"), 2)
        self.assertTrue(talk.read_until("> "), talk.seen)
        talk.write("\x04")
        self.assertEqual(talk.finish(), 0, talk.seen)

    def test_at_a_terminal_an_interrupt_stops_the_answer_only(self):
        talk = tool.OnTerminal(
            "chat",
            "-m",
            MODEL,
            "-c",
            self.cache,
            "--max-tokens",
            100000,
            "--temperature",
            3,
            "--stop",
            "never said",
            whole=True,
        )
        self.assertTrue(talk.read_until("> "), talk.seen)
        talk.write("Go on for ever\n")
        self.assertTrue(talk.read_until("\n"))
        talk.read_until("e", 5)
        talk.interrupt()
        self.assertTrue(talk.read_until("first after"), talk.seen)
        self.assertTrue(talk.read_until("> "), talk.seen)
        talk.write(QUESTION + "\n")
        self.assertTrue(talk.read_until("\n"))
        talk.read_until("e", 5)
        talk.interrupt()  # at this temperature it might not end by itself
        self.assertTrue(talk.read_until("first after"), talk.seen)
        # An interrupt at the prompt starts the line again, and the editor drops what is typed then.
        for _ in range(30):
            talk.write("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                talk.process.wait(1)
                break
        self.assertEqual(talk.finish(), 0)


tool.main()
