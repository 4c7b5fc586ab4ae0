//! Options: what is not set is the library's default.
use std::ffi::CString;
use std::ops::ControlFlow;
use std::os::raw::c_char;
use std::path::PathBuf;
use std::ptr::null;

use kvasir_sys as sys;

use crate::callback::{CancelToken, LogLevel, OnLog, OnProgress, Progress};
use crate::ffi::{self, defaults};
use crate::Result;

/// An option struct for a call, and the strings that it points to.
pub(crate) struct Raw<T> {
    pub(crate) value: T,
    strings: Vec<CString>,
    lists: Vec<Vec<*const c_char>>,
}

impl<T> Raw<T> {
    fn keep(&mut self, string: CString) -> *const c_char {
        let pointer = string.as_ptr(); // of the heap: moving the CString leaves it there
        self.strings.push(string);
        pointer
    }
}

/// The C value of an option.
trait Value {
    type C;
    fn c(&self) -> Self::C;
}

macro_rules! values {
    ($($type:ty => $c:ty: $value:expr;)*) => {
        $(impl Value for $type {
            type C = $c;
            fn c(&self) -> $c {
                let value: fn($type) -> $c = $value;
                value(*self)
            }
        })*
    };
}

values! {
    u32 => u32: |v| v;
    u64 => u64: |v| v;
    f32 => f32: |v| v;
    f64 => f64: |v| v;
    bool => u32: u32::from;
    KvType => u32: |v| v as u32;
    FilterWindow => u32: |v| v as u32;
    BudgetSchedule => u32: |v| v as u32;
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// int8 pages behind a full-precision window.
    Int8 = sys::KV_KV_INT8 as isize,
    /// Everything stays in full precision and is attended in full: the reference; costs 7 times the memory.
    F32 = sys::KV_KV_F32 as isize,
}

/// What a filter layer chooses by: the share of attention that tokens get of these queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterWindow {
    /// The newest query.
    Last = sys::KV_FILTER_LAST as isize,
    /// The newest 16, each counting twice as much as the one before it.
    Exponential = sys::KV_FILTER_EXPONENTIAL as isize,
    /// The newest 16 alike.
    Uniform = sys::KV_FILTER_UNIFORM as isize,
}

/// How a budget is spread over the layers that choose. Its mean is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetSchedule {
    /// The same in all.
    Uniform = sys::KV_BUDGET_UNIFORM as isize,
    /// Evenly less from layer to layer: from 3/2 of the mean in the first to 1/2 in the last.
    Linear = sys::KV_BUDGET_LINEAR as isize,
    /// The same from 39/20 to 1/20.
    Pyramid = sys::KV_BUDGET_PYRAMID as isize,
}

