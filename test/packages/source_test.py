"""The source archive that `meson dist` makes builds and passes its fast tests, far from any
repository: source_test.py BUILD MESON [LAYER...]

With names of layers (base, kv-store, ...) only their tests are built and run."""

import pathlib
import sys
import tarfile
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from steps import SKIPPED, expect, run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The bundled model and the models of the tests, which hardly compress, are 40 million of them.
MAX_BYTES = 45_000_000


def make_archive(build, meson):
    run(
        meson, "dist", "-C", build, "--no-tests", "--allow-dirty"
    )  # what is committed, whatever else is there
    version = (
        run(meson, "introspect", build, "--projectinfo").split('"version": "')[1].split('"')[0]
    )
    return build / "meson-dist" / f"kvasir-{version}.tar.xz"


def check_contents(archive):
    """Everything that is committed and nothing else, under one folder. Returns that folder's name.
    """
    top = archive.name.removesuffix(".tar.xz")
    committed = set(
        run("git", "-C", ROOT, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    ) - {""}
    with tarfile.open(archive) as tar:
        there = {member.name.removeprefix(top + "/") for member in tar if not member.isdir()}
    expect(
        there == committed,
        f"lacks {sorted(committed - there)[:9]}, has besides {sorted(there - committed)[:9]}",
    )
    expect(
        archive.stat().st_size < MAX_BYTES,
        f"{archive.name} has {archive.stat().st_size} bytes, {MAX_BYTES} or more",
    )
    return top


def main():
    build, meson, tests = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if not (ROOT / ".git").exists():
        print("not a repository: there is nothing to make an archive of")
        return SKIPPED
    archive = make_archive(build, meson)
    top = check_contents(archive)
    with tempfile.TemporaryDirectory() as place:
        run("tar", "-xf", archive, "-C", place)
        source = pathlib.Path(place) / top
        run(
            meson,
            "setup",
            "build",
            "--buildtype=release",
            "-Dwerror=false",
            "-Dcuda=disabled",
            folder=source,
        )
        programs = [f"test/test-{test}" for test in tests]
        run("ninja", "-C", "build", "-j2", *programs, folder=source)
        out = run("tools/run-tests", "build", *(tests or ["--suite", "fast"]), folder=source)
        print(f"{archive.name}, {archive.stat().st_size} bytes: {out.splitlines()[-1]}")
    return 0


sys.exit(main())
