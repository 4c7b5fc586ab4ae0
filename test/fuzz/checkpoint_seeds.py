"""Writes the seeds of the fuzz target `checkpoint`: checkpoint_seeds.py FOLDER

fuzz_checkpoint.cc says how an input is read. Each seed is a complete checkpoint of a model, or one
with a single change.
"""

import pathlib
import struct
import sys

FULL, END, UNCHECKED, FIRED, STOPPED = 1, 2, 4, 8, 16
MODELS = {"lfm2": (60, 20), "qwen35": (60, 20), "gemma3": (60, 5), "granitehybrid": (60, 20)}
SMALL = b"\x00\x00\x80\x3d\x00\x00\x00\xbd"  # 1/16, -1/32
CHANGES = {
    "layer": b"\x00\x00\x00" + struct.pack("<I", 99),
    "layout": b"\x00\x00\x01" + struct.pack("<I", 3),
    "layout-unknown": b"\x00\x00\x01" + struct.pack("<I", 9),
    "halves": b"\x00\x00\x02\x01",
    "type-unknown": b"\x00\x00\x02\x03",
    "fewer": b"\x00\x00\x03\x7f",
    "more": b"\x00\x00\x03\x81",
    "null": b"\x00\x00\x04",
    "missing": b"\x00\x00\x05",
    "twice": b"\x00\x00\x06",
    "nan": b"\x00\x00\x07" + struct.pack("<fB", float("nan"), 3),
    "infinity": b"\x00\x01\x07" + struct.pack("<fB", float("inf"), 3),
    "large": b"\x00\x01\x07" + struct.pack("<fB", 9e29, 3),
    "end-nan": b"\x03\x00\x07" + struct.pack("<fB", float("nan"), 3),
    "end-missing": b"\x03\x00\x05",
}


def seed(model, flags, tokens, start, pattern=SMALL, changes=b""):
    head = struct.pack("<BBBH", list(MODELS).index(model), flags, tokens - 1, start)
    return head + bytes([len(pattern)]) + pattern + changes


def seeds():
    for model, (tokens, start) in MODELS.items():
        for name, flags in {"compared": END, "unchecked": UNCHECKED, "full": FULL | UNCHECKED,
                            "fired": UNCHECKED | FIRED, "stopped": UNCHECKED | STOPPED}.items():
            yield f"{model}.{name}", seed(model, flags, tokens, start)
        for count in (1, 2, 256):
            yield f"{model}.tokens-{count}", seed(model, UNCHECKED, count, 1)
        for at in (0, tokens, 65535):
            yield f"{model}.from-{at}", seed(model, UNCHECKED, tokens, at)
        yield f"{model}.zeros", seed(model, UNCHECKED | END, tokens, start, b"")
        for name, change in CHANGES.items():
            yield f"{model}.{name}", seed(model, UNCHECKED | END, tokens, start, SMALL, change)


folder = pathlib.Path(sys.argv[1])
for name, contents in seeds():
    (folder / name).write_bytes(contents)
