"""mypy --strict finds nothing, in the package and in a program that uses it."""
import pathlib
import subprocess
import sys
import tempfile

import support  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = ROOT / "bindings/python"
GOOD = """
import kvasir
options: kvasir.SessionOptions = {"decode": kvasir.Strategy("bounded"), "threads": 2}
def ask(model: kvasir.Model) -> str:
    with model.session(**options) as session, session.stream("Who?", max_tokens=5) as stream:
        return "".join(stream)
async def seconds(session: kvasir.Session) -> float:
    return (await session.aask("Who?")).total_seconds + session.stats().prefill_seconds
"""
BAD = GOOD.replace("max_tokens=5", "max_tokens='5'")


def find_mypy():
    """Returns the command of tools/setup's mypy, or else of this interpreter's own."""
    installed = ROOT / ".mypy/bin/mypy"
    if installed.exists():
        return [installed]
    try:
        import mypy  # noqa: F401
    except ImportError:
        print("skipped: mypy is not installed; tools/setup bindings installs it")
        sys.exit(77)
    return [sys.executable, "-m", "mypy"]


def main():
    mypy = find_mypy()
    with tempfile.TemporaryDirectory() as folder:

        def check(*arguments):
            python = f"--python-executable={sys.executable}"
            command = [*mypy, "--strict", python, f"--cache-dir={folder}/cache", *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)

        whole = check()
        assert whole.returncode == 0, whole.stdout + whole.stderr
        for text, status in ((GOOD, 0), (BAD, 1)):
            program = pathlib.Path(folder, "program.py")
            program.write_text(text, encoding="utf-8")
            found = check("--follow-imports=silent", str(program))
            assert found.returncode == status, found.stdout + found.stderr
            assert ("max_tokens" in found.stdout) == bool(status), found.stdout


main()
