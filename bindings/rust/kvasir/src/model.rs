//! Models: weights, tokenizer and chat format.
use std::fmt;
use std::path::Path;
use std::ptr::null;

use kvasir_sys as sys;

use crate::ffi::{self, call, fill, sized, text, Owned};
use crate::log::OnLog;
use crate::{Cache, Checkpoint, Control, ModelOptions, Result, Session, SessionOptions};

/// Weights (a mapped GGUF file), tokenizer and chat format. Immutable. Clones are the same model.
///
/// It serves any number of threads. Its sessions keep it open. The file must not change meanwhile.
#[derive(Clone)]
pub struct Model {
    raw: Owned<sys::kv_model>,
    _log: Option<OnLog>, // dropped after `raw`, which calls it
}

/// Description of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Transformer blocks.
    pub layers: u32,
    /// Elements of the residual stream.
    pub width: u32,
    /// Query heads per layer.
    pub heads: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Elements of the FFN's hidden layer.
    pub feed_forward: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: u32,
    /// Length that the model was trained for, in tokens.
    pub context_tokens: u64,
    /// Elements of all weights.
    pub parameters: u64,
    /// Bytes of weights in the file.
    pub weight_bytes: u64,
    /// Bytes of the KV cache per token, with scales and page summaries.
    pub kv_bytes_per_token: u64,
    /// Architecture of the GGUF file: "llama", "qwen3".
    pub architecture: String,
    /// The model's own name, truncated.
    pub name: String,
    /// Formats of the weights, most used first: "Q4_K Q6_K F32".
    pub weights: String,
    /// Tokenizer of the GGUF file: "gpt2", "llama".
    pub tokenizer: String,
    /// A value of [`ModelOptions::chat_format`].
    pub chat_format: String,
    /// Fingerprint of metadata, tensor table and samples of the weights, 64 hexadecimal digits.
    /// Cache files belong to it.
    pub fingerprint: String,
    /// Hash of the whole file, 32 hexadecimal digits; empty while unknown:
    /// [`ModelOptions::hash_directory`], [`Model::hash`].
    pub hash: String,
    /// Whether [`GenerateOptions::thinking`](crate::GenerateOptions::thinking) can be set.
    pub thinks: bool,
    /// Layers that predict one token more, for
    /// [`SessionOptions::draft_tokens`](crate::SessionOptions::draft_tokens).
    pub mtp_layers: u32,
}

/// How [`Model::tokenize`] treats text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokenize {
    /// Text that spells a control token becomes that token.
    pub special: bool,
    /// Begin with the begin-of-text token if the model has one.
    pub bos: bool,
    /// Begin as [`Session::prefill`] begins a document without instructions.
    pub document: bool,
}

