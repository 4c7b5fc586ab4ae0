"""pack and unpack, and what inspect says of a packed cache."""

import os

import tool
from tool import CODE, MODEL, QUESTION, SHORT, run


class Packing(tool.InFolder):
    def setUp(self):
        super().setUp()
        self.cache, self.packed, self.back = (
            self.folder / name for name in ("a.kv", "a.kvz", "b.kv")
        )
        self.expect(
            run("prefill", "-q", "-m", MODEL, "-f", self.file("a.txt", SHORT), "-o", self.cache), 0
        )

    def test_a_packed_cache_is_smaller_and_comes_back(self):
        result = self.expect(run("pack", self.cache, "-o", self.packed), 0)
        self.assertRegex(result.stdout, r"a.kvz: .* MB from .* MB, in ")
        self.assertLess(self.packed.stat().st_size, self.cache.stat().st_size * 0.9)
        result = self.expect_json(run("unpack", "--json", self.packed, "-o", self.back))
        self.assertEqual(result["output_bytes"], self.cache.stat().st_size)
        self.assertEqual(result["bytes"], self.packed.stat().st_size)
        self.assertEqual(self.back.read_bytes(), self.cache.read_bytes())
        self.assertIn(
            CODE, self.expect(run("ask", "-m", MODEL, "-c", self.back, QUESTION), 0).stdout
        )

    def test_inspect_recognises_a_packed_file_and_other_commands_say_to_unpack_it(self):
        self.expect(run("pack", self.cache, "-o", self.packed, "--level", "3"), 0)
        self.assertIn("packed file of", self.expect(run("inspect", self.packed), 0).stdout)
        packed, plain = (
            self.expect_json(run("inspect", "--json", path)) for path in (self.packed, self.cache)
        )
        self.assertEqual(packed["kind"], "packed")
        self.assertEqual(packed["level"], 3)
        self.assertEqual(packed["cache_bytes"], plain["file_bytes"])
        for name in ("tokens", "layers", "kv_heads", "head_dim", "model_name", "format_version"):
            self.assertEqual(packed[name], plain[name])
        self.expect_error(run("ask", "-m", MODEL, "-c", self.packed, QUESTION), 3, "kvasir unpack")
        self.expect_error(run("verify", self.packed), 3, "kvasir unpack")

    def test_what_is_refused(self):
        self.expect_error(run("pack", self.folder / "none", "-o", self.packed), 3, "none")
        self.expect_error(run("pack", self.file("a.txt"), "-o", self.packed), 3, "not a cache")
        self.expect_error(run("pack", self.cache, "-o", self.cache, "--force"), 2, "another file")
        self.expect_error(run("pack", self.cache, "-o", self.packed, "--level", "20"), 2, "--level")
        self.expect_error(run("pack", self.cache), 2)
        self.expect_error(run("unpack", self.cache, "-o", self.back), 3, "not a packed")
        self.assertFalse(self.packed.exists() or self.back.exists())
        self.expect(run("pack", self.cache, "-o", self.packed), 0)
        damaged = bytearray(self.packed.read_bytes())
        damaged[5000] ^= 1
        broken = self.file("broken.kvz", bytes(damaged))
        result = run("unpack", broken, "-o", self.back, "--json")
        self.expect_error(result, 3, "damaged at byte", "is unchanged")
        self.assertIn('"status": 13', result.stdout)
        self.assertFalse(self.back.exists())

    def test_a_file_that_is_there_is_not_replaced_unasked(self):
        text = self.file("a.txt")
        self.expect_error(run("pack", self.cache, "-o", text), 3, "--force")
        self.assertEqual(text.read_text(), SHORT)
        for more in ([], ["--force"]):
            self.expect(run("pack", self.cache, "-o", self.packed, *more), 0)
            self.expect(run("unpack", self.packed, "-o", self.back, *more), 0)
        packed, back = self.packed.read_bytes(), self.back.read_bytes()
        self.expect_error(
            run("pack", self.cache, "-o", self.packed), 3, "a.kvz exists already", "--force"
        )
        self.expect_error(
            run("unpack", self.packed, "-o", self.back), 3, "b.kv exists already", "--force"
        )
        self.assertEqual((self.packed.read_bytes(), self.back.read_bytes()), (packed, back))
        self.expect(run("pack", self.cache, "-o", text, "--force"), 0)
        self.assertEqual(text.read_bytes(), self.packed.read_bytes())

    def test_ctrl_c_leaves_nothing(self):
        large = self.folder / "large.kv"
        self.expect(
            run("prefill", "-q", "-m", MODEL, "-f", self.file("b.txt", SHORT * 3), "-o", large), 0
        )
        terminal = tool.OnTerminal("pack", large, "-o", self.packed, "--level", "19")
        self.assertTrue(terminal.read_until("Packing"), terminal.seen)
        terminal.interrupt()
        self.assertEqual(terminal.finish(), 130)
        self.assertEqual([n for n in os.listdir(self.folder) if "kvz" in n], [])


tool.main()
