//! Kvasir's C interface, one to one. `include/kvasir.h` says what each entry does, what it returns, who owns what and which thread
//! may call it; the crate `kvasir` is the same, safe.
//!
//! `src/bindings.rs` is written by `bindings/rust/generate` and tested to be of the header.
#![no_std]
#![allow(non_camel_case_types)]
extern crate std;

mod bindings;
pub use bindings::*;
