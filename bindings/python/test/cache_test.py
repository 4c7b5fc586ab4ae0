"""A KV cache without a model: numpy arrays in and out, against attention in numpy."""
import dataclasses
import unittest

from support import Case  # first: skips where there is no numpy
import numpy as np

import kvasir
from kvasir import CacheShape, NumberType, Precision, Status, Strategy

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
        last = np.arange(len(k) - len(q), len(k))[:, None]
        weights = np.where(np.arange(len(k))[None] <= last, np.exp(scores - scores.max()), 0)
        out[:, h] = weights / weights.sum(1, keepdims=True) @ v[:, kv]
    return out


class Caches(Case):
    def fill(self, cache, steps=(300, 1, 1), number=np.float32):
        """Adds random tokens.

        Returns the queries of the last step, all keys and values of the last layer, and the
        attention of the last step in that layer.
        """
        keys, values = [], []
        for tokens in steps:
            for layer in range(LAYERS):
                k, q = random(tokens, KV_HEADS, number), random(tokens, HEADS, number)
                v = random(tokens + 7, KV_HEADS, number)[7:] + number(layer)
                cache.update(layer, k, v, q)
                out = cache.attention(layer, q)
            keys.append(k)
            values.append(v)
        return q, np.concatenate(keys), np.concatenate(values), out

    def test_keys_of_another_model_are_refused(self):
        info = self.model.info
        shape = CacheShape(info.layers, info.heads, info.kv_heads, info.head_dim, 4096)
        text = "Some text of a document."
        tokens = self.model.tokenize(text, document=True)
        with self.model.session() as session:
            session.prefill(text)
            np.testing.assert_array_equal(session.tokens, tokens)
        with kvasir.Cache(shape) as cache:
            for layer in range(info.layers):
                rows = random(len(tokens), info.kv_heads)[:, :, : info.head_dim].copy()
                cache.update(layer, rows, rows)
            make = self.model.session_from_cache
            self.assert_status(Status.MODEL_MISMATCH, make, cache, tokens, document=True)
            self.assert_status(Status.BAD_ARGUMENT, make, cache, tokens[1:])

    def test_attention_agrees_with_numpy(self):
        for number, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
            with kvasir.Cache(SHAPE, precision=Precision.F32) as cache:
                q, k, v, out = self.fill(cache, number=number)
                self.assertEqual(out.dtype, number)
                np.testing.assert_allclose(out, reference(q, k, v), atol=tolerance)
                again = np.empty_like(q)
                self.assertIs(cache.attention(1, q, again, scale=0.3, softcap=2.0), again)
                np.testing.assert_allclose(again, reference(q, k, v, 0.3, 2.0), atol=tolerance)
                stats = cache.stats()
                self.assertEqual((stats.tokens, stats.max_tokens), (302, 4096))
                self.assertEqual(cache.stats_json()["tokens"], 302)
                self.assertEqual(repr(cache), "<kvasir.Cache: 302 tokens>")

    def test_bfloat16_is_used_in_place(self):
        def bits(a):
            return (a.view(np.uint32) >> 16).astype(np.uint16)

        k, v, q = random(50, KV_HEADS), random(51, KV_HEADS)[1:], random(50, HEADS)
        with kvasir.Cache(SHAPE) as cache:
            cache.update(0, bits(k), bits(v), number_type=NumberType.BF16)
            out = cache.attention(0, bits(q), number_type=NumberType.BF16)
            self.assertEqual(out.dtype, np.uint16)
            wide = (out.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(wide, reference(q, k, v), atol=0.05)
            self.assert_status(Status.BAD_ARGUMENT, cache.attention, 0, bits(q))

    def test_arrays_that_the_library_would_read_past_their_end_are_refused(self):
        k, q = random(5, KV_HEADS), random(5, HEADS)
        frozen = np.empty_like(q)
        frozen.flags.writeable = False
        bad = Status.BAD_ARGUMENT
        with kvasir.Cache(SHAPE) as cache:
            for rows in (
                k[:, :1],
                k[..., :32],
                k[0],
                k.astype(np.float64),
                k[::2],
                k.transpose(1, 0, 2),
                k.astype(">f4"),
            ):
                self.assert_status(bad, cache.update, 0, rows, k)
            self.assert_status(bad, cache.update, 0, k, k[:4])
            self.assert_status(bad, cache.update, 0, k, k.astype(np.float16))
            self.assert_status(bad, cache.update, 0, k, k, q[:4])
            self.assert_status(bad, cache.update, LAYERS, k, k)
            self.assert_status(bad, cache.update, -1, k, k)
            self.assert_status(bad, cache.update, 0, k * np.float32("inf"), k)
            self.assert_status(Status.BAD_STATE, cache.attention, 0, q)
            with self.assertRaises(TypeError):
                cache.update(0, k.tolist(), k)
            cache.update(0, k, k)
            for out in (frozen, q[:4].copy(), q, q.astype(np.float16)):
                self.assert_status(bad, cache.attention, 0, q, out)

    def test_a_step_has_one_update_per_layer_and_ends_complete(self):
        k, q = random(5, KV_HEADS), random(5, HEADS)
        with kvasir.Cache(SHAPE) as cache:
            cache.update(0, k, k)
            self.assert_status(Status.BAD_STATE, cache.update, 0, k, k)
            self.assert_status(Status.BAD_STATE, cache.save, self.folder / "c.kv")
            cache.truncate(0)
            self.assertEqual(cache.stats().step_tokens, 0)
        self.assert_closed(cache.update, 0, k, k)
        self.assert_closed(cache.attention, 0, q)
        self.assert_closed(cache.truncate, 0)
        self.assert_closed(cache.save, "c.kv")
        for function in (cache.fork, cache.stats, cache.stats_json):
            self.assert_closed(function)

    def test_shapes_and_strategies_that_do_not_fit_are_refused(self):
        for change in ({"identity": b"short"}, {"kv_heads": 3}, {"heads": 2**32}):
            shape = dataclasses.replace(SHAPE, **change)
            self.assert_status(Status.BAD_ARGUMENT, kvasir.Cache, shape)
        for decode in ("snapkv", "ood", Strategy("bounded", exact_tokens=5)):
            self.assert_status(Status.BAD_ARGUMENT, kvasir.Cache, SHAPE, decode=decode)

    def test_a_saved_cache_and_a_fork_continue_alike(self):
        path = self.folder / "cache.kv"
        decode = Strategy("bounded", budget_fraction=0.5)
        with kvasir.Cache(SHAPE, decode=decode) as cache:
            self.fill(cache, (700, 1))
            cache.save(path)
            fork = cache.fork()
        k, v, q = random(1, KV_HEADS), random(2, KV_HEADS)[1:], random(1, HEADS)
        with fork, kvasir.Cache.load(SHAPE, path, verify=True, decode=decode) as loaded:
            for cache in (fork, loaded):
                cache.update(0, k, v)
            np.testing.assert_array_equal(fork.attention(0, q), loaded.attention(0, q))
            self.assertEqual(loaded.stats().tokens, 701)
            with kvasir.Cancel() as token:
                token.fire()
                self.assert_status(Status.CANCELLED, loaded.attention, 0, q, cancel=token)
        other = dataclasses.replace(SHAPE, identity=bytes(32))
        self.assert_status(Status.MODEL_MISMATCH, kvasir.Cache.load, other, path)
        self.assert_status(Status.MODEL_MISMATCH, self.model.load, path)
        self.prefilled().save(path)
        self.assert_status(Status.MODEL_MISMATCH, kvasir.Cache.load, SHAPE, path)


unittest.main()
