"""Completions for shells and the manual's page have what --help prints, all of it."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
import unittest

import tool
from tool import MODEL, run


def commands_and_options():
    """{"kvasir ask": ({"-h", "--help", ...}, [its commands])}, from --help of each."""
    found = {}

    def look_at(words):
        text = run(*words, "--help").stdout
        options = {
            name for names in re.findall(r"^  (-\S+)", text, re.M) for name in names.split(",")
        }
        inner = re.findall(
            r"^  (\w+) ", text.partition("\nSubcommands:\n")[2].partition("\n\n")[0], re.M
        )
        found[" ".join(["kvasir", *words])] = (options, inner)
        for name in inner:
            look_at([*words, name])

    look_at([])
    return found


class Describe(tool.InFolder):
    @classmethod
    def setUpClass(cls):
        cls.commands = commands_and_options()

    def described(self, what):
        return self.file(what, self.expect(run("describe", what), 0).stdout)

    def completed(self, *lines):
        """What bash offers for the last word of each line, a line being a list of words."""
        script = 'source ./bash\ncompopt() { options_set+=" $2"; }\n'
        for words in lines:
            quoted = " ".join(f"'{word}'" for word in words)
            script += (
                f"options_set=; COMP_WORDS=(kvasir {quoted}); COMP_CWORD={len(words)}; _kvasir\n"
                'echo "${COMPREPLY[*]}|$options_set"\n'
            )
        self.described("bash")
        result = self.expect(
            subprocess.run(
                ["bash", "--norc", "-u", "-c", script],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=60,
            ),
            0,
        )
        self.assertEqual(result.stderr, "")
        return [line.split("|") for line in result.stdout.splitlines()]

    def test_help_names_commands_and_options(self):
        self.assertIn("kvasir library ask", self.commands)
        self.assertIn("--strategy", self.commands["kvasir ask"][0])
        self.assertNotIn("describe", self.commands["kvasir"][1])

    def test_what_is_not_known_is_not_described(self):
        self.expect_error(run("describe", "csh"), 2, "csh")

    def test_bash_offers_every_option_and_command(self):
        lines = [[*name.split()[1:], "-"] for name in self.commands] + [
            [*name.split()[1:], ""] for name in self.commands
        ]
        offered = [set(words.split()) for words, _ in self.completed(*lines)]
        for (name, (options, inner)), of_dash, of_nothing in zip(
            self.commands.items(), offered, offered[len(self.commands) :], strict=False
        ):
            self.assertEqual(of_dash, options, name)
            self.assertEqual(of_nothing, set(inner), name)

    def test_bash_offers_choices_where_they_stand(self):
        offered = self.completed(
            ["ask", "--strategy", "bo"],
            ["ask", "--strategy", "=", "bo"],
            ["ask", "--chat-format", "mistral-"],
            ["eval", "--strategy", "quest,bo"],
            ["eval", "--task", "single,p"],
            ["library", "ask", "folder", "--budget-schedule", ""],
            ["logits", "--precision", "=", ""],
            ["library", "re"],
            ["ask", "--max-tokens", ""],
            ["--json", "pre"],
            ["ask", "--json", "--stra"],
            ["ask", "--", "--stra"],
        )
        self.assertEqual(
            [words for words, _ in offered],
            [
                "bounded",
                "bounded",
                "mistral-v3 mistral-tekken mistral-v7 mistral-v7-spm",
                "quest,bounded",
                "single,pass-key single,perplexity single,pair",
                "uniform linear pyramid",
                "f32 int8",
                "rename remove",
                "",
                "prefill",
                "--strategy",
                "",
            ],
        )

    def test_bash_leaves_files_and_folders_to_the_line_editor(self):
        offered = self.completed(
            ["ask", "-m", ""],
            ["ask", "--cache", "=", "x"],
            ["inspect", ""],
            ["pack", "a", ""],
            ["library", "list", ""],
            ["library", "rename", "books", ""],
            ["bench", "--folder", ""],
            ["ask", "--temperature", ""],
        )
        self.assertEqual(
            [(words, options.split()) for words, options in offered],
            [
                ("", ["default"]),
                ("", ["default"]),
                ("", ["default"]),
                ("", []),
                ("", ["dirnames"]),
                ("", []),
                ("", ["dirnames"]),
                ("", []),
            ],
        )

    def typed(self, shell, *lines):
        """What a shell on a terminal shows after each line; kvasir is there a function that shows
        its arguments.
        """
        pid, master = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.environ.update(PS1="", TERM="dumb", INPUTRC="/dev/null", HISTFILE="")
            os.execvp(shell[0], shell)
        seen, end = b"", time.monotonic() + 120
        for number, line in enumerate(
            ["kvasir() { printf '<%s>' \"$@\"; echo '!'; }; kvasir ready", *lines], 1
        ):
            os.write(master, line.encode() + b"\n")
            while seen.count(b">!") < number and time.monotonic() < end:
                if select.select([master], [], [], 1)[0]:
                    seen += os.read(master, 4096)
        os.close(master)
        os.waitpid(pid, 0)
        return seen.decode(errors="replace")

    def test_bash_completes_a_line_that_is_typed(self):
        self.described("bash")
        self.file("long name.kv", "x")
        seen = self.typed(
            ["bash", "--norc", "--noprofile", "-i"],
            "source ./bash; kvasir sourced",
            "kvasir inspect lo\t",
            "kvasir ask --strat\tinfl\t",
        )
        self.assertIn("<inspect><long name.kv>!", seen)
        self.assertIn("<ask><--strategy><infllm>!", seen)

    @unittest.skipUnless(
        shutil.which("zsh"), "zsh is missing: its completions were compared, not tried"
    )
    def test_zsh_completes_a_line_that_is_typed(self):
        self.described("zsh").rename(self.folder / "_kvasir")
        self.file("long name.kv", "x")
        seen = self.typed(
            ["zsh", "-f", "-i"],
            "autoload -Uz compinit; fpath=($PWD $fpath); compinit -u -D; kvasir loaded",
            "kvasir inspect lo\t",
            "kvasir library rena\t",
            "kvasir ask --chat-form\tllama2",
            "kvasir ask --strategy infl\t",
            "kvasir eval --strategy quest,infl\t",
        )
        for shown in [
            "<inspect><long name.kv>",
            "<library><rename>",
            "<ask><--chat-format=llama2>",
            "<ask><--strategy><infllm>",
            "<eval><--strategy><quest,infllm",
        ]:
            self.assertIn(shown, seen)

    def test_zsh_has_every_option_and_command(self):
        path = self.described("zsh")
        parts = dict(re.findall(r"^(_kvasir\w*)\(\) \{\n(.*?)^\}$", path.read_text(), re.M | re.S))
        for name, (options, inner) in self.commands.items():
            part = parts["_" + name.replace(" ", "_")]
            said = {
                word
                for words in re.findall(r"^    '(?:\(([^)]*)\)|\*)'", part, re.M)
                for word in words.split()
            }
            said |= {
                word.rstrip("=+")
                for words in re.findall(r"^    '\*'\{?(-[^}']*)", part, re.M)
                for word in words.split(",")
            }
            self.assertEqual(said, options, name)
            self.assertEqual(re.findall(r"^        '(\w+):", part, re.M), inner, name)
        if shutil.which("zsh"):
            self.expect(
                subprocess.run(["zsh", "-n", path], capture_output=True, text=True, timeout=60), 0
            )

    def test_fish_has_every_option_and_command(self):
        path = self.described("fish")
        for name, (options, inner) in self.commands.items():
            lines = [line for line in path.read_text().splitlines() if f'= "{name}"' in line]
            said = {
                "-" + short
                for line in lines
                for short in re.findall(r" -s (\w)", line.partition(" -d ")[0])
            }
            said |= {
                "--" + long
                for line in lines
                for long in re.findall(r" -l ([\w-]+)", line.partition(" -d ")[0])
            }
            self.assertEqual(said, options, name)
            self.assertEqual(
                [command for line in lines for command in re.findall(r"' -a (\w+) -d", line)],
                inner,
                name,
            )

    @unittest.skipUnless(
        shutil.which("fish"), "fish is missing: its completions were compared, not tried"
    )
    def test_fish_completes(self):
        self.described("fish")
        self.file("long name.kv", "x")
        lines = [
            "kvasir library re",
            "kvasir ask --strategy bo",
            "kvasir eval --strategy quest,bo",
            "kvasir ask -m long",
            "kvasir inspect long",
            "kvasir ask --max-tokens lo",
            "kvasir ask --chat-format=mistral-",
        ]
        script = "source ./fish\n" + "".join(
            f"complete -C '{line}' | cut -f 1 | string join ' '\necho\n" for line in lines
        )
        result = self.expect(
            subprocess.run(
                ["fish", "--no-config", "-c", script],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=60,
            ),
            0,
        )
        self.assertEqual(result.stderr, "")
        self.assertEqual(
            [sorted(line.split()) for line in result.stdout.splitlines() if line],
            [
                ["remove", "rename"],
                ["bounded"],
                ["quest,bounded"],
                ["long", "name.kv"],
                ["long", "name.kv"],
                ["--chat-format=mistral-tekken", "--chat-format=mistral-v3"],
            ],
        )

    def test_the_manual_has_every_option_of_every_command(self):
        text = self.described("man").read_text().replace("\\-", "-")
        parts = dict(re.findall(r"^\.SS (kvasir[^\n]*)\n(.*?)(?=^\.S[SH] |\Z)", text, re.M | re.S))
        parts["kvasir"] = text.partition(".SH OPTIONS\n")[2].partition("\n.SH ")[0]
        self.assertEqual(set(parts), set(self.commands))
        for name, (options, _) in self.commands.items():
            items = re.findall(r"^\.TP\n(.*)$", parts[name], re.M)
            self.assertEqual(
                {option for item in items for option in re.findall(r"\\fB(-[^\\]*)\\fR", item)},
                options,
                name,
            )
        self.assertIn("\nExit codes:\n", text)

    def test_the_manual_is_set_without_a_warning(self):
        path = self.described("man")
        for program in [["mandoc", "-Tlint", "-Wall"], ["groff", "-man", "-Tutf8", "-ww", "-z"]]:
            if shutil.which(program[0]):
                result = subprocess.run(
                    [*program, path], capture_output=True, text=True, timeout=60
                )
                self.assertEqual(
                    (result.returncode, result.stdout + result.stderr), (0, ""), program
                )

    def test_choices_are_what_the_library_takes(self):
        text = self.file("text.txt", "Text.")
        formats = re.findall(
            r"'kvasir tokenize --chat-format'\) wanted='choice ([^']*)'",
            self.described("bash").read_text(),
        )[0].split()
        self.assertIn("zephyr", formats)
        for name in formats:
            self.expect(run("tokenize", "-m", MODEL, "--chat-format", name, "-f", text), 0)
        self.expect_error(
            run("tokenize", "-m", MODEL, "--chat-format", "zephyr2", "-f", text), 2, "zephyr2"
        )


tool.main()
