//! The store without a model, for an engine that brings its own weights.
use std::path::Path;

use kvasir_sys as sys;

use crate::ffi::{self, call, json, sized, Owned};
use crate::{AttentionOptions, CacheOptions, CallOptions, Error, LoadOptions, Result};

/// Keys and values of one sequence: the same pages, strategies and file as a session's. For each step of 1 to 4096 tokens (a chunk of the
/// prompt, or one token of the answer), [`Cache::update`] and then [`Cache::attention`] of every layer.
///
/// It serves one call at a time, from any thread; what only looks takes `&self`, and gets [`Error::Busy`] while another thread's call runs.
pub struct Cache {
    raw: Owned<sys::kv_cache>,
    shape: Shape,
}

/// What a cache is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 1 to 1024.
    pub layers: u32,
    /// Query heads, 1 to 1024; heads `h * heads / kv_heads` and on belong to key/value head `h`.
    pub heads: u32,
    /// A divisor of `heads`.
    pub kv_heads: u32,
    /// 1 to 256.
    pub head_dim: u32,
    /// That the sequence may hold, 1 to 2^30; memory is taken as it grows.
    pub max_tokens: u64,
    /// The caller's name for what makes the keys, such as a hash of its weights; [`Cache::load`] compares it.
    pub identity: [u8; 32],
}

/// A number of 16 bits as IEEE 754 has it, by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of an `f32`, by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// Numbers that a cache takes: `f32`, [`F16`], [`BF16`].
pub trait Number: Copy + private::Number {}

impl Number for f32 {}
impl Number for F16 {}
impl Number for BF16 {}

mod private {
    pub trait Number {
        const TYPE: u32;
    }
}

impl private::Number for f32 {
    const TYPE: u32 = super::sys::KV_F32;
}
impl private::Number for F16 {
    const TYPE: u32 = super::sys::KV_F16;
}
impl private::Number for BF16 {
    const TYPE: u32 = super::sys::KV_BF16;
}

impl Cache {
    /// An empty cache. `Error::BadArgument` (a shape or option out of its range), `Error::NoMemory`, `Error::Limit`; `Error::NotFound`,
    /// `Error::Permission`, `Error::NoSpace` (the spill folder).
    pub fn open(shape: &Shape, options: &CacheOptions) -> Result<Cache> {
        let (c_shape, raw) = (shape.raw(), options.raw()?);
        // SAFETY: shape and options live during the call.
        let raw = Owned::open(|out, error| unsafe { sys::kv_cache_open(&c_shape, &raw.value, out, error) })?;
        Ok(Cache { raw, shape: *shape })
    }

    /// A cache over a saved one, mapped. `Error::ModelMismatch` where its shape (but for heads) or identity is another; `window` and
    /// `kv_type` are the file's. Otherwise errors as of [`Model::load_with`](crate::Model::load_with).
    pub fn load(shape: &Shape, path: impl AsRef<Path>, options: &CacheOptions, load: &LoadOptions) -> Result<Cache> {
        let (c_shape, path, raw, call) = (shape.raw(), ffi::path(path.as_ref())?, options.raw()?, load.raw()?);
        // SAFETY: shape, path and options live during the call.
        let raw = Owned::open(|out, error| unsafe { sys::kv_cache_load(&c_shape, path.as_ptr(), &raw.value, &call.value, out, error) })?;
        Ok(Cache { raw, shape: *shape })
    }

