//! What another engine keeps of a sequence besides its keys and values.
use std::fmt;
use std::marker::PhantomData;

use kvasir_sys as sys;

use crate::ffi::sized;
use crate::Number;

/// Order of the numbers of a [`LayerState`]. Channels and heads have the order of the model file.
/// Rows are the newest ones: as many as a query at the checkpoint sees besides itself, or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StateLayout {
    /// Keys of a sliding window, after RoPE: `[rows][kv_heads][head_dim]`.
    Keys,
    /// Values of a sliding window: `[rows][kv_heads][head_dim]`.
    Values,
    /// Inputs of a convolution: `[channels][taps - 1]`, the newest last.
    Inputs,
    /// Matrices of a gated delta net: `[heads][key_dim][value_dim]`.
    KeyValue,
    /// Matrices of Mamba-2: `[heads][value_dim][key_dim]`.
    ValueKey,
}

impl StateLayout {
    fn raw(self) -> u32 {
        match self {
            StateLayout::Keys => sys::KV_STATE_KEYS,
            StateLayout::Values => sys::KV_STATE_VALUES,
            StateLayout::Inputs => sys::KV_STATE_INPUTS,
            StateLayout::KeyValue => sys::KV_STATE_KEY_VALUE,
            StateLayout::ValueKey => sys::KV_STATE_VALUE_KEY,
        }
    }
}

/// One array of a [`Checkpoint`], which the caller keeps.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct LayerState<'a> {
    raw: sys::kv_layer_state,
    _numbers: PhantomData<&'a [u8]>,
}

// SAFETY: the pointer is to numbers that are borrowed, and only read.
unsafe impl Send for LayerState<'_> {}
// SAFETY: as above.
unsafe impl Sync for LayerState<'_> {}

impl<'a> LayerState<'a> {
    /// The numbers of a layer of the model, counted from 0.
    #[must_use]
    pub fn new<T: Number>(layer: u32, layout: StateLayout, numbers: &'a [T]) -> LayerState<'a> {
        let raw = sys::kv_layer_state {
            layer,
            layout: layout.raw(),
            type_: T::TYPE,
            reserved: 0,
            numbers: numbers.as_ptr().cast(),
            count: numbers.len() as u64,
        };
        LayerState { raw, _numbers: PhantomData }
    }
}

impl fmt::Debug for LayerState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut text = f.debug_struct("LayerState");
        text.field("layer", &self.raw.layer).field("layout", &self.raw.layout);
        text.field("count", &self.raw.count).finish_non_exhaustive()
    }
}

/// What layers with a sliding window and recurrent layers keep after the first `tokens` tokens of
/// another engine's sequence.
#[derive(Clone, Debug)]
pub struct Checkpoint<'a> {
    /// 1 or more.
    pub tokens: u64,
    /// `Keys` and `Values` of each layer with a window, `Inputs` of each recurrent layer, and its
    /// matrices if it has any; in any order.
    pub states: Vec<LayerState<'a>>,
}

impl Checkpoint<'_> {
    /// The struct refers to this checkpoint, which must outlive it.
    pub(crate) fn raw(&self) -> sys::kv_checkpoint {
        let mut raw: sys::kv_checkpoint = sized();
        raw.count = u32::try_from(self.states.len()).unwrap_or(u32::MAX);
        raw.tokens = self.tokens;
        raw.states = self.states.as_ptr().cast(); // LayerState is transparent
        raw
    }
}
