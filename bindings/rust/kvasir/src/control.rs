//! Control of a long call: cancel token, progress and flags.
use std::borrow::Cow;
use std::fmt;
use std::ops::ControlFlow;
use std::os::raw::{c_char, c_void};
use std::slice;
use std::sync::Arc;

use kvasir_sys as sys;

use crate::ffi::{callback, sized, Owned};
use crate::Result;

/// Stops the calls that have it, within 100 ms of CPU time, with
/// [`Error::Cancelled`](crate::Error::Cancelled). Clones are the same token.
#[derive(Clone)]
pub struct CancelToken(Arc<Owned<sys::kv_cancel>>);

impl CancelToken {
    /// Creates a token that has not fired.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn new() -> Result<CancelToken> {
        // SAFETY: the outputs are valid.
        Owned::open(|out, error| unsafe { sys::kv_cancel_create(out, error) })
            .map(|raw| CancelToken(Arc::new(raw)))
    }

    /// Fires the token, from any thread or a signal handler, any number of times.
    pub fn fire(&self) {
        // SAFETY: the token is open.
        unsafe { sys::kv_cancel_fire(self.0.raw()) }
    }

    /// Makes a fired token usable again. A call that has seen it fired stays cancelled.
    pub fn reset(&self) {
        // SAFETY: the token is open.
        unsafe { sys::kv_cancel_reset(self.0.raw()) }
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("CancelToken")
    }
}

/// Work that a progress report is about, and the unit of its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Opening a model; never reported by this version.
    Open,
    /// Prefill, in tokens.
    Prefill,
    /// Writing a file, in bytes.
    Save,
    /// Verifying a file, in bytes.
    Verify,
    /// Building what the strategy needs besides the KV cache, in steps.
    Prepare,
    /// Packing, in bytes of the document.
    Pack,
    /// Unpacking, in bytes of the document.
    Unpack,
    /// A phase that this crate does not know: the library is newer.
    Other(i32),
}

/// A progress report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The current work.
    pub phase: Phase,
    /// Tokens, bytes or steps, as the phase says.
    pub done: u64,
    /// 0 while unknown.
    pub total: u64,
}

type ProgressFn<'a> = dyn FnMut(Progress) -> ControlFlow<()> + Send + 'a;

/// Control of one long call: cancel token, progress and flags. The default has none of them.
///
/// ```
/// # fn f(session: &mut kvasir::Session, text: &str) -> kvasir::Result<()> {
/// use std::ops::ControlFlow;
///
/// let mut tokens = 0;
/// let control = kvasir::Control::new().progress(|report| {
///     tokens = report.done;
///     ControlFlow::Continue(())
/// });
/// session.prefill_with(text, control)?;
/// println!("{tokens} tokens");
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
#[must_use]
pub struct Control<'a> {
    cancel: Option<CancelToken>,
    progress: Option<Box<ProgressFn<'a>>>,
    flags: u32,
}

