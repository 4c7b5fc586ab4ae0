"""recall and calibrate: strategies compared with exact attention, filter layers, and the pictures
of both.
"""

import json
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree

import tool
from tool import BOOK, MODEL, ROOT, run

TEXT = str(ROOT / "examples" / "sherlock-holmes.txt")


class Comparing(tool.InFolder):
    def recall(self, *more, strategy="full,window,quest,flat,bounded", budget="64,256", steps=8):
        return [
            "recall",
            "-m",
            MODEL,
            "-c",
            self.folder / "a.kv",
            "--strategy",
            strategy,
            "--budget",
            budget,
            "--steps",
            steps,
            "-o",
            self.folder / "recall.json",
            *more,
        ]

    def read(self, size=9000):
        document = self.file("a.txt", BOOK[2000 : 2000 + size])
        self.expect(run("prefill", "-m", MODEL, "-f", document, "-o", self.folder / "a.kv"), 0)

    def test_strategies_are_compared_with_exact_attention(self):
        self.read()
        report = self.expect_json(run(*self.recall("--json", "What is said of the door?")))
        self.assertEqual(report, json.loads((self.folder / "recall.json").read_text()))
        rows = {(r["strategy"], r["budget"]): r for r in report["compared"]}
        self.assertEqual(
            list(rows),
            [
                ("full", ""),
                ("window", ""),
                *((s, b) for s in ("quest", "flat", "bounded") for b in ("64", "256")),
            ],
        )
        full, window, flat = rows["full", ""], rows["window", ""], rows["flat", "256"]
        self.assertEqual(
            (full["mass"], full["min_recall"], window["recall"], window["tokens"]), (1, 1, 0, 0)
        )
        self.assertLess(full["largest_error"], 1e-3)
        self.assertGreater(window["error"], 0.01)
        self.assertTrue(window["mass"] < rows["flat", "64"]["mass"] < flat["mass"] < 1)
        self.assertTrue(rows["flat", "64"]["recall"] < flat["recall"])
        self.assertTrue(flat["tokens"] == 256 < flat["keys_scanned"], flat)
        self.assertEqual(rows["quest", "64"]["keys_scanned"], 0)
        self.assertGreater(rows["quest", "64"]["summary_bytes_per_token"], 0)
        self.assertEqual(len(rows["quest", "64"]["dense_layers"]), 2)
        self.assertIn("mass_estimated", rows["bounded", "64"])
        self.assertEqual(
            (len(full["layers"]), len(full["layers"][0])),
            (report["model"]["layers"], report["model"]["kv_heads"]),
        )
        self.assertGreater(full["steps"], 8)
        self.assertEqual(
            full["layers"][0][0]["queries"],
            full["steps"] * report["model"]["heads"] / report["model"]["kv_heads"],
        )
        self.assertGreater(full["perplexity"], 1)

    def test_the_table_says_the_same_of_a_document_that_is_read_now(self):
        self.read()
        table = self.expect(run(*self.recall(strategy="full,window")), 0).stdout
        self.assertRegex(
            table,
            r"strategy +budget +tokens +summaries +keys +a head's +finds +mass +certain +least"
            r" +error +largest +recall +claimed\nfull ",
        )
        self.assertRegex(table, r"\nfull .* 100\.00%")
        again = run(
            "recall",
            "-m",
            MODEL,
            "-f",
            self.folder / "a.txt",
            "--strategy",
            "full,window",
            "--steps",
            8,
            "-o",
            self.folder / "again.json",
        )
        self.assertEqual(
            self.expect(again, 0).stdout.split("All results")[0], table.split("All results")[0]
        )

    def test_a_file_that_is_there_is_not_replaced_unasked(self):
        self.read()
        cache = (self.folder / "a.kv").read_bytes()
        here = [
            "recall",
            "-m",
            MODEL,
            "-c",
            self.folder / "a.kv",
            "--strategy",
            "full",
            "--steps",
            2,
            "-o",
            self.folder / "a.kv",
        ]
        self.expect_error(run(*here), 3, "a.kv exists already", "--force")
        self.assertEqual((self.folder / "a.kv").read_bytes(), cache)
        self.expect(run(*here[:-1], self.folder / "recall.json"), 0)
        self.expect_error(
            run(*here[:-1], self.folder / "recall.json"), 3, "recall.json exists already", "--force"
        )
        self.expect(run(*here[:-1], self.folder / "recall.json", "--force"), 0)

    def test_senseless_comparisons_are_refused(self):
        self.read(2000)
        self.expect_error(run("recall", "-m", MODEL), 2, "-f FILE")
        self.expect_error(run(*self.recall(strategy="psychic")), 2, "psychic")
        self.expect_error(run(*self.recall(steps=0)), 2, "--steps")
        self.expect_error(run(*self.recall(steps=10000)), 2, "--steps", "too few")
        self.expect_error(
            run(*self.recall("--filter-window", "first")), 2, "--filter-window", "exponential"
        )
        self.expect_error(run(*self.recall("--filter-layers", "1,x")), 2, "--filter-layers", "x")
        self.expect_error(
            run(*self.recall("--filter-layers", "3,99", strategy="filter-layers")), 2, "99"
        )
        self.assertFalse((self.folder / "recall.json").exists())

    def test_ctrl_c_writes_nothing(self):
        self.read(40000)
        comparing = tool.OnTerminal(*self.recall(steps=4000, strategy="all"))
        self.assertTrue(comparing.read_until("left  "), comparing.seen)
        comparing.interrupt()
        self.assertEqual(comparing.finish(), 130, comparing.seen)
        self.assertIn("stopped; nothing was written", comparing.seen)
        self.assertFalse((self.folder / "recall.json").exists())


