#!/usr/bin/env python3
"""Makes a wheel of this package with the library inside: make_wheel.py FOLDER_OF_LIBKVASIR OUTPUT_FOLDER

It is pip's build backend too: pip install --config-settings library=FOLDER bindings/python. Needs nothing but Python and, where the library needs
others than every Linux has, patchelf.

The wheel's tag names this machine's C library, as the built library may need all that this one has: it installs where the C library is as new.
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
EVERYWHERE = re.compile(r"(ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so\.\d+")  # as manylinux has it
METADATA = """Metadata-Version: 2.1
Name: kvasir
Version: {version}
Summary: Reads a long document once with a language model, keeps it, and answers questions about it
License: MIT
Requires-Python: >=3.9
Requires-Dist: numpy>=1.21
Provides-Extra: transformers
Requires-Dist: torch; extra == "transformers"
Requires-Dist: transformers>=5; extra == "transformers"
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

{readme}"""


def needed(library):
    """What the library needs besides what every Linux has: name to file, itself not among them."""
    found = {}
    for line in subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, path = (part.strip() for part in line.partition("=>"))
        if path and not EVERYWHERE.fullmatch(name):
            if not path.startswith("/"):
                sys.exit(f"make_wheel.py: {name}, which {library} needs, is not there")
            found[name] = pathlib.Path(path.split()[0])
    return found


def platform_tag():
    if sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        sys.exit("make_wheel.py: only Linux with glibc")
    major, minor = re.fullmatch(r"glibc (\d+)\.(\d+).*", os.confstr("CS_GNU_LIBC_VERSION")).groups()
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def libraries(folder):
    """Name in the wheel's lib folder to contents; those beside the library are found there, wherever it is installed."""
    library = pathlib.Path(folder, "libkvasir.so.0").resolve()
    if not library.is_file():
        sys.exit(f"make_wheel.py: no libkvasir.so.0 in {folder}")
    others = needed(library)
    result = {"libkvasir.so.0": library.read_bytes(), **{name: path.read_bytes() for name, path in others.items()}}
    if not others:
        return result
    with tempfile.TemporaryDirectory() as scratch:
        for name in result:
            copy = pathlib.Path(scratch, name)
            copy.write_bytes(result[name])
            subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", copy], check=True)
            result[name] = copy.read_bytes()
    return result


def version():
    return re.search(r'__version__ = "(.*)"', (HERE / "kvasir/__init__.py").read_text(encoding="utf-8")).group(1)


def metadata():
    return METADATA.format(version=version(), readme=(HERE / "README.md").read_text(encoding="utf-8"))


def make(folder, output):
    """The wheel's file name."""
    tag = f"py3-none-{platform_tag()}"
    info = f"kvasir-{version()}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: make_wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n"
    contents = {f"kvasir/{path.name}": path.read_bytes() for path in sorted((HERE / "kvasir").iterdir()) if path.suffix in (".py", ".typed")}
    contents.update({f"kvasir/lib/{name}": data for name, data in libraries(folder).items()})
    contents.update({f"{info}/METADATA": metadata().encode(), f"{info}/WHEEL": wheel.encode()})
    license_file = HERE.parents[1] / "LICENSE"
    if license_file.exists():
        contents[f"{info}/LICENSE"] = license_file.read_bytes()
    record = io.StringIO()
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.write(f"{name},sha256={digest},{len(data)}\n")
    record.write(f"{info}/RECORD,,\n")
    contents[f"{info}/RECORD"] = record.getvalue().encode()
    name = f"kvasir-{version()}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(output, name), "w", zipfile.ZIP_DEFLATED) as file:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path)  # with a constant date: the same files make the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            file.writestr(entry, data)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """For pip (PEP 517)."""
    folder = (config_settings or {}).get("library")
    if not folder:
        sys.exit("say where libkvasir.so.0 is: pip install --config-settings library=FOLDER")
    return make(folder, wheel_directory)


def build_sdist(sdist_directory, config_settings=None):
    sys.exit("there is no source package of this folder: build a wheel")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(pathlib.Path(sys.argv[2], make(*sys.argv[1:])))
