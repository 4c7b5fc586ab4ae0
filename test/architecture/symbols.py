"""What the built library shows to its host: symbols.py SHARED STATIC NM READELF STRIP, either
library may be "".

The symbols are the header's functions and no others, nothing of the language runtime is exported,
nothing runs when the library is
loaded, it needs only the libraries it says, and it stays small.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

from source import code_only, finish, read

HEADERS = ["kvasir.h", "kvasir_experimental.h"]
# Of the stripped shared library, with CUDA. --gc-sections and --icf=all remove nothing; the unwind
# tables of all CPU kernels have 19 KB. The products of 26 weight types, for each instruction set
# and GPU, have most of it; those of a few inputs in the order of one, of common types, 48 KB.
# Prefill attention by warp groups has 57 KB, products with an activation behind them 12 KB, norms
# of many rows 20 KB, products by tiles of bf16 45 KB.
MAX_BYTES = 6_560_000
NEEDED = re.compile(
    r"lib(c|m|stdc\+\+|gcc_s|zstd|pcre2-8|mimalloc(-secure)?|pthread)\.so|ld-linux|ld-musl"
)
NEVER_IMPORTED = {
    "abort",
    "exit",
    "_exit",
    "printf",
    "puts",
    "putchar",
    "fputs",
    "fwrite",
    "perror",
    "__printf_chk",
    "__fprintf_chk",
    "getenv",
    "secure_getenv",
    "signal",
    "sigaction",
    "_ZSt4cout",
    "_ZSt4cerr",
}
TOLD_AT_START = 8  # bytes of .init_array: the compiler's own frame_dummy


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def declared():
    return set(
        re.findall(
            r"\bKV_API\b[^;(]*?\b(kv_\w+)\s*\(",
            "".join(code_only(read(f"include/{name}")) for name in HEADERS),
        )
    )


def names(listing):
    """Symbol names of nm -P: "name[@@version] type ..."; A is the version's own entry."""
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) >= 2 and len(fields[1]) == 1 and fields[1] != "A":
            yield fields[0].split("@")[0]


def compare(what, found, wanted):
    for name in sorted(found - wanted):
        yield f"{what} exports {name}, which no header in include/ declares"
    for name in sorted(wanted - found):
        yield f"{what} lacks {name}, which a header in include/ declares"


def shared_problems(library, nm, readelf, strip, wanted):
    yield from compare(
        "the shared library", set(names(run(nm, "-D", "-P", "--defined-only", library))), wanted
    )
    for name in sorted(
        set(names(run(nm, "-D", "-P", "--undefined-only", library))) & NEVER_IMPORTED
    ):
        yield f"the shared library calls {name}"
    for name in re.findall(r"\(NEEDED\).*\[(.*?)\]", run(readelf, "-d", "-W", library)):
        if not NEEDED.match(name):
            yield f"the shared library needs {name}"
    section = re.search(
        r"\.init_array\s+INIT_ARRAY\s+\S+\s+\S+\s+(\S+)", run(readelf, "-S", "-W", library)
    )
    if section and int(section.group(1), 16) > TOLD_AT_START:
        yield (
            f"{int(section.group(1), 16) // 8 - 1} static initialisers run when the library is"
            " loaded"
        )
    with tempfile.TemporaryDirectory() as folder:
        stripped = pathlib.Path(folder) / "stripped.so"
        run(strip, "-o", str(stripped), library)
        size = stripped.stat().st_size
    print(f"stripped: {size} bytes")
    if size >= MAX_BYTES:
        yield f"the stripped shared library has {size} bytes, {MAX_BYTES} or more"


def main():
    shared, static, nm, readelf, strip = sys.argv[1:]
    wanted = declared()
    problems = [] if wanted else ["no function found in include/"]
    if shared:
        problems += shared_problems(shared, nm, readelf, strip, wanted)
    if static:
        problems += compare(
            "the static library", set(names(run(nm, "-g", "-P", "--defined-only", static))), wanted
        )
    return finish(problems)


sys.exit(main())
