"""tokenize, logits and bench against references and against themselves."""
import array
import json
import math
import unittest

import tool
from tool import FIXTURES, MODEL, run

REFERENCE = json.loads((FIXTURES / "mini-reference.json").read_text())


def floats(path):
    values = array.array("f")
    values.frombytes(path.read_bytes())
    return values


def relative_distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b))


class Measuring(tool.InFolder):
    def test_tokens_are_those_of_the_reference(self):
        result = self.expect(run("tokenize", "-m", MODEL, "--special", "-f", FIXTURES / "mini-prompt.txt"), 0)
        self.assertEqual(json.loads(result.stdout), REFERENCE["tokens"])
        result = self.expect_json(run("tokenize", "--json", "-m", MODEL, "-f", "-", stdin="<|im_start|>"))
        self.assertGreater(len(result["tokens"]), 1)

    def logits(self, *more):
        ids, output = self.file("ids.json", json.dumps(REFERENCE["tokens"])), self.folder / "logits.f32"
        self.expect(run("logits", "-m", MODEL, "--tokens", ids, "-o", output, *more), 0)
        values = floats(output)
        self.assertEqual(len(values), len(REFERENCE["tokens"]) * REFERENCE["vocab"])
        return values

    def test_logits_agree_with_the_reference(self):
        vocabulary, tokens = REFERENCE["vocab"], REFERENCE["tokens"]
        expected = floats(FIXTURES / REFERENCE["last_logits"])
        # The reference is of the weights in 16 bits; the model here has them in 8.
        for kv, chunk, tolerance in (("f32", 256, 1e-3), ("int8", 64, 5e-3)):
            values = self.logits("--kv", kv, "--chunk", chunk)
            self.assertLess(relative_distance(values[-vocabulary:], expected), 5e-2, kv)
            loss, same = 0.0, 0
            for at in range(len(tokens)):
                row = values[at * vocabulary:(at + 1) * vocabulary]
                most = max(row)
                same += row.index(most) == REFERENCE["argmax"][at]
                if at + 1 < len(tokens):
                    loss += most - row[tokens[at + 1]] + math.log(sum(map(math.exp, (x - most for x in row))))
            mean = loss / (len(tokens) - 1)
            self.assertLess(abs(mean / REFERENCE["mean_nll"] - 1), tolerance, kv)
            self.assertGreater(same, 0.93 * len(tokens), kv)

    def test_bench_reports_ratios_of_its_own_run(self):
        arguments = ["bench", "-m", MODEL, "--depth", "0,600", "--prompt", 32, "--generate", 4, "--repetitions", 1,
                     "--strategy", "full,quest", "--budget", "2%", "--mapped", "--folder", self.folder]
        report = self.expect_json(run(*arguments, "--json"))
        self.assertEqual([d["depth"] for d in report["depths"]], [0, 600])
        deep = report["depths"][1]
        speeds = {d["strategy"]: d["tokens_per_second"]["median"] for d in deep["decode"]}
        self.assertAlmostEqual(deep["decode"][1]["to_full"], speeds["quest"] / speeds["full"])
        self.assertGreater(deep["prefill_tokens_per_second"]["median"], 0)
        self.assertGreater(deep["mapped"][0]["kv_bytes"], 0)
        self.assertEqual(list(self.folder.glob("*.kv")), [])
        table = self.expect(run(*arguments), 0).stdout
        self.assertRegex(table, r"\n +600 .*full")
        self.assertRegex(table, r"\n +quest")


tool.main()
