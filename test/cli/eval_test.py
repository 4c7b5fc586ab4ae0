"""eval: what it measures, that it goes on where it was stopped, what it refuses; and the pictures
of its results.
"""

import json
import subprocess
import sys
import unittest
import xml.etree.ElementTree

import tool
from tool import MODEL, ROOT, run

BOOK = str(ROOT / "examples" / "sherlock-holmes.txt")


class Evaluations(tool.InFolder):
    def evaluation(self, *more, **options):
        """The arguments of an evaluation in the folder; options: as on the command line."""
        named = [x for name, value in options.items() for x in (f"--{name}", value)]
        return ["eval", "-m", MODEL, "-f", BOOK, "--work", self.folder / "work", *named, *more]


class Evaluating(Evaluations):
    def arguments(
        self,
        *more,
        length="2K",
        strategy="full,window,quest",
        budget="64,128",
        task="single,key-value,many-queries,perplexity"
    ):
        asked = {"length": length, "strategy": strategy, "budget": budget, "task": task}
        return self.evaluation(*more, documents=1, questions=2, depths=2, **asked)

    def results(self):
        return [
            json.loads(line)
            for line in (self.folder / "work" / "results.jsonl").read_text().splitlines()
        ]

    def caches(self):
        return {path.name: path.stat().st_mtime_ns for path in (self.folder / "work").glob("*.kv")}

    def test_strategies_are_compared_over_the_same_questions(self):
        report = self.expect_json(run(*self.arguments("--json")))
        rows = {(r["strategy"], r["budget"], r["task"]): r for r in report["rows"]}
        methods = [("full", ""), ("window", ""), ("quest", "64"), ("quest", "128")]
        tasks = ["single", "key-value", "many-queries", "perplexity", "all"]
        self.assertEqual(set(rows), {(*method, task) for method in methods for task in tasks})
        self.assertEqual([rows["full", "", t]["questions"] for t in tasks], [2, 2, 1, 1, 6])
        self.assertEqual(rows["full", "", "single"]["score"], 1)
        self.assertEqual(rows["full", "", "all"]["kv_read"], 1)
        self.assertEqual([d["questions"] for d in rows["full", "", "single"]["depths"]], [1, 1])
        self.assertEqual(rows["window", "", "all"]["kv_read"], 0)
        self.assertLess(rows["window", "", "all"]["score"], 0.5)
        self.assertLess(rows["full", "", "perplexity"]["perplexity"], 1000)
        self.assertNotEqual(
            rows["full", "", "perplexity"]["log_probability"],
            rows["window", "", "perplexity"]["log_probability"],
        )
        few, more = rows["quest", "64", "all"], rows["quest", "128", "all"]
        self.assertTrue(0 < few["kv_read"] < more["kv_read"] < 1, (few, more))
        self.assertGreater(few["summary_bytes_per_token"], 0)
        self.assertEqual(len(self.caches()), 2)

        whole = json.loads((self.folder / "work" / "results.json").read_text())
        self.assertEqual(whole["rows"], report["rows"])
        self.assertEqual(len(whole["results"]), 4 * 6)
        talk = next(
            r for r in whole["results"] if r["task"] == "many-queries" and r["strategy"] == "full"
        )
        self.assertEqual(len(talk["questions"]), len(talk["answers"]))
        self.assertIn(talk["expected"][0][0].lower(), talk["answers"][0].lower())

    def test_what_was_answered_is_not_asked_again_and_other_strategies_map_the_same_files(self):
        first = self.expect(run(*self.arguments(strategy="full")), 0)
        self.assertRegex(
            first.stdout,
            r"2,048 tokens +budget +single +many-queries +key-value +perplexity +all +KV read"
            r" +summaries\nfull +1",
        )
        caches, lines = self.caches(), self.results()
        again = self.expect(
            run(*self.arguments("-o", self.folder / "again.json", strategy="full")), 0
        )
        self.assertEqual(again.stdout, first.stdout)
        self.assertEqual(self.results(), lines)
        self.assertTrue((self.folder / "again.json").exists())
        self.expect(run(*self.arguments(strategy="quest,full", task="single")), 0)
        precious = self.file("precious.json", '{"rows": []}')
        self.expect_error(
            run(*self.arguments("-o", precious, strategy="full")),
            3,
            "precious.json is not a file of results",
            "--force",
        )
        elsewhere = self.file("elsewhere.json", '{"results": [{"key": "of another folder"}]}')
        self.expect_error(
            run(*self.arguments("-o", elsewhere, strategy="full")),
            3,
            "has results that are not in",
            "--force",
        )
        self.assertEqual(precious.read_text(), '{"rows": []}')
        self.assertEqual(self.caches(), caches)
        self.assertEqual(len(self.results()), len(lines) + 2 * 2)
        self.expect(run(*self.arguments("--dense-layers", 0, strategy="quest", task="single")), 0)
        self.expect(run(*self.arguments("--separate-heads", strategy="quest", task="single")), 0)
        self.assertEqual(len(self.results()), len(lines) + 3 * 2 * 2)

    def test_all_stands_for_every_strategy_and_task(self):
        report = self.expect_json(
            run(*self.arguments("--json", strategy="all", task="all", budget="64"))
        )
        self.assertLessEqual({"full", "window", "quest"}, {r["strategy"] for r in report["rows"]})
        self.assertEqual(
            {r["task"] for r in report["rows"]},
            {
                "single",
                "many-keys",
                "many-values",
                "many-queries",
                "key-value",
                "pass-key",
                "number-string",
                "quote",
                "perplexity",
                "all",
            },
        )

    def test_a_damaged_cache_is_read_again(self):
        self.expect(run(*self.arguments(task="single", strategy="full")), 0)
        for cache in (self.folder / "work").glob("*.kv"):
            cache.write_bytes(b"not a cache")
        self.expect(run(*self.arguments(task="single", strategy="quest")), 0)

    def test_senseless_evaluations_are_refused_before_any_work(self):
        self.expect_error(run("eval", "-m", MODEL), 2, "--file")
        self.expect_error(
            run(*self.arguments(task="telepathy")), 2, "--task", "telepathy", "key-value"
        )
        self.expect_error(run(*self.arguments(strategy="psychic")), 2, "psychic", "quest")
        self.expect_error(run(*self.arguments(length="8M")), 2, "--length", "8M")
        self.expect_error(run(*self.arguments(length="256K")), 2, "--length", "131,072")
        self.expect_error(run(*self.arguments(length="300")), 2, "--length")
        self.expect_error(run(*self.arguments("--questions", 0)), 2, "--questions")
        self.expect_error(run(*self.arguments(budget="1%,0%")), 2, "--budget", "'0'")
        self.expect_error(run(*self.arguments("-f", self.folder / "missing")), 3, "missing")
        short = self.file("short.txt", "Too short. " * 100)
        self.expect_error(
            run("eval", "-m", MODEL, "-f", short, "--work", self.folder / "work"),
            3,
            "name more texts",
        )
        self.file("occupied", "")
        self.expect_error(
            run("eval", "-m", MODEL, "-f", BOOK, "--work", self.folder / "occupied"), 3, "occupied"
        )
        self.assertEqual(self.caches(), {})


