//! Cache files without a model: description, verification, packed copies.
use std::path::Path;

use kvasir_sys as sys;

use crate::ffi::{self, call, sized, text};
use crate::{Control, Precision, Problem, Result};

/// Description of a cache file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileInfo {
    /// Version of the format: docs/file-format.md.
    pub format_version: u32,
    /// Size of the file.
    pub file_bytes: u64,
    /// Tokens of the sequence.
    pub tokens: u64,
    /// The first of these, in pages.
    pub sealed_tokens: u64,
    /// Bytes of pages, scales and page summaries.
    pub kv_bytes: u64,
    /// Transformer blocks.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// How the KV cache is stored.
    pub precision: Precision,
    /// Name of the model that wrote it, truncated.
    pub model_name: String,
    /// Chat format of its turns; empty: none, or written by an older library.
    pub chat_format: String,
    /// Layers with a state; 0: none.
    pub recurrent_layers: u32,
    /// States that the file has: of the end, and of checkpoints before it.
    pub states: u32,
    /// Bytes of all of them.
    pub state_bytes: u64,
    /// Tokens before each earlier position at which windows and states can go on.
    pub checkpoints: Vec<u64>,
    /// Tokens whose keys and values of the MTP layer it has; 0: saved without drafts.
    pub mtp_tokens: u64,
    /// Documents of a composed session, to which it refers: [`documents`]; 0: none.
    pub documents: u64,
}

/// A document to which a file of a composed session refers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileDocument {
    /// Where it must be.
    pub path: String,
    /// Tokens of the document.
    pub tokens: u64,
    /// Size of its file when it was mapped.
    pub file_bytes: u64,
    /// Why the session cannot be loaded: the document is missing, has changed or cannot be read.
    pub problem: Option<Problem>,
    /// Answers may attend it.
    pub is_candidate: bool,
    /// The last answer attended it.
    pub is_attended: bool,
}

/// Description of a packed file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackedInfo {
    /// Version of the packed format: docs/file-format.md.
    pub packed_version: u32,
    /// Size of the packed file.
    pub file_bytes: u64,
    /// Size of the unpacked file.
    pub document_bytes: u64,
    /// Tokens of the sequence.
    pub tokens: u64,
    /// Version of the unpacked file's format.
    pub format_version: u32,
    /// Level of compression.
    pub level: u32,
    /// Transformer blocks.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Name of the model that wrote it, truncated.
    pub model_name: String,
}

/// Describes a cache file. Checks header and tables only.
///
/// # Errors
/// `NotACache` (also a packed file: [`inspect_packed`]), `NotFound`, `Permission`, `Io`, `Version`,
/// `Corrupt`, `NoMemory`.
pub fn inspect(path: impl AsRef<Path>) -> Result<FileInfo> {
    let (path, mut info) = (ffi::path(path.as_ref())?, sized::<sys::kv_file_info>());
    // SAFETY: the path is terminated, the struct has its size.
    call(|error| unsafe { sys::kv_file_inspect(path.as_ptr(), &mut info, error) })?;
    Ok(FileInfo {
        format_version: info.format_version,
        file_bytes: info.file_bytes,
        tokens: info.tokens,
        sealed_tokens: info.sealed_tokens,
        kv_bytes: info.kv_bytes,
        layers: info.layers,
        kv_heads: info.kv_heads,
        head_dim: info.head_dim,
        precision: Precision::of(info.precision),
        model_name: text(&info.model_name),
        chat_format: text(&info.chat_format),
        recurrent_layers: info.recurrent_layers,
        states: info.states,
        state_bytes: info.state_bytes,
        checkpoints: info
            .checkpoint_tokens
            .iter()
            .take(usize::try_from(info.checkpoints).unwrap_or(0))
            .copied()
            .collect(),
        mtp_tokens: info.mtp_tokens,
        documents: info.documents,
    })
}

/// Lists the documents to which a file of a composed session refers. Checks the headers of their
/// files.
///
/// # Errors
/// Those of [`inspect`].
pub fn documents(path: impl AsRef<Path>) -> Result<Vec<FileDocument>> {
    let (count, path) = (inspect(path.as_ref())?.documents, ffi::path(path.as_ref())?);
    let mut documents = Vec::new();
    for index in 0..u32::try_from(count).unwrap_or(u32::MAX) {
        let mut raw = sized::<sys::kv_file_document>();
        // SAFETY: the path is terminated, the struct has its size.
        call(|e| unsafe { sys::kv_file_get_document(path.as_ptr(), index, &mut raw, e) })?;
        documents.push(FileDocument {
            path: text(&raw.path),
            tokens: raw.tokens,
            file_bytes: raw.file_bytes,
            problem: Problem::of(raw.status),
            is_candidate: raw.flags & sys::KV_DOCUMENT_CANDIDATE != 0,
            is_attended: raw.flags & sys::KV_DOCUMENT_ATTENDED != 0,
        });
    }
    Ok(documents)
}

