//! Log lines.
use std::ffi::CStr;
use std::fmt;
use std::ops::ControlFlow;
use std::os::raw::{c_char, c_void};
use std::sync::Arc;

use kvasir_sys as sys;

use crate::ffi::callback;

/// Level of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogLevel {
    /// Something that the user should know: a document that cannot be used.
    Warning,
    /// Something that explains a behaviour.
    Info,
    /// A level that this crate does not know: the library is newer.
    Other(i32),
}

type LogFn = dyn Fn(LogLevel, &str) + Send + Sync;

/// A log callback. The library uses it until the handle that was opened with it, and each handle
/// made from that one, is closed.
#[derive(Clone)]
pub(crate) struct OnLog(Arc<Box<LogFn>>);

impl OnLog {
    pub(crate) fn new(f: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> OnLog {
        OnLog(Arc::new(Box::new(f)))
    }

    /// Function and user pointer for a C struct, valid as long as a clone of `this` lives.
    pub(crate) fn raw(this: &Option<OnLog>) -> (sys::kv_log_fn, *mut c_void) {
        match this {
            Some(OnLog(f)) => (Some(on_log), Arc::as_ptr(f) as *mut c_void),
            None => (None, std::ptr::null_mut()),
        }
    }
}

impl fmt::Debug for OnLog {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a log callback")
    }
}

unsafe extern "C" fn on_log(level: i32, message: *const c_char, user: *mut c_void) {
    let level = match level as u32 {
        sys::KV_LOG_WARNING => LogLevel::Warning,
        sys::KV_LOG_INFO => LogLevel::Info,
        _ => LogLevel::Other(level),
    };
    // SAFETY: `OnLog::raw` set it, and each handle that logs to it holds it. The message is
    // terminated and valid during the call.
    let (f, message) = unsafe { (&*(user as *const Box<LogFn>), CStr::from_ptr(message)) };
    callback(|| {
        f(level, &message.to_string_lossy());
        ControlFlow::Continue(())
    });
}
