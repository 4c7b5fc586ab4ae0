#!/usr/bin/env python3
"""One test of the Rust binding, as meson runs it: run_test.py check | leaks | vendored | program FILE.

check      format, lints, and cargo test
leaks      1,000 cycles of opening, asking and closing
vendored   the library is built from source, and answers
program    builds the crate's example as FILE
The environment says where the library, the model and the command line are, and by KVASIR_ADDRESS that the library has AddressSanitizer: then programs
are linked with it, doctests too. Exit code 77: not run, and why is said.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
LEAST = (1, 63)
# Where they are installed.
OPTIONAL = {"fmt": ["fmt", "--all", "--check"], "clippy": ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]}
ASK = ["run", "--release", "--features", "vendored", "--example", "ask", "--"]


def skip(why):
    print(f"not run: {why}")
    sys.exit(77)


def find_cargo():
    cargo, rustc = shutil.which("cargo"), shutil.which("rustc")
    if not cargo or not rustc:
        skip("there is no cargo or no rustc")
    text = subprocess.run([rustc, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"rustc (\d+)\.(\d+)", text)
    if not version or tuple(map(int, version.groups())) < LEAST:
        skip(f"rustc is {text.strip() or 'not usable'}, {LEAST[0]}.{LEAST[1]} is needed")
    return cargo


def run(command, env, **options):
    print("+", " ".join(map(str, command)), flush=True)
    result = subprocess.run(command, cwd=HERE, env=env, check=False, **options)
    if result.returncode != 0:
        sys.exit(f"failed: {result.returncode}")
    return result


def address_sanitizer(env):
    """Arguments for cargo: a target of its own, so that build scripts are as always."""
    if not env.get("KVASIR_ADDRESS"):
        return []
    linker = pathlib.Path(env["CARGO_TARGET_DIR"], "linker")  # its runtime has to be the first library, where rustc has no argument of its own for one
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text('#!/bin/sh\nexec cc -Wl,--no-as-needed -lasan -Wl,--as-needed "$@"\n')
    linker.chmod(0o755)
    env["RUSTFLAGS"] = env["RUSTDOCFLAGS"] = f"-C linker={linker}"
    told = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    leaking = ["--skip", "cycles_take_no_memory", "--skip", "a_leaked_stream"]  # freed memory is kept for a while; what is forgotten on purpose
    return ["--target", re.search(r"^host: (.*)$", told, re.M).group(1), "--", *leaking]


def vendored(cargo, env):
    """From source to an answer."""
    for name in ("meson", "ninja"):
        if not shutil.which(name):
            skip(f"there is no {name}")
    target = pathlib.Path(env["CARGO_TARGET_DIR"])
    target.mkdir(parents=True, exist_ok=True)
    document, cache = target / "document.txt", target / "document.kv"
    document.write_text("The tower has a gate. The access code of the north gate is 4821907. It is closed at night.")
    cache.unlink(missing_ok=True)
    question = "What is the access code of the north gate?"
    result = run([cargo, *ASK, env["KVASIR_MODEL"], document, cache, question], env, stdout=subprocess.PIPE, text=True)
    if "4821907" not in result.stdout:
        sys.exit(f"a wrong answer: {result.stdout}")
    run([cargo, "test", "--release", "--features", "vendored", "--test", "all", "attention"], env)


def main():
    if sys.argv[1:2] not in (["check"], ["leaks"], ["vendored"], ["program"]):
        sys.exit(__doc__)
    cargo = find_cargo()
    env = dict(os.environ, CARGO_NET_OFFLINE="true")  # nothing but the two crates is needed
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [env.get("KVASIR_LIB_DIR"), env.get("LD_LIBRARY_PATH")]))
    if sys.argv[1] == "vendored":
        vendored(cargo, env)
    elif sys.argv[1] == "program":
        run([cargo, "build", "--example", "ask"], env)
        shutil.copy(pathlib.Path(env["CARGO_TARGET_DIR"], "debug/examples/ask"), sys.argv[2])
    elif sys.argv[1] == "leaks":
        run([cargo, "test", "--release", "--test", "leaks", "--", "--ignored", "--nocapture"], env)
    else:
        address = address_sanitizer(env)
        for name, command in OPTIONAL.items():
            if address:
                continue
            if subprocess.run([cargo, name, "--version"], capture_output=True, check=False).returncode == 0:
                run([cargo, *command], env)
            else:
                print(f"not run: there is no cargo {name}")
        run([cargo, "test", "--workspace", "--no-fail-fast", *address], env)


main()
