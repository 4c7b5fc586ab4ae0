//! Models: weights, tokenizer and chat format.
use std::path::Path;

use kvasir_sys as sys;

use crate::callback::OnLog;
use crate::ffi::{self, call, fill, sized, text, Owned};
use crate::{Cache, CallOptions, LoadOptions, ModelOptions, Result, Session, SessionOptions};

/// A model's weights (a mapped GGUF file), tokenizer and chat format. Immutable, for any number of threads; clones are the same model. Its
/// sessions keep it open. The file must not be changed meanwhile.
#[derive(Clone)]
pub struct Model {
    raw: Owned<sys::kv_model>,
    _log: Option<OnLog>,
}

/// What a model is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelInfo {
    pub layers: u32,
    /// Of the residual stream.
    pub width: u32,
    /// Query heads.
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub feed_forward: u32,
    /// Tokens.
    pub vocabulary: u32,
    /// Tokens that the model was trained for.
    pub context: u64,
    pub parameters: u64,
    /// In the file.
    pub weight_bytes: u64,
    /// In the store, scales and summaries included.
    pub kv_bytes_per_token: u64,
    pub architecture: String,
    pub name: String,
    /// Number formats, most used first: "Q4_K Q6_K F32".
    pub weights: String,
    pub tokenizer: String,
    pub chat_format: String,
    /// Of the weights, 64 hexadecimal digits; saved documents belong to it.
    pub fingerprint: String,
    /// Of the whole file, 32 hexadecimal digits; empty until it is known (`ModelOptions::hash_folder`, [`Model::hash`]).
    pub hash: String,
}

/// What [`Model::tokenize`] makes of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokenize {
    /// Text that spells a control token becomes that token; otherwise it is text.
    pub special: bool,
    /// Begin with the begin-of-text token, if the model wants one.
    pub bos: bool,
    /// As [`Session::prefill`] reads the text into a new session, with the opening of the chat format's turn.
    pub document: bool,
}

