"""The example answers from a document, and the second time from its cache: ask_test.py PROGRAM MODEL."""
import pathlib
import subprocess
import sys
import tempfile

FACT = "The access code of the north gate is 4821907."


def expect(condition, what):
    if not condition:
        sys.exit(f"ask: {what}")


def main():
    program, model = sys.argv[1:]
    book = (pathlib.Path(model).parent / "sherlock-holmes.txt").read_text()[2000:5000]
    with tempfile.TemporaryDirectory() as folder:
        document, cache = pathlib.Path(folder, "document.txt"), pathlib.Path(folder, "document.kv")
        document.write_text(f"{book} {FACT} {book}")

        def ask():
            return subprocess.run([program, model, document, cache, "What is the access code of the north gate?"],
                                  capture_output=True, text=True, timeout=100)

        first = ask()
        expect(first.returncode == 0, f"exit code {first.returncode}: {first.stderr}")
        expect("4821907" in first.stdout, f"a wrong answer: {first.stdout}")
        document.unlink()  # the cache is enough
        second = ask()
        expect(second.returncode == 0, f"exit code {second.returncode}: {second.stderr}")
        expect(second.stdout == first.stdout, f"another answer from the cache: {second.stdout}")
        cache.unlink()
        third = ask()
        expect(third.returncode == 1 and "cannot read" in third.stderr, f"a missing document: {third.stderr}")


main()
