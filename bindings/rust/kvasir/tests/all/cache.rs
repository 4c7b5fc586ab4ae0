//! Caches without a model: attention by its definition, and checked sizes.
use kvasir::{
    AttentionOptions, Cache, CacheOptions, CancelToken, Checkpoint, Control, Error, LayerState,
    Model, SessionOptions, Shape, StateLayout, Tokenize, BF16, F16,
};

use crate::support::Folder;

const SHAPE: Shape =
    Shape { layers: 2, heads: 4, kv_heads: 2, head_dim: 8, max_tokens: 1000, identity: [7; 32] };

/// `count` numbers between -1 and 1.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Attention of head `head` of the last token by its definition.
fn expected(k: &[f32], v: &[f32], q: &[f32], head: usize) -> Vec<f32> {
    let (dim, kv_heads, group) = (8, 2, 2);
    let q = &q[q.len() - (4 - head) * dim..][..dim];
    let tokens = k.len() / (kv_heads * dim);
    let rows: Vec<usize> = (0..tokens).map(|t| (t * kv_heads + head / group) * dim).collect();
    let dot = |row: &usize| (0..dim).map(|i| q[i] * k[row + i]).sum::<f32>() / (dim as f32).sqrt();
    let weights: Vec<f32> = rows.iter().map(|row| dot(row).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let output = |i| rows.iter().zip(&weights).map(|(row, w)| w * v[row + i]).sum::<f32>() / sum;
    (0..dim).map(output).collect()
}

fn filled() -> (Cache, Vec<f32>, Vec<f32>, Vec<f32>) {
    let mut cache = Cache::open(&SHAPE, &CacheOptions::new().threads(1).decode("full")).unwrap();
    let (k, v, q) = (numbers(20 * 16, 1), numbers(20 * 16, 2), numbers(20 * 32, 3));
    for layer in 0..2 {
        cache.update(layer, &k, &v, Some(&q)).unwrap();
    }
    (cache, k, v, q)
}

#[test]
fn keys_that_are_not_the_models_make_no_session() {
    let model = crate::support::model();
    let info = model.info().unwrap();
    let shape = Shape {
        layers: info.layers,
        heads: info.heads,
        kv_heads: info.kv_heads,
        head_dim: info.head_dim,
        max_tokens: 1000,
        identity: [0; 32],
    };
    let how = Tokenize { document: true, ..Tokenize::default() };
    let tokens = model.tokenize("Some text of a document.", how).unwrap();
    let mut cache = Cache::open(&shape, &CacheOptions::new()).unwrap();
    let rows = numbers(tokens.len() * (info.kv_heads * info.head_dim) as usize, 5);
    for layer in 0..info.layers {
        cache.update(layer, &rows, &rows, None).unwrap();
    }
    let mut over = |tokens: &[i32]| {
        let control = Control::new().document(true);
        model.session_from_cache(&mut cache, tokens, &SessionOptions::new(), control)
    };
    assert!(matches!(over(&tokens), Err(Error::ModelMismatch(_))));
    assert!(matches!(over(&tokens[1..]), Err(Error::BadArgument(_))));
}

/// A model of short convolutions, of which layer 2 attends.
#[test]
fn wrong_states_of_another_engine_are_refused() {
    let path = crate::support::examples().join("../test/fixtures/models/lfm2.gguf");
    let model = Model::open(path).unwrap();
    let shape = Shape { layers: 1, heads: 4, kv_heads: 2, head_dim: 16, ..SHAPE };
    let mut cache = Cache::open(&shape, &CacheOptions::new()).unwrap();
    let tokens: Vec<i32> = (0..40).map(|i| i * 7 % 250 + 3).collect();
    let rows = numbers(40 * 32, 5);
    cache.update(0, &rows, &rows, None).unwrap();
    let (zeros, halves, mut wrong) = (vec![0.0f32; 128], vec![F16(0); 128], vec![0.0f32; 128]);
    let state = |layer| LayerState::new(layer, StateLayout::Inputs, &zeros);
    let at = |tokens| Checkpoint { tokens, states: vec![state(0), state(1), state(3)] };
    let end = [0, 1, 3].map(|layer| LayerState::new(layer, StateLayout::Inputs, &halves));
    let end = Checkpoint { tokens: 40, states: end.to_vec() };
    let mut over = |start: &Checkpoint, end: Option<&Checkpoint>| {
        let (options, control) = (SessionOptions::new(), Control::new().document(true));
        model.session_from_checkpoint(&mut cache, &tokens, start, end, &options, control)
    };
    assert!(matches!(over(&at(20), Some(&end)), Err(Error::ModelMismatch(_))));
    wrong[5] = f32::NAN;
    let count = LayerState::new(0, StateLayout::Inputs, &zeros[1..]);
    let layout = LayerState::new(0, StateLayout::KeyValue, &zeros);
    let nan = LayerState::new(0, StateLayout::Inputs, &wrong);
    for (first, text) in [(count, "count is 127"), (layout, "has none"), (nan, "NaN, infinity")] {
        let start = Checkpoint { tokens: 20, states: vec![first, state(1), state(3)] };
        match over(&start, None) {
            Err(why @ Error::BadArgument(_)) => assert!(why.to_string().contains(text), "{why}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    for (start, end) in [(at(40), None), (at(20), Some(at(39)))] {
        assert!(matches!(over(&start, end.as_ref()), Err(Error::BadArgument(_))));
    }
    let none = Checkpoint { tokens: 20, states: Vec::new() };
    assert!(matches!(over(&none, None), Err(Error::BadArgument(_))));
    assert!(format!("{end:?}").contains("count: 128"));
}

#[test]
fn attention_agrees_with_its_definition() {
    let (mut cache, k, v, q) = filled();
    let mut out = vec![f32::NAN; q.len()];
    cache.attention(1, &q, &mut out).unwrap();
    for head in 0..4 {
        let (got, right) = (&out[out.len() - (4 - head) * 8..][..8], expected(&k, &v, &q, head));
        let same = got.iter().zip(&right).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(same, "head {head}: {got:?} {right:?}");
    }
    let mut sharper = vec![0.0; q.len()];
    let options = AttentionOptions::new().scale(10.0);
    cache.attention_with(1, &q, &mut sharper, &options, Control::new()).unwrap();
    assert_ne!(out, sharper);
    let stats = cache.stats().unwrap();
    assert_eq!((stats.tokens, stats.max_tokens, stats.threads), (20, 1000, 1));
    assert_eq!(stats.decode_strategy, "full");
    assert!(cache.stats_json().unwrap().contains("\"tokens\":20"));
    assert!(format!("{cache:?}").contains("heads: 4"));
}

#[test]
fn arrays_of_16_bits_are_accepted() {
    let mut cache = Cache::open(&SHAPE, &CacheOptions::new().threads(1)).unwrap();
    let upper = |x: &f32| BF16((x.to_bits() >> 16) as u16);
    let bf16 = |array: Vec<f32>| -> Vec<BF16> { array.iter().map(upper).collect() };
    let (k, v, q) = (bf16(numbers(16, 1)), bf16(numbers(16, 2)), bf16(numbers(32, 3)));
    let one = vec![F16(0x3C00); 16]; // 1.0
    cache.update(0, &k, &v, None).unwrap();
    cache.update(1, &one, &one, None).unwrap();
    let mut out = vec![BF16(0); 32];
    cache.attention(0, &q, &mut out).unwrap();
    assert_eq!(out[..8], v[..8], "one token gets all attention");
    let mut halves = vec![F16(0); 32];
    cache.attention(1, &[F16(0x3C00); 32], &mut halves).unwrap();
    assert_eq!(halves, vec![F16(0x3C00); 32]);
}

#[test]
fn a_cache_is_saved_loaded_forked_and_truncated() {
    let (folder, (mut cache, _, _, q)) = (Folder::new(), filled());
    let path = folder.path("a.kv");
    cache.save(&path).unwrap();
    let (options, control) = (CacheOptions::new().decode("full"), Control::new().verify(true));
    let mut loaded = Cache::load(&SHAPE, &path, &options, control).unwrap();
    assert_eq!(*loaded.shape(), SHAPE);
    let mut fork = loaded.fork().unwrap();
    fork.truncate(5).unwrap();
    assert_eq!(fork.stats().unwrap().tokens, 5);
    assert!(matches!(fork.truncate(6), Err(Error::BadArgument(_))));
    drop(loaded.fork().unwrap());
    let other = Shape { identity: [8; 32], ..SHAPE };
    let error = Cache::load(&other, &path, &CacheOptions::new(), Control::new()).unwrap_err();
    assert!(matches!(error, Error::ModelMismatch(_)) && error.is_stale(), "{error}");
    let mut out = vec![0.0; q.len()];
    assert!(matches!(loaded.attention(0, &q, &mut out), Err(Error::BadState(_))), "no step");
}

#[test]
fn wrong_sizes_never_reach_the_library() {
    let (mut cache, k, v, q) = filled();
    let refused = |result: kvasir::Result<()>, part: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::BadArgument(_)), "{error}");
        assert!(error.message().contains(part), "{error}");
    };
    refused(cache.update(0, &k[1..], &v, None), "k has 319 numbers");
    refused(cache.update(0, &k, &v[16..], None), "v has 19 tokens where k has 20");
    refused(cache.update(0, &k, &v, Some(&q[..32])), "q has 1 tokens");
    refused(cache.update::<f32>(0, &[], &[], None), "");
    refused(cache.update(2, &k, &v, None), "");
    refused(cache.update(0, &[f32::NAN; 16], &[0.0; 16], None), "");
    refused(cache.attention(0, &q, &mut vec![0.0; q.len() - 32]), "out has");
    let cancel = CancelToken::new().unwrap();
    cancel.fire();
    let mut out = vec![5.0; q.len()];
    let (options, control) = (AttentionOptions::new(), Control::new().cancel(&cancel));
    let result = cache.attention_with(0, &q, &mut out, &options, control);
    assert!(matches!(result, Err(Error::Cancelled(_))), "{result:?}");
    assert!(out.iter().all(|&x| x == 5.0), "unchanged");
    for shape in [Shape { kv_heads: 3, ..SHAPE }, Shape { kv_heads: 0, heads: 0, ..SHAPE }] {
        let opened = Cache::open(&shape, &CacheOptions::new());
        assert!(matches!(opened, Err(Error::BadArgument(_))));
    }
}
