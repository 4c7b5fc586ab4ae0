"""Writes the seeds of the fuzz target `options`: option_seeds.py FOLDER

Each seed sets one field of one struct of kvasir.h, or one size, or one parameter of a strategy.
fuzz_options.cc says how an
input is read. Run it again into an empty corpus/options when the layout of a struct or of the
inputs changes.
"""

import pathlib
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = [
    "",
    "auto",
    "full",
    "window",
    "quest",
    "flat",
    "dipr",
    "bounded",
    "hnsw",
    "ood",
    "dipr-graph",
    "ivf",
    "filter-layers",
    "infllm",
    "snapkv",
    "empty",
    "0",
    "1",
    "0,1",
    "chatml",
    "raw",
]  # as in Stage::name
SIZES = {
    "uint32_t": 4,
    "int32_t": 4,
    "kv_status": 4,
    "float": 4,
    "uint64_t": 8,
    "double": 8,
    "char": 1,
    "uint8_t": 1,
}
VALUES = {
    "uint32_t": [1, 2, 16, 0x100, 0x200, 4097, 0xFFFFFFFF],
    "uint64_t": [1, 150, 200_000, 1 << 32, (1 << 64) - 1],
    "float": [0.5, 1.0, -1.0, float("nan")],
}
SHAPE = {
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "max_tokens": 300,
}  # the defaults of the target


