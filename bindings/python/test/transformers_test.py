"""A randomly initialised Llama over a kvasir.Cache has the answers of its own cache.

Also where two processes have prefilled.
"""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

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
from kvasir._hybrid import interleaved

needs_gguf = unittest.skipUnless(importlib.util.find_spec("gguf"), "transformers needs gguf")

WORKER = """
import sys, torch, torch.distributed as dist, transformers, kvasir, kvasir.transformers as kt
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], tp_plan="auto", dtype=torch.float32
)
cache = transformers.DynamicCache(config=model.config)
kt.prefill(model, torch.load(sys.argv[1] + "/ids.pt"), cache, chunk=64)
heads = model.config.num_key_value_heads // 2
assert cache.layers[0].keys.shape[1] == heads, cache.layers[0].keys.shape
identity = kt.identity_of(sys.argv[1])
kt.save_cache(model, cache, sys.argv[2], identity=identity, precision=kvasir.Precision.F32)
try:
    kt.save_cache(model, cache, sys.argv[2] + "/no/folder")
except kvasir.Error:
    print("refused in rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""

# Two processes have half of the trained model's heads each. Their cache becomes a session's file.
SESSION_WORKER = """
import pathlib, sys
import torch, torch.distributed as dist, transformers, kvasir, kvasir.transformers as kt
torch.set_num_threads(1)
dist.init_process_group("gloo")
weights = pathlib.Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(
    weights.parent, gguf_file=weights.name, dtype=torch.float32
).eval()
tokens = torch.load(sys.argv[2])
cache = transformers.DynamicCache(config=model.config)
kt.prefill(model, tokens, cache)
head = dist.get_rank()
for layer in cache.layers:
    layer.keys, layer.values = layer.keys[:, head : head + 1], layer.values[:, head : head + 1]
with kvasir.Model(weights) as gguf:
    kt.save_session(model, cache, tokens, gguf, sys.argv[3])
    try:
        kt.save_session(model, cache, tokens.flip(1), gguf, sys.argv[3] + ".other")
    except kvasir.ModelMismatchError:
        print("refused in rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


def made(**changes):
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})).eval()
    model.generation_config.eos_token_id = None
    return model


def ids(count):
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(count))


def answer(model, tokens, cache, count=24):
    result = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        cache=cache,
        max_new_tokens=count,
        do_sample=False,
    )
    return result[0, tokens.shape[1] :].tolist()


