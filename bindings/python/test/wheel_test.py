"""The wheel in a fresh environment answers with its own library, and has all metadata."""
import email
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

from support import FACT, MODEL, QUESTION, document

HERE = pathlib.Path(__file__).resolve().parent
README = HERE.parent / "README.md"
MAPPED = """
import kvasir
print(kvasir._abi.lib._name)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "/kvasir/lib/" in line})
"""


def make_wheel(output):
    library = os.environ["KVASIR_LIB_DIR"]
    command = [sys.executable, HERE.parent / "make_wheel.py", library, output]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0 and "patchelf" in made.stderr:
        print("skipped: no patchelf")
        sys.exit(77)
    assert made.returncode == 0, made.stderr
    return pathlib.Path(made.stdout.strip())


def check_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        name = next(name for name in names if name.endswith("/METADATA"))
        found = email.message_from_bytes(file.read(name))
    version = wheel.name.split("-")[1]
    assert (found["Name"], found["Version"]) == ("kvasir", version), found.items()
    assert found["License-Expression"] == "MIT" and found["Summary"].startswith("Prefill")
    assert found.get_payload().startswith("# Kvasir for Python")
    folder = f"kvasir-{version}.dist-info"
    assert {"kvasir/py.typed", f"{folder}/licenses/LICENSE", f"{folder}/RECORD"} <= set(names)


def main():
    with tempfile.TemporaryDirectory() as folder:
        wheel = make_wheel(pathlib.Path(folder, "not", "there"))
        assert "-py3-none-manylinux_" in wheel.name, wheel
        check_metadata(wheel)
        fresh = pathlib.Path(folder, "fresh")
        venv.create(fresh)  # with the pip and numpy of this interpreter: nothing is downloaded
        python = fresh / "bin/python"
        hidden = ("PYTHONPATH", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}

        def run(*command):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=clean, cwd=folder
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        pip = [sys.executable, "-m", "pip", "--python", python]
        run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
        import numpy

        site = next(fresh.glob("lib/python*/site-packages"))
        numpy_site = pathlib.Path(numpy.__file__).parents[1]
        (site / "numpy.pth").write_text(f"{numpy_site}\n", encoding="utf-8")
        program = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
        text = pathlib.Path(folder, "text.txt")
        text.write_text(document(600), encoding="utf-8")
        answer = run(python, "-c", program.group(1), MODEL, text, QUESTION)
        assert answer.strip() == FACT, answer
        library, mapped = run(python, "-c", MAPPED).splitlines()
        assert pathlib.Path(library).parent == site / "kvasir/lib", library
        assert pathlib.Path(library).name in mapped and "libzstd" in mapped, mapped
        print(wheel.name, wheel.stat().st_size, "bytes; mapped:", mapped)


main()
