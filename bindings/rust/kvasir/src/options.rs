//! Options. An option that is not set has the library's default.
use std::ffi::CString;
use std::fmt;
use std::ops::ControlFlow;
use std::os::raw::c_char;
use std::path::PathBuf;
use std::ptr::null;
use std::sync::Arc;

use kvasir_sys as sys;

use crate::ffi::{self, sized, Owned};
use crate::log::{LogLevel, OnLog};
use crate::{Result, Strategy};

/// An option struct for a call, and what it points to.
pub(crate) struct Raw<T> {
    pub(crate) value: T,
    strings: Vec<CString>,
    lists: Vec<Vec<*const c_char>>,
    strategies: Vec<Owned<sys::kv_strategy>>,
}

impl<T> Raw<T> {
    fn keep(&mut self, string: CString) -> *const c_char {
        let pointer = string.as_ptr(); // of the heap: moving the CString leaves it there
        self.strings.push(string);
        pointer
    }

    fn keep_strategy(&mut self, strategy: &Strategy) -> Result<*const sys::kv_strategy> {
        self.strategies.push(strategy.raw()?);
        Ok(self.strategies[self.strategies.len() - 1].raw())
    }
}

/// How the KV cache is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// int8 pages behind a full-precision window.
    #[default]
    Int8,
    /// float32 throughout, full attention: the reference, 7 times the memory.
    F32,
    /// A precision that this crate does not know: the library is newer.
    Other(u32),
}

impl Precision {
    pub(crate) fn of(raw: u32) -> Precision {
        match raw {
            sys::KV_PRECISION_INT8 => Precision::Int8,
            sys::KV_PRECISION_F32 => Precision::F32,
            other => Precision::Other(other),
        }
    }

    fn raw(self) -> u32 {
        match self {
            Precision::Int8 => sys::KV_PRECISION_INT8,
            Precision::F32 => sys::KV_PRECISION_F32,
            Precision::Other(number) => number,
        }
    }
}

