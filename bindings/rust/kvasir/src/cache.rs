//! KV caches without a model, for an engine that brings its own weights.
use std::fmt;
use std::path::Path;
use std::ptr::null;

use kvasir_sys as sys;

use crate::ffi::{self, call, json, sized, Owned};
use crate::{AttentionOptions, CacheOptions, CacheStats, Control, Error, Result};

/// A KV cache for an engine that brings its own weights: the pages, strategies and file of a
/// session.
///
/// Each step has 1 to 4096 tokens: a chunk of the prompt, or one token of the answer. For each
/// layer the engine calls [`Cache::update`] and then [`Cache::attention`]. A cache serves one call
/// at a time, from any thread. Methods that take `&self` return [`Error::Busy`] while a call of
/// another thread runs.
pub struct Cache {
    raw: Owned<sys::kv_cache>,
    shape: Shape,
}

/// Shape of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// 1 to 1024.
    pub layers: u32,
    /// Query heads, 1 to 1024. KV head `h` serves the query heads from `h * heads / kv_heads` on.
    pub heads: u32,
    /// A divisor of `heads`.
    pub kv_heads: u32,
    /// 1 to 512.
    pub head_dim: u32,
    /// 1 to 2^30; memory grows with the sequence.
    pub max_tokens: u64,
    /// The caller's name of what makes the keys, such as a hash of its weights; [`Cache::load`]
    /// compares it.
    pub identity: [u8; 32],
}

