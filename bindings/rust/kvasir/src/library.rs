//! A folder of saved documents.
use std::path::Path;
use std::ptr::null;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use kvasir_sys as sys;

use crate::callback::OnLog;
use crate::error::status_text;
use crate::ffi::{self, call, sized, text, Owned};
use crate::{Error, LibraryOptions, LibrarySessionOptions, Model, Result, Session, SessionOptions};

/// A folder of saved documents that finds by itself what was read before: every text is read once, and of a text that begins like another only
/// the rest. Any number of processes and threads may use one folder, and of threads one `Library`, at once; sessions stay usable without it.
pub struct Library {
    raw: Owned<sys::kv_library>,
    listing: Mutex<()>, // a list is several calls
    _log: Option<OnLog>,
}

/// One document of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Document {
    pub name: String,
    /// `None`, or why the file cannot be used; then it has no tokens.
    pub problem: Option<Problem>,
    pub file_bytes: u64,
    pub tokens: u64,
    pub last_used: SystemTime,
    pub model_name: String,
    /// Of the model's weights, as [`ModelInfo`](crate::ModelInfo) has it.
    pub fingerprint: String,
}

/// A status beside a result that is there all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// As [`Error::status`] has it.
    pub status: i32,
}

/// What [`Library::session`] found and did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Of the text.
    pub tokens: u64,
    /// The first ones of these, that a document had.
    pub tokens_found: u64,
    /// What was read is now in the library; otherwise it was there, or `problem` says why not.
    pub saved: bool,
    /// `None`, or why what was read is not in the library though the session is there.
    pub problem: Option<Problem>,
    /// Of the document that was found, or saved.
    pub name: String,
}

impl Library {
    /// Makes the folder where there is none (not those above it).
    pub fn open(folder: impl AsRef<Path>) -> Result<Library> {
        Library::open_with(folder, &LibraryOptions::new())
    }

    /// The same with options. `Error::NotFound`, `Error::Permission`, `Error::Io`, `Error::NoMemory`, `Error::Busy` (another process has been
    /// changing the library for 10 seconds).
    pub fn open_with(folder: impl AsRef<Path>, options: &LibraryOptions) -> Result<Library> {
        let (folder, raw) = (ffi::path(folder.as_ref())?, options.raw()?);
        // SAFETY: folder and options live during the call.
        let raw = Owned::open(|out, error| unsafe { sys::kv_library_open(folder.as_ptr(), &raw.value, out, error) })?;
        Ok(Library { raw, listing: Mutex::new(()), _log: options.extra.log.clone() })
    }

    /// All documents, the last used first. A name that is not UTF-8 has replacement characters.
    pub fn list(&self) -> Result<Vec<Document>> {
        let _one_list = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut documents = Vec::new();
        for index in 0.. {
            let mut document = sized();
            // SAFETY: the library is open, the struct has its size.
            match call(|error| unsafe { sys::kv_library_list(self.raw.raw(), index, &mut document, error) }) {
                Ok(()) => documents.push(Document::of(&document)),
                Err(error @ Error::NotFound(_)) if error.os_error().is_none() => break, // after the last; of the folder it has one
                Err(error) => return Err(error),
            }
        }
        Ok(documents)
    }

    /// A session that has read the text as [`Session::prefill`] reads it: what a document begins with is mapped, the rest is read and kept.
    pub fn session(&self, model: &Model, text: impl AsRef<[u8]>) -> Result<(Session, Found)> {
        self.session_with(model, text, &LibrarySessionOptions::new())
    }

    /// The same with options. `Error::BadArgument` (also an empty text), `Error::Cancelled` (nothing was saved; what was read is lost),
    /// `Error::ContextFull`, `Error::NoMemory`, `Error::Io`. A failure to save, or a cancel while saving, is not a failure of this call:
    /// [`Found::problem`].
    pub fn session_with(&self, model: &Model, text: impl AsRef<[u8]>, options: &LibrarySessionOptions) -> Result<(Session, Found)> {
        let defaults = SessionOptions::new();
        let session_options = options.extra.session.as_deref().unwrap_or(&defaults);
        let (text, inner, mut raw) = (text.as_ref(), session_options.raw()?, options.raw()?);
        raw.value.session = if options.extra.session.is_some() { &inner.value } else { null() };
        let mut found = sized();
        // SAFETY: library and model are open, text and options live during the call, the struct has its size.
        let session = Session::open(model, session_options, |out, error| unsafe {
            let (text, size) = (text.as_ptr().cast(), text.len());
            sys::kv_library_session(self.raw.raw(), model.raw(), text, size, &raw.value, out, &mut found, error)
        })?;
        Ok((session, Found::of(&found)))
    }

    /// Durable when it returns. `Error::NotFound`, `Error::BadState` (there is a document of the new name), `Error::Busy`.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (ffi::string(from, "from")?, ffi::string(to, "to")?);
        // SAFETY: the library is open, the names are terminated.
        call(|error| unsafe { sys::kv_library_rename(self.raw.raw(), from.as_ptr(), to.as_ptr(), error) })
    }

    /// Durable when it returns. `Error::NotFound`, `Error::Busy` (a session has it open).
    pub fn remove(&self, name: &str) -> Result<()> {
        let name = ffi::string(name, "name")?;
        // SAFETY: the library is open, the name is terminated.
        call(|error| unsafe { sys::kv_library_remove(self.raw.raw(), name.as_ptr(), error) })
    }
}

impl Problem {
    fn of(status: sys::kv_status) -> Option<Problem> {
        (status != sys::KV_OK as sys::kv_status).then_some(Problem { status })
    }

    /// A short constant text, "not a cache file" for example.
    pub fn text(&self) -> &'static str {
        status_text(self.status)
    }
}

impl Document {
    fn of(raw: &sys::kv_library_document) -> Document {
        Document {
            name: text(&raw.name),
            problem: Problem::of(raw.status),
            file_bytes: raw.file_bytes,
            tokens: raw.tokens,
            last_used: SystemTime::UNIX_EPOCH + Duration::from_nanos(raw.last_used),
            model_name: text(&raw.model_name),
            fingerprint: text(&raw.fingerprint),
        }
    }
}

impl Found {
    fn of(raw: &sys::kv_library_result) -> Found {
        Found {
            tokens: raw.tokens,
            tokens_found: raw.tokens_found,
            saved: raw.saved != 0,
            problem: Problem::of(raw.save_status),
            name: text(&raw.name),
        }
    }
}
