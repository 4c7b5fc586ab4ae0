"""Programs in C, Rust, Go and Python have the same answers from one cache file: answers_test.py ASK

ASK is the C example of that name. Rust's program is the example of its crate; those of Go and
Python are in their READMEs. The environment is that of the bindings' own tests. A language that is
not installed is left out, which the output reports.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BINDINGS = pathlib.Path(__file__).resolve().parents[1]
MODEL = pathlib.Path(os.environ["KVASIR_MODEL"])
BOOK = (MODEL.parent / "sherlock-holmes.txt").read_text(encoding="utf-8")
GATE = "The access code of the north gate is 4821907."
KEY = "The pass key is 71432. Remember it. 71432 is the pass key."
# So long that attention is sparse.
DOCUMENT = f"{BOOK[2000:10000]} {GATE} {BOOK[10000:18000]} {KEY} {BOOK[18000:26000]}"
QUESTIONS = {
    "What is the access code of the north gate?": "4821907",
    "What is the pass key?": "71432",
    "What did Holmes say to Watson?": "",
}


def run(*command):
    """Runs a command; ends the test where it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 77):
        sys.exit(f"{command[:3]}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done


def program(folder, language, script):
    """Builds a language's program as its own tests do; None where it is not installed."""
    built = folder / language
    done = run(sys.executable, BINDINGS / script, "program", built)
    if done.returncode == 77:
        print(f"left out: {language}: {done.stdout.strip()}")
        return None
    return lambda text, question: run(built, MODEL, text, f"{text}.kv", question).stdout


def python(folder):
    """The program of Python's README; None without numpy."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        print(f"left out: Python: {error}")
        return None
    script = folder / "ask.py"
    readme = (BINDINGS / "python/README.md").read_text(encoding="utf-8")
    text = re.search(r"```python\n(import sys\n.*?)```", readme, re.S).group(1)
    script.write_text(text, encoding="utf-8")
    return lambda text, question: run(sys.executable, script, MODEL, text, question).stdout


def check(question, expected, answers):
    """Compares answers: some programs allow a longer one than others."""
    shortest = min(answers.values(), key=len)
    same = all(
        answer == shortest or (len(shortest) > 500 and answer.startswith(shortest))
        for answer in answers.values()
    )
    if not same or expected not in shortest or not shortest:
        sys.exit(f"different or wrong answers to {question!r}: {answers}")


def main():
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        text = folder / "document.txt"
        text.write_text(DOCUMENT, encoding="utf-8")

        def c(text, question):
            return run(sys.argv[1], MODEL, text, f"{text}.kv", question).stdout

        languages = {
            "C": c,
            "Rust": program(folder, "Rust", "rust/run_test.py"),
            "Go": program(folder, "Go", "go/check.py"),
            "Python": python(folder),
        }
        c(text, "What?")
        text.unlink()  # the cache file of C is enough
        for question, expected in QUESTIONS.items():
            answers = {name: ask(text, question).strip() for name, ask in languages.items() if ask}
            print(f"{', '.join(answers)}: {question} {answers['C']}")
            check(question, expected, answers)


main()
