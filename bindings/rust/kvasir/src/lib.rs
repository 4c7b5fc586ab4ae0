//! Kvasir reads a long document once with a local language model, keeps what the model has read (its keys and values) in a file, and answers
//! questions about it from then on.
//!
//! ```
//! # fn main() -> kvasir::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kvasir-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! # let path = folder.join("book.kv");
//! # let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/mini-reader-q8_0.gguf");
//! # let text = "The tower has a gate. The access code of the north gate is 4821907. It is closed at night.";
//! let model = kvasir::Model::open(gguf)?;
//! let mut session = model.session()?;
//! session.prefill(text)?; // minutes for a book, once
//! session.save(&path)?;
//!
//! let mut session = model.load(&path)?; // milliseconds, mapped
//! let answer = session.ask("What is the access code of the north gate?")?;
//! assert!(answer.contains("4821907"));
//! # drop(session);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! **Threads.** A [`Model`], a [`Library`] and a [`CancelToken`] serve any number of threads. A [`Session`] and a [`Cache`] go to any thread and
//! serve one call at a time, which the borrow checker sees to where the call changes something.
//!
//! **Order.** Everything may be dropped in any order: sessions keep their model, forks their pages, handles their log callbacks. What was dropped
//! cannot be used:
//!
//! ```compile_fail,E0382
//! # fn f(mut session: kvasir::Session) {
//! drop(session);
//! session.ask("Who?");
//! # }
//! ```
//!
//! **Callbacks** run on the calling thread, during the call. They stop it with `ControlFlow::Break(())`; their panics go around the library and on
//! in the caller. What is called cannot be called from them:
//!
//! ```compile_fail,E0499
//! # use std::ops::ControlFlow;
//! # fn f(mut session: kvasir::Session) {
//! session.generate("Who?", &Default::default(), |_| {
//!     session.rewind(0).unwrap();
//!     ControlFlow::Continue(())
//! });
//! # }
//! ```
//!
//! **Errors** are an [`Error`] with the library's whole message. Text is UTF-8 where it is `&str`; documents and questions may have other bytes.
#![warn(unreachable_pub)]
#![deny(unsafe_op_in_unsafe_fn)]

mod cache;
mod callback;
mod error;
mod ffi;
pub mod file;
mod library;
mod model;
mod options;
mod session;
mod stream;

use std::ffi::CStr;

use kvasir_sys as sys;

pub use cache::{Cache, Number, Shape, BF16, F16};
pub use callback::{CancelToken, LogLevel, Phase, Progress};
pub use error::{Error, Failure, Result};
pub use library::{Document, Found, Library, Problem};
pub use model::{Model, ModelInfo, Tokenize};
pub use options::*;
pub use session::{Answer, Next, Read, Session, Span, StopReason};
pub use stream::{Continuation, Stream};

/// What a strategy takes and its defaults.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StrategyInfo {
    pub name: String,
    /// The default of that option; `u32::MAX`: all.
    pub dense_layers: u32,
    /// Likewise.
    pub budget_fraction: f64,
    /// Tokens that the default fraction is at least.
    pub budget_floor: u64,
    /// Otherwise it reads the same whatever the budget.
    pub takes_budget: bool,
    pub takes_select_tokens: bool,
    pub takes_coverage: bool,
    pub takes_head_graphs: bool,
}

/// The strategies that decode can go through; "auto" is a choice of one.
pub fn strategies() -> Result<Vec<StrategyInfo>> {
    let mut all = Vec::new();
    for index in 0.. {
        let mut info = ffi::sized::<sys::kv_strategy_information>();
        // SAFETY: the struct has its size.
        match ffi::call(|error| unsafe { sys::kv_strategy_info(index, &mut info, error) }) {
            Err(Error::NotFound(_)) => break,
            other => other?,
        }
        all.push(StrategyInfo {
            name: ffi::text(&info.name),
            dense_layers: info.dense_layers,
            budget_fraction: info.budget_fraction,
            budget_floor: info.budget_floor,
            takes_budget: info.takes_budget != 0,
            takes_select_tokens: info.takes_select_tokens != 0,
            takes_coverage: info.takes_coverage != 0,
            takes_head_graphs: info.takes_head_graphs != 0,
        });
    }
    Ok(all)
}

/// The version of the library that was loaded: major * 10000 + minor * 100 + patch.
pub fn version() -> u32 {
    // SAFETY: takes nothing.
    unsafe { sys::kv_version() }
}

/// JSON about the library that was loaded: version, cache format, compiler, kernels that this processor gets, backends.
pub fn build_info() -> &'static str {
    // SAFETY: the text is constant, terminated and valid for ever.
    let text = unsafe { CStr::from_ptr(sys::kv_build_info()) };
    text.to_str().unwrap_or("{}")
}

/// A short constant text for the number of a status, "unknown status" for others.
pub fn status_text(status: i32) -> &'static str {
    error::status_text(status)
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
