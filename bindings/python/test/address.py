"""Runs one of these tests where the library has AddressSanitizer: address.py TEST. The interpreter gets its runtime by LD_PRELOAD (KVASIR_ADDRESS), and
takes all memory from malloc, so that what Python has is watched too. A leak fails the test where libkvasir allocated it: the interpreter has its own."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def main():
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, LD_PRELOAD=os.environ["KVASIR_ADDRESS"], PYTHONMALLOC="malloc", ASAN_OPTIONS="detect_leaks=1",
                   LSAN_OPTIONS=f"exitcode=0:log_path={folder}/log")
        status = subprocess.run([sys.executable, sys.argv[1]], env=env, check=False).returncode
        reports = [report for log in pathlib.Path(folder).iterdir() for report in re.split(r"\n\s*\n", log.read_text(encoding="utf-8", errors="replace"))]
        leaks = [report for report in reports if re.match(r"(Indirect|Direct) leak of", report) and "libkvasir" in report]
        errors = [report for report in reports if re.search(r"ERROR: AddressSanitizer", report)]
        print(*errors, *leaks, sep="\n\n")
        print(f"exit code {status}, {len(leaks)} leaks")
        sys.exit(status or bool(leaks or errors))


main()