def document_ids(model, characters):
    tokens = model.tokenize(support.document(characters), document=True)
    return torch.from_numpy(tokens.astype("int64"))[None]


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
        warned = warnings.catch_warnings()
        warned.__enter__()
        self.addCleanup(warned.__exit__, None, None, None)
        warnings.simplefilter("error", FutureWarning)

    def test_the_answer_is_that_of_the_plain_cache_when_everything_is_read(self):
        for options in ({"precision": Precision.F32}, {"window_tokens": 1024, "decode": "full"}):
            cache = kt.KvasirCache(self.model, **options)
            self.assertEqual(answer(self.model, self.tokens, cache), self.plain)
            self.assertEqual(cache.get_seq_length(), 300 + 23)
            self.assertEqual(cache.store.stats().tokens, 300 + 23)
            self.assertIn("323 tokens", repr(cache))

    def test_a_saved_prefill_continues(self):
        cache = kt.KvasirCache(self.model, precision=Precision.F32)
        kt.prefill(self.model, self.tokens[:, :-1], cache, chunk=128)
        cache.save(self.folder / "cache.kv")
        loaded = kt.KvasirCache.load(self.model, self.folder / "cache.kv")
        self.assertEqual(answer(self.model, self.tokens, loaded), self.plain)
        loaded.truncate(299)
        self.assertEqual(answer(self.model, self.tokens, loaded), self.plain)

    def test_half_precision_is_used_in_place(self):
        for dtype in (torch.bfloat16, torch.float16):
            model = made().to(dtype)
            with torch.no_grad():
                expected = model(self.tokens).logits.float()
            model.set_attn_implementation("kvasir")
            with torch.no_grad():
                found = model(self.tokens, cache=kt.KvasirCache(model)).logits
            self.assertEqual(found.dtype, dtype)
            difference = (found.float() - expected).abs().max().item()
            self.assertLess(difference, 0.1 * expected.abs().max().item())

    def test_what_a_cache_does_not_do_is_refused(self):
        def run(**options):
            cache = kt.KvasirCache(self.model)
            with torch.no_grad():
                self.model(**{"input_ids": self.tokens, "cache": cache, **options})

        padding = torch.cat([torch.zeros(1, 1), torch.ones(1, 299)], 1)
        for options in ({"input_ids": self.tokens.repeat(2, 1)}, {"attention_mask": padding}):
            with self.assertRaises(kvasir.UnsupportedError):
                run(**options)
        with self.assertRaises(kvasir.BadStateError):
            run(cache=transformers.DynamicCache())
        with self.assertRaises(kvasir.UnsupportedError):
            self.model(self.tokens, cache=kt.KvasirCache(self.model))  # gradients
        with self.assertRaises(kvasir.BadArgumentError):
            kt.KvasirCache(made())

    def test_a_cache_is_usable_after_another_attention_was_refused(self):
        model = made()
        model.set_attn_implementation("kvasir")
        cache = kt.KvasirCache(model)
        model.set_attn_implementation("eager")
        with self.assertRaises(kvasir.BadStateError), torch.no_grad():
            model(self.tokens, cache=cache)
        cache.truncate(0)
        model.set_attn_implementation("kvasir")
        self.assertEqual(len(answer(model, self.tokens, cache)), 24)

    def in_two_processes(self, program, *values):
        worker = self.folder / "worker.py"
        worker.write_text(program, encoding="utf-8")
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *run, worker, *values]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(done.stdout.count("refused in rank"), 2, done.stdout)

    def test_two_processes_prefill_and_one_answers(self):
        weights, file = self.folder / "model", self.folder / "document.kv"
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
        with kvasir.Model(support.MODEL) as model, self.assertRaises(kvasir.ModelMismatchError):
            model.load(file)

    @needs_gguf
    def test_the_library_answers_from_a_prefill_of_transformers(self):
        """The trained model is float32 in transformers and Q8_0 in the library."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            support.MODEL.parent, gguf_file=support.MODEL.name, dtype=torch.float32
        ).eval()
        file = self.folder / "document.kv"
        with kvasir.Model(support.MODEL) as gguf:
            tokens = document_ids(gguf, 4000)
            cache = transformers.DynamicCache(config=model.config)
            kt.prefill(model, tokens, cache)
            kt.save_session(model, cache, tokens, gguf, file)
            with gguf.load(file, verify=True) as session:
                self.assertEqual(len(session.tokens), tokens.shape[1])
                self.assertIn("4821907", session.ask(support.QUESTION).text)
            with self.assertRaises(kvasir.ModelMismatchError):  # other tokens
                kt.save_session(model, cache, tokens.flip(1), gguf, file)
            for layer in cache.layers:
                layer.keys = interleaved(layer.keys[0].transpose(0, 1)).transpose(0, 1)[None]
            with self.assertRaises(kvasir.ModelMismatchError):  # another order of channels
                kt.save_session(model, cache, tokens, gguf, file)

    @needs_gguf
    def test_the_library_answers_from_a_prefill_of_two_processes(self):
        ids_file, file = self.folder / "ids.pt", self.folder / "document.kv"
        with kvasir.Model(support.MODEL) as gguf:
            torch.save(document_ids(gguf, 3000), ids_file)
            self.in_two_processes(SESSION_WORKER, support.MODEL, ids_file, file)
            with gguf.load(file, verify=True) as session:
                self.assertIn("4821907", session.ask(support.QUESTION).text)


unittest.main()
