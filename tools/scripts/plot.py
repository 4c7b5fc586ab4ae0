#!/usr/bin/env python3
"""Draws the results of `kvasir eval`, `recall` and `calibrate` as SVG pictures:
tools/scripts/plot.py results.json [MORE.json ...] -o FOLDER

  accuracy    score against the bytes read per token: a line per strategy, a panel per length
  perplexity  the same for the perplexity of the text after the document
  needles     score by depth and length: a picture per strategy, a panel per budget

  recall      share of the 100 largest scores, against the keys that were scored to select
  mass        share of the exact attention that was read, against the tokens read
  chosen      tokens read by each layer and head: a picture per strategy, a panel per budget

  similarity  share of a layer's attention on the tokens that another layer attends most; filter
  layers are marked

A picture is a function of the rows of reports and of the requested task, and returns (name, figure)
pairs. PICTURES names them with the
part of a report that they draw.
"""
import argparse
import json
import pathlib
import sys

try:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker
except ImportError:
    sys.exit(
        "plot.py: matplotlib is missing; tools/setup plots installs it (for the system's python3)"
    )

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c6d31",
    "#5e4fa2",
)  # distinct also for the colour-blind
MARKERS = "osD^vP*X"
REFERENCE = "#444444"  # of strategies without a budget


def distinct(values):
    return list(dict.fromkeys(values))


def tokens_text(tokens):
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def bytes_read(row):
    """For each token: keys and values, and the summaries read to select them."""
    return row["kv_bytes_per_token"] + row["summary_bytes_per_token"]


def panels(count, width=5.2, height=4.0):
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), squeeze=False, layout="constrained"
    )
    return figure, list(axes[0])