def structs():
    """name: ([(field, type, offset, bytes)], bytes of the struct)."""
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/kvasir.h").read_text(), flags=re.DOTALL)
    found = {}
    for name, body in re.findall(r"struct (kv_\w+) \{(.*?)\n\}", header, re.DOTALL):
        fields, at, alignment = [], 0, 1
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            declared = re.fullmatch(r"(.*?)(\w+)(?:\[(\d+)\])?", declaration, re.DOTALL)
            kind, field, count = (
                declared.group(1).strip(),
                declared.group(2),
                int(declared.group(3) or 1),
            )
            is_pointer = "*" in kind or kind.endswith("_fn")
            size = 8 if is_pointer else SIZES[kind]
            at = -(-at // size) * size
            fields.append((field, "pointer" if is_pointer else kind, at, size * count))
            at, alignment = at + size * count, max(alignment, size)
        found[name] = fields, -(-at // alignment) * alignment
    return found


def text(data):
    assert len(data) < 256
    return bytes([len(data)]) + data


def laid_over(struct_of, field=None, value=None, how=b"\0"):
    """A Struct of the target, with one field set."""
    data = b""
    if field:
        kind, at = next((k, a) for f, k, a, _ in struct_of[0] if f == field)
        over = struct.pack({"uint32_t": "<I", "uint64_t": "<Q", "float": "<f"}[kind], value)
        if struct_of is STRUCTS["kv_cache_shape"] and field in SHAPE:
            over = (value ^ SHAPE[field]).to_bytes(len(over), "little")
        data = b"\0" * (at - 4) + over
    return text(data) + how


def strategy(name="", parameters=(), layers=0):
    """What Stage::strategy reads."""
    if not name:
        return b"\0"
    out = bytes([NAMES.index(name), len(parameters)])
    for parameter, value in parameters:
        out += bytes([parameter if parameter < 128 else 128 + parameter - 1000, 255]) + struct.pack(
            "<d", value
        )
    return out + bytes([layers])


STRUCTS = structs()
SESSION_POINTERS = strategy() + strategy() + b"\0" + b"\0"
CONTROL = laid_over(STRUCTS["kv_control"])
# which of the target's calls: its number, the struct, what comes before it and after it
CALLS = {
    "open": (0, "kv_session_options", b"", SESSION_POINTERS),
    "load": (1, "kv_session_options", b"", SESSION_POINTERS + b"\x64"),
    "generate": (3, "kv_generate_options", b"", b"\x1b" + b"\x10\x11" + CONTROL + text(b"ab?")),
    "next": (4, "kv_generate_options", b"", b"\0\0\0" + CONTROL + text(b"")),
    "call": (5, "kv_control", b"", b"\0"),
    "pack": (6, "kv_control", b"\3\0\0\0", b"\0"),
    "model": (7, "kv_model_options", b"", b"\0\0" + CONTROL + b"\0"),
    "model-call": (7, "kv_control", laid_over(STRUCTS["kv_model_options"]) + b"\0\0", b"\0"),
    "library": (
        8,
        "kv_library_options",
        b"",
        b"\0"
        + laid_over(STRUCTS["kv_library_session_options"])
        + laid_over(STRUCTS["kv_session_options"])
        + SESSION_POINTERS
        + b"\x09"
        + CONTROL
        + b"\0",
    ),
    "library-session": (
        8,
        "kv_library_session_options",
        laid_over(STRUCTS["kv_library_options"]) + b"\0",
        laid_over(STRUCTS["kv_session_options"]) + SESSION_POINTERS + b"\x09" + CONTROL + b"\x11",
    ),
    "shape": (
        9,
        "kv_cache_shape",
        b"",
        laid_over(STRUCTS["kv_cache_options"])
        + strategy()
        + laid_over(STRUCTS["kv_cache_attention_options"])
        + CONTROL
        + b"\0"
        + b"\x20\0"
        + text(b"keys")
        + b"\x05",
    ),
    "cache": (
        9,
        "kv_cache_options",
        laid_over(STRUCTS["kv_cache_shape"]),
        strategy("quest")
        + laid_over(STRUCTS["kv_cache_attention_options"])
        + CONTROL
        + b"\0"
        + b"\x20\1"
        + text(b"keys")
        + b"\x05",
    ),
    "attention": (
        9,
        "kv_cache_attention_options",
        laid_over(STRUCTS["kv_cache_shape"])
        + laid_over(STRUCTS["kv_cache_options"])
        + strategy("full"),
        CONTROL + b"\0" + b"\x10\2" + text(b"keys and values") + b"\x05",
    ),
}
RESULTS = [
    "kv_model_info",
    "kv_strategy_info",
    "kv_file_info",
    "kv_packed_info",
    "kv_answer",
    "kv_model_info",
    "kv_session_stats",
]


def seeds():
    """name: bytes."""
    for call, (number, name, before, after) in CALLS.items():
        struct_of = STRUCTS[name]
        start = bytes([number]) + before
        yield f"{call}", start + laid_over(struct_of) + after
        for field, kind, at, _ in struct_of[0]:
            if field != "struct_size":
                yield f"{call}.ends-at-{field}", start + laid_over(
                    struct_of, how=bytes([3, at])
                ) + after
            for i, value in enumerate(VALUES.get(kind, []) if field != "struct_size" else []):
                yield f"{call}.{field}.{i}", start + laid_over(struct_of, field, value) + after
        for size in [0, 3, 4, 7, 65536, 65537, 0xFFFFFFFF]:
            yield f"{call}.size-{size}", start + laid_over(
                struct_of, how=b"\1" + struct.pack("<I", size)
            ) + after
        for behind in [b"", b"\1"]:
            how = bytes([2 + (8 if behind else 0), 24]) + behind
            yield f"{call}.longer{'-set' if behind else ''}", start + laid_over(
                struct_of, how=how
            ) + after
        for pointers in range(1, 9) if after == b"\0" else []:  # cancel token and callback
            yield f"{call}.control-{pointers}", start + laid_over(struct_of) + bytes([pointers])
    for i, name in enumerate(RESULTS):
        for how in [b"\0", b"\3\x08", b"\3\x14", b"\2\x40", b"\1\0\0\0\0", b"\1\xff\xff\xff\xff"]:
            yield f"result-{i}.{how.hex()}", bytes([10, i]) + laid_over(
                STRUCTS[name], how=how
            ) + b"\3"
    for name in NAMES[1:]:
        for use, call in [("decode", 0), ("prefill", 0), ("loaded", 1)]:
            pointers = (
                strategy() + strategy(name) if use == "prefill" else strategy(name) + strategy()
            ) + b"\0\0"
            yield f"{use}.{name or 'none'}", bytes([call]) + laid_over(
                STRUCTS["kv_session_options"]
            ) + pointers + b"\x64"
        yield f"set.{name}", b"\2" + strategy(name) + b"\0"
    for i, instructions in enumerate([15, 16, 19]):
        for call in [0, 1]:
            yield f"instructions.{call}.{i}", bytes([call]) + laid_over(
                STRUCTS["kv_session_options"]
            ) + strategy() + strategy() + bytes([instructions, 0, 0])
    for measure in range(9):
        yield f"measure.{measure}", b"\2" + strategy("quest", [(1, 32)]) + bytes([measure])
    values = [0, 1, 0.5, 16, 32, 64, 1e-30, 1e15, -1, float("nan"), float("inf")]
    fits = {
        1: "bounded",
        2: "flat",
        3: "quest",
        4: "ood",
        5: "dipr",
        6: "bounded",
        7: "quest",
        8: "quest",
        1000: "ivf",
        1001: "ood",
        1002: "flat",
        1003: "filter-layers",
        9: "quest",
    }
    for parameter, name in fits.items():
        for i, value in enumerate(values):
            yield f"parameter-{parameter}.{i}", b"\2" + strategy(name, [(parameter, value)]) + b"\0"
        yield f"parameter-{parameter}.prefill", b"\0" + laid_over(
            STRUCTS["kv_session_options"]
        ) + strategy() + strategy(name, [(parameter, 1)]) + b"\0\0"
    for layers in [1, 2, 5, 33, 75, 255]:
        yield f"layers.{layers}", b"\2" + strategy("filter-layers", [(1, 32)], layers) + b"\0"
        yield f"layers.quest.{layers}", b"\2" + strategy("quest", [], layers) + b"\0"


def main():
    folder = pathlib.Path(sys.argv[1])
    for name, data in seeds():
        (folder / name).write_bytes(data)


main()