    /// One layer's keys (after RoPE) and values of the step's tokens, `[tokens][kv_heads][head_dim]`, and, for the strategy "infllm", its
    /// queries `[tokens][heads][head_dim]`. The first update after a complete step begins a step, which is complete when every layer has
    /// had its update; the order of layers is free.
    ///
    /// `Error::BadArgument` (layer, sizes; a number that is not finite), `Error::BadState` (the layer has been updated; another number of
    /// tokens than the step has), `Error::ContextFull`, `Error::Limit`, `Error::NoMemory`, `Error::Corrupt`, `Error::NoSpace`, `Error::Io`.
    pub fn update<T: Number>(&mut self, layer: u32, k: &[T], v: &[T], q: Option<&[T]>) -> Result<()> {
        let tokens = self.tokens_of("k", k.len(), self.shape.kv_heads)?;
        for (name, given, heads) in [("v", Some(v), self.shape.kv_heads), ("q", q, self.shape.heads)] {
            match given.map(|array| self.tokens_of(name, array.len(), heads)) {
                Some(Ok(same)) if same == tokens => {}
                Some(Ok(other)) => return Err(Error::bad_argument(format!("{name} has {other} tokens where k has {tokens}"))),
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        let q = q.map_or(std::ptr::null(), |q| q.as_ptr());
        // SAFETY: the cache is open, the arrays are of its shape.
        call(|error| unsafe {
            sys::kv_cache_update(self.raw(), layer, T::TYPE, k.as_ptr().cast(), v.as_ptr().cast(), q.cast(), tokens, error)
        })
    }

    /// Attention of the step's queries in one layer, `q` and `out` `[tokens][heads][head_dim]`: query `i` sees the tokens before the step and
    /// those of the step up to its own. The layer has had its update in this step. A failed call leaves `out` as it was.
    ///
    /// `Error::BadArgument`, `Error::BadState` (no update in this step; the step is over), `Error::Cancelled`, `Error::NoMemory`,
    /// `Error::Corrupt`, `Error::Io`.
    pub fn attention<T: Number>(&mut self, layer: u32, q: &[T], out: &mut [T], options: &AttentionOptions) -> Result<()> {
        let (tokens, raw) = (self.tokens_of("q", q.len(), self.shape.heads)?, options.raw()?);
        if out.len() != q.len() {
            return Err(Error::bad_argument(format!("out has {} numbers where q has {}", out.len(), q.len())));
        }
        // SAFETY: the cache is open, the arrays are of its shape, the options live during the call.
        call(|error| unsafe {
            let (q, out) = (q.as_ptr().cast(), out.as_mut_ptr().cast());
            sys::kv_cache_attention(self.raw(), layer, T::TYPE, q, out, tokens, &raw.value, error)
        })
    }

    /// Goes back to the first `tokens` tokens, and drops a step that is not complete. `Error::BadArgument` when there are fewer.
    pub fn truncate(&mut self, tokens: u64) -> Result<()> {
        // SAFETY: the cache is open.
        call(|error| unsafe { sys::kv_cache_truncate(self.raw(), tokens, error) })
    }

    /// A second cache that begins as an exact copy, pages shared, with the same options. `Error::BadState` while a step is not complete.
    pub fn fork(&mut self) -> Result<Cache> {
        // SAFETY: the cache is open.
        let raw = Owned::open(|out, error| unsafe { sys::kv_cache_fork(self.raw(), std::ptr::null_mut(), out, error) })?;
        Ok(Cache { raw, shape: self.shape })
    }

    /// Writes the cache to a file, atomically, as [`Session::save`](crate::Session::save) does. `Error::BadState` while a step is not complete.
    pub fn save(&mut self, path: impl AsRef<Path>, options: &CallOptions) -> Result<()> {
        let (path, raw) = (ffi::path(path.as_ref())?, options.raw()?);
        // SAFETY: the cache is open, path and options live during the call.
        call(|error| unsafe { sys::kv_cache_save(self.raw(), path.as_ptr(), &raw.value, error) })
    }

    /// JSON: tokens (of complete steps), pages, strategy, budget, bytes of memory.
    pub fn stats(&self) -> Result<String> {
        // SAFETY: the cache is open; the output is as long as it is said to be.
        json(|out, capacity, size, error| unsafe { sys::kv_cache_stats(self.raw(), out, capacity, size, error) })
    }

    /// What the cache is of.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How many tokens an array is of; the library takes pointers alone.
    fn tokens_of(&self, name: &str, numbers: usize, heads: u32) -> Result<u32> {
        let row = heads as usize * self.shape.head_dim as usize; // at most 1024 * 256: the cache was opened with them
        match u32::try_from(numbers / row) {
            Ok(tokens) if numbers % row == 0 => Ok(tokens),
            _ => Err(Error::bad_argument(format!("{name} has {numbers} numbers: a token has {row}"))),
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_cache {
        self.raw.raw()
    }
}

impl Shape {
    fn raw(&self) -> sys::kv_cache_shape {
        sys::kv_cache_shape {
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            max_tokens: self.max_tokens,
            identity: self.identity,
            ..sized()
        }
    }
}
