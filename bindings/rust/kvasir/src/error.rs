//! What calls fail with.
use std::error::Error as StdError;
use std::ffi::CStr;
use std::{fmt, io};

use kvasir_sys as sys;

use crate::{Answer, Read};

/// The result of a call of the library.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident = $status:ident,)*) => {
        /// Why a call failed: a variant for each status, each with the library's message, which is what it displays as. Unless the call says
        /// otherwise, what it was called on is as it was before.
        #[derive(Debug)]
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
    /// A value out of its range, or a string with a NUL byte.
    BadArgument = KV_BAD_ARGUMENT,
    /// Another call on this session or cache is running; or another process has been changing the library.
    Busy = KV_BUSY,
    /// The call does not fit what happened before; the message says what does.
    BadState = KV_BAD_STATE,
    /// There is not enough memory, the CPU's or the GPU's.
    NoMemory = KV_NO_MEMORY,
    /// A limit of the system or of the options: open files, threads, sizes.
    Limit = KV_LIMIT,
    /// Reading or writing failed; [`Error::os_error`] says how.
    Io = KV_IO,
    /// The disk is full, or a quota or a limit of file sizes is reached.
    NoSpace = KV_NO_SPACE,
    /// There is no such file, device, document or name.
    NotFound = KV_NOT_FOUND,
    /// The system does not allow it.
    Permission = KV_PERMISSION,
    /// The file is something else.
    NotACache = KV_NOT_A_CACHE,
    /// Written by a newer library: stale.
    Version = KV_VERSION,
    /// Damaged; [`Error::offset`] says where.
    Corrupt = KV_CORRUPT,
    /// A saved document of another model: stale.
    ModelMismatch = KV_MODEL_MISMATCH,
    /// A good file with something that the library does not do; the message names it.
    Unsupported = KV_UNSUPPORTED,
    /// The model's or the session's context length is reached.
    ContextFull = KV_CONTEXT_FULL,
    /// A bug in Kvasir.
    Internal = KV_INTERNAL,
    /// A GPU failed or was lost: close the sessions and the model that use it.
    Device = KV_DEVICE,
}

/// What the variants of [`Error`] hold; its methods tell of it.
#[derive(Debug)]
pub struct Failure(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: i32,
    message: String,
    offset: Option<u64>,
    source: Option<Box<dyn StdError + Send + Sync>>,
    done: Done,
}

/// How far a call came that failed.
#[derive(Debug)]
enum Done {
    Unknown,
    Read(Read),
    Answer(Answer),
}

impl Error {
    /// Of a call that failed and filled `error`.
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

    /// An error that this crate found before the library could.
    pub(crate) fn found(status: u32, message: String, source: Option<Box<dyn StdError + Send + Sync>>) -> Error {
        let (offset, done) = (None, Done::Unknown);
        Error::of(Failure(Box::new(Parts { status: status as i32, message, offset, source, done })))
    }

    pub(crate) fn bad_argument(message: String) -> Error {
        Error::found(sys::KV_BAD_ARGUMENT, message, None)
    }

    pub(crate) fn after_reading(mut self, read: Read) -> Error {
        self.failure_mut().0.done = Done::Read(read);
        self
    }

    pub(crate) fn after_answering(mut self, answer: Answer) -> Error {
        self.failure_mut().0.done = Done::Answer(answer);
        self
    }

    /// The library's message: one line that names the subject and says what stayed unchanged.
    pub fn message(&self) -> &str {
        &self.failure().0.message
    }

    /// The number of the status, as `kvasir.h` has it (`KV_CORRUPT` is 13).
    pub fn status(&self) -> i32 {
        self.failure().0.status
    }

    /// A short constant text for the status, "not found" for example.
    pub fn status_text(&self) -> &'static str {
        status_text(self.status())
    }

    /// Whether a saved document was refused because it is of another version or model: delete it and read again, nothing is broken.
    pub fn is_stale(&self) -> bool {
        // SAFETY: takes any number.
        unsafe { sys::kv_status_is_stale(self.status()) != 0 }
    }

    /// Where in the file, in bytes.
    pub fn offset(&self) -> Option<u64> {
        self.failure().0.offset
    }

    /// The system's own error.
    pub fn os_error(&self) -> Option<&io::Error> {
        self.source()?.downcast_ref()
    }

    /// What a call of [`Session::prefill`](crate::Session::prefill) or [`Session::prefill_tokens`](crate::Session::prefill_tokens) that failed
    /// added to the sequence all the same.
    pub fn read(&self) -> Option<Read> {
        match self.failure().0.done {
            Done::Read(read) => Some(read),
            _ => None,
        }
    }

    /// The counts of an answer that was cancelled.
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

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.failure().0.source.as_ref().map(|source| &**source as _)
    }
}

pub(crate) fn status_text(status: i32) -> &'static str {
    // SAFETY: takes any number; the text is constant and terminated.
    let text = unsafe { CStr::from_ptr(sys::kv_status_text(status)) };
    text.to_str().unwrap_or("unknown status")
}
