"""What is written twice is the same: the version of header and build, and the functions of Debian's list of symbols and of the header."""
import pathlib
import re
import sys

from source import code_only, finish, read


def main():
    problems = []
    header, build = code_only(read(pathlib.Path("include/kvasir.h"))), read(pathlib.Path("meson.build"))
    number = int(re.search(r"#define KV_VERSION_NUMBER (\d+)", header).group(1))
    version = re.search(r"^  version: '(\d+)\.(\d+)\.(\d+)'", build, re.MULTILINE)
    if number != sum(int(part) * factor for part, factor in zip(version.groups(), [10000, 100, 1])):
        problems.append(f"KV_VERSION_NUMBER is {number} in a build of {version.group(0).strip()}")
    major = re.search(r"^soversion = '(\d+)'", build, re.MULTILINE).group(1)
    symbols = read(pathlib.Path(f"tools/packaging/debian/libkvasir{major}.symbols"))
    node = f"KVASIR_{major}"
    if f"libkvasir.so.{major} libkvasir{major} " not in symbols or f"{node} {{" not in read(pathlib.Path("src/kvasir.map")):
        problems.append(f"soversion {major} is not that of the symbols")
    declared = set(re.findall(r"\bKV_API\b[^;(]*?\b(kv_\w+)\s*\(", header))
    listed = set(re.findall(rf"^ (kv_\w+)@{node} ", symbols, re.MULTILINE))
    problems += [f"{name} is not in tools/packaging/debian/libkvasir{major}.symbols: add it with the version that brings it" for name in sorted(declared - listed)]
    problems += [f"{name} is in tools/packaging/debian/libkvasir{major}.symbols and not in the header" for name in sorted(listed - declared)]
    return finish(problems)


sys.exit(main())