def draw_budgets(axis, number, strategy, points):
    """A strategy's line, with a point (x, y, budget) for each budget."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    axis.plot(
        [x for x, _, _ in points],
        [y for _, y, _ in points],
        color=colour,
        marker=marker,
        label=strategy,
    )
    for x, y, budget in points:
        axis.annotate(
            budget,
            (x, y),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )


def against_bytes(rows, measure, label, of):
    """A panel for each length, a line for each strategy that takes a budget, a level for each
    other.
    """
    lengths, strategies = distinct(r["length"] for r in rows), distinct(r["strategy"] for r in rows)
    figure, axes = panels(len(lengths))
    for axis, length in zip(axes, lengths):
        for number, strategy in enumerate(strategies):
            points = sorted(
                (bytes_read(r) / 1e6, of(r), r["budget"])
                for r in rows
                if (r["length"], r["strategy"]) == (length, strategy) and measure in r
            )
            if points and not points[0][2]:
                x, y, _ = points[0]
                axis.axhline(y, color=REFERENCE, linestyle=":", linewidth=1)
                axis.annotate(
                    strategy,
                    (0, y),
                    xycoords=("axes fraction", "data"),
                    xytext=(4, 2),
                    textcoords="offset points",
                    color=REFERENCE,
                )
                if x > 0:
                    axis.plot([x], [y], color=REFERENCE, marker="o")
            elif points:
                draw_budgets(axis, number, strategy, points)
        axis.set(
            title=f"{tokens_text(length)} tokens", xlabel="MB read for each token", xscale="log"
        )
        axis.xaxis.set_major_locator(ticker.LogLocator(10, (1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.margins(0.08, 0.12)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    axes[0].set_ylabel(label)
    return figure


def accuracy(rows, task):
    some = [r for r in rows if r["task"] == task and "score" in r]
    if some:
        yield "accuracy", against_bytes(
            some, "score", f"score, {task} (%)", lambda r: 100 * r["score"]
        )


def perplexity(rows, _):
    some = [r for r in rows if r["task"] == "perplexity"]
    if some:
        yield "perplexity", against_bytes(
            some, "perplexity", "perplexity", lambda r: r["perplexity"]
        )


def depth_grid(rows, depths, lengths):
    """[depths][lengths] means in percent; None where nothing was asked."""
    cells = {}
    for row in rows:
        for stretch in row["depths"]:
            score, questions = cells.get((stretch["depth"], row["length"]), (0, 0))
            cells[stretch["depth"], row["length"]] = (
                score + stretch["score"] * stretch["questions"],
                questions + stretch["questions"],
            )
    means = {place: 100 * score / questions for place, (score, questions) in cells.items()}
    return [[means.get((depth, length)) for length in lengths] for depth in depths]


def needles(rows, task):
    some = [r for r in rows if r.get("depths") and task in ("all", r["task"])]
    lengths, depths = sorted({r["length"] for r in some}), sorted(
        {d["depth"] for r in some for d in r["depths"]}
    )
    for strategy in distinct(r["strategy"] for r in some):
        of_strategy = [r for r in some if r["strategy"] == strategy]
        budgets = distinct(r["budget"] for r in of_strategy)
        figure, axes = panels(len(budgets), 1.6 + 0.7 * len(lengths), 1.6 + 0.45 * len(depths))
        for axis, budget in zip(axes, budgets):
            grid = depth_grid([r for r in of_strategy if r["budget"] == budget], depths, lengths)
            image = axis.imshow(
                [[float("nan") if v is None else v for v in line] for line in grid],
                cmap="viridis",
                vmin=0,
                vmax=100,
                aspect="auto",
            )
            for y, line in enumerate(grid):
                for x, value in enumerate(line):
                    if value is not None:
                        axis.text(
                            x,
                            y,
                            f"{value:.0f}",
                            ha="center",
                            va="center",
                            color="black" if value > 60 else "white",
                        )
            axis.set_xticks(range(len(lengths)), [tokens_text(n) for n in lengths])
            axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}%" for d in depths])
            axis.set(title=f"{strategy} {budget}", xlabel="tokens")
        axes[0].set_ylabel("depth of the answer")
        figure.colorbar(image, ax=axes, label="score (%)")
        yield f"needles-{strategy}", figure


def of_strategies(rows, x, y, labels, log=False):
    """One panel, a line for each strategy, a point for each budget."""
    figure, (axis,) = panels(1, 6.4, 4.4)
    for number, strategy in enumerate(distinct(r["strategy"] for r in rows)):
        points = sorted((r[x], 100 * r[y], r["budget"]) for r in rows if r["strategy"] == strategy)
        draw_budgets(axis, number, strategy, points)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if log:
        axis.set_xscale("symlog", linthresh=10)
    axis.margins(0.08, 0.12)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    return figure


def recall(rows, _):
    yield "recall", of_strategies(
        rows,
        "keys_scanned",
        "recall",
        ("keys scanned by each layer and head for each token", "of the 100 best tokens read (%)"),
        log=True,
    )


def mass(rows, _):
    yield "mass", of_strategies(
        rows,
        "tokens",
        "mass",
        ("tokens read by each layer and head for each token", "exact attention that was read (%)"),
        log=True,
    )


def heat(axis, grid, top, form="{:.0f}"):
    """A grid of numbers from 0 to top, with the numbers in it where there is room."""
    image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto")
    if len(grid) <= 16 and len(grid[0]) <= 16:
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(
                    x,
                    y,
                    form.format(value),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="black" if value > 0.6 * top else "white",
                )
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(ticker.MaxNLocator(integer=True))
    return image


def chosen(rows, _):
    for strategy in distinct(r["strategy"] for r in rows):
        some = [r for r in rows if r["strategy"] == strategy]
        figure, axes = panels(
            len(some), 2.4 + 0.3 * len(some[0]["layers"][0]), 1.6 + 0.3 * len(some[0]["layers"])
        )
        top = max(h["tokens"] for r in some for layer in r["layers"] for h in layer) or 1
        for axis, row in zip(axes, some):
            image = heat(axis, [[head["tokens"] for head in layer] for layer in row["layers"]], top)
            axis.set(title=f"{strategy} {row['budget']}", xlabel="KV head")
        axes[0].set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="tokens read for each token")
        yield f"chosen-{strategy}", figure


def similarity(reports, _):
    for number, report in enumerate(reports):
        size = 2 + 0.4 * len(report["covered"])
        figure, (axis,) = panels(1, size + 1, size)
        image = heat(axis, [[100 * share for share in line] for line in report["covered"]], 100)
        for layer in report["filter_layers"]:
            axis.annotate(
                "\u25b6",
                (0, layer),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                color=COLOURS[1],
            )
        axis.set(
            xlabel="layer that attends",
            ylabel="layer that chooses",
            title=f"filter layers {', '.join(map(str, report['filter_layers']))}",
        )
        figure.colorbar(image, ax=axis, label="part of its attention in the selected tokens (%)")
        yield "similarity" + (f"-{number + 1}" if number else ""), figure


PICTURES = {
    "accuracy": ("rows", accuracy),
    "perplexity": ("rows", perplexity),
    "needles": ("rows", needles),
    "recall": ("compared", recall),
    "mass": ("compared", mass),
    "chosen": ("compared", chosen),
    "similarity": ("covered", similarity),
}


def parts_of(reports):
    """Rows by the part of a report that they are from; a calibration is a row in itself."""
    parts = {"rows": [], "compared": [], "covered": []}
    for report in reports:
        if not parts.keys() & report.keys():
            raise ValueError("it is no report of kvasir eval, recall or calibrate")
        parts["rows"] += report.get("rows", [])
        parts["compared"] += report.get("compared", [])
        parts["covered"] += [report] if "covered" in report else []
    return parts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=pathlib.Path, metavar="results.json")
    parser.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("."),
        metavar="FOLDER",
        help="(default: here)",
    )
    parser.add_argument(
        "--picture",
        action="append",
        choices=PICTURES,
        help="only this one; may be given several times",
    )
    parser.add_argument(
        "--task", default="all", help="of accuracy and needles (default: all tasks)"
    )
    arguments = parser.parse_args()
    try:
        parts = parts_of(json.loads(path.read_text()) for path in arguments.reports)
        arguments.output.mkdir(parents=True, exist_ok=True)
        matplotlib.rcParams["svg.hashsalt"] = "kvasir"  # the same rows give the same file
        for name in arguments.picture or PICTURES:
            part, draw = PICTURES[name]
            for file_name, figure in draw(parts[part], arguments.task) if parts[part] else ():
                path = arguments.output / f"{file_name}.svg"
                figure.savefig(path, metadata={"Date": None})
                plt.close(figure)
                print(path)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"plot.py: {error!r}")


main()
