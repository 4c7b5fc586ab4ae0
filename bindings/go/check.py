"""Runs the Go binding's tests with a library that is not installed.

check.py fast|race|leaks|pointers|program. `program FILE` builds the program of the README as FILE.
KVASIR_LIB_DIR and KVASIR_INCLUDE_DIR are the folders of the library and its headers. KVASIR_MODEL
and KVASIR_TOOL (may be empty) are the model and the command line. KVASIR_ADDRESS is set if the
library has AddressSanitizer; the tests then have it too. Exit code 77: no Go, or an old one.
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
MODULE = re.search(r"^module (.*)$", (HERE / "go.mod").read_text(encoding="utf-8"), re.M).group(1)


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def find_tools():
    for tool in ["go", "gofmt", "pkg-config", "cc"]:
        if not shutil.which(tool):
            skip(f"there is no {tool}")
    version = subprocess.run(["go", "env", "GOVERSION"], env=dict(os.environ, GOTOOLCHAIN="local"),
                             cwd="/", capture_output=True, text=True, check=True).stdout
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < OLDEST:
        skip(f"{version.strip()} is older than Go {OLDEST[0]}.{OLDEST[1]}")


def run(*command, **more):
    print("+", *command, flush=True)
    if subprocess.run(command, cwd=HERE, env=dict(os.environ, **more), check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def fast():
    unformatted = subprocess.run(["gofmt", "-l", "."], cwd=HERE, capture_output=True, text=True,
                                 check=True).stdout
    if unformatted:
        sys.exit(f"gofmt would change: {unformatted}")
    run("go", "vet", "./...")
    run("go", "test", "-count=1", "./...")


def race():
    run("go", "test", "-count=1", "-race", ".")


def leaks():
    run("go", "test", "-count=1", "-timeout=0", "-v", "-run=TestCyclesLeaveNothing", ".",
        "-cycles=4000")


def pointers():
    run("go", "test", "-count=1", "-timeout=0", ".", GOEXPERIMENT="cgocheck2")


def program():
    with tempfile.TemporaryDirectory() as folder:
        text = (HERE / "README.md").read_text(encoding="utf-8")
        source = re.search("```go\n(package main.*?)```", text, re.S).group(1)
        pathlib.Path(folder, "main.go").write_text(source, encoding="utf-8")
        module = (f"module ask\n\ngo 1.23\n\nrequire {MODULE} v0.0.0\n\n"
                  f"replace {MODULE} => {HERE}\n")
        pathlib.Path(folder, "go.mod").write_text(module, encoding="utf-8")
        run("go", "build", "-C", folder, "-o", os.path.abspath(sys.argv[2]), ".")


def main():
    tests = {"fast": fast, "race": race, "leaks": leaks, "pointers": pointers, "program": program}
    test = tests[sys.argv[1]]
    find_tools()
    with tempfile.TemporaryDirectory() as folder:
        address = bool(os.environ.get("KVASIR_ADDRESS"))
        link, flags = (" -fsanitize=address", " -asan") if address else ("", "")
        library, include = os.environ["KVASIR_LIB_DIR"], os.environ["KVASIR_INCLUDE_DIR"]
        pathlib.Path(folder, "kvasir.pc").write_text(
            "Name: kvasir\nDescription: not installed\nVersion: 0\n"
            f'Libs: -L"{library}" -lkvasir{link}\nCflags: -I"{include}"\n', encoding="utf-8")
        # Go's linker cannot test what "ccache gcc" supports, and would break the race detector.
        for name in ["CC", "CXX"]:
            if " " in os.environ.get(name, ""):
                os.environ[name] = os.environ[name].split()[-1]
        os.environ.update(PKG_CONFIG_PATH=folder, LD_LIBRARY_PATH=library, GOTOOLCHAIN="local",
                          GOPROXY="off", GOFLAGS="-buildvcs=false" + flags, GOWORK="off",
                          GODEBUG="clobberfree=1" if flags else "", CGO_ENABLED="1")
        test()


main()