impl<'a> Control<'a> {
    /// Creates a control without token, progress and flags.
    pub fn new() -> Control<'a> {
        Control::default()
    }

    /// Sets a token that stops the call.
    pub fn cancel(mut self, token: &CancelToken) -> Control<'a> {
        self.cancel = Some(token.clone());
        self
    }

    /// Sets a function that receives progress on the calling thread, at most ten times a second
    /// and once at the end. `ControlFlow::Break(())` stops the call. A panic stops it too, and
    /// continues in the caller when the library has returned.
    pub fn progress(
        mut self,
        f: impl FnMut(Progress) -> ControlFlow<()> + Send + 'a,
    ) -> Control<'a> {
        self.progress = Some(Box::new(f));
        self
    }

    /// Prefill: text that spells a control token becomes that token.
    pub fn special(self, special: bool) -> Control<'a> {
        self.flag(sys::KV_TOKENIZE_SPECIAL, special)
    }

    /// Loading: verify the whole file now, not each page at its first use.
    pub fn verify(self, verify: bool) -> Control<'a> {
        self.flag(sys::KV_VERIFY, verify)
    }

    /// [`Model::session_from_cache`](crate::Model::session_from_cache):
    /// [`Tokenize::document`](crate::Tokenize::document) made the tokens.
    pub fn document(self, document: bool) -> Control<'a> {
        self.flag(sys::KV_TOKENIZE_DOCUMENT, document)
    }

    pub(crate) fn flag(mut self, bit: u32, on: bool) -> Control<'a> {
        self.flags = if on { self.flags | bit } else { self.flags & !bit };
        self
    }

    /// Adds a condition that stops the call at its next progress report.
    pub(crate) fn stop_if(mut self, mut stop: impl FnMut() -> bool + Send + 'a) -> Control<'a> {
        let mut inner = self.progress.take();
        self.progress(move |progress| match &mut inner {
            _ if stop() => ControlFlow::Break(()),
            Some(f) => f(progress),
            None => ControlFlow::Continue(()),
        })
    }

    /// The C struct, which points into `self`.
    pub(crate) fn raw(&mut self) -> sys::kv_control {
        let mut raw: sys::kv_control = sized();
        raw.flags = self.flags;
        if let Some(token) = &self.cancel {
            raw.cancel = token.0.raw();
        }
        if let Some(f) = &mut self.progress {
            raw.progress = Some(on_progress);
            raw.user = f as *mut Box<ProgressFn<'a>> as *mut c_void;
        }
        raw
    }
}

impl fmt::Debug for Control<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Control")
            .field("cancel", &self.cancel)
            .field("progress", &self.progress.is_some())
            .field("flags", &self.flags)
            .finish()
    }
}

unsafe extern "C" fn on_progress(phase: i32, done: u64, total: u64, user: *mut c_void) -> i32 {
    let phase = match phase as u32 {
        sys::KV_PHASE_OPEN => Phase::Open,
        sys::KV_PHASE_PREFILL => Phase::Prefill,
        sys::KV_PHASE_SAVE => Phase::Save,
        sys::KV_PHASE_VERIFY => Phase::Verify,
        sys::KV_PHASE_PREPARE => Phase::Prepare,
        sys::KV_PHASE_PACK => Phase::Pack,
        sys::KV_PHASE_UNPACK => Phase::Unpack,
        _ => Phase::Other(phase),
    };
    // SAFETY: `Control::raw` set it. The control outlives the call, which alone uses it, on one
    // thread.
    let f = unsafe { &mut *(user as *mut Box<ProgressFn>) };
    callback(|| f(Progress { phase, done, total }))
}

/// Receivers of one answer.
pub(crate) struct OnTexts<'a> {
    pub(crate) text: &'a mut dyn FnMut(&str) -> ControlFlow<()>,
    pub(crate) thinking: &'a mut dyn FnMut(&str) -> ControlFlow<()>,
}

/// A `kv_text_fn` whose `user` is an `OnTexts` that only the call uses.
pub(crate) unsafe extern "C" fn on_text(
    text: *const c_char,
    size: usize,
    user: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    let texts = unsafe { &mut *(user as *mut OnTexts) };
    // SAFETY: the text has `size` bytes.
    let text = unsafe { piece(text, size) };
    callback(|| (texts.text)(&text))
}

/// The same for `kv_generate_options::on_thinking`.
pub(crate) unsafe extern "C" fn on_thinking(
    text: *const c_char,
    size: usize,
    user: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    let texts = unsafe { &mut *(user as *mut OnTexts) };
    // SAFETY: the text has `size` bytes.
    let text = unsafe { piece(text, size) };
    callback(|| (texts.thinking)(&text))
}

unsafe fn piece<'a>(text: *const c_char, size: usize) -> Cow<'a, str> {
    match size {
        0 => Cow::Borrowed(""),
        // SAFETY: the caller's.
        _ => String::from_utf8_lossy(unsafe { slice::from_raw_parts(text as *const u8, size) }),
    }
}
