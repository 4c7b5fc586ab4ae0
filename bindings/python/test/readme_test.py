"""The programs of README.md run: readme_test.py [transformers]."""
import pathlib
import re
import subprocess
import sys
import tempfile

from support import FACT, MODEL, QUESTION, document

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def run(program, folder, *arguments):
    command = [sys.executable, "-W", "error::FutureWarning", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def main():
    programs = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(programs) == 3, len(programs)
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] == ["transformers"]:
            try:
                import torch  # noqa: F401
                import transformers  # noqa: F401
            except ImportError as error:
                print(f"skipped: {error}")
                sys.exit(77)
            done = run(programs[2], folder)
            assert "205" in done.stdout and "FutureWarning" not in done.stderr, done
            return
        text = pathlib.Path(folder, "text.txt")
        text.write_text(document(), encoding="utf-8")
        first = run(programs[0], folder, MODEL, text, QUESTION)
        assert first.stdout.strip() == FACT and "/" in first.stderr, first
        text.unlink()  # the cache file is enough
        second = run(programs[0], folder, MODEL, text, QUESTION)
        assert second.stdout == first.stdout and "/" not in second.stderr, second
        assert "(100, 4, 64)" in run(programs[1], folder).stdout


main()
