"""The reference is made from the header, and everything in the header has a comment: reference.py
DOXYGEN DOXYFILE
"""

import pathlib
import re
import subprocess
import sys
import tempfile

from source import finish, read


def draw(doxygen, settings, header, folder):
    """Doxygen's exit code and what it says of a header. The last setting of a name holds."""
    folder.mkdir()
    (folder / "kvasir.h").write_text(header)
    (folder / "Doxyfile").write_text(
        f'{settings}\nINPUT = "{folder}/kvasir.h"\nSTRIP_FROM_PATH = "{folder}"\nOUTPUT_DIRECTORY ='
        f' "{folder}"\n'
    )
    result = subprocess.run(
        [doxygen, folder / "Doxyfile"], capture_output=True, text=True, cwd=folder
    )
    return result.returncode, result.stdout + result.stderr


def main():
    doxygen, settings = sys.argv[1], pathlib.Path(sys.argv[2]).read_text()
    header = read(pathlib.Path("include/kvasir.h"))
    problems = []
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        status, said = draw(doxygen, settings, header, folder / "whole")
        if status != 0:
            problems.append(said)
        pages = "".join(page.read_text() for page in (folder / "whole").glob("*.html"))
        for name in re.findall(
            r"\b(kv_\w+)\(",
            " ".join(line for line in header.splitlines() if line.startswith("KV_API")),
        ):
            if f">{name}<" not in pages.replace("&#160;", "") and f"{name} " not in pages:
                problems.append(f"{name} is not in the reference")
        lacking = {
            "kv_unsaid": header.replace(
                "/* Increments the reference count",
                "KV_API void kv_unsaid(void);\n\n/* Increments the reference count",
                1,
            ),
            "vocabulary": re.sub(r"(uint32_t vocabulary;) */\*.*?\*/", r"\1", header),
            "kv_passage": re.sub(
                r"/\* Passage of the document:.*?\*/\n", "", header, flags=re.DOTALL
            ),
            "KV_TOKENIZE_BOS": re.sub(r"(#define KV_TOKENIZE_BOS \w+) */\*.*?\*/", r"\1", header),
        }
        for name, without in lacking.items():
            status, said = draw(doxygen, settings, without, folder / name)
            if without == header or status == 0 or name not in said:
                problems.append(f"a header without a comment of {name} passes: {said}")
    return finish(problems)


sys.exit(main())
