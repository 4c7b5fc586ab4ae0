#!/usr/bin/env python3
"""What a strategy and its budget cost in right answers.

Documents of given lengths are cut from a text, some with facts and a pass key hidden in them, some with a table of keys and values
(tools/tasks.py). Each is read once and saved; every strategy and budget maps the file and answers all questions greedily, in random order. An answer counts when it
is exactly the expected sentence. The same seed gives the same documents and questions. What was read and answered stays in the work
folder, so an interrupted run goes on where it was.
"""
import argparse
import dataclasses
import hashlib
import json
import pathlib
import random
import sys
import time

import kvasir_ctypes as kvasir
import tasks

ROOT = pathlib.Path(__file__).resolve().parents[1]
FACTS, TABLE_QUESTIONS = 15, 12  # of a text document, which also has a pass key, and of a table document
ANSWER_TOKENS = 160  # the longest expected answer, two UUIDs, has about 100
ALWAYS = ("full", "window")  # strategies without a budget


@dataclasses.dataclass(frozen=True)
class Method:
    strategy: str
    budget: str  # "2%", "2048" or "" for strategies without one

    def options(self):
        if not self.budget:
            return {"strategy": self.strategy}
        if self.budget.endswith("%"):
            return {"strategy": self.strategy, "budget_fraction": float(self.budget[:-1]) / 100}
        return {"strategy": self.strategy, "budget_tokens": int(self.budget)}


@dataclasses.dataclass(frozen=True)
class Sample:
    length: str
    cache: pathlib.Path
    document: tasks.Document


class Progress:
    """One line with the time left, on a terminal only."""

    def __init__(self, total):
        self.start, self.done, self.total = time.monotonic(), 0, total

    def show(self, what, share_of_next=0.0, step=0):
        self.done += step
        share = (self.done + share_of_next) / max(self.total, 1)
        if sys.stderr.isatty() and share > 0:
            left = (time.monotonic() - self.start) * (1 - share) / share
            print(f"\r\033[K{100 * share:5.1f}%  {left:5.0f} s left  {what}", end="", file=sys.stderr, flush=True)

    def end(self):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def parse_arguments():
    def words(text):
        return [word for word in text.split(",") if word]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/src/libkvasir.so")
    parser.add_argument("-m", "--model", type=pathlib.Path, default=ROOT / "examples/mini-reader-q8_0.gguf")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "examples/sherlock-holmes.txt", help="what documents are cut from")
    parser.add_argument("--length", type=words, default="16K,32K", help="tokens a document; K is 1024 (default %(default)s)")
    parser.add_argument("--questions", type=int, default=200, help="in all lengths together, at least (default %(default)s)")
    parser.add_argument("--strategies", type=words, default="full,quest", help="(default %(default)s)")
    parser.add_argument("--budgets", type=words, default="0.5%,1%,2%,5%",
                        help="of each strategy that has one: tokens, or a share (%%) of the sealed tokens (default %(default)s)")
    parser.add_argument("--dense-layers", type=int, help="first layers that read everything (default: the strategy's)")
    parser.add_argument("--separate-heads", action="store_true", help="query heads of a group choose each for itself")
    parser.add_argument("--threads", type=int, default=0, help="(default: as many as processors)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/accuracy", help="folder for what was read and answered")
    parser.add_argument("--fresh", action="store_true", help="read and answer everything again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers")
    return parser.parse_args()


def token_count(text):
    return int(text[:-1]) * 1024 if text.upper().endswith("K") else int(text)


def methods(arguments):
    return [Method(strategy, budget) for strategy in arguments.strategies
            for budget in ([""] if strategy in ALWAYS else arguments.budgets)]


def identity(arguments):
    """Names what documents and answers depend on: the work of another library, model, text or seed is not mixed in."""
    digest = hashlib.sha256()
    for path in (arguments.library, arguments.model, arguments.text, tasks.__file__):
        digest.update(pathlib.Path(path).read_bytes())
    digest.update(repr(arguments.seed).encode())
    return digest.hexdigest()[:12]


