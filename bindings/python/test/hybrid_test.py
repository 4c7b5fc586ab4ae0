"""Windows and states of transformers' hybrid models continue in the library.

The models are those of the fixtures, in float32 on both sides.
"""
import pathlib
import sys
import tempfile
import unittest

import support

try:
    import gguf  # noqa: F401, of fixture_models
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import fixture_models
import kvasir
import kvasir.experimental
import kvasir.transformers as kt
from kvasir import Precision, StateLayout

assert support.kvasir is kvasir
DOCUMENT, MORE, ANSWER = 1400, 20, 16  # tokens
WINDOWED = ("gemma3", "gpt-oss")


def ids(count):
    return torch.randint(3, 250, (1, count), generator=torch.Generator().manual_seed(count))


def apart(found, expected):
    """Relative L2 difference of the median token.

    Of some tokens the router's second and third expert are nearly equal: int8 keys swap them.
    """
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


def logits_of(session, tokens):
    return torch.from_numpy(kvasir.experimental.prefill_logits(session, tokens[0].numpy()))


class Hybrid(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.models = {name: fixture_models.of(name) for name in fixture_models.NAMES}
        cls.tokens = ids(DOCUMENT + MORE)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name) / "document.kv"

    def prefilled(self, name, tokens=DOCUMENT):
        model = self.models[name][0]
        cache = transformers.DynamicCache(config=model.config)
        kt.prefill(model, self.tokens[:, :tokens], cache)
        return model, cache

    def answer(self, model, cache, logits):
        """Tokens of transformers after the cache, the most probable ones."""
        found = []
        for _ in range(ANSWER):
            found.append(int(logits.argmax()))
            with torch.no_grad():
                logits = model(torch.tensor([[found[-1]]]), cache=cache).logits[0, -1]
        return found

    def check_continues(self, name, limit, **options):
        document, more = self.tokens[:, :DOCUMENT], self.tokens[:, DOCUMENT:]
        model, cache = self.prefilled(name)
        with kvasir.Model(self.models[name][1]) as library:
            kt.save_session(model, cache, document, library, self.file, **options)
            with torch.no_grad():
                expected = model(more, cache=cache).logits[0]
            with library.load(self.file, verify=True) as session:
                self.assertEqual(session.stats().tokens, DOCUMENT)
                found = logits_of(session, more)
                with session.fork() as fork:
                    answer = [fork.next(temperature=0).id for _ in range(ANSWER)]
            with library.session(**options) as session:
                session.prefill_tokens(document[0].numpy())
                own = logits_of(session, more)
        self.assertLess(apart(found, expected), limit)
        self.assertLess(apart(found, own), limit)
        if limit < 1e-3:
            self.assertEqual(answer, self.answer(model, cache, expected[-1]))

    def test_the_models_are_those_of_the_fixtures(self):
        for name, (model, _) in self.models.items():
            with self.subTest(name), torch.no_grad():
                tokens, positions, expected = fixture_models.reference(name)
                self.assertLess(apart(model(tokens).logits[0, positions], expected), 2e-5)

    def test_a_prefill_of_transformers_continues_in_the_library(self):
        for name in fixture_models.NAMES:
            with self.subTest(name):
                self.check_continues(name, 2e-5, precision=Precision.F32)

    def test_it_continues_with_keys_and_values_in_pages(self):
        for name in fixture_models.NAMES:
            with self.subTest(name):
                self.check_continues(name, 0.03)

    def test_the_library_wants_the_rest_of_a_prefill_that_it_did_not_watch(self):
        for name in ("qwen3next", "gemma3"):
            with self.subTest(name), kvasir.Model(self.models[name][1]) as library:
                model = self.models[name][0]
                document = self.tokens[:, :DOCUMENT]
                cache = transformers.DynamicCache(config=model.config)
                with torch.no_grad():
                    model(document, cache=cache, use_cache=True)
                with self.assertRaises(kvasir.UnsupportedError):
                    kt.save_session(model, cache, document, library, self.file)
                cache = transformers.DynamicCache(config=model.config)
                with torch.no_grad():
                    model(document[:, :200], cache=cache, use_cache=True)
                kt.save_session(model, cache, document, library, self.file)
                self.assertEqual(cache.get_seq_length(), DOCUMENT)
                with library.load(self.file) as session:
                    self.assertEqual(len(session.tokens), DOCUMENT)

    def test_short_documents_are_saved(self):
        for name in ("falcon-h1", "gpt-oss"):
            for count in (2, 10, 40):
                with self.subTest(name, count=count):
                    model, cache = self.prefilled(name, count)
                    with kvasir.Model(self.models[name][1]) as library:
                        kt.save_session(model, cache, self.tokens[:, :count], library, self.file)

    def test_another_prefill_is_refused(self):
        """Also where only states of the last layers are wrong, of which no key depends."""
        for name in fixture_models.NAMES:
            with self.subTest(name), kvasir.Model(self.models[name][1]) as library:
                model, cache = self.prefilled(name)
                other = self.tokens[:, :DOCUMENT].flip(1)
                with self.assertRaises(kvasir.ModelMismatchError):
                    kt.save_session(model, cache, other, library, self.file)
                last = cache.layers[-1]
                if name in WINDOWED or not hasattr(last, "conv_states"):
                    continue
                last.conv_states[0] = last.conv_states[0].flip(1)
                with self.assertRaises(kvasir.ModelMismatchError):
                    kt.save_session(model, cache, self.tokens[:, :DOCUMENT], library, self.file)

    def test_what_is_no_state_is_refused(self):
        model, cache = self.prefilled("lfm2")
        with kvasir.Model(self.models["lfm2"][1]) as library:
            state = cache._kvasir_snapshot.layers[0].inputs
            state[0, 3, 1] = float("nan")
            with self.assertRaises(kvasir.BadArgumentError):
                kt.save_session(model, cache, self.tokens[:, :DOCUMENT], library, self.file)
            wrong = kvasir.LayerState(0, StateLayout.INPUTS, state[0].numpy().astype("float64"))
            with kvasir.Cache(kvasir.CacheShape(1, 4, 2, 16, 100)) as store:
                with self.assertRaises(kvasir.BadArgumentError):
                    library.session_from_checkpoint(store, [3], kvasir.Checkpoint(1, [wrong]))
        with self.assertRaises(kvasir.UnsupportedError):
            kt.save_cache(model, cache, self.file)

    def test_a_static_cache_is_refused(self):
        model = self.models["gemma3"][0]
        cache = transformers.StaticCache(config=model.config, max_cache_len=2000)
        with torch.no_grad():
            model(self.tokens[:, :100], cache=cache, use_cache=True)
        with kvasir.Model(self.models["gemma3"][1]) as library:
            with self.assertRaises(kvasir.UnsupportedError):
                kt.save_session(model, cache, self.tokens[:, :200], library, self.file)


unittest.main()