class Collections(Evaluations):
    WAYS = ["composed", "joined", "alone", "retrieved"]
    TASKS = ["fact", "lookup", "values", "source", "pair", "no-answer"]

    def arguments(self, *more, length="600", documents=4, questions=1, task="collection"):
        asked = {"length": length, "documents": documents, "questions": questions, "task": task}
        return self.evaluation("--retrieve", 512, *more, **asked)

    def results(self):
        return (self.folder / "work" / "results.jsonl").read_text().splitlines()

    def test_a_collection_is_asked_in_every_way(self):
        report = self.expect_json(run(*self.arguments("--json")))
        rows = {(r["strategy"], r["task"]): r for r in report["rows"]}
        self.assertEqual(set(rows), {(w, t) for w in self.WAYS for t in [*self.TASKS, "all"]})
        for (way, task), row in rows.items():
            self.assertTrue(0 <= row["score"] <= 1, row)
            self.assertEqual(row["budget"], "auto")
            self.assertEqual(row["questions"], 6 if task == "all" else 1)
            self.assertEqual("attended" in row, task != "no-answer", row)
        self.assertEqual(rows["composed", "fact"]["attended"], 1)
        self.assertEqual(rows["joined", "all"]["attended"], 1)
        self.assertEqual(rows["composed", "source"]["score"], 1)
        self.assertGreater(rows["composed", "all"]["score"], 0.4)
        self.assertEqual(report["documents"], 4)
        # each document once, and all of them
        self.assertEqual(len(list((self.folder / "work").glob("*.kv"))), 5)
        lines = self.results()
        again = self.expect(run(*self.arguments("--way", "composed,joined")), 0)
        self.assertEqual(self.results(), lines)
        self.assertRegex(again.stdout, r"4 x 600 tokens +strategy +fact +lookup .*\ncomposed +auto")
        self.expect_json(run(*self.arguments("--json", "--way", "composed", "--attend", 1)))
        self.assertEqual(len(self.results()), len(lines) + 6)
        self.assertEqual(json.loads(self.results()[-1])["strategy"], "composed")
        # other options, other answers
        dense = ["--strategy", "bounded", "--way", "composed"]
        self.expect(run(*self.arguments(*dense)), 0)
        self.expect(run(*self.arguments(*dense, "--dense-layers", 0)), 0)
        self.assertEqual(len(self.results()), len(lines) + 18)

    def test_senseless_collections_are_refused(self):
        self.expect_error(run(*self.arguments("--way", "psychic")), 2, "psychic", "retrieved")
        self.expect_error(run(*self.arguments("--strategy", "psychic")), 2, "psychic")
        self.expect_error(run(*self.arguments(task="collection,single")), 2, "apart")
        self.expect_error(run(*self.arguments(documents=2)), 2, "--documents")
        self.expect_error(run(*self.arguments(length="128K")), 2, "--length", "131,072")
        self.expect_error(run(*self.arguments("--strategy", "snapkv")), 3, "snapkv")
        for option in ("--budget", "--depths"):
            self.expect_error(run(*self.arguments(option, 5)), 2, option)
        coverage = self.arguments("--strategy", "full", "--coverage", "95%")
        self.expect_error(run(*coverage), 2, "--coverage")
        for option, value in (("--way", "joined"), ("--attend", 2), ("--retrieve", 512)):
            self.expect_error(run(*self.evaluation(option, value)), 2, option, "collection")

    def test_a_collection_too_long_for_one_prefill_is_not_joined(self):
        result = run(*self.arguments("--way", "joined", length="50K", task="fact"))
        self.assertIn("joined is left out: 204,800 tokens", self.expect(result, 0).stderr)
        self.assertFalse((self.folder / "work" / "results.jsonl").exists())

    def test_a_collection_that_was_stopped_goes_on(self):
        arguments = self.arguments("--way", "composed,retrieved", length="1500", questions=2)
        evaluation = tool.OnTerminal(*arguments)
        self.assertTrue(evaluation.read_until("left  composed"), evaluation.seen)
        evaluation.interrupt()
        self.assertEqual(evaluation.finish(), 130, evaluation.seen)
        self.assertRegex(
            evaluation.seen,
            r"stopped; \d+ of 24 answers are in .*work; run the same command again to continue",
        )
        kept = self.results()
        self.assertLess(len(kept), 24)
        self.expect(run(*arguments), 0)
        self.assertEqual(self.results()[: len(kept)], kept)
        self.assertEqual(len(self.results()), 24)


