"""The tree as the rules see it: its files, and C++ without comments and strings."""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP = {".h", ".cc", ".inl", ".cu"}
CODE = CPP | {".c"}
TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^()\\\s]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'
    r'(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)


def files(*folders, suffixes=None):
    """Paths under folders of the tree, relative to its root. Build folders and hidden ones other
    than .ci and .github are no part of it.
    """
    for folder in folders:
        for place, names, entries in os.walk(ROOT / folder):
            names[:] = sorted(
                n
                for n in names
                if n in (".ci", ".github") or not n.startswith((".", "build", "__pycache__"))
            )
            for entry in sorted(entries):
                path = (pathlib.Path(place) / entry).relative_to(ROOT)
                if suffixes is None or path.suffix in suffixes:
                    yield path


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def code_only(text):
    """C++ text with comments and the contents of strings blanked, lines kept. #include "..." lines
    stay as they are.
    """

    def blank(match):
        token = match.group()
        start = text.rfind("\n", 0, match.start()) + 1
        if token.startswith('"') and text[start : match.start()].lstrip().startswith("#include"):
            return token
        return " " + "\n" * token.count("\n")

    return TOKENS.sub(blank, text)


def includes(path):
    """(line number, name) of each #include."""
    for number, line in enumerate(code_only(read(path)).splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1)


def finish(problems):
    """Prints what is wrong and gives the exit code."""
    for problem in problems:
        print(problem)
    return 1 if problems else 0
