"""Every text file of the tree: no places of one machine, no leftovers, no endless files."""
import pathlib
import re
import sys

from source import CODE, files, finish, read

TEXT = CODE | {".py", ".md", ".build", ".txt", ".sh", ".map", ".cross", ".in", ".rs", ".go", ".toml", ".mod", ".yml", ".sed", ""}
FOLDERS = ["src", "kernels", "include", "bindings", "test", "tools", "examples", ".ci", ".github"]
ROOT_FILES = ["README.md", "CONTRIBUTING.md", "meson.build", "meson_options.txt"]
DATA = ("test/fixtures/", "test/fuzz/corpus", "examples/sherlock-holmes.txt", "examples/demo.txt")
LEFTOVERS = {
    r"(?<![\w.$}])/(?:home|root|work|mnt|Users)/\w": "a path of one machine",
    r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b": "unfinished: do it or leave it out",
    r"^(?:<{7}|>{7}|={7})(?: |$)": "a merge marker",
    r"\r": "a carriage return",
    r"[ \t]+$": "space at the end of the line",
    r"^ *\t": "a tab for indentation",
}
TABBED = {pathlib.Path("tools/debian/rules")}  # a makefile
MOST_LINES = 500  # of a source file; 400 is what to aim at


def main():
    problems = []
    rules = [(re.compile(pattern), why) for pattern, why in LEFTOVERS.items()]
    paths = [p for p in files(*FOLDERS) if (p.suffix in TEXT or p.name.startswith("run")) and not str(p).startswith(DATA)]
    for path in [*paths, *ROOT_FILES]:
        try:
            text = read(path)
        except UnicodeDecodeError:
            if getattr(path, "suffix", "") in CODE:
                problems.append(f"{path}: not UTF-8")
            continue
        lines = text.split("\n")
        tabs = path in TABBED or str(path).endswith(".go")
        if text and lines[-1]:
            problems.append(f"{path}: the last line has no end")
        for number, line in enumerate(lines, 1):
            problems += [f"{path}:{number}: {why}" for rule, why in rules if rule.search(line) and not (tabs and "tab" in why)]
        if str(path).startswith(("src/", "kernels/")) and len(lines) > MOST_LINES:
            problems.append(f"{path}: {len(lines)} lines, more than {MOST_LINES}")
    return finish(problems)


sys.exit(main())
