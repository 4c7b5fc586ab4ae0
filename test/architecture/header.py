"""Each public header compiles alone and twice, without a warning, as C and as C++, and so do the
programs of README.md and of
kvasir.h: header.py CC... -- CXX..."""

import re
import subprocess
import sys

from source import ROOT, finish, read

WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wconversion", "-Wshadow", "-Wundef"]
C_WARNINGS = ["-Wstrict-prototypes", "-Wmissing-prototypes", "-Wc++-compat"]
CPP_WARNINGS = ["-Wold-style-cast"]
HEADERS = ["kvasir.h", "kvasir_experimental.h"]
SOURCE = """#include <{0}>
#include <{0}>
int main(void) {{ return sizeof(kv_error) == 0 || KV_OK != 0; }}
"""


def problem(compiler, language, standard, warnings, source):
    command = [
        *compiler,
        f"-std={standard}",
        *WARNINGS,
        *warnings,
        f"-I{ROOT / 'include'}",
        "-fsyntax-only",
        "-x",
        language,
        "-",
    ]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return [f"{' '.join(command)}\n{run.stderr}"] if run.returncode else []


def program_of_header():
    """The program in the first comment of kvasir.h, without the remark in its callback."""
    lines = re.search(
        r"#include <kvasir\.h>.*?\n \*   }\n(?= \*\n \* The next)",
        read("include/kvasir.h"),
        re.DOTALL,
    ).group()
    return re.sub(r"^ \*(   )?", "", lines, flags=re.MULTILINE).replace(
        "(non-zero stops the answer)", ""
    )


def main():
    middle = sys.argv.index("--")
    cc, cxx = sys.argv[1:middle], sys.argv[middle + 1 :]
    problems = []
    for source in [SOURCE.format(header) for header in HEADERS]:
        for standard in ["c99", "c11", "c17"]:
            problems += problem(cc, "c", standard, C_WARNINGS, source)
        for standard in ["c++11", "c++20"]:
            problems += problem(cxx, "c++", standard, CPP_WARNINGS, source)
    problems += problem(cc, "c", "c99", C_WARNINGS, program_of_header())
    examples = re.findall(r"^```c\n(.*?)^```", read("README.md"), re.DOTALL | re.MULTILINE)
    if not examples:
        problems.append("README.md has no example in C")
    for example in examples:
        problems += problem(cc, "c", "c99", C_WARNINGS, example)
    return finish(problems)


sys.exit(main())
