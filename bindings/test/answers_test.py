"""Programs in C, Rust, Go and Python ask one saved document and give the same answers: answers_test.py ASK

ASK is the example of that name in C, Rust's is its crate's example, those of Go and Python are in their READMEs. The environment is that of the bindings'
own tests. A language that is not there is left out, which is said.
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
FACTS = ["The access code of the north gate is 4821907.", "The pass key is 71432. Remember it. 71432 is the pass key."]
DOCUMENT = f"{BOOK[2000:10000]} {FACTS[0]} {BOOK[10000:18000]} {FACTS[1]} {BOOK[18000:26000]}"  # so long that it is not read exactly
QUESTIONS = {"What is the access code of the north gate?": "4821907", "What is the pass key?": "71432", "What did Holmes say to Watson?": ""}


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **more)
    if done.returncode not in (0, 77):
        sys.exit(f"{command[:3]}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done


def program(folder, language, script):
    """Built as that language's tests do it; none where it is not there."""
    built = folder / language
    done = run(sys.executable, BINDINGS / script, "program", built)
    if done.returncode == 77:
        print(f"left out: {language}: {done.stdout.strip()}")
        return None
    return lambda text, question: run(built, MODEL, text, f"{text}.kv", question).stdout


def python(folder):
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        print(f"left out: Python: {error}")
        return None
    script = folder / "ask.py"
    readme = (BINDINGS / "python/README.md").read_text(encoding="utf-8")
    script.write_text(re.search(r"```python\n(import sys\n.*?)```", readme, re.S).group(1), encoding="utf-8")
    return lambda text, question: run(sys.executable, script, MODEL, text, question).stdout


def main():
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        text = folder / "document.txt"
        text.write_text(DOCUMENT, encoding="utf-8")
        languages = {"C": lambda text, question: run(sys.argv[1], MODEL, text, f"{text}.kv", question).stdout,
                     "Rust": program(folder, "Rust", "rust/run_test.py"), "Go": program(folder, "Go", "go/check.py"), "Python": python(folder)}
        languages["C"](text, "What?")
        text.unlink()  # what C has saved is enough
        for question, expected in QUESTIONS.items():
            answers = {name: ask(text, question).strip() for name, ask in languages.items() if ask}
            print(f"{', '.join(answers)}: {question} {answers['C']}")
            shortest = min(answers.values(), key=len)  # some of the programs let an answer be longer than others do
            same = all(a == shortest or (len(shortest) > 500 and a.startswith(shortest)) for a in answers.values())
            if not same or expected not in shortest or not shortest:
                sys.exit(f"different or wrong answers: {answers}")


main()