class Interrupted(Evaluations):
    def arguments(self, *more):
        asked = {"length": "6K", "strategy": "full,quest", "budget": "2%", "task": "single"}
        return self.evaluation(*more, documents=1, questions=6, **asked)

    def stop_at(self, seen):
        evaluation = tool.OnTerminal(*self.arguments())
        self.assertTrue(evaluation.read_until(seen), evaluation.seen)
        evaluation.interrupt()
        self.assertEqual(evaluation.finish(), 130, evaluation.seen)
        self.assertRegex(
            evaluation.seen,
            r"stopped; \d+ of 12 answers are in .*work; run the same command again to continue",
        )
        return evaluation.seen

    def test_an_evaluation_that_was_stopped_goes_on(self):
        self.assertRegex(
            self.stop_at("left  prefilling"),
            r"\d+%  \d+:\d\d left  prefilling story of 6,144 tokens",
        )
        cache = next((self.folder / "work").glob("*.kv"))
        part = self.expect_json(run("inspect", cache, "--json"))["tokens"]
        self.assertTrue(0 < part < 6000, part)
        self.stop_at("left  full")
        kept = (self.folder / "work" / "results.jsonl").read_text()
        self.assertTrue(1 <= kept.count("\n") < 12, kept)
        self.assertEqual(list((self.folder / "work").glob("*.json")), [])

        report = self.expect_json(run(*self.arguments("--json")))
        whole = (self.folder / "work" / "results.jsonl").read_text()
        self.assertTrue(whole.startswith(kept))
        self.assertEqual(whole.count("\n"), 12)
        (self.folder / "work").rename(self.folder / "stopped")
        straight = self.expect_json(run(*self.arguments("--json")))
        for row, other in zip(report["rows"], straight["rows"]):
            row.pop("seconds"), other.pop("seconds")
        self.assertEqual(report, straight)


