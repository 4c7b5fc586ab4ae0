//! Saved documents as files: what they are, whether they are whole, packed copies. No model is needed.
use std::path::Path;

use kvasir_sys as sys;

use crate::ffi::{self, call, sized, text};
use crate::{CallOptions, KvType, PackOptions, Result};

/// What a saved document says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileInfo {
    pub format_version: u32,
    pub file_bytes: u64,
    pub tokens: u64,
    pub sealed_tokens: u64,
    /// Pages, scales and summaries.
    pub kv_bytes: u64,
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// `None`: one that this crate does not know.
    pub kv_type: Option<KvType>,
    pub model_name: String,
    /// Of its turns; empty: it has none, or an older library wrote it.
    pub chat_format: String,
}

/// What a packed document says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackedInfo {
    pub packed_version: u32,
    pub file_bytes: u64,
    /// When it is unpacked.
    pub document_bytes: u64,
    pub tokens: u64,
    /// Of the document.
    pub format_version: u32,
    pub level: u32,
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub model_name: String,
}

/// Checks the header and the sequence's facts only. A packed document is `Error::NotACache`: [`inspect_packed`].
pub fn inspect(path: impl AsRef<Path>) -> Result<FileInfo> {
    let (path, mut info) = (ffi::path(path.as_ref())?, sized::<sys::kv_file_information>());
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
        kv_type: match info.kv_type {
            sys::KV_KV_INT8 => Some(KvType::Int8),
            sys::KV_KV_F32 => Some(KvType::F32),
            _ => None,
        },
        model_name: text(&info.model_name),
        chat_format: text(&info.chat_format),
    })
}

/// Reads and checks every byte. `Error::Corrupt` names section and offset.
pub fn verify(path: impl AsRef<Path>, options: &CallOptions) -> Result<()> {
    let (path, raw) = (ffi::path(path.as_ref())?, options.raw()?);
    // SAFETY: path and options live during the call.
    call(|error| unsafe { sys::kv_file_verify(path.as_ptr(), &raw.value, error) })
}

/// Makes a smaller copy of a saved document, about 85% of its size, for sending or keeping away. `packed` is replaced atomically.
pub fn pack(path: impl AsRef<Path>, packed: impl AsRef<Path>, options: &PackOptions) -> Result<()> {
    let (path, packed, raw) = (ffi::path(path.as_ref())?, ffi::path(packed.as_ref())?, options.raw()?);
    // SAFETY: paths and options live during the call.
    call(|error| unsafe { sys::kv_pack(path.as_ptr(), packed.as_ptr(), &raw.value, error) })
}

/// Restores at `path`, bit for bit, what [`pack`] packed. `Error::Corrupt` when anything in the file is not as it was written.
pub fn unpack(packed: impl AsRef<Path>, path: impl AsRef<Path>, options: &PackOptions) -> Result<()> {
    let (packed, path, raw) = (ffi::path(packed.as_ref())?, ffi::path(path.as_ref())?, options.raw()?);
    // SAFETY: paths and options live during the call.
    call(|error| unsafe { sys::kv_unpack(packed.as_ptr(), path.as_ptr(), &raw.value, error) })
}

/// Checks header and size only. `Error::NotACache` when it is something else.
pub fn inspect_packed(path: impl AsRef<Path>) -> Result<PackedInfo> {
    let (path, mut info) = (ffi::path(path.as_ref())?, sized::<sys::kv_packed_information>());
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