impl Model {
    /// Maps a GGUF file and checks its metadata and tensor shapes. Pages of weights are read when
    /// they are used.
    ///
    /// # Errors
    /// Those of [`Model::open_with`].
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::open_with(path, &ModelOptions::new(), Control::new())
    }

    /// Does what [`Model::open`] does, with options and a cancel token.
    ///
    /// # Errors
    /// `NotFound` (the file, the GPU or its driver), `Permission`, `Io`, `NoMemory`, `Cancelled`,
    /// `Device`, `Limit`; `BadArgument` (an option); `Corrupt` (damaged or contradictory);
    /// `Unsupported` (not a GGUF file, or a feature that the message names).
    pub fn open_with(
        path: impl AsRef<Path>,
        options: &ModelOptions,
        mut control: Control,
    ) -> Result<Model> {
        let (path, raw, control) = (ffi::path(path.as_ref())?, options.raw()?, control.raw());
        // SAFETY: path, options and control live during the call.
        let raw = Owned::open(|out, error| unsafe {
            sys::kv_open(path.as_ptr(), &raw.value, &control, out, error)
        })?;
        Ok(Model { raw, _log: options.extra.log.clone() })
    }

    /// Describes a model file. Reads metadata, no weights.
    ///
    /// # Errors
    /// Those of [`Model::open_with`].
    pub fn inspect(path: impl AsRef<Path>) -> Result<ModelInfo> {
        let (path, mut info) = (ffi::path(path.as_ref())?, sized());
        // SAFETY: the path is terminated, the struct has its size.
        call(|error| unsafe { sys::kv_model_inspect(path.as_ptr(), &mut info, error) })?;
        Ok(ModelInfo::of(&info))
    }

    /// Describes the model.
    ///
    /// # Errors
    /// None in practice; those of any call.
    pub fn info(&self) -> Result<ModelInfo> {
        let mut info = sized();
        // SAFETY: the model is open, the struct has its size.
        call(|error| unsafe { sys::kv_model_get_info(self.raw(), &mut info, error) })?;
        Ok(ModelInfo::of(&info))
    }

    /// Hashes the whole model file, unless the hash is known; [`Model::info`] then has it.
    ///
    /// # Errors
    /// Those of [`Model::hash_with`].
    pub fn hash(&self) -> Result<()> {
        self.hash_with(Control::new())
    }

    /// Does what [`Model::hash`] does, with progress.
    ///
    /// # Errors
    /// `Cancelled`, `Io`, `Corrupt` (the file changed while it was open), `NoMemory`.
    pub fn hash_with(&self, mut control: Control) -> Result<()> {
        let control = control.raw();
        // SAFETY: the model is open, the control lives during the call.
        call(|error| unsafe { sys::kv_model_hash(self.raw(), &control, error) })
    }

    /// Tokenizes text in linear time. Bytes that are not UTF-8 are tokenized as bytes.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn tokenize(&self, text: impl AsRef<[u8]>, how: Tokenize) -> Result<Vec<i32>> {
        let text = text.as_ref();
        let (start, size) = (text.as_ptr().cast(), text.len());
        let flag = |on, bit| if on { bit } else { 0 };
        let flags = flag(how.special, sys::KV_TOKENIZE_SPECIAL)
            | flag(how.bos, sys::KV_TOKENIZE_BOS)
            | flag(how.document, sys::KV_TOKENIZE_DOCUMENT);
        // SAFETY: the model is open; the text has `size` bytes, and there is room for `capacity`
        // tokens.
        fill(size / 3 + 16, |out, capacity, count, error| unsafe {
            let model = self.raw();
            sys::kv_tokenize(model, start, size, flags, null(), out, capacity, count, error)
        })
    }

    /// Returns the bytes of the tokens' text, which may begin or end within a character. Omits
    /// control tokens unless `special`.
    ///
    /// # Errors
    /// `BadArgument` (an id outside the vocabulary), `NoMemory`.
    pub fn detokenize(&self, tokens: &[i32], special: bool) -> Result<Vec<u8>> {
        let flags = if special { sys::KV_TOKENIZE_SPECIAL } else { 0 };
        let (start, count) = (tokens.as_ptr(), tokens.len());
        // SAFETY: the model is open; there are `count` tokens, and room for `capacity` bytes.
        fill(count.saturating_mul(6), |out: *mut u8, capacity, size, error| unsafe {
            let out = out.cast();
            sys::kv_detokenize(self.raw(), start, count, flags, out, capacity, size, error)
        })
    }

    /// Creates a session with an empty sequence.
    ///
    /// # Errors
    /// Those of [`Model::session_with`].
    pub fn session(&self) -> Result<Session> {
        self.session_with(&SessionOptions::new())
    }

    /// Does what [`Model::session`] does, with options.
    ///
    /// # Errors
    /// `BadArgument` (an option out of range, a parameter that does not fit), `NoMemory`, `Limit`;
    /// with a memory limit also `NotFound`, `Permission`, `NoSpace` (the spill directory).
    pub fn session_with(&self, options: &SessionOptions) -> Result<Session> {
        let raw = options.raw()?;
        // SAFETY: the model is open, the options live during the call.
        Session::open(self, options, |out, error| unsafe {
            sys::kv_session_open(self.raw(), &raw.value, out, error)
        })
    }

    /// Creates a session from a cache file by mapping it. Header and tables are verified now, each
    /// page at its first use.
    ///
    /// # Errors
    /// Those of [`Model::load_with`].
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Session> {
        self.load_with(path, &SessionOptions::new(), Control::new())
    }

    /// Does what [`Model::load`] does, with options, [`Control::verify`] and its progress.
    ///
    /// Precision, window and chat format come from the file. The file may be replaced or unlinked
    /// afterwards. It must not be truncated or written in place.
    ///
    /// # Errors
    /// `NotFound`, `NotACache`, `Corrupt`, `ContextFull`, `Cancelled`, `Io`, `Permission`;
    /// `Version` and `ModelMismatch` (stale); `Limit` (the memory limit); `BadArgument` (a
    /// full-precision file with a memory limit); and those of [`Model::session_with`].
    pub fn load_with(
        &self,
        path: impl AsRef<Path>,
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let (path, raw, control) = (ffi::path(path.as_ref())?, options.raw()?, control.raw());
        // SAFETY: the model is open; path, options and control live during the call.
        Session::open(self, options, |out, error| unsafe {
            sys::kv_load(self.raw(), path.as_ptr(), &raw.value, &control, out, error)
        })
    }

    /// Creates a session from the first `tokens` tokens of a file (0: all), as if no more had been
    /// prefilled. The newest tokens, at most the window and a page, are prefilled again.
    ///
    /// # Errors
    /// `BadArgument` (the file has fewer tokens), and those of [`Model::load_with`].
    pub fn load_prefix(
        &self,
        path: impl AsRef<Path>,
        tokens: u64,
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let (path, raw, control) = (ffi::path(path.as_ref())?, options.raw()?, control.raw());
        // SAFETY: as above.
        Session::open(self, options, |out, error| unsafe {
            let path = path.as_ptr();
            sys::kv_load_prefix(self.raw(), path, tokens, &raw.value, &control, out, error)
        })
    }

    /// Creates a session over a cache that another engine has filled. `tokens` are all of the
    /// cache's. The session shares the pages; the cache stays as it is.
    ///
    /// Keys must be as the model's file makes them: after RoPE, with the file's channel order. The
    /// model prefills the newest tokens again and compares their keys. With [`Control::document`],
    /// questions have the turns of the chat format.
    ///
    /// # Errors
    /// `BadArgument` (another number of tokens; instructions), `BadState` (the step is
    /// incomplete), `ModelMismatch` (other keys), `ContextFull`, `Cancelled`, `Limit`, `Corrupt`,
    /// `NoMemory`, `Busy`.
    pub fn session_from_cache(
        &self,
        cache: &mut Cache,
        tokens: &[i32],
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let (raw, control) = (options.raw()?, control.raw());
        // SAFETY: model and cache are open; there are `count` tokens; options and control live
        // during the call.
        Session::open(self, options, |out, error| unsafe {
            let (cache, tokens, count) = (cache.raw(), tokens.as_ptr(), tokens.len());
            let options = &raw.value;
            sys::kv_session_from_cache(
                self.raw(),
                cache,
                tokens,
                count,
                options,
                &control,
                out,
                error,
            )
        })
    }

    /// Creates a session as [`Model::session_from_cache`], of a model with sliding windows or
    /// recurrent layers. The cache has the layers that attend to all tokens, in their order.
    ///
    /// The model prefills the tokens from `start` on again and compares what it computes: keys and
    /// values of the newest tokens, and windows and states with `end`, a checkpoint of all tokens.
    /// Without `end` nothing proves the states of layers behind the last one that attends to all
    /// tokens.
    ///
    /// # Errors
    /// `BadArgument` also: a checkpoint whose layers, layouts or counts are not the model's, or
    /// with NaN, infinity or a magnitude over 1e30; `start` too near to the end; a model without
    /// such layers. Others: [`Model::session_from_cache`].
    pub fn session_from_checkpoint(
        &self,
        cache: &mut Cache,
        tokens: &[i32],
        start: &Checkpoint,
        end: Option<&Checkpoint>,
        options: &SessionOptions,
        mut control: Control,
    ) -> Result<Session> {
        let (raw, control) = (options.raw()?, control.raw());
        let (start, end) = (start.raw(), end.map(Checkpoint::raw));
        let end = end.as_ref().map_or(null(), |end| end as *const sys::kv_checkpoint);
        // SAFETY: as above; checkpoints and their arrays live during the call.
        Session::open(self, options, |out, error| unsafe {
            let (cache, tokens, count) = (cache.raw(), tokens.as_ptr(), tokens.len());
            sys::kv_session_from_checkpoint(
                self.raw(),
                cache,
                &start,
                end,
                tokens,
                count,
                &raw.value,
                &control,
                out,
                error,
            )
        })
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_model {
        self.raw.raw()
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut text = f.debug_struct("Model");
        if let Ok(info) = self.info() {
            text.field("name", &info.name).field("architecture", &info.architecture);
            text.field("layers", &info.layers);
        }
        text.finish_non_exhaustive()
    }
}

impl ModelInfo {
    fn of(raw: &sys::kv_model_info) -> ModelInfo {
        ModelInfo {
            layers: raw.layers,
            width: raw.width,
            heads: raw.heads,
            kv_heads: raw.kv_heads,
            head_dim: raw.head_dim,
            feed_forward: raw.feed_forward,
            vocabulary: raw.vocabulary,
            context_tokens: raw.context_tokens,
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
            thinks: raw.thinks != 0,
            mtp_layers: raw.mtp_layers,
        }
    }
}
