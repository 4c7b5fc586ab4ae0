"""The Debian packages are made, install into a fresh system, work there and go without remains:
debian_test.py [FOLDER]

FOLDER has packages that tools/packaging/package-deb made before; without it they are made here,
their own tests left out. A fresh system is a folder that mmdebstrap
fills with what this Debian's mirror has; it takes root."""

import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from steps import SKIPPED, expect, run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHANGED_BY_ANY_PACKAGE = [
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/log",
    "/tmp",
    "/proc",
    "/sys",
    "/dev",
]


def codename():
    lines = pathlib.Path("/etc/os-release").read_text().splitlines()
    return next(
        (line.split("=")[1].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")),
        None,
    )


class System:
    """A Debian in a folder."""

    def __init__(self, folder):
        self.folder = folder
        run(
            "mmdebstrap",
            "--variant=apt",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            "--include=g++,libc6-dev,pkg-config",
            codename(),
            folder,
        )
        self.run("apt-get", "update", "-q")

    def run(self, *command):
        return run(
            "chroot",
            self.folder,
            *command,
            DEBIAN_FRONTEND="noninteractive",
            LC_ALL="C.UTF-8",
            PATH="/usr/sbin:/usr/bin:/sbin:/bin",
            TMPDIR="/tmp",
        )

    def files(self):
        pruned = [
            word for place in CHANGED_BY_ANY_PACKAGE for word in ("-path", place, "-prune", "-o")
        ]
        return set(self.run("find", "/", *pruned, "-print").splitlines())

    def installed(self):
        return set(
            self.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n").splitlines()
        )

    def copy(self, *paths):
        for path in paths:
            shutil.copy(path, self.folder / "tmp")


def check_use(system):
    """The command line answers, also from the cache it saved; the example is built against the
    library and answers from that.
    """
    system.copy(ROOT / "examples/mini-reader-q8_0.gguf", ROOT / "examples/demo.txt")
    model, question = "/tmp/mini-reader-q8_0.gguf", "What is the access code of the north gate?"
    answer = system.run(
        "kvasir", "ask", "-m", model, "-f", "/tmp/demo.txt", "--save", "/tmp/demo.kv", question
    )
    expect("4821907" in answer, f"kvasir ask: {answer}")
    for kind, link in [
        ("shared", "$(pkg-config --libs kvasir)"),
        ("static", "$(pkg-config --static --libs kvasir | sed s/-lkvasir/-l:libkvasir.a/)"),
    ]:
        system.run(
            "sh",
            "-ec",
            "cp /usr/share/doc/libkvasir-dev/examples/* /tmp\n"
            f"cc -std=c99 /tmp/ask.c -o /tmp/ask-{kind} $(pkg-config --cflags kvasir) {link}",
        )
        answer = system.run(
            "sh", "-ec", f"/tmp/ask-{kind} {model} /tmp/demo.txt /tmp/demo.kv '{question}'"
        )
        expect("4821907" in answer, f"ask, {kind}: {answer}")
    expect(
        "libkvasir.so.0.2" in run("readelf", "-d", system.folder / "tmp/ask-shared"),
        "the example is not linked with the installed library",
    )
    for page in [
        "usr/share/man/man1/kvasir.1.gz",
        "usr/share/bash-completion/completions/kvasir",
        "usr/share/zsh/vendor-completions/_kvasir",
        "usr/share/fish/vendor_completions.d/kvasir.fish",
    ]:
        expect((system.folder / page).exists(), f"{page} is missing")


def main():
    missing = [
        program
        for program in ["dpkg-buildpackage", "dh", "lintian", "mmdebstrap"]
        if not shutil.which(program)
    ]
    if missing or os.geteuid() != 0 or codename() is None:
        print(
            "not run: it takes root, Debian and"
            f" {', '.join(missing) or 'nothing else'} (tools/setup packages)"
        )
        return SKIPPED
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        packages = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "packages"
        if len(sys.argv) == 1:
            run(
                "tools/packaging/package-deb",
                packages,
                folder=ROOT,
                DEB_BUILD_OPTIONS=f"nocheck noautodbgsym parallel={os.cpu_count()}",
            )
        # The one that is suppressed is about uploads to Debian's own archive.
        run(
            "lintian",
            "--allow-root",
            "--suppress-tags",
            "initial-upload-closes-no-bugs",
            "--fail-on",
            "error,warning",
            next(packages.glob("*.changes")),
        )
        debs = sorted(path for path in packages.glob("*.deb") if "dbgsym" not in path.name)
        expect(len(debs) == 3, f"three packages, not {debs}")
        system = System(folder / "system")
        system.copy(*debs)
        before, packages_before = system.files(), system.installed()
        system.run(
            "apt-get",
            "install",
            "-q",
            "-y",
            "--no-install-recommends",
            *[f"/tmp/{deb.name}" for deb in debs],
        )
        check_use(system)
        system.run(
            "apt-get",
            "purge",
            "-q",
            "-y",
            "--autoremove",
            *[deb.name.split("_")[0] for deb in debs],
        )
        expect(
            system.installed() == packages_before,
            f"remains: {system.installed() ^ packages_before}",
        )
        left = system.files() ^ before
        expect(not left, f"remains: {sorted(left)[:20]}")
    return 0


sys.exit(main())