def make_samples(arguments, model, work):
    """Documents of all lengths, as many pairs of both kinds as the questions need."""
    text = arguments.text.read_text(encoding="utf-8")
    pairs = -(-arguments.questions // ((FACTS + 1 + TABLE_QUESTIONS) * len(arguments.length)))
    samples = []
    for length in arguments.length:
        for number in range(pairs):
            for kind, make, questions in (("text", tasks.text_document, FACTS), ("table", tasks.table_document, TABLE_QUESTIONS)):
                rng = random.Random(f"{arguments.seed} {length} {kind} {number}")
                document = make(text, token_count(length), questions, model.count_tokens, rng)
                samples.append(Sample(length, work / f"{length}-{kind}-{number}.kv", document))
    return samples


def read_documents(arguments, model, samples):
    todo = [sample for sample in samples if not sample.cache.exists()]
    progress = Progress(sum(token_count(sample.length) for sample in todo))
    for sample in todo:
        with kvasir.Session(model, threads=arguments.threads) as session:
            session.prefill(sample.document.text, lambda done, _: progress.show(f"reading {sample.cache.name}", done))
            session.save(sample.cache)
        progress.show(f"read {sample.cache.name}", step=token_count(sample.length))
    progress.end()


def answer_questions(arguments, model, samples, work):
    """One record a question and method, kept line by line in a file as they come."""
    path = work / f"answers{'-separate' if arguments.separate_heads else ''}-{arguments.dense_layers}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(r["cache"], r["strategy"], r["budget"]) for r in records}
    todo = [(sample, method) for sample in samples for method in methods(arguments)
            if (sample.cache.name, method.strategy, method.budget) not in known]
    progress = Progress(sum(len(sample.document.questions) for sample, _ in todo))
    for sample, method in todo:
        new = []
        with kvasir.Session(model, cache=sample.cache, threads=arguments.threads, dense_layers=arguments.dense_layers,
                            share_heads=not arguments.separate_heads, **method.options()) as session:
            for question in sample.document.questions:
                text, figures = session.ask(question.text, ANSWER_TOKENS)
                new.append({"cache": sample.cache.name, "length": sample.length, "strategy": method.strategy, "budget": method.budget,
                            "task": question.task, "depth": question.depth, "question": question.text, "expected": question.answer,
                            "answer": text, "right": text.strip() == question.answer, "read": figures.tokens_read,
                            "present": figures.tokens_present, "answer_tokens": figures.answer_tokens, "total_ns": figures.total_ns})
                progress.show(f"{sample.cache.name} {method.strategy} {method.budget}", step=1)
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in new)
        records += new
    progress.end()
    wanted = {(sample.cache.name, method) for sample in samples for method in methods(arguments)}
    return [r for r in records if (r["cache"], Method(r["strategy"], r["budget"])) in wanted]


def summary(records):
    """A row a length ("all" for all of them) and method: right answers by task, share of the store's tokens that was read."""
    rows = []
    lengths = list(dict.fromkeys(r["length"] for r in records))
    for length in lengths + (["all"] if len(lengths) > 1 else []):
        here = [r for r in records if length in (r["length"], "all")]
        for strategy, budget in dict.fromkeys((r["strategy"], r["budget"]) for r in here):
            group = [r for r in here if (r["strategy"], r["budget"]) == (strategy, budget)]
            row = {"length": length, "strategy": strategy, "budget": budget, "questions": len(group),
                   "right": sum(r["right"] for r in group) / len(group),
                   "read": sum(r["read"] for r in group) / max(sum(r["present"] for r in group), 1)}
            for task in tasks.TASKS:
                some = [r["right"] for r in group if r["task"] == task]
                row[task] = sum(some) / len(some) if some else None
            rows.append(row)
    return rows


def print_table(rows):
    print(f"{'length':>6}  {'strategy':8} {'budget':>6}  {'questions':>9}" + "".join(f"  {t:>9}" for t in tasks.TASKS) + f"  {'all':>6}  {'read':>6}")
    for row in rows:
        shares = "".join(f"  {100 * row[t]:8.1f}%" if row[t] is not None else f"  {'-':>9}" for t in tasks.TASKS)
        print(f"{row['length']:>6}  {row['strategy']:8} {row['budget']:>6}  {row['questions']:9}{shares}"
              f"  {100 * row['right']:5.1f}%  {100 * row['read']:5.2f}%")


def main():
    arguments = parse_arguments()
    library = kvasir.Library(arguments.library)
    work = arguments.work / identity(arguments)
    work.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        for path in work.iterdir():
            path.unlink()
    with kvasir.Model(library, arguments.model) as model:
        samples = make_samples(arguments, model, work)
        read_documents(arguments, model, samples)
        records = answer_questions(arguments, model, samples, work)
    rows = summary(records)
    if arguments.json:
        print(json.dumps({"model": arguments.model.name, "text": arguments.text.name, "seed": arguments.seed, "rows": rows}, indent=2))
    else:
        print_table(rows)
    if arguments.wrong:
        for r in records:
            if not r["right"]:
                print(f"{r['cache']} {r['strategy']} {r['budget']}: {r['question']}\n  expected {r['expected']}\n  answered {r['answer']!r}")


try:
    main()
except (kvasir.Error, ValueError, OSError) as error:
    sys.exit(f"accuracy: {error}")
except KeyboardInterrupt:
    sys.exit("accuracy: stopped; run it again to go on")
