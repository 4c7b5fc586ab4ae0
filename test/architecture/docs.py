"""The documentation is true where a script can tell: links, commands, lengths, generated parts.
docs.py [KVASIR]

KVASIR is the command line of this build; without it the options of its commands are not checked.
"""

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys

from source import ROOT, files, finish, read

README_LINES = 150
MODEL = "examples/mini-reader-q8_0.gguf"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = "<!-- tools/scripts/footprint.py -->\n\n{}\n\n<!-- end -->"


def pages():
    """Every page that people read, relative to the tree's root."""
    yield from (p for p in files("docs", "bindings", "examples", ".github", suffixes={".md"}))
    yield from (pathlib.Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", re.sub(r"`|\[|\]\([^)]*\)", "", heading).strip().lower())
    return text.replace(" ", "-")


def anchors(path):
    text = re.sub(FENCE, "", read(path))
    return {slug(match) for match in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def link_problems(path):
    for target in LINK.findall(re.sub(FENCE, "", read(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = ((ROOT / path).parent / name).resolve() if name else ROOT / path
        if not place.exists():
            yield f"{path}: {target} is not there"
        elif anchor and anchor not in anchors(place):
            yield f"{path}: {target}: there is no such heading"


def commands(path):
    """The words of each line of a block of shell that begins with kvasir or tools/."""
    for language, block in FENCE.findall(read(path)):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"(?<!\S)#.*", "", line))
            for at, word in enumerate(words):
                starts = at == 0 or words[at - 1] in ("|", "&&", "||", ";")
                if starts and (word == "kvasir" or word.startswith("tools/")):
                    yield [w for w in words[at:] if w not in ("|", "&&")]


class Tool:
    """The options and commands that the command line knows, by its --help."""

    def __init__(self, program):
        self.program, self.known = program, {}

    def options(self, *command):
        if command not in self.known:
            run = subprocess.run(
                [self.program, *command, "--help"], capture_output=True, text=True, check=False
            )
            there = run.returncode == 0 and " ".join(("Usage: kvasir", *command, "[")) in run.stdout
            self.known[command] = (
                set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", run.stdout)) if there else None
            )
        return self.known[command]

    def problem(self, words):
        command = tuple(
            words[1:3] if words[1:2] == ["library"] and words[2:3] != ["--help"] else words[1:2]
        )
        if command and command[0].startswith("-"):
            command = ()
        if command == ("COMMAND",):
            return None
        options = self.options(*command)
        if options is None:
            return f"there is no command '{' '.join(command)}'"
        unknown = [
            w
            for w in words[1:]
            if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in options | {"-h", "--help"}
        ]
        return f"'{' '.join(command)}' has no {', '.join(unknown)}" if unknown else None


def script_problem(words):
    """A script of tools/: it is there, and names the options it is called with."""
    if not (ROOT / words[0]).exists():
        return f"{words[0]} is not there"
    text = read(words[0])
    if words[0] == "tools/build":  # targets of ninja
        return None
    unknown = [w for w in words[1:] if w.startswith("--") and w not in text]
    if words[0] == "tools/setup":
        unknown += [
            w for w in words[1:] if not re.search(rf"^ +{re.escape(w)}\)", text, re.MULTILINE)
        ]
    return f"{words[0]} does not know {', '.join(unknown)}" if unknown else None


def load(name):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def footprint_problems(tool):
    footprint = load("footprint")
    block = SHORT.format("\n".join(footprint.table(100_000)))
    for page in ("README.md", "docs/memory-and-files.md"):
        if block not in read(page):
            yield (
                f"{page}: the table of memory and disk is not what tools/scripts/footprint.py"
                " prints"
            )
    if tool:
        model = json.loads(
            subprocess.run(
                [tool.program, "inspect", "--json", ROOT / MODEL], capture_output=True, check=True
            ).stdout
        )
        tokens = 1 << 20
        parts = footprint.layout(
            model["layers"],
            model["kv_heads"],
            model["head_dim"],
            model["heads"],
            model["vocabulary"],
            tokens + footprint.WINDOW,
        )
        ours = sum(parts[name] for name in ("pages", "scales", "bounds")) / tokens
        if round(ours) != model["kv_bytes_per_token"]:
            yield (
                f"tools/scripts/footprint.py has {ours} bytes a token where kvasir inspect has"
                f" {model['kv_bytes_per_token']}"
            )


def render_problems():
    """Tables of what `kvasir bench --json` and `kvasir eval` write."""

    def decode(strategy, speed):
        return {"strategy": strategy, "tokens_per_second": {"median": speed}}

    def row(task, **values):
        return {
            "length": 8192,
            "strategy": "bounded",
            "budget": "1%",
            "task": task,
            "kv_read": 0.0099,
            **values,
        }

    bench = {
        "depths": [
            {"depth": 0, "decode": []},
            {
                "depth": 4096,
                "prefill_tokens_per_second": {"median": 1280.0},
                "decode": [decode("full", 28.91)],
            },
        ]
    }
    results = {
        "rows": [
            row("single", score=0.875),
            row("perplexity", perplexity=12.37),
            row("all", score=0.661),
        ]
    }
    compared = {
        "command": "kvasir bench --compare llama-bench",
        "compared": {
            "program": "llama.cpp",
            "version": "d32676d (7062)",
            "command": ["llama-bench", "-d", "4096"],
            "steps": [
                {
                    "step": "decode at 4,096, bounded",
                    "other_tokens_per_second": 20.0,
                    "kvasir_tokens_per_second": 25.0,
                    "ratio": 1.25,
                }
            ],
        },
    }
    module = load("measurements")
    for lines, last in (
        (module.bench_table({"bench": bench}), "| 4,096 | 1,280 | 28.9 |"),
        (
            module.comparison_table(module.with_program({"bench": compared})),
            "| decode at 4,096, bounded | 20.0 | 25.0 | 1.25 |",
        ),
        (
            module.eval_table({"eval": results}),
            "| 8,192 | bounded | 1% | 87.5 | 66.1 | 12.37 | 0.99 |",
        ),
    ):
        found = list(lines)[-1]
        if found != last:
            yield f"tools/scripts/measurements.py renders '{found}' for '{last}'"


def result_problems():
    """Figures of README's results that no generated page has."""
    results = re.search(
        r"^## Results\n(.*?)^## ", read("README.md"), re.DOTALL | re.MULTILINE
    ).group(1)
    numbers = r"(?<![\w.,-])\d[\d,.]*\d(?!\w)"
    measured = set(re.findall(numbers, read("docs/measurements.md") + read("docs/comparison.md")))
    for number in re.findall(
        numbers, "\n".join(line for line in results.splitlines() if line.startswith("|"))
    ):
        if number not in measured:
            yield f"README.md: no measurement has the result {number}"


def main():
    tool = Tool(sys.argv[1]) if len(sys.argv) > 1 else None
    problems = []
    for path in pages():
        problems += link_problems(path)
        for words in commands(path):
            problem = (
                script_problem(words)
                if words[0].startswith("tools/")
                else tool and tool.problem(words)
            )
            if problem:
                problems.append(f"{path}: {' '.join(words)}: {problem}")
    lines = read("README.md").count("\n")
    if lines > README_LINES:
        problems.append(f"README.md has {lines} lines, more than {README_LINES}")
    for script in ("measurements.py", "chart.py"):
        run = subprocess.run(
            [sys.executable, ROOT / "tools" / "scripts" / script, "--check"],
            capture_output=True,
            text=True,
            check=False,
        )
        problems += [f"tools/{script}: {line}" for line in (run.stdout + run.stderr).splitlines()]
    return finish([*problems, *render_problems(), *result_problems(), *footprint_problems(tool)])


sys.exit(main())