def row(strategy, budget, length, task, score, **more):
    sizes = {"full": 1e6, "window": 0, "quest": 1e5}
    return {
        "strategy": strategy,
        "budget": budget,
        "length": length,
        "task": task,
        "score": score,
        "questions": 2,
        "kv_bytes_per_token": sizes[strategy],
        "summary_bytes_per_token": 1000 if budget else 0,
        **more,
    }


class Pictures(tool.InFolder):
    PYTHON = next(
        (
            p
            for p in (sys.executable, "/usr/bin/python3")
            if subprocess.run([p, "-c", "import matplotlib"], capture_output=True).returncode == 0
        ),
        None,
    )

    def plot(self, *arguments):
        return subprocess.run(
            [self.PYTHON, str(ROOT / "tools" / "scripts" / "plot.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
        )

    @unittest.skipUnless(PYTHON, "needs matplotlib")
    def test_results_are_drawn(self):
        depths = [{"depth": d, "questions": 1, "score": d} for d in (0.25, 0.75)]
        rows = []
        for length in (8192, 32768):
            for strategy, budget in (
                ("full", ""),
                ("window", ""),
                ("quest", "1%"),
                ("quest", "5%"),
            ):
                rows += [
                    row(strategy, budget, length, "single", 0.5, depths=depths),
                    row(strategy, budget, length, "all", 0.5),
                ]
                rows[-1]["kv_bytes_per_token"] *= 1 + len(rows)
        rows.append(dict(row("full", "", 8192, "perplexity", 0), perplexity=12.5))
        report = self.file("results.json", json.dumps({"rows": rows}))
        result = self.plot(report, "-o", self.folder / "pictures")
        self.assertEqual(result.returncode, 0, result.stderr)
        names = [
            "accuracy.svg",
            "needles-full.svg",
            "needles-quest.svg",
            "needles-window.svg",
            "perplexity.svg",
        ]
        self.assertEqual(sorted(p.name for p in (self.folder / "pictures").iterdir()), names)
        for name in names:
            xml.etree.ElementTree.parse(self.folder / "pictures" / name)
        again = self.plot(report, "--picture", "accuracy", "-o", self.folder / "again")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(
            (self.folder / "again" / "accuracy.svg").read_bytes(),
            (self.folder / "pictures" / "accuracy.svg").read_bytes(),
        )
        self.assertEqual(len(list((self.folder / "again").iterdir())), 1)

    @unittest.skipUnless(PYTHON, "needs matplotlib")
    def test_what_is_no_report_is_an_error(self):
        for path in (
            self.folder / "missing",
            self.file("text.json", "no json"),
            self.file("other.json", "{}"),
        ):
            result = self.plot(path, "-o", self.folder)
            self.assertEqual(result.returncode, 1)
            self.assertRegex(result.stderr, r"^plot.py: .*\n$")


tool.main()
