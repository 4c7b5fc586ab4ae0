#!/usr/bin/env python3
"""Writes docs/measurements.md and docs/comparison.md from result files:
tools/scripts/measurements.py [--check]

A result file is JSON in docs/data/measurements or docs/data/comparison:

  title, order    the heading, and its place on the page
  machine         CPU, cores, memory or GPU
  commit          the commit that was built
  command         the command; null: not recorded; optional in a comparison
  other           in a comparison: the other program and its version; not with `bench`
  notes           sentences below the table; optional

and one of

  bench           the output of `kvasir bench --json`, of any version
  eval            the file that `kvasir eval` wrote (results.json)
  table           {"columns": [...], "rows": [[...], ...]}

A comparison is a table with the columns step, the other program and Kvasir, or the output of
`kvasir bench --compare PROGRAM --json`; the ratio is computed. The command is that of the output,
if the file has none.
With --check the script writes nothing, and the exit code is 1 if a page differs.
"""
import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data"
REQUIRED = {
    "measurements": ("title", "order", "machine", "commit", "command"),
    "comparison": ("title", "order", "machine", "commit"),
}
KINDS = ("bench", "eval", "table")

MEASUREMENTS = """# Measurements

`tools/scripts/measurements.py` writes this page from result files in
[data/measurements](data/measurements).
Each table names its machine, its commit and its command.
[Comparison](comparison.md) has the figures of other programs from the same run.
[Strategies](strategies.md) says what the names mean.

To add a table, keep the output of `kvasir bench --json` or the `results.json` of `kvasir eval`.
Put it into a result file with machine, commit and command. Then run the script again.
"""
COMPARISON = """# Comparison with other programs

`tools/scripts/measurements.py` writes this page from result files in
[data/comparison](data/comparison).
Both programs of a table ran on the same machine, in the same run.
Figures are tokens per second, and the ratio is Kvasir's figure divided by the other's.
[Measurements](measurements.md) has Kvasir's own figures.
"""


def number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.1f}"


def table(columns, rows, digits=None):
    """Lines of a Markdown table. digits: {column: decimals} for columns whose cells all show the
    same number of them.
    """
    digits = digits or {}

    def cell(column, value):
        if value is None:
            return ""
        if column in digits and isinstance(value, (int, float)):
            return f"{value:.{digits[column]}f}"
        return number(value)

    yield "| " + " | ".join(columns) + " |"
    numeric = [
        all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(columns))
    ]
    yield "|" + "|".join("---:" if n else "---" for n in numeric) + "|"
    for row in rows:
        yield "| " + " | ".join(cell(c, v) for c, v in zip(columns, row)) + " |"


def decimals(columns, rows):
    """{column: decimals} of a plain table: as many as its most exact cell has, so that a column
    lines up.
    """
    found = {}
    for i, column in enumerate(columns):
        values = [row[i] for row in rows if isinstance(row[i], float)]
        if (
            values
            and len(values) == len([row for row in rows if row[i] is not None])
            and max(values) < 1000
        ):
            found[column] = max(len(repr(v).partition(".")[2]) for v in values)
    return found


def plain_table(report):
    columns, rows = report["table"]["columns"], report["table"]["rows"]
    yield from table(columns, rows, decimals(columns, rows))


def bench_table(report):
    """A row for each depth: prefill, then decode by each strategy, tokens/s."""
    depths = report["bench"]["depths"]
    names = list(dict.fromkeys(d["strategy"] for depth in depths for d in depth.get("decode", [])))
    columns = ["context (tokens)", "prefill (tokens/s)"] + [f"`{n}` (tokens/s)" for n in names]
    rows = []
    for depth in depths:
        speed = {d["strategy"]: d["tokens_per_second"]["median"] for d in depth.get("decode", [])}
        prefill = depth.get("prefill_tokens_per_second")
        rows.append(
            [depth["depth"], prefill["median"] if prefill else None] + [speed.get(n) for n in names]
        )
    yield from table(columns, rows)