/// Makes an option struct of a C one: its fields of the same names, and the callbacks and flags that are listed.
macro_rules! options {
    ($(#[$doc:meta])* $name:ident: $raw:ident by $init:ident {
        $(numbers { $($(#[$number_doc:meta])* $number:ident: $type:ty,)* })?
        $(text { $($(#[$text_doc:meta])* $text:ident,)* })?
        $(flags { $($(#[$flag_doc:meta])* $flag:ident = $bit:ident,)* })?
        callbacks { $($callback:ident)* }
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name {
            $($($number: Option<$type>,)*)?
            $($($text: Option<String>,)*)?
            $($($flag: bool,)*)?
            pub(crate) extra: Extra,
        }

        impl $name {
            /// The defaults.
            pub fn new() -> Self {
                Self::default()
            }

            $($($(#[$number_doc])* pub fn $number(mut self, $number: $type) -> Self {
                self.$number = Some($number);
                self
            })*)?

            $($($(#[$text_doc])* pub fn $text(mut self, $text: impl Into<String>) -> Self {
                self.$text = Some($text.into());
                self
            })*)?

            $($($(#[$flag_doc])* pub fn $flag(mut self, $flag: bool) -> Self {
                self.$flag = $flag;
                self
            })*)?

            $(options!(@setter $callback);)*

            /// The C struct. It points into `self` and into what it comes with.
            pub(crate) fn raw(&self) -> Result<Raw<sys::$raw>> {
                let mut raw = Raw { value: defaults(sys::$init), strings: Vec::new(), lists: Vec::new() };
                $($(if let Some(value) = &self.$number {
                    raw.value.$number = Value::c(value);
                })*)?
                $($(if let Some(text) = &self.$text {
                    raw.value.$text = raw.keep(ffi::string(text, stringify!($text))?);
                })*)?
                $($(if self.$flag {
                    raw.value.flags |= sys::$bit;
                })*)?
                $(options!(@fill $callback self raw);)*
                Ok(raw)
            }
        }
    };

    (@setter cancel) => {
        /// A token that stops the call.
        pub fn cancel(mut self, token: &CancelToken) -> Self {
            self.extra.cancel = Some(token.clone());
            self
        }
    };
    (@setter progress) => {
        /// Called on the calling thread, at most ten times a second and once at the end of the work. `ControlFlow::Break(())` stops the
        /// call; a panic stops it too and goes on when it has returned.
        pub fn progress(mut self, f: impl Fn(Progress) -> ControlFlow<()> + Send + Sync + 'static) -> Self {
            self.extra.progress = Some(OnProgress::new(f));
            self
        }
    };
    (@setter log) => {
        /// Called with one line, from any thread that calls the library; kept as long as what is opened. A panic goes on when the call
        /// that logs has returned.
        pub fn log(mut self, f: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
            self.extra.log = Some(OnLog::new(f));
            self
        }
    };
    (@setter spill_folder) => {
        /// On a local disk; without it `/var/tmp`. The file is gone with the last session or cache that uses it, also when the process is
        /// killed.
        pub fn spill_folder(mut self, folder: impl Into<PathBuf>) -> Self {
            self.extra.spill_folder = Some(folder.into());
            self
        }
    };
    (@setter hash_folder) => {
        /// For the hashes of whole model files, made where there is none; without it nothing is hashed, read or written. A thread of low
        /// priority computes the hash of a file that has none there.
        pub fn hash_folder(mut self, folder: impl Into<PathBuf>) -> Self {
            self.extra.hash_folder = Some(folder.into());
            self
        }
    };
    (@setter stop) => {
        /// One more string that ends the answer and is not part of it.
        pub fn stop(mut self, text: impl Into<String>) -> Self {
            self.extra.stop.push(text.into());
            self
        }
    };
    (@setter session) => {
        /// As for [`Model::session_with`](crate::Model::session_with).
        pub fn session(mut self, options: SessionOptions) -> Self {
            self.extra.session = Some(Box::new(options));
            self
        }
    };
    (@fill cancel $self:ident $raw:ident) => {
        if let Some(token) = &$self.extra.cancel {
            $raw.value.cancel = token.raw();
        }
    };
    (@fill progress $self:ident $raw:ident) => {
        let (f, user) = OnProgress::raw(&$self.extra.progress);
        $raw.value.progress = f;
        $raw.value.progress_user = user;
    };
    (@fill log $self:ident $raw:ident) => {
        let (f, user) = OnLog::raw(&$self.extra.log);
        $raw.value.log = f;
        $raw.value.log_user = user;
    };
    (@fill spill_folder $self:ident $raw:ident) => {
        if let Some(folder) = &$self.extra.spill_folder {
            $raw.value.spill_folder = $raw.keep(ffi::path(folder)?);
        }
    };
    (@fill hash_folder $self:ident $raw:ident) => {
        if let Some(folder) = &$self.extra.hash_folder {
            $raw.value.hash_folder = $raw.keep(ffi::path(folder)?);
        }
    };
    (@fill stop $self:ident $raw:ident) => {
        let mut list = Vec::new();
        for text in &$self.extra.stop {
            list.push($raw.keep(ffi::string(text, "stop")?));
        }
        $raw.value.stop_count = list.len() as u32;
        $raw.value.stop = if list.is_empty() { null() } else { list.as_ptr() };
        $raw.lists.push(list);
    };
    (@fill session $self:ident $raw:ident) => {}; // by `Library`, which holds it during the call
}

/// What options have besides numbers and text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extra {
    pub(crate) cancel: Option<CancelToken>,
    pub(crate) progress: Option<OnProgress>,
    pub(crate) log: Option<OnLog>,
    pub(crate) session: Option<Box<SessionOptions>>,
    spill_folder: Option<PathBuf>,
    hash_folder: Option<PathBuf>,
    stop: Vec<String>,
}

mod list;
pub use list::*;