/// Reads and verifies every byte of a cache file.
///
/// # Errors
/// Those of [`verify_with`].
pub fn verify(path: impl AsRef<Path>) -> Result<()> {
    verify_with(path, Control::new())
}

/// Does what [`verify`] does, with progress.
///
/// # Errors
/// `Corrupt`, which names section and offset; `Cancelled`, and those of [`inspect`].
pub fn verify_with(path: impl AsRef<Path>, mut control: Control) -> Result<()> {
    let (path, control) = (ffi::path(path.as_ref())?, control.raw());
    // SAFETY: path and control live during the call.
    call(|error| unsafe { sys::kv_file_verify(path.as_ptr(), &control, error) })
}

/// Options of [`pack_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct PackOptions {
    level: u32,
}

impl PackOptions {
    /// Creates the defaults.
    pub fn new() -> PackOptions {
        PackOptions::default()
    }

    /// Level of compression, 1 to 19: slower and slightly smaller; 0: 1.
    pub fn level(mut self, level: u32) -> PackOptions {
        self.level = level;
        self
    }
}

/// Writes a packed copy of a cache file, about 85% of its size, to send or archive. `packed` is
/// replaced atomically; after a failure it is as before.
///
/// # Errors
/// Those of [`pack_with`].
pub fn pack(path: impl AsRef<Path>, packed: impl AsRef<Path>) -> Result<()> {
    pack_with(path, packed, PackOptions::new(), Control::new())
}

/// Does what [`pack`] does, with options and progress.
///
/// # Errors
/// `BadArgument` (the level; both paths are one file), `NotFound`, `NotACache`, `Version`,
/// `Corrupt` (header or tables), `Cancelled`, `NoSpace`, `Permission`, `Io`, `NoMemory`.
pub fn pack_with(
    path: impl AsRef<Path>,
    packed: impl AsRef<Path>,
    options: PackOptions,
    mut control: Control,
) -> Result<()> {
    let (path, packed) = (ffi::path(path.as_ref())?, ffi::path(packed.as_ref())?);
    let control = control.raw();
    // SAFETY: paths and control live during the call.
    call(|error| unsafe {
        sys::kv_pack(path.as_ptr(), packed.as_ptr(), options.level, &control, error)
    })
}

/// Restores at `path`, bit for bit, the cache file that [`pack`] packed.
///
/// # Errors
/// Those of [`unpack_with`].
pub fn unpack(packed: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
    unpack_with(packed, path, Control::new())
}

/// Does what [`unpack`] does, with progress.
///
/// # Errors
/// `Corrupt` (any byte differs from what was written), and those of [`pack_with`].
pub fn unpack_with(
    packed: impl AsRef<Path>,
    path: impl AsRef<Path>,
    mut control: Control,
) -> Result<()> {
    let (packed, path) = (ffi::path(packed.as_ref())?, ffi::path(path.as_ref())?);
    let control = control.raw();
    // SAFETY: paths and control live during the call.
    call(|error| unsafe { sys::kv_unpack(packed.as_ptr(), path.as_ptr(), &control, error) })
}

/// Describes a packed file. Checks its header and size only.
///
/// # Errors
/// `NotACache` (another kind of file), and those of [`inspect`].
pub fn inspect_packed(path: impl AsRef<Path>) -> Result<PackedInfo> {
    let (path, mut info) = (ffi::path(path.as_ref())?, sized::<sys::kv_packed_info>());
    // SAFETY: the path is terminated, the struct has its size.
    call(|error| unsafe { sys::kv_packed_inspect(path.as_ptr(), &mut info, error) })?;
    Ok(PackedInfo {
        packed_version: info.packed_version,
        file_bytes: info.file_bytes,
        document_bytes: info.document_bytes,
        tokens: info.tokens,
        format_version: info.format_version,
        level: info.level,
        layers: info.layers,
        kv_heads: info.kv_heads,
        head_dim: info.head_dim,
        model_name: text(&info.model_name),
    })
}
