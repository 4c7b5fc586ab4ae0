"""The wheel in a fresh environment answers, with its own library, and its types are whole."""
import os
import pathlib
import subprocess
import sys
import tempfile
import venv

from support import FACT, MODEL, QUESTION, document

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = """
import sys, kvasir
with kvasir.Model(sys.argv[1]) as model, model.session() as session:
    session.prefill(sys.argv[2])
    print(session.generate(sys.argv[3]).text)
print(kvasir._abi.lib._name)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "/kvasir/lib/" in line})
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([sys.executable, HERE.parent / "make_wheel.py", os.environ["KVASIR_LIB_DIR"], folder],
                              capture_output=True, text=True, check=False)
        if made.returncode != 0 and "patchelf" in made.stderr:
            print("skipped: no patchelf")
            sys.exit(77)
        assert made.returncode == 0, made.stderr
        wheel = pathlib.Path(made.stdout.strip())
        assert "-py3-none-manylinux_" in wheel.name, wheel
        fresh = pathlib.Path(folder, "fresh")
        venv.create(fresh)  # pip and numpy are those of the interpreter that runs this, so that nothing is downloaded
        python = fresh / "bin/python"
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        import numpy

        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True, env=clean, cwd=folder)
        site = next(fresh.glob("lib/python*/site-packages"))
        (site / "numpy.pth").write_text(str(pathlib.Path(numpy.__file__).parents[1]) + "\n", encoding="utf-8")
        told = subprocess.run([python, "-c", PROGRAM, MODEL, document(600), QUESTION], capture_output=True, text=True, check=False, env=clean,
                              cwd=folder)
        assert told.returncode == 0, told.stderr
        answer, library, mapped = told.stdout.splitlines()
        assert answer == FACT, answer
        assert library == str(site / "kvasir/lib/libkvasir.so.0"), library
        assert "libkvasir.so.0" in mapped and "libzstd" in mapped, mapped
        print(wheel.name, wheel.stat().st_size, "bytes; mapped:", mapped)


main()
