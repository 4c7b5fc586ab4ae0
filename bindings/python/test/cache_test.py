"""The store without a model: numpy arrays in and out, against attention in numpy."""
import unittest

from support import Case  # first: skips where there is no numpy
import numpy as np

import kvasir
from kvasir import CacheShape, Precision, NumberType, Status

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
SHAPE = CacheShape(LAYERS, HEADS, KV_HEADS, DIM, 4096, bytes(range(32)))


def random(tokens, heads, dtype=np.float32):
    return np.random.default_rng(tokens).standard_normal((tokens, heads, DIM)).astype(dtype)


def reference(q, k, v, scale=DIM**-0.5, softcap=0.0):
    """Causal attention of the last len(q) tokens, in float64."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    out = np.empty_like(q)
    for h in range(HEADS):
        kv = h * KV_HEADS // HEADS
        scores = scale * q[:, h] @ k[:, kv].T
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        seen = np.arange(len(k))[None] <= np.arange(len(k) - len(q), len(k))[:, None]
        weights = np.where(seen, np.exp(scores - scores.max(1, keepdims=True)), 0)
        out[:, h] = weights / weights.sum(1, keepdims=True) @ v[:, kv]
    return out


class Caches(Case):
    def fill(self, cache, steps=(300, 1, 1), number=np.float32):
        """Reads made-up tokens; the last step's queries, and all keys and values of the last layer."""
        keys, values = [], []
        for tokens in steps:
            for layer in range(LAYERS):
                k, v, q = random(tokens, KV_HEADS, number), random(tokens + 7, KV_HEADS, number)[7:] + number(layer), random(tokens, HEADS, number)
                cache.update(layer, k, v, q)
                out = cache.attention(layer, q)
            keys.append(k), values.append(v)
        return q, np.concatenate(keys), np.concatenate(values), out

    def test_keys_that_are_not_the_model_s_make_no_session(self):
        info = self.model.info
        shape = CacheShape(info.layers, info.heads, info.kv_heads, info.head_dim, 4096)
        tokens = self.model.tokenize("Some text of a document.", document=True)
        self.assertEqual(list(tokens), list(self.read("Some text of a document.")))
        with kvasir.Cache(shape) as cache:
            for layer in range(info.layers):
                rows = random(len(tokens), info.kv_heads)[:, :, : info.head_dim].copy()
                cache.update(layer, rows, rows)
            with self.assertRaises(kvasir.ModelMismatchError) as told:
                self.model.session_from_cache(cache, tokens, document=True)
            self.assertIn("other weights, tokens or positions", str(told.exception))
            with self.assertRaises(kvasir.BadArgumentError):
                self.model.session_from_cache(cache, tokens[1:])

    def read(self, text):
        with self.model.session() as session:
            session.prefill(text)
            return session.tokens

    def test_attention_is_numpy_s(self):
        for number, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
            with kvasir.Cache(SHAPE, precision=Precision.F32) as cache:
                q, k, v, out = self.fill(cache, number=number)
                self.assertEqual(out.dtype, number)
                np.testing.assert_allclose(out, reference(q, k, v), atol=tolerance)
                again = np.empty_like(q)
                self.assertIs(cache.attention(1, q, again, scale=0.3, softcap=2.0), again)
                np.testing.assert_allclose(again, reference(q, k, v, 0.3, 2.0), atol=tolerance)
                self.assertEqual(cache.stats().tokens, 302)

    def test_bfloat16_is_read_and_written_as_it_is(self):
        def bits(a):
            return (a.view(np.uint32) >> 16).astype(np.uint16)

        k, v, q = random(50, KV_HEADS), random(51, KV_HEADS)[1:], random(50, HEADS)
        with kvasir.Cache(SHAPE) as cache:
            cache.update(0, bits(k), bits(v), number_type=NumberType.BF16)
            out = cache.attention(0, bits(q), number_type=NumberType.BF16)
            self.assertEqual(out.dtype, np.uint16)
            wide = (out.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(wide, reference(q, k, v), atol=0.05)
            self.assert_status(Status.BAD_ARGUMENT, "uint16", cache.attention, 0, bits(q))

    def test_arrays_that_would_be_read_past_their_end_are_refused(self):
        k, q = random(5, KV_HEADS), random(5, HEADS)
        frozen = np.empty_like(q)
        frozen.flags.writeable = False
        with kvasir.Cache(SHAPE) as cache:
            for bad in (k[:, :1], k[..., :32], k[0], k.astype(np.float64), k[::2], k.transpose(1, 0, 2), k.astype(">f4")):
                self.assert_status(Status.BAD_ARGUMENT, "k ", cache.update, 0, bad, k)
            self.assert_status(Status.BAD_ARGUMENT, "v has", cache.update, 0, k, k[:4])
            self.assert_status(Status.BAD_ARGUMENT, "v has", cache.update, 0, k, k.astype(np.float16))
            self.assert_status(Status.BAD_ARGUMENT, "q has", cache.update, 0, k, k, q[:4])
            self.assert_status(Status.BAD_ARGUMENT, "", cache.update, LAYERS, k, k)
            self.assert_status(Status.BAD_ARGUMENT, "", cache.update, -1, k, k)
            self.assert_status(Status.BAD_ARGUMENT, "", cache.update, 0, k * np.float32("inf"), k)
            self.assert_status(Status.BAD_STATE, "", cache.attention, 0, q)
            with self.assertRaises(TypeError):
                cache.update(0, k.tolist(), k)
            cache.update(0, k, k)
            for out in (frozen, q[:4].copy(), q, q.astype(np.float16)):
                self.assert_status(Status.BAD_ARGUMENT, "out ", cache.attention, 0, q, out)
            self.assert_status(Status.BAD_STATE, "", cache.update, 0, k, k)
            self.assert_status(Status.BAD_STATE, "", cache.save, self.folder / "c.kv")
            cache.truncate(0)
            self.assertEqual(cache.stats().step_tokens, 0)
        self.assert_status(Status.BAD_ARGUMENT, "is closed", cache.update, 0, k, k)
        self.assert_status(Status.BAD_ARGUMENT, "is closed", cache.attention, 0, q)
        for function in (cache.fork, cache.stats, lambda: cache.truncate(0), lambda: cache.save("c.kv")):
            self.assert_status(Status.BAD_ARGUMENT, "is closed", function)
        self.assert_status(Status.BAD_ARGUMENT, "identity", kvasir.Cache, SHAPE._replace(identity=b"short"))
        self.assert_status(Status.BAD_ARGUMENT, "", kvasir.Cache, SHAPE._replace(kv_heads=3))
        self.assert_status(Status.BAD_ARGUMENT, "", kvasir.Cache, SHAPE._replace(heads=2**32))
        self.assert_status(Status.BAD_ARGUMENT, "", kvasir.Cache, SHAPE, strategy="snapkv")

    def test_a_saved_cache_and_a_fork_go_on_alike(self):
        path = self.folder / "cache.kv"
        with kvasir.Cache(SHAPE, decode=kvasir.Strategy("bounded", budget_fraction=0.5)) as cache:
            self.fill(cache, (700, 1))
            cache.save(path)
            fork = cache.fork()
        k, v, q = random(1, KV_HEADS), random(2, KV_HEADS)[1:], random(1, HEADS)
        options = {"strategy": "bounded", "budget_fraction": 0.5}
        with fork, kvasir.Cache.load(SHAPE, path, verify=True, **options) as loaded:
            for cache in (fork, loaded):
                cache.update(0, k, v)
            np.testing.assert_array_equal(fork.attention(0, q), loaded.attention(0, q))
            self.assertEqual(loaded.stats().tokens, 701)
            with kvasir.Cancel() as token:
                token.fire()
                self.assert_status(Status.CANCELLED, "", loaded.attention, 0, q, cancel=token)
        self.assert_status(Status.MODEL_MISMATCH, "", kvasir.Cache.load, SHAPE._replace(identity=bytes(32)), path)
        self.assert_status(Status.MODEL_MISMATCH, "", self.model.load, path)
        self.prefilled().save(path)
        self.assert_status(Status.MODEL_MISMATCH, "", kvasir.Cache.load, SHAPE, path)


unittest.main()