impl Model {
    /// Maps a GGUF file and checks its metadata and tensor shapes; weights are read when they are used.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::open_with(path, &ModelOptions::new())
    }

    /// The same with options. `Error::NotFound`, `Error::Permission`, `Error::Io`; `Error::Corrupt` (damaged); `Error::Unsupported` (not a
    /// GGUF, or with what the library does not do); `Error::NoMemory`; `Error::Device`.
    pub fn open_with(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Model> {
        let (path, raw) = (ffi::path(path.as_ref())?, options.raw()?);
        // SAFETY: the strings are terminated and live during the call.
        let raw = Owned::open(|out, error| unsafe { sys::kv_open(path.as_ptr(), &raw.value, out, error) })?;
        Ok(Model { raw, _log: options.extra.log.clone() })
    }

    /// What a file is, without opening it for use. Errors as [`Model::open_with`].
    pub fn inspect(path: impl AsRef<Path>) -> Result<ModelInfo> {
        let (path, mut info) = (ffi::path(path.as_ref())?, sized());
        // SAFETY: the path is terminated, the struct has its size.
        call(|error| unsafe { sys::kv_model_inspect(path.as_ptr(), &mut info, error) })?;
        Ok(ModelInfo::of(&info))
    }

    /// What this model is.
    pub fn info(&self) -> Result<ModelInfo> {
        let mut info = sized();
        // SAFETY: the model is open, the struct has its size.
        call(|error| unsafe { sys::kv_model_info(self.raw(), &mut info, error) })?;
        Ok(ModelInfo::of(&info))
    }

    /// Reads the whole file and computes its hash, unless it is known; [`Model::info`] then has it. `Error::Cancelled`, `Error::Io`,
    /// `Error::Corrupt` (the file was changed while it was open), `Error::NoMemory`: it stays unknown.
    pub fn hash(&self, options: &CallOptions) -> Result<()> {
        let raw = options.raw()?;
        // SAFETY: the model is open, the options live during the call.
        call(|error| unsafe { sys::kv_model_hash(self.raw(), &raw.value, error) })
    }

    /// Text to tokens, in time linear in its size. Bytes that are not UTF-8 are tokenized as bytes.
    pub fn tokenize(&self, text: impl AsRef<[u8]>, how: Tokenize) -> Result<Vec<i32>> {
        let text = text.as_ref();
        let set = |asked, flag| if asked { flag } else { 0 };
        let flags =
            set(how.special, sys::KV_TOKENIZE_SPECIAL) | set(how.bos, sys::KV_TOKENIZE_BOS) | set(how.document, sys::KV_TOKENIZE_DOCUMENT);
        // SAFETY: the model is open, text and output are as long as they are said to be.
        fill(text.len() / 3 + 16, |out, capacity, count, error| unsafe {
            sys::kv_tokenize(self.raw(), text.as_ptr().cast(), text.len(), flags, std::ptr::null_mut(), out, capacity, count, error)
        })
    }

    /// Tokens to bytes, which need not be whole characters. Control tokens are left out unless `special`.
    pub fn detokenize(&self, tokens: &[i32], special: bool) -> Result<Vec<u8>> {
        let flags = if special { sys::KV_TOKENIZE_SPECIAL } else { 0 };
        // SAFETY: the model is open, tokens and output are as long as they are said to be.
        fill(tokens.len().saturating_mul(6), |out: *mut u8, capacity, size, error| unsafe {
            sys::kv_detokenize(self.raw(), tokens.as_ptr(), tokens.len(), flags, out.cast(), capacity, size, error)
        })
    }

    /// An empty sequence.
    pub fn session(&self) -> Result<Session> {
        self.session_with(&SessionOptions::new())
    }

    /// The same with options. `Error::BadArgument` (an unknown strategy, ranges), `Error::NoMemory`, `Error::Limit`.
    pub fn session_with(&self, options: &SessionOptions) -> Result<Session> {
        let raw = options.raw()?;
        // SAFETY: the model is open, the options live during the call.
        Session::open(self, options, |out, error| unsafe { sys::kv_session_open(self.raw(), &raw.value, out, error) })
    }

    /// A session over a saved sequence, mapped: its pages are read when they are used, their checksums now.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Session> {
        self.load_with(path, &SessionOptions::new(), &LoadOptions::new())
    }

    /// The same with options, of which `window` and `kv_type` are the file's. The file may be replaced or removed by name afterwards, but not
    /// cut or written in place. `Error::NotFound`, `Error::NotACache`, `Error::Version` and `Error::ModelMismatch` (stale), `Error::Corrupt`,
    /// `Error::ContextFull`, `Error::Limit`, `Error::Io`, `Error::NoMemory`.
    pub fn load_with(&self, path: impl AsRef<Path>, session: &SessionOptions, load: &LoadOptions) -> Result<Session> {
        let (path, raw, call) = (ffi::path(path.as_ref())?, session.raw()?, load.raw()?);
        // SAFETY: the model is open, path and options live during the call.
        Session::open(self, session, |out, error| unsafe { sys::kv_load(self.raw(), path.as_ptr(), &raw.value, &call.value, out, error) })
    }

    /// The same of the first `tokens` tokens of the saved sequence alone (0: all), as if no more had been read. The newest ones, at most the
    /// window and a page, are read again. `Error::BadArgument` (the file has fewer), `Error::Cancelled`, and as [`Model::load_with`].
    pub fn load_prefix(&self, path: impl AsRef<Path>, tokens: u64, session: &SessionOptions, load: &LoadOptions) -> Result<Session> {
        let (path, raw, call) = (ffi::path(path.as_ref())?, session.raw()?, load.raw()?);
        // SAFETY: as above.
        Session::open(self, session, |out, error| unsafe {
            sys::kv_load_prefix(self.raw(), path.as_ptr(), tokens, &raw.value, &call.value, out, error)
        })
    }

    /// A session over the keys and values of `tokens` that another engine has put into a cache, whose pages it shares. Keys are those of the model's
    /// file: in files of the architecture "llama" two halves that other formats rotate are interleaved. `document`: the tokens are what
    /// [`Tokenize::document`] makes. The newest ones are read again and compared. `Error::BadArgument` (another number of tokens), `Error::BadState`
    /// (a step is not complete), `Error::ModelMismatch`, `Error::ContextFull`, `Error::Cancelled`, `Error::Limit`, `Error::Corrupt`, `Error::NoMemory`.
    pub fn session_from_cache(
        &self,
        cache: &mut Cache,
        tokens: &[i32],
        document: bool,
        session: &SessionOptions,
        options: &CallOptions,
    ) -> Result<Session> {
        let (raw, mut how) = (session.raw()?, options.raw()?);
        how.value.flags |= if document { sys::KV_TOKENIZE_DOCUMENT } else { 0 };
        // SAFETY: model and cache are open, tokens are as many as is said, the options live during the call.
        Session::open(self, session, |out, error| unsafe {
            let (tokens, count) = (tokens.as_ptr(), tokens.len());
            sys::kv_session_from_cache(self.raw(), cache.raw(), tokens, count, &raw.value, &how.value, out, error)
        })
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_model {
        self.raw.raw()
    }
}

impl ModelInfo {
    fn of(raw: &sys::kv_model_information) -> ModelInfo {
        ModelInfo {
            layers: raw.layers,
            width: raw.width,
            heads: raw.heads,
            kv_heads: raw.kv_heads,
            head_dim: raw.head_dim,
            feed_forward: raw.feed_forward,
            vocabulary: raw.vocabulary,
            context: raw.context,
            parameters: raw.parameters,
            weight_bytes: raw.weight_bytes,
            kv_bytes_per_token: raw.kv_bytes_per_token,
            architecture: text(&raw.architecture),
            name: text(&raw.name),
            weights: text(&raw.weights),
            tokenizer: text(&raw.tokenizer),
            chat_format: text(&raw.chat_format),
            fingerprint: text(&raw.fingerprint),
            hash: text(&raw.hash),
        }
    }
}
