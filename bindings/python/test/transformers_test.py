"""A randomly initialised Llama over Kvasir's store says what it says over its own cache, also where two processes have read."""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest

import support

try:
    import accelerate  # noqa: F401, of transformers' tensor parallelism
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import kvasir
import kvasir.transformers as kt
from kvasir import Precision

WORKER = """
import sys, torch, torch.distributed as dist, transformers, kvasir, kvasir.transformers as kt
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float32)
cache = transformers.DynamicCache(config=model.config)
kt.prefill(model, torch.load(sys.argv[1] + "/ids.pt"), cache, chunk=64)
assert cache.layers[0].keys.shape[1] == model.config.num_key_value_heads // 2, cache.layers[0].keys.shape
kt.save_cache(model, cache, sys.argv[2], identity=kt.identity_of(sys.argv[1]), precision=kvasir.Precision.F32)
try:
    kt.save_cache(model, cache, sys.argv[2] + "/no/folder")
except kvasir.Error:
    print("refused in rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""

# Two processes with half of the trained model's heads each; what they have read becomes a session's file.
SESSION_WORKER = """
import pathlib, sys, torch, torch.distributed as dist, transformers, kvasir, kvasir.transformers as kt
torch.set_num_threads(1)
dist.init_process_group("gloo")
weights = pathlib.Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32).eval()
tokens = torch.load(sys.argv[2])
cache = transformers.DynamicCache(config=model.config)
kt.prefill(model, tokens, cache)
head = dist.get_rank()
for layer in cache.layers:
    layer.keys, layer.values = layer.keys[:, head : head + 1], layer.values[:, head : head + 1]
with kvasir.Model(weights) as home:
    kt.save_session(model, cache, tokens, home, sys.argv[3])
    try:
        kt.save_session(model, cache, tokens.flip(1), home, sys.argv[3] + ".other")
    except kvasir.ModelMismatchError:
        print("refused in rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


def made(**changes):
    config = transformers.LlamaConfig(**{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
                                         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, **changes})
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def ids(count):
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(count))


