//! Kvasir prefills a long document once with a local language model, saves its KV cache in a file,
//! and answers any number of questions about it.
//!
//! ```
//! # fn main() -> kvasir::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kvasir-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! # let path = folder.join("book.kv");
//! # let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");
//! # let gguf = format!("{root}/examples/mini-reader-q8_0.gguf");
//! # let text = "The tower has a gate. The access code of the north gate is 4821907.";
//! let model = kvasir::Model::open(gguf)?;
//! let mut session = model.session()?;
//! session.prefill(text)?; // minutes for a book, once
//! session.save(&path)?;
//!
//! let mut session = model.load(&path)?; // milliseconds: it maps the file
//! let answer = session.ask("What is the access code of the north gate?")?;
//! assert!(answer.text.contains("4821907"));
//! # drop(session);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! **Threads.** A [`Model`], a [`Library`] and a [`CancelToken`] serve any number of threads. A
//! [`Session`] and a [`Cache`] serve one call at a time, from any thread; what changes them takes
//! `&mut self`.
//!
//! **Handles** may be dropped in any order: sessions keep their model, forks their pages, handles
//! their log callbacks. A dropped handle cannot be used:
//!
//! ```compile_fail,E0382
//! # fn f(mut session: kvasir::Session) {
//! drop(session);
//! session.ask("Who?");
//! # }
//! ```
//!
//! **Callbacks** run on the calling thread, during the call. `ControlFlow::Break(())` stops it. A
//! panic continues in the caller when the library has returned. A callback cannot use the handle
//! of its call:
//!
//! ```compile_fail,E0499
//! # use std::ops::ControlFlow;
//! # fn f(mut session: kvasir::Session) {
//! session.generate("Who?", &Default::default(), Default::default(), |_| {
//!     session.rewind(0).unwrap();
//!     ControlFlow::Continue(())
//! });
//! # }
//! ```
//!
//! **Errors** are an [`Error`] with the library's message. Documents and questions are UTF-8, or
//! any bytes.
//!
//! **Names.** A function `x_with` does what `x` does, with options and a [`Control`].
#![warn(missing_debug_implementations, missing_docs, unreachable_pub)]
#![warn(clippy::missing_errors_doc, clippy::must_use_candidate, clippy::return_self_not_must_use)]
#![deny(unsafe_op_in_unsafe_fn)]

mod answer;
mod cache;
mod checkpoint;
mod composed;
mod control;
mod error;
#[cfg(feature = "experimental")]
pub mod experimental;
mod ffi;
pub mod file;
mod library;
mod log;
mod model;
mod options;
mod session;
mod stats;
mod strategy;
mod stream;

use std::ffi::CStr;

use kvasir_sys as sys;

pub use answer::{Answer, Passage, Prefilled, StopReason, Token};
pub use cache::{Cache, Number, Shape, BF16, F16};
pub use checkpoint::{Checkpoint, LayerState, StateLayout};
pub use composed::ComposedDocument;
pub use control::{CancelToken, Control, Phase, Progress};
pub use error::{Error, Failure, Result};
pub use library::{Document, Found, Library, Problem};
pub use log::LogLevel;
pub use model::{Model, ModelInfo, Tokenize};
pub use options::*;
pub use session::Session;
pub use stats::{CacheStats, SessionStats};
pub use strategy::{strategies, Param, Strategy, StrategyInfo};
pub use stream::{Continuation, Stream};

/// Version of the loaded library: major * 10000 + minor * 100 + patch.
#[must_use]
pub fn version() -> u32 {
    // SAFETY: takes no argument.
    unsafe { sys::kv_version() }
}

/// JSON about the loaded library: version, cache format, compiler, kernels chosen for this CPU,
/// backends.
#[must_use]
pub fn build_info() -> &'static str {
    // SAFETY: the text is static and terminated.
    let text = unsafe { CStr::from_ptr(sys::kv_build_info()) };
    text.to_str().unwrap_or("{}")
}

/// A short text for the number of a status; "unknown status" for others.
#[must_use]
pub fn status_text(status: i32) -> &'static str {
    error::status_text(status)
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