def eval_table(report):
    """A row for each length, strategy and budget, a column for each task."""
    rows = report["eval"]["rows"]
    tasks = list(
        dict.fromkeys(r["task"] for r in rows if r["task"] not in ("all", "perplexity"))
    ) + ["all", "perplexity"]
    keys = list(dict.fromkeys((r["length"], r["strategy"], r["budget"]) for r in rows))
    columns = (
        ["tokens", "strategy", "budget"]
        + [t if t == "perplexity" else f"{t} (%)" for t in tasks]
        + ["KV read (%)"]
    )
    out = []
    for key in keys:
        some = {r["task"]: r for r in rows if (r["length"], r["strategy"], r["budget"]) == key}
        scores = [
            some.get(t, {}).get("perplexity" if t == "perplexity" else "score") for t in tasks
        ]
        scores = [s if s is None or t == "perplexity" else 100 * s for s, t in zip(scores, tasks)]
        out.append([*key, *scores, 100 * some["all"]["kv_read"] if "all" in some else None])
    digits = {column: 2 if column in ("perplexity", "KV read (%)") else 1 for column in columns[3:]}
    yield from table(columns, out, digits)


def with_program(report):
    """A comparison with `other`, `command` and `table`, if it is the output of kvasir bench."""
    if "bench" not in report:
        return report
    bench = report["bench"]
    compared = bench["compared"]
    rows = [
        [s["step"], s["other_tokens_per_second"], s["kvasir_tokens_per_second"]]
        for s in compared["steps"]
    ]
    command = bench["command"] + "; " + " ".join(compared["command"])
    return {
        "other": f"{compared['program']} {compared['version']}",
        "command": command,
        "table": {"columns": ["step", compared["program"], "Kvasir"], "rows": rows},
        **report,
    }


def comparison_table(report):
    rows = [[step, other, ours, ours / other] for step, other, ours in report["table"]["rows"]]
    yield from table(
        [
            "step",
            "llama.cpp" if "llama.cpp" in report["other"] else report["other"],
            "Kvasir",
            "ratio",
        ],
        rows,
        {"ratio": 2},
    )


def section(report, body, comparison):
    yield f"\n## {report['title']}\n"
    yield f"- Machine: {report['machine']}"
    yield f"- Commit: {report['commit']}"
    if comparison:
        yield f"- Other program: {report['other']}"
    elif not report["command"]:
        yield "- Command: not recorded"
    yield ""
    if report.get("command"):
        yield "```sh"
        yield from wrapped(report["command"])
        yield "```\n"
    yield from body
    if report.get("notes"):
        yield ""
        for note in report["notes"]:
            yield from fill(note)


def wrapped(command, width=96):
    """A command over several lines, cut between options."""
    line = ""
    for part in re.split(r" (?=-)", command):
        if line and len(line) + 1 + len(part) > width:
            yield line + " \\"
            line = "  " + part
        else:
            line = f"{line} {part}" if line else part
    yield line


def fill(sentences, width=98):
    """A note as an item of a list, cut at spaces."""
    line = "-"
    for word in sentences.split(" "):
        if len(line) + 1 + len(word) > width:
            yield line
            line = " "
        line += " " + word
    yield line


def load(folder):
    reports = []
    for path in sorted((DATA / folder).glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in REQUIRED[folder] if key not in report]
        if missing or sum(kind in report for kind in KINDS) != 1:
            raise ValueError(
                f"{path.name} lacks {', '.join(missing) or 'one of ' + ', '.join(KINDS)}"
            )
        if folder == "comparison":
            report = with_program(report)
            if "other" not in report or "table" not in report:
                raise ValueError(f"{path.name} lacks other, or is no table and no output of bench")
        reports.append(report)
    return sorted(reports, key=lambda r: (r["order"], r["title"]))


def pages():
    """{path: text} of both pages."""
    bodies = {"bench": bench_table, "eval": eval_table, "table": plain_table}
    lines = [MEASUREMENTS.rstrip()]
    for report in load("measurements"):
        kind = next(k for k in KINDS if k in report)
        lines += section(report, bodies[kind](report), False)
    compared = [COMPARISON.rstrip()]
    for report in load("comparison"):
        compared += section(report, comparison_table(report), True)
    return {
        ROOT / "docs" / "measurements.md": "\n".join(lines) + "\n",
        ROOT / "docs" / "comparison.md": "\n".join(compared) + "\n",
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    try:
        different = [
            (path, text)
            for path, text in pages().items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"measurements.py: {error}")
    for path, text in different:
        print(path.relative_to(ROOT), "differs from the result files" if check else "written")
        if not check:
            path.write_text(text, encoding="utf-8")
    sys.exit(1 if check and different else 0)


if __name__ == "__main__":
    main()
