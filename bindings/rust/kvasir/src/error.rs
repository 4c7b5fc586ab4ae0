//! Errors of calls.
use std::error::Error as StdError;
use std::ffi::CStr;
use std::{fmt, io};

use kvasir_sys as sys;

use crate::{Answer, Prefilled};

/// The result of a call of the library.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident = $status:ident,)*) => {
        /// Why a call failed: a variant for each status.
        ///
        /// It displays as the library's message, and debugs as it too. After a failure the handle
        /// is as before the call, unless the call's entry says otherwise.
        #[non_exhaustive]
        pub enum Error {
            $($(#[$doc])* $name(Failure),)*
            /// A status that this crate does not know: the library is newer.
            Other(Failure),
        }

        impl Error {
            fn of(failure: Failure) -> Error {
                match failure.0.status as u32 {
                    $(sys::$status => Error::$name(failure),)*
                    _ => Error::Other(failure),
                }
            }

            fn failure(&self) -> &Failure {
                match self {
                    $(Error::$name(failure))|* | Error::Other(failure) => failure,
                }
            }

            fn failure_mut(&mut self) -> &mut Failure {
                match self {
                    $(Error::$name(failure))|* | Error::Other(failure) => failure,
                }
            }
        }
    };
}

errors! {
    /// A cancel token fired or a callback stopped the call.
    Cancelled = KV_CANCELLED,
    /// A value out of range, or a string with a NUL byte.
    BadArgument = KV_BAD_ARGUMENT,
    /// Another call on this session or cache is running, or another process is changing the
    /// library.
    Busy = KV_BUSY,
    /// Not possible after the earlier calls; the message names what is.
    BadState = KV_BAD_STATE,
    /// No host memory or GPU memory.
    NoMemory = KV_NO_MEMORY,
    /// A limit of the system or the options: open files, threads, sizes.
    Limit = KV_LIMIT,
    /// A read or write failed; [`Error::os_error`] has the cause.
    Io = KV_IO,
    /// Disk full, quota, or file size limit.
    NoSpace = KV_NO_SPACE,
    /// There is no such file, device or document.
    NotFound = KV_NOT_FOUND,
    /// The system denies access.
    Permission = KV_PERMISSION,
    /// The file is not a cache file.
    NotACache = KV_NOT_A_CACHE,
    /// A newer library wrote the file: stale.
    Version = KV_VERSION,
    /// Damaged data; [`Error::offset`] has the place.
    Corrupt = KV_CORRUPT,
    /// The file has another model, chat format or instructions: stale.
    ModelMismatch = KV_MODEL_MISMATCH,
    /// A valid file, but this library lacks a feature; the message names it.
    Unsupported = KV_UNSUPPORTED,
    /// The context length of the model or of the session is reached.
    ContextFull = KV_CONTEXT_FULL,
    /// A bug in Kvasir.
    Internal = KV_INTERNAL,
    /// A GPU failed: close the sessions and the model that use it.
    Device = KV_DEVICE,
}

/// Content of the variants of [`Error`], whose methods read it.
pub struct Failure(Box<Parts>);

struct Parts {
    status: i32,
    message: String,
    offset: Option<u64>,
    source: Option<Box<dyn StdError + Send + Sync>>,
    done: Done,
}

/// How far a failed call came.
enum Done {
    Unknown,
    Prefilled(Prefilled),
    Answer(Box<Answer>),
}

impl Error {
    /// The error of a call that failed and filled `error`.
    pub(crate) fn reported(status: i32, error: &sys::kv_error) -> Error {
        let message = error.message.map(|c| c as u8);
        let end = message.iter().position(|&c| c == 0).unwrap_or(message.len());
        let source = match error.sys_errno {
            0 => None,
            code => Some(io::Error::from_raw_os_error(code).into()),
        };
        Error::of(Failure(Box::new(Parts {
            status,
            message: String::from_utf8_lossy(&message[..end]).into_owned(),
            offset: Some(error.offset).filter(|&offset| offset != u64::MAX),
            source,
            done: Done::Unknown,
        })))
    }

    /// An error that this crate finds before a call of the library.
    pub(crate) fn found(
        status: u32,
        message: String,
        source: Option<Box<dyn StdError + Send + Sync>>,
    ) -> Error {
        let (status, offset, done) = (status as i32, None, Done::Unknown);
        Error::of(Failure(Box::new(Parts { status, message, offset, source, done })))
    }

    pub(crate) fn bad_argument(message: String) -> Error {
        Error::found(sys::KV_BAD_ARGUMENT, message, None)
    }

    pub(crate) fn with_prefilled(mut self, prefilled: Prefilled) -> Error {
        self.failure_mut().0.done = Done::Prefilled(prefilled);
        self
    }

    pub(crate) fn with_answer(mut self, answer: Answer) -> Error {
        self.failure_mut().0.done = Done::Answer(Box::new(answer));
        self
    }

    /// The library's message: one line that names the subject and what is unchanged.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.failure().0.message
    }

    /// The number of the status in `kvasir.h`: 13 for `KV_CORRUPT`.
    #[must_use]
    pub fn status(&self) -> i32 {
        self.failure().0.status
    }

    /// A short text for the status, such as "not found".
    #[must_use]
    pub fn status_text(&self) -> &'static str {
        status_text(self.status())
    }

    /// Whether a file is of another version or model: delete it and prefill again.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        // SAFETY: takes any number.
        unsafe { sys::kv_status_is_stale(self.status()) != 0 }
    }

    /// The place in the file, in bytes from its start.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.failure().0.offset
    }

    /// The system's error.
    #[must_use]
    pub fn os_error(&self) -> Option<&io::Error> {
        self.source()?.downcast_ref()
    }

    /// What a failed [`Session::prefill`](crate::Session::prefill) or
    /// [`Session::prefill_tokens`](crate::Session::prefill_tokens) appended before its failure.
    #[must_use]
    pub fn prefilled(&self) -> Option<Prefilled> {
        match self.failure().0.done {
            Done::Prefilled(prefilled) => Some(prefilled),
            _ => None,
        }
    }

    /// The part of a cancelled answer that was decoded.
    #[must_use]
    pub fn answer(&self) -> Option<&Answer> {
        match &self.failure().0.done {
            Done::Answer(answer) => Some(answer),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.message())
    }
}

/// The message, because `unwrap` and a `main` that returns the error print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.failure().0.source.as_ref().map(|source| &**source as _)
    }
}

pub(crate) fn status_text(status: i32) -> &'static str {
    // SAFETY: takes any number; the text is static and terminated.
    let text = unsafe { CStr::from_ptr(sys::kv_status_text(status)) };
    text.to_str().unwrap_or("unknown status")
}