/// Bits of an IEEE 754 number of 16 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper 16 bits of an `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// Element types of the caller's arrays: `f32`, [`F16`], [`BF16`].
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
    /// Creates an empty cache.
    ///
    /// # Errors
    /// `BadArgument` (shape, options), `NoMemory`, `Limit` (threads; the memory limit);
    /// `NotFound`, `Permission`, `NoSpace` (the spill directory).
    pub fn open(shape: &Shape, options: &CacheOptions) -> Result<Cache> {
        let (c_shape, raw) = (shape.raw(), options.raw()?);
        // SAFETY: shape and options live during the call.
        let raw = Owned::open(|out, error| unsafe {
            sys::kv_cache_open(&c_shape, &raw.value, out, error)
        })?;
        Ok(Cache { raw, shape: *shape })
    }

    /// Creates a cache from a file by mapping it. Window and precision come from the file. The
    /// control may have [`Control::verify`] and its progress.
    ///
    /// # Errors
    /// `ModelMismatch` (another shape or identity; query heads are not compared), and those of
    /// [`Model::load_with`](crate::Model::load_with) and [`Cache::open`].
    pub fn load(
        shape: &Shape,
        path: impl AsRef<Path>,
        options: &CacheOptions,
        mut control: Control,
    ) -> Result<Cache> {
        let (c_shape, path) = (shape.raw(), ffi::path(path.as_ref())?);
        let (raw, control) = (options.raw()?, control.raw());
        // SAFETY: shape, path, options and control live during the call.
        let raw = Owned::open(|out, error| unsafe {
            sys::kv_cache_load(&c_shape, path.as_ptr(), &raw.value, &control, out, error)
        })?;
        Ok(Cache { raw, shape: *shape })
    }

    /// Adds one layer's keys (after RoPE) and values of the step's tokens,
    /// `[tokens][kv_heads][head_dim]`. `q` has the queries, `[tokens][heads][head_dim]`, for the
    /// strategies that ask for them.
    ///
    /// The first update after a complete step begins a step. A step is complete when every layer
    /// has its update, in any order.
    ///
    /// # Errors
    /// `BadArgument` (layer, sizes; NaN, infinity, or a magnitude over 1e30), `BadState` (the layer
    /// has its update; the step has another number of tokens), `ContextFull`, `Limit` (the memory
    /// limit), `NoMemory`, `Corrupt`, `NoSpace`, `Io`, `Busy`.
    pub fn update<T: Number>(
        &mut self,
        layer: u32,
        k: &[T],
        v: &[T],
        q: Option<&[T]>,
    ) -> Result<()> {
        let tokens = self.tokens_of("k", k.len(), self.shape.kv_heads)?;
        let arrays = [("v", Some(v), self.shape.kv_heads), ("q", q, self.shape.heads)];
        for (name, array, heads) in arrays {
            let other = match array {
                Some(array) => self.tokens_of(name, array.len(), heads)?,
                None => continue,
            };
            if other != tokens {
                let message = format!("{name} has {other} tokens where k has {tokens}");
                return Err(Error::bad_argument(message));
            }
        }
        let (k, v) = (k.as_ptr().cast(), v.as_ptr().cast());
        let q = q.map_or(null(), |q| q.as_ptr().cast());
        // SAFETY: the cache is open; the arrays have its shape.
        call(|error| unsafe {
            sys::kv_cache_update(self.raw(), layer, T::TYPE, k, v, q, tokens, error)
        })
    }

    /// Computes the attention of the step's queries in one layer, `q` and `out`
    /// `[tokens][heads][head_dim]`. Query `i` sees the tokens before the step and those of the step
    /// up to its own. The layer must have its update.
    ///
    /// # Errors
    /// Those of [`Cache::attention_with`].
    pub fn attention<T: Number>(&mut self, layer: u32, q: &[T], out: &mut [T]) -> Result<()> {
        self.attention_with(layer, q, out, &AttentionOptions::new(), Control::new())
    }

    /// Does what [`Cache::attention`] does, with options and a cancel token.
    ///
    /// # Errors
    /// `BadArgument`, `BadState` (no update of this layer in the step; the step is over; its filter
    /// layer has not been attended), `Cancelled`, `NoMemory`, `Corrupt`, `Io`, `Busy`: cache and
    /// `out` are unchanged.
    pub fn attention_with<T: Number>(
        &mut self,
        layer: u32,
        q: &[T],
        out: &mut [T],
        options: &AttentionOptions,
        mut control: Control,
    ) -> Result<()> {
        let tokens = self.tokens_of("q", q.len(), self.shape.heads)?;
        if out.len() != q.len() {
            let message = format!("out has {} numbers where q has {}", out.len(), q.len());
            return Err(Error::bad_argument(message));
        }
        let (raw, control) = (options.raw()?, control.raw());
        let (cache, options) = (self.raw(), &raw.value);
        let (q, out) = (q.as_ptr().cast(), out.as_mut_ptr().cast());
        // SAFETY: the cache is open; the arrays have its shape; options and control live during
        // the call.
        call(|error| unsafe {
            sys::kv_cache_attention(cache, layer, T::TYPE, q, out, tokens, options, &control, error)
        })
    }

    /// Truncates the cache to its first `tokens` tokens and drops an incomplete step.
    ///
    /// # Errors
    /// `BadArgument` (there are fewer), `Corrupt`, `NoMemory`, `Busy`.
    pub fn truncate(&mut self, tokens: u64) -> Result<()> {
        // SAFETY: the cache is open.
        call(|error| unsafe { sys::kv_cache_truncate(self.raw(), tokens, error) })
    }

    /// Creates an exact copy with the same options. Both share the pages.
    ///
    /// # Errors
    /// Those of [`Cache::fork_with`].
    pub fn fork(&mut self) -> Result<Cache> {
        self.fork_with(Control::new())
    }

    /// Does what [`Cache::fork`] does, with a cancel token.
    ///
    /// # Errors
    /// `BadState` (the step is incomplete), `Cancelled`, `NoMemory`, `Limit`, `Corrupt`, `Busy`.
    pub fn fork_with(&mut self, mut control: Control) -> Result<Cache> {
        let control = control.raw();
        // SAFETY: the cache is open; the control lives during the call.
        let raw = Owned::open(|out, error| unsafe {
            sys::kv_cache_fork(self.raw(), &control, out, error)
        })?;
        Ok(Cache { raw, shape: self.shape })
    }

    /// Writes the cache to a file, as [`Session::save`](crate::Session::save) does.
    ///
    /// # Errors
    /// Those of [`Cache::save_with`].
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.save_with(path, Control::new())
    }

    /// Does what [`Cache::save`] does, with progress.
    ///
    /// # Errors
    /// `BadState` (the step is incomplete), and those of
    /// [`Session::save_with`](crate::Session::save_with).
    pub fn save_with(&mut self, path: impl AsRef<Path>, mut control: Control) -> Result<()> {
        let (path, control) = (ffi::path(path.as_ref())?, control.raw());
        // SAFETY: the cache is open; path and control live during the call.
        call(|error| unsafe { sys::kv_cache_save(self.raw(), path.as_ptr(), &control, error) })
    }

    /// Returns the state of the cache.
    ///
    /// # Errors
    /// `Busy`.
    pub fn stats(&self) -> Result<CacheStats> {
        let mut stats = sized();
        // SAFETY: the cache is open; the struct has its size.
        call(|error| unsafe { sys::kv_cache_get_stats(self.raw(), &mut stats, error) })?;
        Ok(CacheStats::of(&stats))
    }

    /// Returns JSON for people: the statistics, and why a strategy was chosen.
    ///
    /// # Errors
    /// `NoMemory`, `Busy`.
    pub fn stats_json(&self) -> Result<String> {
        // SAFETY: the cache is open; there is room for `capacity` bytes.
        json(|out, capacity, size, error| unsafe {
            sys::kv_cache_stats_json(self.raw(), out, capacity, size, error)
        })
    }

    /// The shape.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the number of tokens of an array. The library gets pointers without sizes.
    fn tokens_of(&self, name: &str, numbers: usize, heads: u32) -> Result<u32> {
        // At most 1024 * 256, because the cache was opened with them.
        let row = heads as usize * self.shape.head_dim as usize;
        match u32::try_from(numbers / row) {
            Ok(tokens) if numbers % row == 0 => Ok(tokens),
            _ => {
                Err(Error::bad_argument(format!("{name} has {numbers} numbers: a token has {row}")))
            }
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_cache {
        self.raw.raw()
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Cache").field("shape", &self.shape).finish_non_exhaustive()
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
