//! Libraries: folders of cache files.
use std::fmt;
use std::path::Path;
use std::ptr::null;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use kvasir_sys as sys;

use crate::error::status_text;
use crate::ffi::{self, call, sized, text, Owned};
use crate::log::OnLog;
use crate::{
    Control, Error, LibraryOptions, LibrarySessionOptions, Model, Result, Session, SessionOptions,
};

/// A folder of cache files that finds earlier prefills by itself.
///
/// A text is prefilled once; of a text that begins like another only the rest is prefilled.
/// Processes and threads may use one folder at once, and threads one `Library`. Sessions stay
/// usable without it.
pub struct Library {
    raw: Owned<sys::kv_library>,
    listing: Mutex<()>, // a list is several calls
    _log: Option<OnLog>,
}

/// A document of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Document {
    /// Name without ".kv". Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Why the file cannot be used; then it has no tokens.
    pub problem: Option<Problem>,
    /// Size of the file.
    pub file_bytes: u64,
    /// Tokens of the sequence.
    pub tokens: u64,
    /// Time of the last use.
    pub last_used: SystemTime,
    /// Name of the model that wrote it, truncated.
    pub model_name: String,
    /// As [`ModelInfo::fingerprint`](crate::ModelInfo::fingerprint).
    pub fingerprint: String,
}

/// A status that comes with a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// As [`Error::status`].
    pub status: i32,
}

/// What [`Library::session`] found and saved.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Tokens of the text.
    pub tokens: u64,
    /// The first of these, found in a document.
    pub tokens_found: u64,
    /// This call saved the prefill. Otherwise it was found, another call saved it meanwhile, or
    /// `problem` says why not.
    pub saved: bool,
    /// Why the prefill is not in the library although the session exists.
    pub problem: Option<Problem>,
    /// Name of the document found or saved.
    pub name: String,
}

