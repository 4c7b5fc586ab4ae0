"""What is written twice is the same: the version of header and build, the functions of Debian's
list of symbols and of the headers, and the homepage of the crates and of tools/packaging/publisher.
"""

import pathlib
import re
import sys

from source import code_only, finish, read

HEADERS = ["include/kvasir.h", "include/kvasir_experimental.h"]


def main():
    problems = []
    header = "".join(code_only(read(pathlib.Path(path))) for path in HEADERS)
    build = read(pathlib.Path("meson.build"))
    number = int(re.search(r"#define KV_VERSION_NUMBER (\d+)", header).group(1))
    version = re.search(r"^  version: '(\d+)\.(\d+)\.(\d+)'", build, re.MULTILINE)
    major, minor, patch = version.groups()
    if number != int(major) * 10000 + int(minor) * 100 + int(patch):
        problems.append(f"KV_VERSION_NUMBER is {number} in a build of {version.group(0).strip()}")
    soname = f"0.{minor}" if major == "0" else major  # as meson.build has it
    listing = f"tools/packaging/debian/libkvasir{soname}.symbols"
    if (
        not pathlib.Path(listing).is_file()
        and not (pathlib.Path(__file__).resolve().parents[2] / listing).is_file()
    ):
        return finish(problems + [f"{listing} is missing: the soname is libkvasir.so.{soname}"])
    symbols = read(pathlib.Path(listing))
    node = f"KVASIR_{soname}"
    if f"libkvasir.so.{soname} libkvasir{soname} " not in symbols or f"{node} {{" not in read(
        pathlib.Path("src/kvasir.map")
    ):
        problems.append(f"soname {soname} is not that of the symbols")
    if f"Package: libkvasir{soname}\n" not in read(pathlib.Path("tools/packaging/debian/control")):
        problems.append(f"tools/packaging/debian/control has no package libkvasir{soname}")
    declared = set(re.findall(r"\bKV_API\b[^;(]*?\b(kv_\w+)\s*\(", header))
    listed = set(re.findall(rf"^ (kv_\w+)@{re.escape(node)} ", symbols, re.MULTILINE))
    problems += [
        f"{name} is not in {listing}: add it with the version that brings it"
        for name in sorted(declared - listed)
    ]
    problems += [
        f"{name} is in {listing} and not in the headers" for name in sorted(listed - declared)
    ]
    return finish(problems + list(homepage_problems()))


def homepage_problems():
    publisher = read(pathlib.Path("tools/packaging/publisher"))
    homepage = re.search(r'^homepage="(.*)"$', publisher, re.MULTILINE).group(1)
    for crate in ("kvasir", "kvasir-sys"):
        manifest = f"bindings/rust/{crate}/Cargo.toml"
        found = re.search(r'^homepage = "(.*)"$', read(pathlib.Path(manifest)), re.MULTILINE)
        if (found.group(1) if found else "") != homepage:
            yield f"{manifest}: its homepage is not that of tools/packaging/publisher"


sys.exit(main())
