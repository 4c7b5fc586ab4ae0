//! Sessions over several documents.
use std::ffi::CStr;
use std::path::Path;

use kvasir_sys as sys;

use crate::ffi::{self, call, fill, sized};
use crate::{Control, Error, Model, Result, Session, SessionOptions};

/// A document of a composed session.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ComposedDocument {
    /// Path of its file. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Tokens of the document.
    pub tokens: u64,
    /// Share of the last question's scores, 0 to 1, if it was scored.
    pub score: Option<f64>,
    /// Answers may attend it.
    pub is_candidate: bool,
    /// The last answer attended it.
    pub is_attended: bool,
}

impl Model {
    /// Creates a session over several cache files by mapping them; nothing is prefilled again.
    /// Answers attend all documents, or those that a choice by the question finds.
    /// [`Session::save`] writes a small file that refers to them, which [`Model::load`] takes.
    ///
    /// # Errors
    /// Those of [`Model::compose_with`].
    pub fn compose<P: AsRef<Path>>(&self, paths: impl IntoIterator<Item = P>) -> Result<Session> {
        self.compose_with(paths, 0, &SessionOptions::new(), Control::new())
    }

    /// Does what [`Model::compose`] does, with options. `max_documents`: that an answer attends; 0:
    /// up to 8. At least as many as there are documents: all, without a choice, if they fit.
    ///
    /// # Errors
    /// `Unsupported` (the model or the strategy cannot), `BadArgument` (no path; a file with a
    /// question), and those of [`Model::load_with`].
    pub fn compose_with<P: AsRef<Path>>(
        &self,
        paths: impl IntoIterator<Item = P>,
        max_documents: u32,
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let paths =
            paths.into_iter().map(|path| ffi::path(path.as_ref())).collect::<Result<Vec<_>>>()?;
        let list: Vec<_> = paths.iter().map(|path| path.as_ptr()).collect();
        let (raw, control) = (options.raw()?, control.raw());
        let mut compose = sized::<sys::kv_compose_options>();
        compose.max_documents = max_documents;
        compose.session = &raw.value;
        // SAFETY: the model is open; paths, options and control live during the call.
        Session::open(self, options, |out, error| unsafe {
            let (first, count) = (list.as_ptr(), list.len());
            sys::kv_session_compose(self.raw(), first, count, &compose, &control, out, error)
        })
    }
}

impl Session {
    /// Lists the documents of [`Model::compose`], in its order; none of other sessions.
    ///
    /// # Errors
    /// `Busy`.
    pub fn documents(&self) -> Result<Vec<ComposedDocument>> {
        let mut documents = Vec::new();
        loop {
            match self.document(documents.len()) {
                Ok(document) => documents.push(document),
                Err(Error::NotFound(_) | Error::BadState(_)) => return Ok(documents),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn document(&self, index: usize) -> Result<ComposedDocument> {
        let (mut raw, index) = (sized::<sys::kv_session_document>(), ffi::index(index)?);
        // SAFETY: the session is open, the struct has its size.
        call(|e| unsafe { sys::kv_session_get_document(self.raw(), index, &mut raw, e) })?;
        // SAFETY: the path is terminated, and lives until the documents are replaced.
        let path = unsafe { CStr::from_ptr(raw.path) };
        Ok(ComposedDocument {
            path: path.to_string_lossy().into_owned(),
            tokens: raw.tokens,
            score: (raw.score >= 0.0).then_some(raw.score),
            is_candidate: raw.flags & sys::KV_DOCUMENT_CANDIDATE != 0,
            is_attended: raw.flags & sys::KV_DOCUMENT_ATTENDED != 0,
        })
    }

    /// Returns the tokens of a document of [`Model::compose`]; passages refer to them.
    ///
    /// # Errors
    /// `NotFound`, `BadState` (not of [`Model::compose`]), `NoMemory`, `Busy`.
    pub fn document_tokens(&self, index: usize) -> Result<Vec<i32>> {
        let index = ffi::index(index)?;
        // SAFETY: the session is open; there is room for `capacity` tokens.
        fill(4096, |out, capacity, count, error| unsafe {
            sys::kv_session_document_tokens(self.raw(), index, out, capacity, count, error)
        })
    }

    /// Replaces the documents of a session of [`Model::compose`]. Questions and answers stay. The
    /// limit of [`Session::limit_documents`] ends.
    ///
    /// # Errors
    /// `BadState` (not over several documents), `ModelMismatch` (other instructions or another chat
    /// format), and those of [`Model::compose_with`]. The session then has the old documents.
    pub fn set_documents<P: AsRef<Path>>(
        &mut self,
        paths: impl IntoIterator<Item = P>,
    ) -> Result<()> {
        let paths =
            paths.into_iter().map(|path| ffi::path(path.as_ref())).collect::<Result<Vec<_>>>()?;
        let list: Vec<_> = paths.iter().map(|path| path.as_ptr()).collect();
        let (first, count) = (list.as_ptr(), list.len());
        // SAFETY: the session is open, the paths live during the call.
        call(|error| unsafe {
            sys::kv_session_set_documents(self.raw(), first, count, std::ptr::null(), error)
        })
    }

    /// Limits later answers to these of [`Session::documents`], ascending; none: all are
    /// candidates.
    ///
    /// # Errors
    /// `BadState` (not of [`Model::compose`]), `BadArgument`, `NoMemory`, `Busy`.
    pub fn limit_documents(&mut self, indexes: &[usize]) -> Result<()> {
        let limits = indexes.iter().map(|&i| ffi::index(i)).collect::<Result<Vec<u32>>>()?;
        // SAFETY: the session is open, the indexes live during the call.
        call(|error| unsafe {
            let (first, count) = (limits.as_ptr(), limits.len());
            sys::kv_session_limit_documents(self.raw(), first, count, error)
        })
    }
}