def answer(model, tokens, cache, count=24):
    everything = torch.ones_like(tokens)
    made = model.generate(tokens, attention_mask=everything, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return made[0, tokens.shape[1] :].tolist()


class Transformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.tokens = ids(300)
        cls.plain = answer(made(), cls.tokens, transformers.DynamicCache())
        cls.model = made()
        cls.model.set_attn_implementation("kvasir")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_the_same_tokens_as_the_plain_cache_when_nothing_is_dropped(self):
        for options in ({"precision": Precision.F32}, {"window": 1024, "strategy": "full"}):
            cache = kt.KvasirCache(self.model, **options)
            self.assertEqual(answer(self.model, self.tokens, cache), self.plain)
            self.assertEqual(cache.get_seq_length(), 300 + 23)
            self.assertEqual(cache.store.stats().tokens, 300 + 23)

    def test_a_saved_prefill_is_gone_on_with(self):
        cache = kt.KvasirCache(self.model, precision=Precision.F32)
        kt.prefill(self.model, self.tokens[:, :-1], cache, chunk=128)
        cache.save(self.folder / "cache.kv")
        loaded = kt.KvasirCache.load(self.model, self.folder / "cache.kv")
        self.assertEqual(answer(self.model, self.tokens, loaded), self.plain)
        loaded.truncate(299)
        self.assertEqual(answer(self.model, self.tokens, loaded), self.plain)

    def test_half_precision_is_read_as_it_is(self):
        for dtype in (torch.bfloat16, torch.float16):
            model = made().to(dtype)
            with torch.no_grad():
                expected = model(self.tokens).logits.float()
            model.set_attn_implementation("kvasir")
            with torch.no_grad():
                told = model(self.tokens, past_key_values=kt.KvasirCache(model)).logits
            self.assertEqual(told.dtype, dtype)
            self.assertLess((told.float() - expected).abs().max().item(), 0.1 * expected.abs().max().item())

    def test_what_the_store_does_not_do_is_refused(self):
        def run(**options):
            with torch.no_grad():
                self.model(**{"input_ids": self.tokens, "past_key_values": kt.KvasirCache(self.model), **options})

        for options in ({"input_ids": self.tokens.repeat(2, 1)}, {"attention_mask": torch.cat([torch.zeros(1, 1), torch.ones(1, 299)], 1)}):
            with self.assertRaises(kvasir.UnsupportedError):
                run(**options)
        with self.assertRaises(kvasir.BadStateError):
            run(past_key_values=transformers.DynamicCache())
        with self.assertRaises(kvasir.UnsupportedError):
            self.model(self.tokens, past_key_values=kt.KvasirCache(self.model))  # gradients
        with self.assertRaises(kvasir.BadArgumentError):
            kt.KvasirCache(made())
        model = made()
        model.set_attn_implementation("kvasir")
        cache = kt.KvasirCache(model)
        model.set_attn_implementation("eager")
        with self.assertRaises(kvasir.BadStateError), torch.no_grad():
            model(self.tokens, past_key_values=cache)
        cache.truncate(0)
        model.set_attn_implementation("kvasir")
        self.assertEqual(len(answer(model, self.tokens, cache)), 24)

    def in_two_processes(self, program, *values):
        worker = self.folder / "worker.py"
        worker.write_text(program, encoding="utf-8")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, *values],
                              capture_output=True, text=True, timeout=800, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(done.stdout.count("refused in rank"), 2, done.stdout)

    def test_two_processes_read_and_one_answers(self):
        weights, file = self.folder / "model", self.folder / "read.kv"
        made().save_pretrained(weights)
        torch.save(self.tokens[:, :-1], weights / "ids.pt")
        self.in_two_processes(WORKER, weights, file)
        self.assertEqual(kvasir.inspect(file).kv_heads, 2)
        kvasir.verify(file)
        identity = kt.identity_of(weights)
        cache = kt.KvasirCache.load(self.model, file, identity=identity)
        self.assertEqual(answer(self.model, self.tokens, cache), self.plain)
        with self.assertRaises(kvasir.ModelMismatchError):
            kt.KvasirCache.load(self.model, file, identity=bytes(32))
        with kvasir.Model(support.MODEL) as reader, self.assertRaises(kvasir.ModelMismatchError):
            reader.load(file)

    @unittest.skipUnless(importlib.util.find_spec("gguf"), "transformers reads GGUF files by the package gguf")
    def test_what_transformers_has_read_is_asked_by_the_library_itself(self):
        """The trained model, in float32 there and in Q8_0 here."""
        there = transformers.AutoModelForCausalLM.from_pretrained(support.MODEL.parent, gguf_file=support.MODEL.name, dtype=torch.float32).eval()
        file = self.folder / "read.kv"
        with kvasir.Model(support.MODEL) as home:
            tokens = torch.from_numpy(home.tokenize(support.document(4000), document=True).astype("int64"))[None]
            cache = transformers.DynamicCache(config=there.config)
            kt.prefill(there, tokens, cache)
            kt.save_session(there, cache, tokens, home, file)
            with home.load(file, verify=True) as session:
                self.assertEqual(len(session.tokens), tokens.shape[1])
                self.assertIn("4821907", session.ask(support.QUESTION).text)
            with self.assertRaises(kvasir.ModelMismatchError):  # other tokens
                kt.save_session(there, cache, tokens.flip(1), home, file)
            for layer in cache.layers:
                layer.keys = kt._interleaved(layer.keys[0].transpose(0, 1)).transpose(0, 1)[None]
            with self.assertRaises(kvasir.ModelMismatchError):  # channels in an order that is nobody's
                kt.save_session(there, cache, tokens, home, file)

    @unittest.skipUnless(importlib.util.find_spec("gguf"), "transformers reads GGUF files by the package gguf")
    def test_what_two_processes_have_read_is_asked_by_the_library_itself(self):
        ids_file, file = self.folder / "ids.pt", self.folder / "read.kv"
        with kvasir.Model(support.MODEL) as home:
            torch.save(torch.from_numpy(home.tokenize(support.document(3000), document=True).astype("int64"))[None], ids_file)
            self.in_two_processes(SESSION_WORKER, support.MODEL, ids_file, file)
            with home.load(file, verify=True) as session:
                self.assertIn("4821907", session.ask(support.QUESTION).text)


unittest.main()
