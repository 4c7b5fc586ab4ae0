//! Measurement and research: `kvasir_experimental.h`. Feature `experimental`.
//!
//! Nothing here is part of the promise about versions: names, numbers and behaviour may change or
//! disappear in any version. Build a program that uses it together with its library. The parameters
//! of strategies are numbers for [`Strategy::experimental`](crate::Strategy::experimental).
use crate::ffi::{call, zeros};
use crate::{Control, Result, Session};

use kvasir_sys as sys;

pub use sys::{
    KV_BUDGET_LINEAR, KV_BUDGET_PYRAMID, KV_BUDGET_UNIFORM, KV_FILTER_EXPONENTIAL, KV_FILTER_LAST,
    KV_FILTER_UNIFORM, KV_PARAM_BUDGET_SCHEDULE, KV_PARAM_FILTER_WINDOW, KV_PARAM_HEAD_GRAPHS,
    KV_PARAM_SEARCH_BREADTH,
};

/// What [`Session::measure`] measures; nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Measure {
    /// Attend each decoded token exactly too, and compare.
    pub compare: bool,
    /// Also compare the layers with each other; implies `compare`.
    pub layers: bool,
    /// Bound the attention that was read from below.
    pub certify: bool,
}

impl Session {
    /// Measures all decode from now on. [`Session::stats_json`] has the results of the last answer.
    ///
    /// # Errors
    /// `NoMemory`, `Busy`.
    pub fn measure(&mut self, measure: Measure) -> Result<()> {
        let flag = |on, bit| if on { bit } else { 0 };
        let flags = flag(measure.compare, sys::KV_MEASURE_COMPARE)
            | flag(measure.layers, sys::KV_MEASURE_LAYERS)
            | flag(measure.certify, sys::KV_MEASURE_CERTIFY);
        // SAFETY: the session is open.
        call(|error| unsafe { sys::kv_session_measure(self.raw(), flags, error) })
    }

    /// Appends tokens as [`Session::prefill_tokens`] does. Returns the logits at each token,
    /// `[tokens][vocabulary]`. After a failure the complete chunks stay, as [`Session::tokens`]
    /// shows.
    ///
    /// # Errors
    /// Those of [`Session::prefill_tokens_with`].
    pub fn prefill_logits(&mut self, tokens: &[i32], mut control: Control) -> Result<Vec<f32>> {
        let vocabulary = self.model().info()?.vocabulary as usize;
        let mut logits = zeros(tokens.len().saturating_mul(vocabulary))?;
        let (start, count, out) = (tokens.as_ptr(), tokens.len(), logits.as_mut_ptr());
        let control = control.raw();
        // SAFETY: the session is open; there is room for the logits of `count` tokens.
        call(|error| unsafe {
            sys::kv_prefill_logits(self.raw(), start, count, out, &control, error)
        })?;
        Ok(logits)
    }
}

impl Control<'_> {
    /// [`Model::session_from_cache`](crate::Model::session_from_cache): do not compare keys. Keys
    /// and values may then be synthetic, to measure with.
    pub fn unchecked(self, unchecked: bool) -> Self {
        self.flag(sys::KV_CACHE_UNCHECKED, unchecked)
    }
}
