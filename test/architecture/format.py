"""Every C and C++ source is formatted as .clang-format says: format.py CLANG_FORMAT."""

import subprocess
import sys

from source import CODE, ROOT, files

FOLDERS = ["include", "src", "kernels", "tools", "test", "examples", "bindings"]


def main():
    paths = [
        str(p) for p in files(*FOLDERS, suffixes=CODE) if not str(p).startswith("test/fuzz/corpus")
    ]
    command = [sys.argv[1], "--dry-run", "--Werror", *paths]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


sys.exit(main())
