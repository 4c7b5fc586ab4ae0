"""The Go binding's tests against a library that was built and not installed: check.py fast|race|long.

KVASIR_LIB_DIR and KVASIR_INCLUDE_DIR say where the library and its header are, KVASIR_MODEL and KVASIR_TOOL (may be empty) what is
tested with. Exit code 77: there is no Go, or too old a one.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OLDEST = (1, 23)


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def find_tools():
    for tool in ["go", "gofmt", "pkg-config", "cc"]:
        if not shutil.which(tool):
            skip(f"there is no {tool}")
    version = subprocess.run(["go", "env", "GOVERSION"], env=dict(os.environ, GOTOOLCHAIN="local"), cwd="/",
                             capture_output=True, text=True, check=True).stdout
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < OLDEST:
        skip(f"{version.strip()} is older than Go {OLDEST[0]}.{OLDEST[1]}")


def run(*command, **more):
    print("+", *command, flush=True)
    if subprocess.run(command, cwd=HERE, env=dict(os.environ, **more), check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def fast():
    unformatted = subprocess.run(["gofmt", "-l", "."], cwd=HERE, capture_output=True, text=True, check=True).stdout
    if unformatted:
        sys.exit(f"not as gofmt has it: {unformatted}")
    run("go", "vet", "./...")
    run("go", "test", "-count=1", "./...")


def race():
    run("go", "test", "-count=1", "-race", ".")


def long():
    run("go", "test", "-count=1", "-timeout=0", "-v", "-run=TestCyclesLeaveNothing", ".", "-cycles=1000")
    run("go", "test", "-count=1", "-timeout=0", ".", GOEXPERIMENT="cgocheck2")


def main():
    what = {"fast": fast, "race": race, "long": long}[sys.argv[1]]
    find_tools()
    with tempfile.TemporaryDirectory() as folder:
        library, include = os.environ["KVASIR_LIB_DIR"], os.environ["KVASIR_INCLUDE_DIR"]
        pathlib.Path(folder, "kvasir.pc").write_text(
            "Name: kvasir\nDescription: as it was built\nVersion: 0\n"
            f'Libs: -L"{library}" -lkvasir\nCflags: -I"{include}"\n', encoding="utf-8")
        for name in ["CC", "CXX"]:  # of "ccache gcc" Go's linker cannot find out what it can do, and links what the race detector cannot be in
            if " " in os.environ.get(name, ""):
                os.environ[name] = os.environ[name].split()[-1]
        os.environ.update(PKG_CONFIG_PATH=folder, LD_LIBRARY_PATH=library, GOTOOLCHAIN="local", GOPROXY="off", GOFLAGS="-buildvcs=false",
                          GOWORK="off", CGO_ENABLED="1")
        what()


main()
