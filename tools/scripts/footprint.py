#!/usr/bin/env python3
"""Memory and disk of a document, from the layout in docs/file-format.md: tools/scripts/footprint.py
[--tokens N]

Prints a Markdown table for well-known models, or for one shape with --shape
LAYERS,KV_HEADS,HEAD_DIM,HEADS,VOCABULARY.
"""
import argparse

MODELS = {  # layers, KV heads of a layer, elements of a head, query heads, vocabulary
    "Llama-3.2-1B": (16, 8, 64, 32, 128256),
    "Qwen2.5-7B": (28, 4, 128, 28, 152064),
    "Llama-3.1-8B": (32, 8, 128, 32, 128256),
    "Qwen3-4B": (36, 8, 128, 32, 151936),
    "Qwen3-8B": (36, 8, 128, 32, 151936),
}
PAGE_BYTES = 4096
EXTENT_PAGES = 16
WINDOW = 64  # the default of the option `window`
QUERIES = 32  # newest tokens whose queries are kept
SECTION_UNIT = 65536


def layout(layers, kv_heads, head_dim, heads, vocabulary, tokens):
    """Bytes by part: the sections of a cache file, and the part that a memory limit cannot spill.
    """
    dim = next(d for d in (32, 64, 128, 256, 512) if head_dim <= d)
    page_tokens = PAGE_BYTES // 2 // dim
    all_heads = layers * kv_heads
    pages = max(0, (tokens - WINDOW) // page_tokens)
    window = tokens - pages * page_tokens
    extents = -(-pages // EXTENT_PAGES) * all_heads
    block_tokens = min(16, page_tokens)
    extent_tokens = EXTENT_PAGES * page_tokens
    sketch_numbers = (dim * 3 // 8 + 7) // 8 * 8
    parts = {
        "pages": extents * EXTENT_PAGES * PAGE_BYTES,
        "scales": extents * extent_tokens * 2 * 2,
        "bounds": extents * extent_tokens // block_tokens * (2 * dim + 4),
        "sketch": extents * extent_tokens // 4 * (4 * sketch_numbers // 2 + 2)
        + 2 * 4 * all_heads * dim * sketch_numbers,
        "representatives": tokens // 128 * all_heads * dim * 2,
        "window and sinks": all_heads * 2 * (window + page_tokens) * dim * 4,
        "tokens": tokens * 4,
        "logits": vocabulary * 4,
        "queries": 4 * layers * QUERIES * (heads * head_dim + heads),
        "chain": tokens // 256 * 8,
    }
    return parts


def file_bytes(parts):
    padded = sum(-(-size // SECTION_UNIT) * SECTION_UNIT for size in parts.values())
    return SECTION_UNIT + padded + sum(-(-size // PAGE_BYTES) * 8 for size in parts.values())


def figures(shape, tokens):
    """(bytes of 16-bit keys and values, KV cache in host memory, the least with a memory limit,
    cache file).
    """
    layers, kv_heads, head_dim, _, _ = shape
    parts = layout(*shape, tokens)
    held = sum(
        parts[name]
        for name in ("pages", "scales", "bounds", "sketch", "representatives", "window and sinks")
    )
    return (
        layers * kv_heads * head_dim * 2 * 2 * tokens,
        held,
        held - parts["pages"],
        file_bytes(parts),
    )


def table(tokens):
    yield (
        "| model | layers x KV heads x head size | host memory | at least | cache file | f16, for"
        " comparison |"
    )
    yield "|---|---|---:|---:|---:|---:|"
    for name, shape in MODELS.items():
        half, held, least, file = (f"{n / 1e9:.1f} GB" for n in figures(shape, tokens))
        yield (
            f"| {name} | {shape[0]} x {shape[1]} x {shape[2]} | {held} | {least} | {file} |"
            f" {half} |"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=100_000, metavar="N", help="of the document [100000]"
    )
    parser.add_argument(
        "--shape", metavar="L,H,D,Q,V", help="bytes of each part of one shape instead of the table"
    )
    arguments = parser.parse_args()
    if arguments.shape:
        parts = layout(*map(int, arguments.shape.split(",")), arguments.tokens)
        for name, size in parts.items():
            print(f"{name:18} {size:,}")
        print(f"{'file':18} {file_bytes(parts):,}")
    else:
        print("\n".join(table(arguments.tokens)))


if __name__ == "__main__":
    main()
