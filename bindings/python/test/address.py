"""Runs a test where the library has AddressSanitizer: address.py TEST.

The interpreter gets the sanitizer's runtime by LD_PRELOAD (KVASIR_ADDRESS). It takes all memory
from malloc, so the sanitizer watches Python's memory too. A leak fails the test where libkvasir
allocated it, because the interpreter has leaks of its own.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def main():
    with tempfile.TemporaryDirectory() as folder:
        env = dict(
            os.environ,
            LD_PRELOAD=os.environ["KVASIR_ADDRESS"],
            PYTHONMALLOC="malloc",
            ASAN_OPTIONS="detect_leaks=1",
            LSAN_OPTIONS=f"exitcode=0:log_path={folder}/log",
        )
        done = subprocess.run([sys.executable, sys.argv[1]], env=env, check=False)
        reports = []
        for log in pathlib.Path(folder).iterdir():
            reports += re.split(r"\n\s*\n", log.read_text(encoding="utf-8", errors="replace"))
        leak = re.compile(r"(Indirect|Direct) leak of")
        leaks = [r for r in reports if leak.match(r) and "libkvasir" in r]
        errors = [r for r in reports if "ERROR: AddressSanitizer" in r]
        print(*errors, *leaks, sep="\n\n")
        print(f"exit code {done.returncode}, {len(leaks)} leaks")
        sys.exit(done.returncode or bool(leaks or errors))


main()
