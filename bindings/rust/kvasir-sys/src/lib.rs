//! Kvasir's C interface, one to one. `include/kvasir.h` documents each entry: codes, ownership and
//! threads. The crate `kvasir` is the safe interface. Feature `experimental` adds
//! `kvasir_experimental.h`, which is no part of the ABI promise.
//!
//! `bindings/rust/generate` writes `bindings.rs` and `experimental.rs`. A test compares them with
//! the headers.
#![no_std]
#![allow(non_camel_case_types)]
extern crate std;

mod bindings;
#[cfg(feature = "experimental")]
mod experimental;

pub use bindings::*;
#[cfg(feature = "experimental")]
pub use experimental::*;
