//! The binding, with the library and the bundled model.
mod answers;
mod cache;
mod callbacks;
mod composed;
mod documents;
mod failures;
mod sequences;
mod support;