impl Library {
    /// Opens a folder, and creates it where it does not exist, but not its parents.
    ///
    /// # Errors
    /// Those of [`Library::open_with`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Library> {
        Library::open_with(folder, &LibraryOptions::new())
    }

    /// Does what [`Library::open`] does, with options.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`, `NoMemory`; `Busy` (another process has been changing the
    /// library for 10 seconds).
    pub fn open_with(folder: impl AsRef<Path>, options: &LibraryOptions) -> Result<Library> {
        let (folder, raw) = (ffi::path(folder.as_ref())?, options.raw()?);
        // SAFETY: folder and options live during the call.
        let raw = Owned::open(|out, error| unsafe {
            sys::kv_library_open(folder.as_ptr(), &raw.value, out, error)
        })?;
        Ok(Library { raw, listing: Mutex::new(()), _log: options.extra.log.clone() })
    }

    /// Lists all documents, the most recently used first.
    ///
    /// # Errors
    /// `Io`, `Permission`, `NotFound` (the folder is gone), `NoMemory`.
    pub fn list(&self) -> Result<Vec<Document>> {
        let _one_list = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        let (library, mut documents) = (self.raw.raw(), Vec::new());
        for index in 0.. {
            let mut document = sized();
            // SAFETY: the library is open, the struct has its size.
            match call(|e| unsafe { sys::kv_library_list(library, index, &mut document, e) }) {
                Ok(()) => documents.push(Document::of(&document)),
                // After the last document there is no system error.
                Err(error @ Error::NotFound(_)) if error.os_error().is_none() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(documents)
    }

    /// Creates a session whose sequence is the text, as after [`Session::prefill`]. Maps the
    /// document that shares the longest prefix, prefills the rest and saves the result.
    ///
    /// # Errors
    /// Those of [`Library::session_with`].
    pub fn session(&self, model: &Model, text: impl AsRef<[u8]>) -> Result<(Session, Found)> {
        self.session_with(model, text, &LibrarySessionOptions::new(), Control::new())
    }

    /// Does what [`Library::session`] does, with options and progress. A failed or cancelled save
    /// is no failure of this call: [`Found::problem`].
    ///
    /// # Errors
    /// `BadArgument` (also an empty text), `ContextFull`, `NoMemory`, `Io`; `Cancelled` (nothing
    /// was saved; the prefill is lost); and those of [`Model::session_with`].
    pub fn session_with(
        &self,
        model: &Model,
        text: impl AsRef<[u8]>,
        options: &LibrarySessionOptions,
        mut control: Control,
    ) -> Result<(Session, Found)> {
        let defaults = SessionOptions::new();
        let session = options.extra.session.as_deref();
        let session_options = session.unwrap_or(&defaults);
        let (inner, mut raw, control) = (session_options.raw()?, options.raw()?, control.raw());
        raw.value.session = if session.is_some() { &inner.value } else { null() };
        let (text, mut found) = (text.as_ref(), sized());
        let (start, size, result) = (text.as_ptr().cast(), text.len(), &mut found);
        // SAFETY: library and model are open; text, options and control live during the call; the
        // struct has its size.
        let session = Session::open(model, session_options, |out, error| unsafe {
            let (library, model, raw) = (self.raw.raw(), model.raw(), &raw.value);
            sys::kv_library_session(library, model, start, size, raw, &control, out, result, error)
        })?;
        Ok((session, Found::of(&found)))
    }

    /// Creates a session over documents of the library, as [`Model::compose`]: those named, in this
    /// order, or without names all of this model, by name. Then documents that cannot be used are
    /// left out, and the log has the reason.
    ///
    /// # Errors
    /// `NotFound` (no document of this model, or of a name), and those of [`Model::compose_with`].
    pub fn compose(&self, model: &Model, names: &[&str]) -> Result<Session> {
        self.compose_with(model, names, 0, &SessionOptions::new(), Control::new())
    }

    /// Does what [`Library::compose`] does, with the options of [`Model::compose_with`].
    ///
    /// # Errors
    /// Those of [`Library::compose`].
    pub fn compose_with(
        &self,
        model: &Model,
        names: &[&str],
        max_documents: u32,
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let names =
            names.iter().map(|name| ffi::string(name, "name")).collect::<Result<Vec<_>>>()?;
        let list: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let (raw, control) = (options.raw()?, control.raw());
        let mut compose = sized::<sys::kv_compose_options>();
        compose.max_documents = max_documents;
        compose.session = &raw.value;
        // SAFETY: library and model are open; names, options and control live during the call.
        Session::open(model, options, |out, error| unsafe {
            let (library, model, first) = (self.raw.raw(), model.raw(), list.as_ptr());
            sys::kv_library_compose(
                library,
                model,
                first,
                list.len(),
                &compose,
                &control,
                out,
                error,
            )
        })
    }

    /// Renames a document, durably.
    ///
    /// # Errors
    /// `NotFound`, `BadState` (a document or a file has the new name), `BadArgument` (a name that
    /// no document can have), `Io`, `Permission`, `Busy`.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (ffi::string(from, "from")?, ffi::string(to, "to")?);
        // SAFETY: the library is open, the names are terminated.
        call(|error| unsafe {
            sys::kv_library_rename(self.raw.raw(), from.as_ptr(), to.as_ptr(), error)
        })
    }

    /// Removes a document, durably.
    ///
    /// # Errors
    /// `NotFound`, `Busy` (a session maps it), `Io`, `Permission`.
    pub fn remove(&self, name: &str) -> Result<()> {
        let name = ffi::string(name, "name")?;
        // SAFETY: the library is open, the name is terminated.
        call(|error| unsafe { sys::kv_library_remove(self.raw.raw(), name.as_ptr(), error) })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Problem {
    pub(crate) fn of(status: sys::kv_status) -> Option<Problem> {
        (status != sys::KV_OK as sys::kv_status).then_some(Problem { status })
    }

    /// A short text for the status, such as "not a cache file".
    #[must_use]
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
