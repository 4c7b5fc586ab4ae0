"""A file includes only its own layer or a lower one; third-party headers stay in one file each."""

import sys

from source import CODE, CPP, ROOT, files, finish, includes

LAYERS = [
    ["base"],
    ["os"],
    ["gguf", "backend"],
    ["text", "cachefile"],
    ["store"],
    ["select"],
    ["model"],
    ["attention"],
    ["offload"],
    ["engine"],
    ["session"],
    ["library"],
    ["api"],
]  # lowest first
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
INNER = {"select": ["graph", "research"]}  # folders within a layer
ONE_FILE_EACH = ["mimalloc.h", "pcre2.h", "zstd.h", "xxhash.h", "hnswlib/hnswlib.h"]
KERNELS_MAY = ("backend/", "cpu/", "reference/", "cuda/")  # besides gguf/tensor_type.h


def layer_problems(path, edges):
    own = path.parts[1]
    for line, name in includes(path):
        other = name.split("/")[0]
        where = f"{path}:{line}: includes {name}"
        if name in ("kvasir.h", "kvasir_experimental.h") and own != "api":
            yield f"{where}: the public header is for src/api only"
        elif name.startswith("kernels/") or ".." in name:
            yield f"{where}: includes are relative to src/ and never reach into kernels/"
        elif other in RANK and "/" in name:
            if RANK[other] > RANK[own]:
                yield f"{where}: {own} is below {other}"
            if other != own:
                edges.setdefault(own, set()).add(other)
        elif "/" not in name and (ROOT / path.parent / name).exists():
            yield f'{where}: write it relative to src/, "{own}/{name}"'


def kernel_problems(path):
    for line, name in includes(path):
        if (
            "/" in name
            and name.split("/")[0] in RANK
            and name != "gguf/tensor_type.h"
            and not name.startswith(KERNELS_MAY)
        ):
            yield (
                f"{path}:{line}: includes {name}: kernels know backend/ and gguf/tensor_type.h only"
            )


def cycle(edges):
    """A folder that includes itself by way of another, or None. Layers of one rank may include each
    other one way.
    """

    def reaches(start, seen):
        for other in edges.get(start, ()):
            if other not in seen:
                seen.add(other)
                reaches(other, seen)
        return seen

    return next((f for f in edges if f in reaches(f, set())), None)


def main():
    problems, edges = [], {}
    sources = list(files("src", suffixes=CPP))
    kernels = list(files("kernels", suffixes=CPP))
    if not sources or not kernels:
        problems.append("no sources found")
    for path in sources:
        inner = path.parts[2:-1]
        if path.parts[1] not in RANK or list(inner) not in [[]] + [
            [name] for name in INNER.get(path.parts[1], [])
        ]:
            problems.append(f"{path}: in no layer's folder")
            continue
        problems += layer_problems(path, edges)
    for path in kernels:
        problems += kernel_problems(path)
    around = cycle(edges)
    if around:
        problems.append(
            f"src/{around} includes itself by way of: {', '.join(sorted(edges[around]))}"
        )
    for header in ONE_FILE_EACH:
        users = sorted(
            {str(p) for p in sources + kernels for _, name in includes(p) if name == header}
        )
        if len(users) > 1:
            problems.append(f"<{header}> is included by {', '.join(users)}: one file each")
    for path in files("examples", suffixes=CODE):
        problems += [
            f"{path}:{line}: includes {name}: examples use the public header only"
            for line, name in includes(path)
            if "/" in name and name.split("/")[0] in RANK
        ]
    return finish(problems)


sys.exit(main())
