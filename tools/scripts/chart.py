#!/usr/bin/env python3
"""Draws docs/images/NAME.svg from docs/data/charts/NAME.json: tools/scripts/chart.py [--check]

A chart names its title, its axes (x, y, x_range, y_range; both logarithmic) and its series. A
series has a label,
a result file below docs/data (its form: tools/scripts/measurements.py) and one source of points:

  "columns": [X, Y]                         two columns of a table
  "rows": {STEP: X}, "per_second": COLUMN   rows by their first cell; 1000 / the number in that
  column
  "strategy": NAME                          of a bench result: 1000 / tokens per second at each
  depth

A series with "below": true has its numbers below its points. The script needs no other package. The
same files give the same bytes. With --check the script writes nothing.
"""
import argparse
import json
import math
import pathlib
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data"
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 128
COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#d55e00",
    "#e69f00",
    "#009e73",
    "#cc79a7",
)  # distinct also for the colour-blind
TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]


def points(series):
    report = json.loads((DATA / series["file"]).read_text(encoding="utf-8"))
    if "strategy" in series:
        return [
            (depth["depth"], 1000 / answer["tokens_per_second"]["median"])
            for depth in report["bench"]["depths"]
            for answer in depth.get("decode", [])
            if answer["strategy"] == series["strategy"] and depth["depth"] > 0
        ]
    table = report["table"]
    if "columns" in series:
        x, y = (table["columns"].index(name) for name in series["columns"])
        return [(row[x], row[y]) for row in table["rows"]]
    by_step = {row[0]: row for row in table["rows"]}
    return [(x, 1000 / by_step[step][series["per_second"]]) for step, x in series["rows"].items()]


def tokens_text(tokens):
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K"


def draw(chart):
    x_low, x_high = chart["x_range"]
    y_low, y_high = chart["y_range"]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(x):
        return LEFT + wide * math.log(x / x_low) / math.log(x_high / x_low)

    def down(y):
        return TOP + high * (1 - math.log(y / y_low) / math.log(y_high / y_low))

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield (
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(chart["title"])}</text>'
    )
    tick = x_low
    while tick <= x_high:
        yield (
            f'<line x1="{across(tick):.1f}" y1="{TOP}" x2="{across(tick):.1f}" y2="{TOP + high}"'
            ' stroke="#dddddd"/>'
        )
        yield (
            f'<text x="{across(tick):.1f}" y="{TOP + high + 18}"'
            f' text-anchor="middle">{tokens_text(tick)}</text>'
        )
        tick *= 2
    for tick in (t for t in TICKS if y_low <= t <= y_high):
        yield (
            f'<line x1="{LEFT}" y1="{down(tick):.1f}" x2="{LEFT + wide}" y2="{down(tick):.1f}"'
            ' stroke="#dddddd"/>'
        )
        yield f'<text x="{LEFT - 8}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:,}</text>'
    yield (
        f'<text x="{LEFT + wide / 2:.1f}" y="{TOP + high + 38}"'
        f' text-anchor="middle">{escape(chart["x"])}</text>'
    )
    yield (
        f'<text x="16" y="{TOP + high / 2:.1f}" text-anchor="middle" transform="rotate(-90 16'
        f' {TOP + high / 2:.1f})">{escape(chart["y"])}</text>'
    )
    for number, series in enumerate(chart["series"]):
        colour, places = COLOURS[number % len(COLOURS)], sorted(points(series))
        line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in places)
        if len(places) > 1:
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        for x, y in places:
            yield f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="4" fill="{colour}"/>'
            at = down(y) + (18 if series.get("below") else -9)
            text = f"{y:.1f}" if y < 100 else f"{y:.0f}"
            yield (
                f'<text x="{across(x):.1f}" y="{at:.1f}" text-anchor="middle" font-size="12"'
                f' fill="{colour}">{text}</text>'
            )
        column, row = number % 2, number // 2
        x, y = LEFT + column * wide / 2, HEIGHT - BOTTOM + 68 + 24 * row
        yield f'<circle cx="{x + 6:.1f}" cy="{y - 4:.1f}" r="5" fill="{colour}"/>'
        yield f'<text x="{x + 18:.1f}" y="{y:.1f}">{escape(series["label"])}</text>'
    yield "</svg>"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check, different = parser.parse_args().check, 0
    try:
        for source in sorted((DATA / "charts").glob("*.json")):
            text = "\n".join(draw(json.loads(source.read_text(encoding="utf-8")))) + "\n"
            path = ROOT / "docs" / "images" / f"{source.stem}.svg"
            if path.exists() and path.read_text(encoding="utf-8") == text:
                continue
            different += 1
            print(path.relative_to(ROOT), "differs from the result files" if check else "written")
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"chart.py: {error!r}")
    sys.exit(1 if check and different else 0)


if __name__ == "__main__":
    main()
