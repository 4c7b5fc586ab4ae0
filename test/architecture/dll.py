"""What the library for Windows shows to its host: dll.py DLL OBJDUMP.

It exports the header's functions and no others, and needs no DLL but Windows' own.
"""

import re
import subprocess
import sys

from source import code_only, finish, read

HEADERS = ["kvasir.h", "kvasir_experimental.h"]
NEEDED = {"KERNEL32.dll", "msvcrt.dll", "ADVAPI32.dll", "bcrypt.dll"}


def main():
    library, objdump = sys.argv[1:]
    listing = subprocess.run(
        [objdump, "-p", library], capture_output=True, text=True, check=True
    ).stdout
    wanted = set(
        re.findall(
            r"\bKV_API\b[^;(]*?\b(kv_\w+)\s*\(",
            "".join(code_only(read(f"include/{name}")) for name in HEADERS),
        )
    )
    exports = set(
        re.findall(r"^\s+\[ *\d+\] (?:\+base\[ *\d+\] +[0-9a-f]+ )?(\w+)$", listing, re.MULTILINE)
    )
    problems = [] if wanted else ["no function found in include/"]
    problems += [
        f"the DLL exports {name}, which no header in include/ declares"
        for name in sorted(exports - wanted)
    ]
    problems += [
        f"the DLL lacks {name}, which a header in include/ declares"
        for name in sorted(wanted - exports)
    ]
    problems += [
        f"the DLL needs {name}"
        for name in re.findall(r"DLL Name: (\S+)", listing)
        if name not in NEEDED
    ]
    return finish(problems)


sys.exit(main())
