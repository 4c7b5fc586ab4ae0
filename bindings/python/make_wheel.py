#!/usr/bin/env python3
"""Makes a wheel of this package with the library in it.

    make_wheel.py FOLDER_OF_LIBKVASIR OUTPUT_FOLDER

The output folder is created where it does not exist. This file is also the build backend of pip:
pip install --config-settings library=FOLDER bindings/python. It needs Python alone and, where the
library needs others than every Linux has, patchelf.

The tag of the wheel names the C library of this machine: the wheel installs where that is as new.
"""
import base64
import hashlib
import io
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
# Libraries that manylinux expects on every system.
EVERYWHERE = re.compile(
    r"(ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so\.\d+"
)
METADATA = """Metadata-Version: 2.4
Name: kvasir
Version: {version}
Summary: {summary}
License-Expression: MIT
License-File: LICENSE
Keywords: LLM,inference,KV cache,long context,GGUF
Requires-Python: >=3.10
Requires-Dist: numpy>=1.21
Provides-Extra: transformers
Requires-Dist: torch; extra == "transformers"
Requires-Dist: transformers>=5; extra == "transformers"
Classifier: Development Status :: 4 - Beta
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Python :: 3 :: Only
Classifier: Programming Language :: C++
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

{readme}"""


def fail(message):
    """Ends the program with one line."""
    sys.exit(f"make_wheel.py: {message}")


def constant(name, file):
    """Returns the string that the package's file assigns to a name."""
    text = (HERE / "kvasir" / file).read_text(encoding="utf-8")
    return re.search(rf'^{name} = "(.*?)"', text, re.MULTILINE).group(1)


LIBRARY = constant("LIBRARY", "_abi.py")
VERSION = constant("__version__", "__init__.py")


def summary():
    """Returns the first line of the package's docstring, without its full stop."""
    text = (HERE / "kvasir/__init__.py").read_text(encoding="utf-8")
    return re.match(r'"""(.*)\.', text).group(1)


def needed(library):
    """Returns what the library needs besides EVERYWHERE: name to file, without itself."""
    found = {}
    listed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name, _, path = (part.strip() for part in line.partition("=>"))
        if path and not EVERYWHERE.fullmatch(name):
            if not path.startswith("/"):
                fail(f"{library} needs {name}, which is not installed")
            found[name] = pathlib.Path(path.split()[0])
    return found


def platform_tag():
    """Returns the platform of the wheel's tag."""
    if sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        fail("wheels are for Linux with glibc")
    version = os.confstr("CS_GNU_LIBC_VERSION")
    major, minor = re.fullmatch(r"glibc (\d+)\.(\d+).*", version).groups()
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def libraries(folder):
    """Returns the files of the wheel's lib folder: name to contents.

    The library finds the others next to itself, wherever the wheel is installed.
    """
    library = pathlib.Path(folder, LIBRARY).resolve()
    if not library.is_file():
        fail(f"no {LIBRARY} in {folder}: build it first")
    others = needed(library)
    result = {LIBRARY: library.read_bytes()}
    result.update((name, path.read_bytes()) for name, path in others.items())
    if not others:
        return result
    with tempfile.TemporaryDirectory() as scratch:
        for name in result:
            copy = pathlib.Path(scratch, name)
            copy.write_bytes(result[name])
            subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", copy], check=True)
            result[name] = copy.read_bytes()
    return result


def metadata():
    """Returns the wheel's METADATA."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    return METADATA.format(version=VERSION, summary=summary(), readme=readme)


def license_text():
    """Returns the licence of the project, or of an unpacked copy of this folder."""
    for folder in (HERE, HERE.parents[1]):
        if (folder / "LICENSE").is_file():
            return (folder / "LICENSE").read_bytes()
    return fail("no LICENSE next to the package or at the top of the project")


def contents_of(folder, tag):
    """Returns the files of the wheel without RECORD: name to contents."""
    info = f"kvasir-{VERSION}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: make_wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n"
    sources = [p for p in sorted((HERE / "kvasir").iterdir()) if p.suffix in (".py", ".typed")]
    return {
        **{f"kvasir/{path.name}": path.read_bytes() for path in sources},
        **{f"kvasir/lib/{name}": data for name, data in libraries(folder).items()},
        f"{info}/METADATA": metadata().encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/licenses/LICENSE": license_text(),
    }


def record_of(contents):
    """Returns the wheel's RECORD: names, digests and sizes."""
    record = io.StringIO()
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.write(f"{name},sha256={digest},{len(data)}\n")
    record.write(f"kvasir-{VERSION}.dist-info/RECORD,,\n")
    return record.getvalue().encode()


def make(folder, output):
    """Writes the wheel into the output folder and returns its file name."""
    tag = f"py3-none-{platform_tag()}"
    contents = contents_of(folder, tag)
    contents[f"kvasir-{VERSION}.dist-info/RECORD"] = record_of(contents)
    name = f"kvasir-{VERSION}-{tag}.whl"
    pathlib.Path(output).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(pathlib.Path(output, name), "w", zipfile.ZIP_DEFLATED) as file:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path)  # its date is constant: the same files, the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            file.writestr(entry, data)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds a wheel for pip (PEP 517)."""
    folder = (config_settings or {}).get("library")
    if not folder:
        fail(f"name the folder of {LIBRARY}: pip install --config-settings library=FOLDER")
    return make(folder, wheel_directory)


def build_sdist(sdist_directory, config_settings=None):
    """Refuses source packages (PEP 517)."""
    fail("this folder has no source package: build a wheel")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(pathlib.Path(sys.argv[2], make(*sys.argv[1:])))
