"""mypy --strict finds nothing, in the package and in a program that uses it."""
import pathlib
import subprocess
import sys
import tempfile

import support  # noqa: F401

HERE = pathlib.Path(__file__).resolve().parents[1]
GOOD = """
import kvasir
options: kvasir.SessionOptions = {"strategy": "bounded", "threads": 2}
def ask(model: kvasir.Model) -> str:
    with model.session(**options) as session, session.stream("Who?", max_tokens=5) as stream:
        return "".join(stream)
"""
BAD = GOOD.replace("max_tokens=5", "max_tokens='5'")


def main():
    try:
        import mypy  # noqa: F401
    except ImportError:
        print("skipped: mypy is not installed")
        sys.exit(77)

    with tempfile.TemporaryDirectory() as folder:

        def check(*arguments):
            return subprocess.run([sys.executable, "-m", "mypy", "--strict", f"--cache-dir={folder}/cache", *arguments], capture_output=True,
                                  text=True, check=False, cwd=HERE)

        whole = check()
        assert whole.returncode == 0, whole.stdout + whole.stderr
        for text, status in ((GOOD, 0), (BAD, 1)):
            program = pathlib.Path(folder, "program.py")
            program.write_text(text, encoding="utf-8")
            told = check("--follow-imports=silent", str(program))
            assert told.returncode == status and ("max_tokens" in told.stdout) == bool(status), told.stdout + told.stderr


main()