class Calibrating(tool.InFolder):
    def setUp(self):
        super().setUp()
        self.model = self.folder / "model.gguf"
        self.kept = self.folder / "model.gguf.calibration.json"
        shutil.copy(MODEL, self.model)

    def calibrate(self, *more):
        return run("calibrate", "-m", self.model, "--length", "2K", "--questions", 1, *more)

    def ask(self, *more):
        return run(
            "ask",
            "-m",
            self.model,
            "-f",
            self.file("a.txt", BOOK[2000:6000]),
            "--strategy",
            "filter-layers",
            *more,
            "What is said?",
        )

    def test_filter_layers_are_found_kept_and_used(self):
        self.assertNotIn("calibrat", self.expect(self.ask(), 0).stderr)
        report = self.expect_json(self.calibrate("-f", TEXT, "--filters", 2, "--json"))
        self.assertEqual(json.loads(self.kept.read_text()), report)
        layers = report["filter_layers"]
        self.assertEqual(
            (len(layers), len(report["covered"]), len(report["covered"][0])), (2, 10, 10)
        )
        for row in report["covered"]:
            self.assertTrue(all(0 < share <= 1 for share in row))
        for i, row in enumerate(report["covered"]):
            self.assertTrue(
                all(row[j] <= report["covered"][j][j] + 0.05 for j in range(10)), i
            )  # a layer serves itself best
        named = ",".join(map(str, layers))
        self.assertIn(
            f"filter layers {named}, calibrated in {self.kept}", self.expect(self.ask(), 0).stderr
        )
        self.assertNotIn("calibrat", self.expect(self.ask("--filter-layers", "3"), 0).stderr)
        evaluation = run(
            "eval",
            "-m",
            self.model,
            "-f",
            TEXT,
            "--length",
            "2K",
            "--documents",
            1,
            "--questions",
            1,
            "--task",
            "single",
            "--strategy",
            "filter-layers",
            "--budget",
            "128",
            "--work",
            self.folder / "work",
            "--json",
        )
        self.assertEqual(self.expect_json(evaluation)["filter_layers"], named)
        bench = run(
            "bench",
            "-m",
            self.model,
            "--depth",
            1000,
            "--prompt",
            0,
            "--generate",
            2,
            "--repetitions",
            1,
            "--strategy",
            "filter-layers",
            "--json",
        )
        self.assertEqual(
            self.expect_json(bench)["depths"][0]["decode"][0]["stats"]["filter_layers"], layers
        )

    def test_a_calibration_of_another_model_is_not_used(self):
        self.expect(self.calibrate(), 0)  # with sentences of its own
        with open(self.model, "r+b") as model:
            at = (
                self.model.stat().st_size // 256 * 200 + 1000
            )  # within the parts by which a file is known
            model.seek(at)
            weight = model.read(1)[0]
            model.seek(at)
            model.write(bytes([weight ^ 1]))
        result = self.expect(self.ask(), 0)
        self.assertIn("belongs to another model and is ignored", result.stderr)
        self.assertNotIn("calibrated in", result.stderr)
        self.expect_error(self.calibrate(), 3, "calibration.json exists already", "--force")
        self.kept.write_text("{")
        self.assertIn("is not a result of `kvasir calibrate`", self.expect(self.ask(), 0).stderr)

    def test_senseless_calibrations_are_refused(self):
        self.expect_error(self.calibrate("--filters", 11), 2, "--filters", "10 layers")
        self.expect_error(self.calibrate("--length", "128K"), 2, "--length")
        self.expect_error(self.calibrate("-f", self.folder / "missing"), 3, "missing")
        self.expect_error(run("calibrate", "-m", self.model, "--length", 1), 2, "too few")
        self.assertFalse(self.kept.exists())


class Pictures(tool.InFolder):
    PYTHON = next(
        (
            p
            for p in (sys.executable, "/usr/bin/python3")
            if subprocess.run([p, "-c", "import matplotlib"], capture_output=True).returncode == 0
        ),
        None,
    )

    @unittest.skipUnless(PYTHON, "needs matplotlib")
    def test_comparisons_and_calibrations_are_drawn(self):
        def head(n):
            return {"queries": 1, "mass": 0.5, "recall": 0.25, "tokens": 10 * n, "error": 0.1}

        rows = [
            {
                "strategy": s,
                "budget": b,
                "keys_scanned": k,
                "tokens": 10 * k + 1,
                "recall": 0.5,
                "mass": 0.6,
                "error": 0.1,
                "layers": [[head(1), head(2)], [head(3), head(4)]],
            }
            for s, b, k in (
                ("full", "", 0),
                ("quest", "1%", 0),
                ("flat", "1%", 900),
                ("flat", "5%", 900),
            )
        ]
        recall = self.file("recall.json", json.dumps({"tokens": 1000, "compared": rows}))
        calibration = self.file(
            "calibration.json",
            json.dumps({"filter_layers": [1], "covered": [[0.9, 0.5], [0.6, 0.8]]}),
        )
        out = self.folder / "pictures"
        result = subprocess.run(
            [
                self.PYTHON,
                str(ROOT / "tools" / "scripts" / "plot.py"),
                str(recall),
                str(calibration),
                "-o",
                str(out),
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(
            sorted(p.name for p in out.iterdir()),
            [
                "chosen-flat.svg",
                "chosen-full.svg",
                "chosen-quest.svg",
                "mass.svg",
                "recall.svg",
                "similarity.svg",
            ],
        )
        for path in out.iterdir():
            xml.etree.ElementTree.parse(path)


tool.main()
