//! What the library calls back: progress, log lines, text; and the token that stops a call.
use std::ffi::CStr;
use std::fmt;
use std::ops::ControlFlow;
use std::os::raw::{c_char, c_void};
use std::slice;
use std::sync::Arc;

use kvasir_sys as sys;

use crate::ffi::{callback, Owned};
use crate::Result;

/// Stops the calls it was given to, within 100 ms: they fail with [`Error::Cancelled`](crate::Error::Cancelled). Clones are the same token.
#[derive(Clone)]
pub struct CancelToken(Arc<Owned<sys::kv_cancel>>);

impl CancelToken {
    /// A token that has not been fired.
    pub fn new() -> Result<CancelToken> {
        // SAFETY: the outputs are valid.
        Owned::open(|out, error| unsafe { sys::kv_cancel_create(out, error) }).map(|raw| CancelToken(Arc::new(raw)))
    }

    /// From any thread or a signal handler, any number of times.
    pub fn fire(&self) {
        // SAFETY: the token is open.
        unsafe { sys::kv_cancel_fire(self.raw()) }
    }

    /// Makes it usable again. A call that has seen it fired stays cancelled.
    pub fn reset(&self) {
        // SAFETY: the token is open.
        unsafe { sys::kv_cancel_reset(self.raw()) }
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_cancel {
        self.0.raw()
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("CancelToken")
    }
}

/// A stage of a long call, and in what it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Bytes of the model file checked.
    Open,
    /// Tokens read.
    Prefill,
    /// Bytes written.
    Save,
    /// Bytes checked.
    Verify,
    /// Steps of making what a strategy needs beside keys and values.
    Prepare,
    /// Bytes of the document packed.
    Pack,
    /// Bytes of the document restored.
    Unpack,
    /// One that this crate does not know.
    Other(i32),
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Tokens, bytes or steps, as the phase says.
    pub done: u64,
    /// 0 while unknown.
    pub total: u64,
}

/// How important a log line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogLevel {
    /// Something is not as it should be.
    Warning,
    /// Something that is good to know.
    Info,
    /// One that this crate does not know.
    Other(i32),
}

type ProgressFn = dyn Fn(Progress) -> ControlFlow<()> + Send + Sync;
type LogFn = dyn Fn(LogLevel, &str) + Send + Sync;

/// A progress callback; at most ten calls a second, and one at the end of the work. `ControlFlow::Break(())` stops the call.
#[derive(Clone)]
pub(crate) struct OnProgress(Arc<Box<ProgressFn>>);

impl OnProgress {
    pub(crate) fn new(f: impl Fn(Progress) -> ControlFlow<()> + Send + Sync + 'static) -> OnProgress {
        OnProgress(Arc::new(Box::new(f)))
    }

    pub(crate) fn call(&self, progress: Progress) -> ControlFlow<()> {
        (self.0)(progress)
    }

    /// For the C struct: valid as long as a clone of this lives.
    pub(crate) fn raw(this: &Option<OnProgress>) -> (sys::kv_progress_fn, *mut c_void) {
        match this {
            Some(OnProgress(f)) => (Some(on_progress), Arc::as_ptr(f) as *mut c_void),
            None => (None, std::ptr::null_mut()),
        }
    }
}

/// A log callback, which the library keeps as long as the handle that was opened with it and the handle's forks.
#[derive(Clone)]
pub(crate) struct OnLog(Arc<Box<LogFn>>);

impl OnLog {
    pub(crate) fn new(f: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> OnLog {
        OnLog(Arc::new(Box::new(f)))
    }

    /// As [`OnProgress::raw`].
    pub(crate) fn raw(this: &Option<OnLog>) -> (sys::kv_log_fn, *mut c_void) {
        match this {
            Some(OnLog(f)) => (Some(on_log), Arc::as_ptr(f) as *mut c_void),
            None => (None, std::ptr::null_mut()),
        }
    }
}

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a progress callback")
    }
}

impl fmt::Debug for OnLog {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a log callback")
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
    // SAFETY: `OnProgress::raw` gave it, and the options that hold it outlive the call.
    let f = unsafe { &*(user as *const Box<ProgressFn>) };
    callback(|| f(Progress { phase, done, total }))
}

unsafe extern "C" fn on_log(level: i32, message: *const c_char, user: *mut c_void) {
    let level = match level as u32 {
        sys::KV_LOG_WARNING => LogLevel::Warning,
        sys::KV_LOG_INFO => LogLevel::Info,
        _ => LogLevel::Other(level),
    };
    // SAFETY: `OnLog::raw` gave it, and whatever logs to it holds it; the message is terminated and valid during the call.
    let (f, message) = unsafe { (&*(user as *const Box<LogFn>), CStr::from_ptr(message)) };
    callback(|| {
        f(level, &message.to_string_lossy());
        ControlFlow::Continue(())
    });
}

/// A `kv_text_fn` whose `user` is an `F`, valid and not used elsewhere during the call.
pub(crate) unsafe extern "C" fn on_text<F: FnMut(&str) -> ControlFlow<()>>(text: *const c_char, size: usize, user: *mut c_void) -> i32 {
    // SAFETY: as above; the text is `size` bytes.
    let f = unsafe { &mut *(user as *mut F) };
    let bytes = if size == 0 { &[] } else { unsafe { slice::from_raw_parts(text as *const u8, size) } };
    callback(|| f(&String::from_utf8_lossy(bytes)))
}
