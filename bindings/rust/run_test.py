#!/usr/bin/env python3
"""Runs one test of the Rust binding: run_test.py check | leaks | vendored | package | program FILE.

check      format, lints, and cargo test
leaks      1,000 cycles of opening, asking and closing
vendored   builds the library from source and asks a question
package    packages both crates and builds them from the packages
program    builds the crate's example as FILE

KVASIR_LIB_DIR, KVASIR_MODEL and KVASIR_TOOL name the library, the model and the command line.
KVASIR_ADDRESS is set if the library has AddressSanitizer: programs and doctests are then linked
with it. Exit code 77: not run; the output has the reason.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
MIN_VERSION = (1, 63)
EXPERIMENTAL = ["--features", "kvasir/experimental"]
CLIPPY = ["clippy", "--workspace", "--all-targets"]
# Components of a toolchain that may be missing, and the commands that need them.
LINTS = {
    "fmt": [["fmt", "--all", "--check"]],
    "clippy": [[*CLIPPY, "--", "-D", "warnings"], [*CLIPPY, *EXPERIMENTAL, "--", "-D", "warnings"]],
}
VENDORED = ["--release", "--features", "vendored"]


def skip(reason):
    print(f"not run: {reason}")
    sys.exit(77)


def find_cargo():
    cargo, rustc = shutil.which("cargo"), shutil.which("rustc")
    if not cargo or not rustc:
        skip("there is no cargo or no rustc")
    version = subprocess.run([rustc, "--version"], capture_output=True, text=True, check=False)
    text = version.stdout.strip()
    found = re.match(r"rustc (\d+)\.(\d+)", text)
    if not found or tuple(map(int, found.groups())) < MIN_VERSION:
        skip(f"rustc is {text or 'not usable'}, {MIN_VERSION[0]}.{MIN_VERSION[1]} is needed")
    return cargo


def run(command, env, **options):
    print("+", " ".join(map(str, command)), flush=True)
    result = subprocess.run(command, cwd=HERE, env=env, check=False, **options)
    if result.returncode != 0:
        sys.exit(f"failed: {result.returncode}")
    return result


def address_sanitizer(env):
    """Returns arguments for cargo: a target, so that build scripts are linked without it."""
    if not env.get("KVASIR_ADDRESS"):
        return []
    # Its runtime must be the first library, and rustc has no argument for that.
    linker = pathlib.Path(env["CARGO_TARGET_DIR"], "linker")
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text('#!/bin/sh\nexec cc -Wl,--no-as-needed -lasan -Wl,--as-needed "$@"\n')
    linker.chmod(0o755)
    env["RUSTFLAGS"] = env["RUSTDOCFLAGS"] = f"-C linker={linker}"
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = re.search(r"^host: (.*)$", version, re.M).group(1)
    # It keeps freed memory for a while. One test leaks a stream on purpose.
    leaking = ["--skip", "cycles_take_no_memory", "--skip", "a_leaked_stream"]
    return ["--target", host, "--", *leaking]


def check(cargo, env):
    address = address_sanitizer(env)
    for name, commands in LINTS.items():
        if address:
            continue
        version = subprocess.run([cargo, name, "--version"], capture_output=True, check=False)
        if version.returncode != 0:
            print(f"not run: there is no cargo {name}")
            continue
        for command in commands:
            run([cargo, *command], env)
    run([cargo, "test", "--workspace", "--no-fail-fast", *EXPERIMENTAL, *address], env)


def need_build_tools():
    for name in ("meson", "ninja"):
        if not shutil.which(name):
            skip(f"there is no {name}")


def vendored(cargo, env):
    need_build_tools()
    target = pathlib.Path(env["CARGO_TARGET_DIR"])
    target.mkdir(parents=True, exist_ok=True)
    document, cache = target / "document.txt", target / "document.kv"
    fact = "The access code of the north gate is 4821907."
    document.write_text(f"The tower has a gate. {fact} It is closed at night.", encoding="utf-8")
    cache.unlink(missing_ok=True)
    question = "What is the access code of the north gate?"
    values = [env["KVASIR_MODEL"], document, cache, question]
    command = [cargo, "run", *VENDORED, "--example", "ask", "--", *values]
    result = run(command, env, stdout=subprocess.PIPE, text=True)
    if "4821907" not in result.stdout:
        sys.exit(f"a wrong answer: {result.stdout}")
    run([cargo, "test", *VENDORED, "--test", "all", "attention"], env)


def package(env):
    """Packages need no library but the sources in them."""
    need_build_tools()
    del env["KVASIR_LIB_DIR"]
    run([HERE / "package", "--features", "kvasir-sys/vendored,kvasir/vendored"], env)


def main():
    if sys.argv[1:2] not in (["check"], ["leaks"], ["vendored"], ["package"], ["program"]):
        sys.exit(__doc__)
    cargo = find_cargo()
    env = dict(os.environ, CARGO_NET_OFFLINE="true")  # the two crates need no other
    folders = [env.get("KVASIR_LIB_DIR"), env.get("LD_LIBRARY_PATH")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    if sys.argv[1] == "check":
        check(cargo, env)
    elif sys.argv[1] == "leaks":
        leaks = ["--test", "leaks", "--", "--ignored", "--nocapture"]
        run([cargo, "test", "--release", *leaks], env)
    elif sys.argv[1] == "vendored":
        vendored(cargo, env)
    elif sys.argv[1] == "package":
        package(env)
    else:
        run([cargo, "build", "--example", "ask"], env)
        built = pathlib.Path(env["CARGO_TARGET_DIR"], "debug/examples/ask")
        shutil.copy(built, sys.argv[2])


main()
