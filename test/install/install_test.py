"""An installation that was moved is found by pkg-config and by CMake: install_test.py MODEL BUILD
MESON C_COMPILER... -- CXX_COMPILER...

A C program, a C++ program and one with the static library are built and run with each."""

import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from steps import SKIPPED, expect, run  # noqa: E402

SOURCES = pathlib.Path(__file__).resolve().parent


def needed(program):
    """The shared libraries that a program names."""
    return [
        line.split("[")[1].rstrip("]")
        for line in run("readelf", "-d", program).splitlines()
        if "(NEEDED)" in line
    ]


def check_program(program, model, library):
    """library: where libkvasir.so is; None: the program does without."""
    out = run(program, model, LD_LIBRARY_PATH=str(library or ""))
    expect(out.endswith(" tokens\n"), f"{program}: {out}")
    expect(
        any("libkvasir" in name for name in needed(program)) == (library is not None),
        f"{program} names {needed(program)}",
    )


def by_pkg_config(prefix, folder, model, c_compiler, cxx_compiler):
    description = next(prefix.rglob("kvasir.pc"))
    library = description.parent.parent

    def query(*what):
        return run("pkg-config", *what, "kvasir", PKG_CONFIG_PATH=str(description.parent)).split()

    for define in [
        "--dont-define-prefix",
        "--define-prefix",
    ]:  # the second is what pkg-config does by itself on some systems
        folders = [
            os.path.realpath(*query(define, f"--variable={name}"))
            for name in ["includedir", "libdir"]
        ]
        expect(
            folders == [str(prefix / "include"), str(library)],
            f"{define}: kvasir.pc does not move with its folder: {folders}",
        )
    static = query("--static", "--libs")
    for name in ["kvasir", "stdc++", "m", "mimalloc", "zstd", "pcre2-8"]:
        expect(f"-l{name}" in static, f"--static --libs lacks -l{name}: {static}")
    expect(
        static.index("-lc") < static.index("-lmimalloc"),
        "mimalloc comes before the C library: it would be the program's malloc",
    )
    run(*c_compiler, SOURCES / "reader.c", "-o", folder / "c", *query("--cflags", "--libs"))
    run(*cxx_compiler, SOURCES / "reader.cc", "-o", folder / "cc", *query("--cflags", "--libs"))
    by_name = [
        "-l:libkvasir.a" if word == "-lkvasir" else word for word in static
    ]  # both kinds are there
    run(*c_compiler, SOURCES / "reader.c", "-o", folder / "static", *query("--cflags"), *by_name)
    check_program(folder / "c", model, library)
    check_program(folder / "cc", model, library)
    check_program(folder / "static", model, None)


def by_cmake(prefix, folder, model):
    configuration = next(prefix.rglob("kvasir-config.cmake"))
    for file in configuration.parent.iterdir():
        expect("@" not in file.read_text(), f"{file.name} has something that was not filled in")
    run("cmake", "-S", SOURCES, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", folder / "build")
    library = configuration.parents[2]
    check_program(folder / "build" / "reader-c", model, library)
    check_program(folder / "build" / "reader-cc", model, library)
    check_program(folder / "build" / "reader-static", model, None)
    for version, found in [
        ("0.2", True),
        ("0.2.0", True),
        ("0.1", False),
        ("0.99", False),
        ("1.0", False),
    ]:
        text = (
            "cmake_minimum_required(VERSION 3.16)\nproject(asks C)\nfind_package(kvasir"
            f" {version} CONFIG)\nif(NOT kvasir_FOUND STREQUAL {int(found)})\n  message(FATAL_ERROR"
            f' "{version}: ${{kvasir_FOUND}}")\nendif()\n'
        )
        asks = folder / f"asks-{version}"
        asks.mkdir()
        (asks / "CMakeLists.txt").write_text(text)
        run("cmake", "-S", asks, "-B", asks / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


def main():
    model, build, meson = sys.argv[1:4]
    middle = sys.argv.index("--")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place).resolve()
        run(meson, "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", folder / "first")
        prefix = folder / "moved"
        header = next((folder / "first").rglob("kvasir.h"))
        expect(
            (header.parent / "kvasir_experimental.h").is_file(),
            "kvasir_experimental.h is not installed",
        )
        shutil.move(header.parent.parent, prefix)
        shutil.rmtree(folder / "first")
        for file in [
            "bin/kvasir",
            "share/man/man1/kvasir.1",
            "share/bash-completion/completions/kvasir",
            "share/zsh/site-functions/_kvasir",
            "share/fish/vendor_completions.d/kvasir.fish",
        ]:
            expect((prefix / file).stat().st_size > 1000, f"{file} is empty")
        missing = [program for program in ["pkg-config", "cmake"] if not shutil.which(program)]
        if "pkg-config" not in missing:
            by_pkg_config(prefix, folder, model, sys.argv[4:middle], sys.argv[middle + 1 :])
        if "cmake" not in missing:
            by_cmake(prefix, folder, model)
    for program in missing:
        print(f"{program} is missing: what is built with it was not tested")
    return SKIPPED if missing else 0


sys.exit(main())
