"""include/kvasir.h compiles alone and twice, without a warning, as C and as C++, and so does README's example: header.py CC... -- CXX..."""
import re
import subprocess
import sys

from source import ROOT, finish, read

WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wconversion", "-Wshadow", "-Wundef"]
C_WARNINGS = ["-Wstrict-prototypes", "-Wmissing-prototypes", "-Wc++-compat"]
CPP_WARNINGS = ["-Wold-style-cast"]
SOURCE = """#include <kvasir.h>
#include <kvasir.h>
int main(void) { return sizeof(kv_error) == 0 || KV_OK != 0; }
"""


def problem(compiler, language, standard, warnings, source=SOURCE):
    command = [*compiler, f"-std={standard}", *WARNINGS, *warnings, f"-I{ROOT / 'include'}", "-fsyntax-only", "-x", language, "-"]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return [f"{' '.join(command)}\n{run.stderr}"] if run.returncode else []


def main():
    middle = sys.argv.index("--")
    cc, cxx = sys.argv[1:middle], sys.argv[middle + 1:]
    problems = []
    for standard in ["c99", "c11", "c17"]:
        problems += problem(cc, "c", standard, C_WARNINGS)
    for standard in ["c++11", "c++20"]:
        problems += problem(cxx, "c++", standard, CPP_WARNINGS)
    examples = re.findall(r"^```c\n(.*?)^```", read("README.md"), re.DOTALL | re.MULTILINE)
    if not examples:
        problems.append("README.md has no example in C")
    for example in examples:
        problems += problem(cc, "c", "c99", C_WARNINGS, example)
    return finish(problems)


sys.exit(main())
