"""Every text file of the tree: no places of one machine, no leftovers, no endless files; plain
words where PROSE says so.
"""

import pathlib
import re
import sys

from source import CODE, ROOT, files, finish, read

TEXT = CODE | {
    ".py",
    ".md",
    ".build",
    ".txt",
    ".sh",
    ".map",
    ".cross",
    ".in",
    ".rs",
    ".go",
    ".toml",
    ".mod",
    ".yml",
    ".sed",
    "",
}
FOLDERS = [
    "src",
    "kernels",
    "include",
    "bindings",
    "test",
    "tools",
    "examples",
    "docs",
    ".ci",
    ".github",
]
ROOT_FILES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "meson.build", "meson_options.txt"]
DATA = ("test/fixtures/", "test/fuzz/corpus", "examples/sherlock-holmes.txt", "examples/demo.txt")
LEFTOVERS = {
    r"(?<![\w.$}])/(?:home|root|work|mnt|Users)/\w": "a path of one machine",
    r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b": "unfinished: do it or leave it out",
    r"^(?:<{7}|>{7}|={7})(?: |$)": "a merge marker",
    r"\r": "a carriage return",
    r"[ \t]+$": "space at the end of the line",
    r"^ *\t": "a tab for indentation",
}
TABBED = {pathlib.Path("tools/packaging/debian/rules")}  # a makefile
MOST_LINES = 600  # of a source file; 400 is what to aim at

# Files and folders whose words, columns and sentences are checked.
PROSE = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    ".github/SECURITY.md",
    "examples/desk/README.md",
    ".github/ISSUE_TEMPLATE",
]
# Sources whose words and columns are checked, but for those with identifiers of banned words.
SOURCES = ["src", "kernels", "include", "tools", "test", "bindings", "examples"]
# Its prompt has a banned phrase.
SOURCES_NOT_YET = ("test/cli/chat_test.py",)
COLUMNS = 100
WORDS = 25  # of a sentence
BAN_LIST = "docs/style.md"
BAN = re.compile(r"^\| <!-- ban --> ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$|^(?: {4}\S.*\n|\n(?= {4}\S))+", re.DOTALL | re.MULTILINE)


def banned():
    """(pattern, what to write) of each row of the ban list; a row may name several phrases."""
    for phrases, instead in BAN.findall(read(BAN_LIST)):
        for phrase in phrases.split(", "):
            yield re.compile(
                rf"\b{re.escape(phrase)}\b".replace(r"\ ", r"\s+"), re.IGNORECASE
            ), f"'{phrase}': write {instead}"


def blank(match):
    return "\n" * match.group().count("\n")


def prose_of(text):
    """Markdown without code, comments, places of links and rows of the ban list; lines keep their
    numbers.
    """
    text = BAN.sub("", text)
    text = re.sub(r"<!--.*?-->", blank, FENCE.sub(blank, text), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*(?:\n[^`\n]*)?`", lambda m: "CODE" + blank(m), text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(prose):
    """(line, sentence): a sentence ends at its mark, at an empty line, at an item of a list and at
    a cell of a table.
    """
    start, words = 1, []
    for number, line in enumerate(prose.split("\n") + [""], 1):
        for cell in line.split("|") if line.startswith("|") else [line]:
            if line.startswith("|") or not line.strip() or re.match(r"\s*(?:[-*#]+|\d+\.) ", line):
                if words:
                    yield start, " ".join(words)
                words = []
            for word in re.sub(r"^\s*(?:[-*#]+|\d+\.) ", "", cell).split():
                start = start if words else number
                words.append(word)
                if re.search(r"[.!?:][)\"*]*$", word):
                    yield start, " ".join(words)
                    words = []


def prose_problems(path):
    """What is wrong with the words, columns and sentences of one file."""
    text, markdown = read(path), path.suffix == ".md"
    prose = prose_of(text) if markdown else text
    for pattern, instead in banned():
        for match in pattern.finditer(prose):
            yield f"{path}:{prose.count(chr(10), 0, match.start()) + 1}: {instead}"
    lines = (
        re.sub(r"^```text\n.*?^```$", blank, text, flags=re.DOTALL | re.MULTILINE)
        if markdown
        else text
    )  # output as it is
    for number, line in enumerate(lines.split("\n"), 1):
        if len(line) > COLUMNS and not (markdown and (line.startswith("|") or "https://" in line)):
            yield f"{path}:{number}: {len(line)} columns, more than {COLUMNS}"
    for number, sentence in sentences(prose) if markdown else ():
        count = len(re.findall(r"\w[\w'/.,-]*", sentence))
        if count > WORDS:
            yield f"{path}:{number}: a sentence of {count} words: {sentence[:60]}"


def source_files():
    """Sources without data, other programs' formats and SOURCES_NOT_YET."""
    kinds = CODE | {".py", ".rs", ".go"}
    return [
        p
        for p in files(*SOURCES)
        if p.suffix in kinds and not str(p).startswith(DATA + SOURCES_NOT_YET)
    ]


def source_problems(path):
    """Banned words, and lines that are too long, of one source."""
    text = read(path)
    for pattern, instead in banned():
        for match in pattern.finditer(text):
            yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {instead}"
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > COLUMNS and "https://" not in line:
            yield f"{path}:{number}: {len(line)} columns, more than {COLUMNS}"


def prose_files():
    for name in PROSE:
        paths = files(name) if (ROOT / name).is_dir() else [pathlib.Path(name)]
        yield from (p for p in paths if p.suffix in TEXT)


def main():
    problems = []
    rules = [(re.compile(pattern), why) for pattern, why in LEFTOVERS.items()]
    paths = [
        p
        for p in files(*FOLDERS)
        if (p.suffix in TEXT or p.name.startswith("run")) and not str(p).startswith(DATA)
    ]
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
            problems += [
                f"{path}:{number}: {why}"
                for rule, why in rules
                if rule.search(line) and not (tabs and "tab" in why)
            ]
        if str(path).startswith(("src/", "kernels/", "test/")) and len(lines) > MOST_LINES:
            problems.append(f"{path}: {len(lines)} lines, more than {MOST_LINES}")
    for path in prose_files():
        problems += prose_problems(path)
    for path in source_files():
        problems += source_problems(path)
    return finish(problems)


sys.exit(main())