/// Defines an option struct with the fields of a C struct, and the setters of `others` below.
macro_rules! options {
    ($(#[$doc:meta])* $name:ident: $raw:ident {
        $(numbers { $($(#[$number_doc:meta])* $number:ident: $type:ty,)* })?
        $(text { $($(#[$text_doc:meta])* $text:ident,)* })?
        $(flags { $($(#[$flag_doc:meta])* $flag:ident = $bit:ident,)* })?
        $(strategies { $($(#[$strategy_doc:meta])* $strategy:ident,)* })?
        others { $($other:ident)* }
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        #[must_use]
        pub struct $name {
            $($($number: $type,)*)?
            $($($text: Option<String>,)*)?
            $($($flag: bool,)*)?
            $($($strategy: Option<Strategy>,)*)?
            #[allow(dead_code)] // not every struct has others
            pub(crate) extra: Extra,
        }

        impl $name {
            /// Creates the defaults.
            pub fn new() -> Self {
                Self::default()
            }

            $($($(#[$number_doc])* pub fn $number(mut self, $number: $type) -> Self {
                self.$number = $number;
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

            $($($(#[$strategy_doc])*
            pub fn $strategy(mut self, $strategy: impl Into<Strategy>) -> Self {
                self.$strategy = Some($strategy.into());
                self
            })*)?

            $(options!(@setter $other);)*

            /// The C struct, which points into `self` and into the rest of the result.
            pub(crate) fn raw(&self) -> Result<Raw<sys::$raw>> {
                let mut raw: Raw<sys::$raw> = Raw {
                    value: sized(),
                    strings: Vec::new(),
                    lists: Vec::new(),
                    strategies: Vec::new(),
                };
                $($(raw.value.$number = self.$number.into();)*)?
                $($(if let Some(text) = &self.$text {
                    raw.value.$text = raw.keep(ffi::string(text, stringify!($text))?);
                })*)?
                $($(if self.$flag {
                    raw.value.flags |= sys::$bit;
                })*)?
                $($(if let Some(strategy) = &self.$strategy {
                    raw.value.$strategy = raw.keep_strategy(strategy)?;
                })*)?
                $(options!(@fill $other self raw);)*
                Ok(raw)
            }
        }
    };

    (@setter log) => {
        /// Sets a function that receives log lines. Any thread that calls the library may call it,
        /// several at once. It is kept as long as what is opened with it. A panic continues in the
        /// caller when the call that logs has returned. Default: silent.
        pub fn log(mut self, f: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
            self.extra.log = Some(OnLog::new(f));
            self
        }
    };
    (@setter precision) => {
        /// How the KV cache is stored. A loaded file has its own.
        pub fn precision(mut self, precision: Precision) -> Self {
            self.extra.precision = precision;
            self
        }
    };
    (@setter spill_directory) => {
        /// Directory of the unnamed file of [`memory_limit`](Self::memory_limit), on a local disk.
        /// Default: `/var/tmp`. The file disappears with the last session or cache that uses it,
        /// also when the process is killed.
        pub fn spill_directory(mut self, directory: impl Into<PathBuf>) -> Self {
            self.extra.spill_directory = Some(directory.into());
            self
        }
    };
    (@setter hash_directory) => {
        /// Directory for hashes of whole model files, created where it does not exist. Default: no
        /// hash. A background thread of low priority reads the file once.
        pub fn hash_directory(mut self, directory: impl Into<PathBuf>) -> Self {
            self.extra.hash_directory = Some(directory.into());
            self
        }
    };
    (@setter stop) => {
        /// Adds a string that ends the answer and is not part of it.
        pub fn stop(mut self, text: impl Into<String>) -> Self {
            self.extra.stop.push(text.into());
            self
        }
    };
    (@setter session) => {
        /// Options of the session, as for [`Model::session_with`](crate::Model::session_with).
        pub fn session(mut self, options: SessionOptions) -> Self {
            self.extra.session = Some(Box::new(options));
            self
        }
    };
    (@setter thinking) => {
        /// Whether the model thinks before it answers: `Error::Unsupported` unless
        /// [`ModelInfo::thinks`](crate::ModelInfo::thinks). Default: marks before the answer skip
        /// the thought.
        pub fn thinking(mut self, thinking: bool) -> Self {
            self.extra.thinking = thinking;
            self
        }

        /// Sets a function that receives whole characters of the thought, on the thread that
        /// computes the answer. `ControlFlow::Break(())` stops the call, and so does a panic,
        /// which continues in the caller.
        pub fn on_thinking(
            mut self,
            f: impl Fn(&str) -> ControlFlow<()> + Send + Sync + 'static,
        ) -> Self {
            self.extra.on_thinking = Some(OnThinking(Arc::new(f)));
            self
        }

        pub(crate) fn thought(&self, piece: &str) -> ControlFlow<()> {
            match &self.extra.on_thinking {
                Some(OnThinking(f)) => f(piece),
                None => ControlFlow::Continue(()),
            }
        }
    };
    (@fill log $self:ident $raw:ident) => {
        let (f, user) = OnLog::raw(&$self.extra.log);
        $raw.value.log = f;
        $raw.value.log_user = user;
    };
    (@fill precision $self:ident $raw:ident) => {
        $raw.value.precision = $self.extra.precision.raw();
    };
    (@fill spill_directory $self:ident $raw:ident) => {
        if let Some(directory) = &$self.extra.spill_directory {
            $raw.value.spill_directory = $raw.keep(ffi::path(directory)?);
        }
    };
    (@fill hash_directory $self:ident $raw:ident) => {
        if let Some(directory) = &$self.extra.hash_directory {
            $raw.value.hash_directory = $raw.keep(ffi::path(directory)?);
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
    (@fill thinking $self:ident $raw:ident) => {
        // `Shared::generate` sets the callback
        $raw.value.thinking =
            if $self.extra.thinking { sys::KV_THINKING_ON } else { sys::KV_THINKING_OFF };
    };
    (@fill session $self:ident $raw:ident) => {}; // `Library` sets it and keeps it alive
}

/// Options that are neither numbers nor text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extra {
    pub(crate) log: Option<OnLog>,
    pub(crate) session: Option<Box<SessionOptions>>,
    precision: Precision,
    spill_directory: Option<PathBuf>,
    hash_directory: Option<PathBuf>,
    stop: Vec<String>,
    thinking: bool,
    on_thinking: Option<OnThinking>,
}

type ThinkingFn = dyn Fn(&str) -> ControlFlow<()> + Send + Sync;

#[derive(Clone)]
struct OnThinking(Arc<ThinkingFn>);

impl fmt::Debug for OnThinking {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a thinking callback")
    }
}

mod list;
pub use list::*;
