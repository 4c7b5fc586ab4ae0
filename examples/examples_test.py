"""The examples do what they say, with the bundled model: examples_test.py MODEL NAME=PROGRAM, the
one to test first, then what it needs.
"""

import pathlib
import re
import signal
import subprocess
import sys
import tempfile

MODEL = pathlib.Path(sys.argv[1])
PROGRAMS = dict(pair.split("=", 1) for pair in sys.argv[2:])
NAME = sys.argv[2].split("=")[0]
BOOK = (MODEL.parent / "sherlock-holmes.txt").read_text()
FACT = "The access code of the north gate is 4821907."
QUESTION = "What is the access code of the north gate?"
PASS_KEY = "The pass key is 71432. Remember it. 71432 is the pass key."
SHORT = f"{BOOK[2000:3500]} {FACT} {PASS_KEY} {BOOK[3500:5000]}"


def expect(condition, what):
    if not condition:
        sys.exit(f"{NAME}: {what}")


def run(*arguments, code=0, name=NAME):
    result = subprocess.run(
        [PROGRAMS[name], *map(str, arguments)], capture_output=True, text=True, timeout=250
    )
    expect(
        result.returncode == code, f"exit code {result.returncode}: {result.stderr}{result.stdout}"
    )
    return result


def document(folder, name="document.txt", text=SHORT):
    path = folder / name
    path.write_text(text)
    return path


def ask(folder):
    """Answers from a document, and the second time from its cache."""
    text, cache = document(folder), folder / "document.kv"
    first = run(MODEL, text, cache, QUESTION)
    expect(FACT in first.stdout, f"a wrong answer: {first.stdout}")
    text.unlink()  # the cache is enough
    second = run(MODEL, text, cache, QUESTION)
    expect(second.stdout == first.stdout, f"another answer from the cache: {second.stdout}")
    cache.write_text("a letter")
    run(MODEL, text, cache, QUESTION, code=1)
    expect(cache.read_text() == "a letter", "what was no cache was replaced")
    cache.unlink()
    expect(
        "cannot read" in run(MODEL, text, cache, QUESTION, code=1).stderr,
        "a missing document is not reported",
    )


def stream(folder):
    """Shows progress. An interrupt ends the prefill; an answer comes from the part that is kept."""
    whole = run(MODEL, document(folder), QUESTION)
    expect(
        FACT in whole.stdout and "cancelled" not in whole.stderr,
        f"a wrong answer: {whole.stdout}{whole.stderr}",
    )
    done, total = re.findall(r"prefill: (\d+) of (\d+) tokens", whole.stderr)[-1]
    expect(done == total, f"the last progress is {done} of {total}")

    long = document(
        folder, "long.txt", FACT + " " + BOOK[:400000]
    )  # the whole prefill would take minutes
    process = subprocess.Popen(
        [PROGRAMS[NAME], MODEL, long, QUESTION], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    seen = b""
    while not re.search(rb"prefill: [1-9]\d* of", seen):
        part = process.stderr.read1()
        expect(part, f"no progress: {seen}")
        seen += part
    process.send_signal(signal.SIGINT)
    answer, rest = process.communicate(timeout=250)
    match = re.search(r"cancelled: kept (\d+) tokens, (\d+) of (\d+) bytes", (seen + rest).decode())
    expect(match, f"the cancelled prefill is not reported: {rest}")
    tokens, done, total = map(int, match.groups())
    expect(0 < tokens < done < total == long.stat().st_size, f"kept {match.group()}")
    expect(
        process.returncode == 0 and FACT in answer.decode(),
        f"exit code {process.returncode}, answer {answer}",
    )


def resume(folder):
    """A stopped prefill continues from a file, with the answer of one that was not stopped."""
    text = SHORT + BOOK[5000:15000]
    result = run(MODEL, document(folder, text=text), folder / "document.kv", QUESTION)
    expect(result.stdout == FACT + "\n", f"a wrong answer: {result.stdout}")
    stopped = re.search(r"cancelled: (\d+) tokens, (\d+) of (\d+) bytes", result.stderr)
    expect(stopped, f"it was not stopped: {result.stderr}")
    tokens, done, total = map(int, stopped.groups())
    expect(0 < tokens < done < total == len(text.encode()), f"stopped at {stopped.group()}")
    cache = (folder / "document.kv").read_bytes()
    expect(
        "exists"
        in run(MODEL, folder / "document.txt", folder / "document.kv", QUESTION, code=1).stderr,
        "a file was to be replaced",
    )
    expect((folder / "document.kv").read_bytes() == cache, "a file was replaced")
    continued = int(re.search(r"continued: (\d+) tokens", result.stderr).group(1))
    expect(continued > 0, "nothing was left to prefill")


def forks(folder):
    """Questions are answered in their order, from a cache that two threads share."""
    cache = folder / "document.kv"
    run(MODEL, document(folder), cache, QUESTION, name="ask")
    questions = [
        QUESTION,
        "What is the pass key?",
        "What is the pass key?",
        QUESTION,
        "What is the pass key?",
    ]
    answers = run(MODEL, cache, *questions).stdout.splitlines()
    expected = [
        FACT if question == QUESTION else "The pass key is 71432." for question in questions
    ]
    expect(answers == expected, f"wrong answers: {answers}")
    expect(
        "not found" in run(MODEL, folder / "missing.kv", QUESTION, code=1).stderr,
        "a missing cache is not reported",
    )


def library(folder):
    """A text is prefilled once, a longer one from where it differs; both are listed and removed."""
    books, short = folder / "books", document(folder)
    longer = document(folder, "longer.txt", SHORT + BOOK[5000:6000])

    def found(path):
        result = run(books, "ask", MODEL, path, QUESTION)
        expect(result.stdout == FACT + "\n", f"a wrong answer: {result.stdout}")
        there, tokens, name = re.search(
            r"(\d+) of (\d+) tokens found, in (.+)", result.stderr
        ).groups()
        return int(there), int(tokens), name

    there, tokens, name = found(short)
    expect(there == 0 < tokens, f"{there} tokens of a new text")
    expect(found(short) == (tokens, tokens, name), "a known text is prefilled again")
    there, all_tokens, longer_name = found(longer)
    expect(0 < there <= tokens < all_tokens, f"{there} of {all_tokens} tokens of a longer text")

    def listed():
        return [line.split("\t")[0] for line in run(books, "list").stdout.splitlines()]

    expect(listed() == [longer_name, name], f"listed: {listed()}")
    run(books, "remove", name)
    expect(listed() == [longer_name] and not (books / f"{name}.kv").exists(), f"listed: {listed()}")
    expect(
        "not found" in run(books, "remove", name, code=1).stderr,
        "a document that is not there is not reported",
    )


with tempfile.TemporaryDirectory() as place:
    {"ask": ask, "stream": stream, "resume": resume, "forks": forks, "library": library}[NAME](
        pathlib.Path(place)
    )
