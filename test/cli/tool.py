"""Runs the command line for the tests: PROGRAM SOURCE_ROOT come as arguments of the test."""

import atexit
import json
import os
import pathlib
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = os.path.abspath(sys.argv[1])
ROOT = pathlib.Path(sys.argv[2])
MODEL = str(ROOT / "examples" / "mini-reader-q8_0.gguf")
BOOK = (ROOT / "examples" / "sherlock-holmes.txt").read_text()
FIXTURES = ROOT / "test" / "fixtures"

FACT = "The access code of the north gate is 4821907."
QUESTION = "What is the access code of the north gate?"
CODE = "4821907"
SHORT = BOOK[2000:5000] + " " + FACT + " " + BOOK[5000:8000]


# Not the user's own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def count_faults(kind, cases=1):
    """As test/fault_count.h does."""
    if os.environ.get("KVASIR_FAULT_COUNTS"):
        with open(os.environ["KVASIR_FAULT_COUNTS"], "a", encoding="utf-8") as out:
            out.write(f"{cases}\t{kind}\n")


def run(*arguments, stdin="", timeout=600, **options):
    """Without a terminal; stdin is text."""
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


class OnTerminal:
    """The program with standard error (and, on request, input and output) on a terminal of its own.
    """

    def __init__(self, *arguments, whole=False, columns=100):
        self.master, slave = pty.openpty()
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        environment = dict(os.environ, TERM="xterm", LC_ALL="C.UTF-8")

        def own_terminal():
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        ends = (slave, slave, slave) if whole else (subprocess.DEVNULL, subprocess.PIPE, slave)
        self.process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            stdin=ends[0],
            stdout=ends[1],
            stderr=ends[2],
            env=environment,
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.seen, self.passed = "", 0

    def read_until(self, text, timeout=60):
        """Whether the text came up after what was waited for before; everything seen is in
        self.seen.
        """
        end = time.monotonic() + timeout
        while (found := self.seen.find(text, self.passed)) < 0 and time.monotonic() < end:
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                part = os.read(self.master, 65536)
            except OSError:  # the other end was closed
                break
            if not part:
                break
            self.seen += part.decode(errors="replace")
        if found >= 0:
            self.passed = found + len(text)
        return found >= 0

    def write(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def finish(self, timeout=60):
        """The exit code, once everything has been read."""
        self.read_until("\0 never", timeout)
        if self.process.stdout:
            self.process.stdout.close()
        code = self.process.wait(timeout)
        os.close(self.master)
        return code


def on_screen(seen):
    """Lines as a terminal would show them in the end: a carriage return goes back, erasing what
    follows is known.
    """
    lines = []
    for line in seen.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            erased = "\x1b[K" in part
            part = part.replace("\x1b[K", "")
            shown = part + ("" if erased else shown[len(part) :])
        lines.append(shown)
    return lines


class InFolder(unittest.TestCase):
    """Each test in an empty folder of its own."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-cli-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def file(self, name, content=None):
        path = self.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            path.write_text(content)
        return path

    def expect(self, result, code):
        self.assertEqual(
            result.returncode, code, f"{result.args}\n{result.stdout}\n{result.stderr}"
        )
        return result

    def expect_error(self, result, code, *words):
        """One line on standard error that names the tool and the words."""
        self.expect(result, code)
        last = result.stderr.strip().split("\n")[-1]
        self.assertTrue(last.startswith("kvasir: "), result.stderr)
        for word in words:
            self.assertIn(word, last)
        return result

    def expect_json(self, result, code=0):
        self.expect(result, code)
        return json.loads(result.stdout)


def main():
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
