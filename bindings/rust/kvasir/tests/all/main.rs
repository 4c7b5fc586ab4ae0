//! The binding over the real library and the bundled model.
mod answers;
mod callbacks;
mod documents;
mod failures;
mod store;
mod support;
