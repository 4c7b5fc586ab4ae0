//! Sessions: prefill, answers, rewind, fork, save.
use std::fmt;
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use kvasir_sys as sys;

use crate::answer::{Answer, Passage, Prefilled, Token};
use crate::control::{on_text, on_thinking, OnTexts};
use crate::ffi::{self, call, fill, json, sized, zeros, Owned};
use crate::log::OnLog;
use crate::stream::{Continuation, Stream};
use crate::{
    Control, Error, GenerateOptions, Model, Result, SessionOptions, SessionStats, Strategy,
};

/// Maximum of `kv_session_passages`.
const MAX_PASSAGES: usize = 64;

/// A sequence of tokens and its KV cache.
///
/// It serves one call at a time, from any thread. Methods that take `&self` return [`Error::Busy`]
/// while a call of another thread runs. A session keeps its model open.
pub struct Session {
    pub(crate) shared: Arc<Shared>,
}

/// State that a session and the thread of a [`Stream`] share.
pub(crate) struct Shared {
    raw: Owned<sys::kv_session>,
    log: Option<OnLog>, // dropped after `raw`, which calls it; forks hold it too
    model: Model,
}

impl Session {
    pub(crate) fn open(
        model: &Model,
        options: &SessionOptions,
        f: impl FnOnce(*mut *mut sys::kv_session, *mut sys::kv_error) -> sys::kv_status,
    ) -> Result<Session> {
        Session::over(model.clone(), options.extra.log.clone(), f)
    }

    fn over(
        model: Model,
        log: Option<OnLog>,
        f: impl FnOnce(*mut *mut sys::kv_session, *mut sys::kv_error) -> sys::kv_status,
    ) -> Result<Session> {
        let raw = Owned::open(f)?;
        Ok(Session { shared: Arc::new(Shared { raw, log, model }) })
    }

    /// The session's model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.shared.model
    }

    // ---- prefill ----

    /// Appends document text to the sequence, in the turn of the chat format. Several calls
    /// continue one document. Bytes that are not UTF-8 are tokenized as bytes.
    ///
    /// # Errors
    /// Those of [`Session::prefill_with`].
    pub fn prefill(&mut self, text: impl AsRef<[u8]>) -> Result<Prefilled> {
        self.prefill_with(text, Control::new())
    }

    /// Does what [`Session::prefill`] does, with [`Control::special`] and progress.
    ///
    /// # Errors
    /// `Cancelled`, `ContextFull` (nothing was appended), `BadState` (a conversation has begun),
    /// `NoMemory`, `Busy`, `Corrupt`; with a memory limit `Limit`, `NoSpace`, `Io`. The complete
    /// chunks stay, as [`Error::prefilled`] says.
    pub fn prefill_with(
        &mut self,
        text: impl AsRef<[u8]>,
        mut control: Control,
    ) -> Result<Prefilled> {
        let (text, control, mut done) = (text.as_ref(), control.raw(), Prefilled::default());
        let (start, size) = (text.as_ptr().cast(), text.len());
        let (tokens, bytes) = (&mut done.tokens, &mut done.bytes);
        // SAFETY: the session is open; text, control and outputs live during the call.
        let result = call(|error| unsafe {
            sys::kv_prefill(self.raw(), start, size, &control, tokens, bytes, error)
        });
        result.map_err(|error| error.with_prefilled(done))?;
        Ok(done)
    }

    /// Appends the caller's own tokens, without a turn or special tokens.
    ///
    /// # Errors
    /// Those of [`Session::prefill_tokens_with`].
    pub fn prefill_tokens(&mut self, tokens: &[i32]) -> Result<Prefilled> {
        self.prefill_tokens_with(tokens, Control::new())
    }

    /// Does what [`Session::prefill_tokens`] does, with progress.
    ///
    /// # Errors
    /// Those of [`Session::prefill_with`]; `BadArgument` (an id outside the vocabulary); `BadState`
    /// (the sequence is empty and the options have instructions).
    pub fn prefill_tokens_with(
        &mut self,
        tokens: &[i32],
        mut control: Control,
    ) -> Result<Prefilled> {
        let (control, mut done) = (control.raw(), Prefilled::default());
        let (start, count, appended) = (tokens.as_ptr(), tokens.len(), &mut done.tokens);
        // SAFETY: as above.
        let result = call(|error| unsafe {
            sys::kv_prefill_tokens(self.raw(), start, count, &control, appended, error)
        });
        result.map_err(|error| error.with_prefilled(done))?;
        Ok(done)
    }

    // ---- answers ----

    /// Appends the question as a turn of the chat format and returns the whole answer. Afterwards
    /// the sequence is as before.
    ///
    /// # Errors
    /// Those of [`Session::generate`].
    pub fn ask(&mut self, question: impl AsRef<[u8]>) -> Result<Answer> {
        self.ask_with(question, &GenerateOptions::new(), Control::new())
    }

    /// Does what [`Session::ask`] does, with options, and progress while the question is prefilled.
    ///
    /// # Errors
    /// Those of [`Session::generate`].
    pub fn ask_with(
        &mut self,
        question: impl AsRef<[u8]>,
        options: &GenerateOptions,
        control: Control,
    ) -> Result<Answer> {
        self.generate(question, options, control, |_| ControlFlow::Continue(()))
    }

    /// Does what [`Session::ask_with`] does, and calls `f` with whole characters of the answer as
    /// decode produces them.
    ///
    /// `ControlFlow::Break(())` stops the answer: `Error::Cancelled`, whose [`Error::answer`] has
    /// the part. A panic of `f` stops it too, and continues in the caller.
    ///
    /// # Errors
    /// `Cancelled`, `ContextFull` (the question does not fit), `BadState` (sequence and question
    /// are both empty), `BadArgument` (an option), `Unsupported` (the model does not think),
    /// `NoMemory`, `Busy`; `Limit` (the memory limit has no room); `Corrupt` (a damaged page of a
    /// mapped file).
    pub fn generate<F>(
        &mut self,
        question: impl AsRef<[u8]>,
        options: &GenerateOptions,
        control: Control,
        f: F,
    ) -> Result<Answer>
    where
        F: FnMut(&str) -> ControlFlow<()>,
    {
        self.shared.generate(question.as_ref(), options, control, f)
    }

    /// Asks as [`Session::ask`] does, and returns an iterator over the pieces of the answer. A
    /// thread of its own decodes it. Dropping the iterator stops the answer.
    ///
    /// # Errors
    /// Those of [`Session::stream_with`].
    pub fn stream(&mut self, question: impl Into<Vec<u8>>) -> Result<Stream<'_>> {
        self.stream_with(question, &GenerateOptions::new(), Control::new())
    }

    /// Does what [`Session::stream`] does, with options, and progress while the question is
    /// prefilled.
    ///
    /// # Errors
    /// `BadArgument` (a string with a NUL byte), `Limit` (no thread). The iterator has those of
    /// [`Session::generate`].
    pub fn stream_with(
        &mut self,
        question: impl Into<Vec<u8>>,
        options: &GenerateOptions,
        control: Control<'static>,
    ) -> Result<Stream<'_>> {
        Stream::new(self, question.into(), options.clone(), control)
    }

    /// Samples one token after the end of the sequence and appends it, without turns. It uses
    /// `seed`, `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`.
    ///
    /// # Errors
    /// `BadState` (the sequence is empty), `ContextFull`, `NoMemory`, `Limit`, `Corrupt`, `Busy`.
    pub fn next_token(&mut self, options: &GenerateOptions) -> Result<Token> {
        self.next_with(options, &mut Control::new())
    }

    pub(crate) fn next_with(
        &mut self,
        options: &GenerateOptions,
        control: &mut Control,
    ) -> Result<Token> {
        let (raw, control, mut id, mut end) = (options.raw()?, control.raw(), 0, 0);
        // SAFETY: the session is open; options, control and outputs live during the call.
        call(|error| unsafe {
            sys::kv_session_next(self.raw(), &raw.value, &control, &mut id, &mut end, error)
        })?;
        Ok(Token { id, ends_turn: end != 0 })
    }

    /// Returns an iterator over the tokens of a raw continuation, without turns. Each step calls
    /// [`Session::next_token`]. The token that ends the turn ends the iteration and is not in it.
    pub fn continuation(&mut self, options: &GenerateOptions) -> Continuation<'_> {
        self.continuation_with(options, Control::new())
    }

    /// Does what [`Session::continuation`] does, with a cancel token.
    pub fn continuation_with<'s>(
        &'s mut self,
        options: &GenerateOptions,
        control: Control<'s>,
    ) -> Continuation<'s> {
        Continuation::new(self, options.clone(), control)
    }

    /// Returns the natural logarithm of the probability of each token after everything before it.
    /// exp(-mean) is the perplexity. Each token is decoded with the strategy. Afterwards the
    /// sequence is as before.
    ///
    /// # Errors
    /// Those of [`Session::score_with`].
    pub fn score(&mut self, tokens: &[i32]) -> Result<Vec<f32>> {
        self.score_with(tokens, Control::new())
    }

    /// Does what [`Session::score`] does, with progress.
    ///
    /// # Errors
    /// `Cancelled`, `BadState` (the sequence is empty), `BadArgument` (an id outside the
    /// vocabulary), `ContextFull`, `NoMemory`, `Limit`, `Corrupt`, `Busy`.
    pub fn score_with(&mut self, tokens: &[i32], mut control: Control) -> Result<Vec<f32>> {
        let (control, mut scores) = (control.raw(), zeros(tokens.len())?);
        let (start, count, out) = (tokens.as_ptr(), tokens.len(), scores.as_mut_ptr());
        // SAFETY: the session is open; there are as many scores as tokens.
        call(|error| unsafe {
            sys::kv_session_score(self.raw(), start, count, out, &control, error)
        })?;
        Ok(scores)
    }

    /// Lists the passages that the last answer attended, the largest share first. They show where
    /// the model looked and prove nothing about the answer.
    ///
    /// # Errors
    /// `BadState`: the answer had no [`GenerateOptions::trace_passages`], or the sequence has
    /// changed since. `NoMemory`, `Busy`.
    pub fn passages(&self) -> Result<Vec<Passage>> {
        // SAFETY: zeros are valid for its fields, which are numbers.
        let zero: sys::kv_passage = unsafe { std::mem::zeroed() };
        let (mut raw, mut count) = (vec![zero; MAX_PASSAGES], 0);
        let (out, capacity) = (raw.as_mut_ptr(), raw.len());
        // SAFETY: the session is open; there is room for `capacity` passages.
        call(|error| unsafe {
            sys::kv_session_passages(self.raw(), out, capacity, &mut count, error)
        })?;
        let is_composed = self.document(0).is_ok();
        let own = if is_composed { Vec::new() } else { self.tokens()? };
        let text = |passage: &sys::kv_passage| {
            let document;
            let mut tokens = &own;
            if is_composed {
                document = self.document_tokens(passage.document as usize)?;
                tokens = &document;
            }
            self.model().detokenize(&tokens[Passage::tokens_of(passage)], false)
        };
        raw[..count].iter().map(|passage| Ok(Passage::of(passage, &text(passage)?))).collect()
    }

    // ---- sequence ----

    /// Returns the tokens of the sequence.
    ///
    /// # Errors
    /// `Busy`, `NoMemory`.
    pub fn tokens(&self) -> Result<Vec<i32>> {
        // SAFETY: the session is open; there is room for `capacity` tokens.
        fill(4096, |out, capacity, count, error| unsafe {
            sys::kv_session_tokens(self.raw(), out, capacity, count, error)
        })
    }

    /// Truncates the sequence to its first `tokens` tokens. Tokens that had left the window return
    /// with the precision of their pages.
    ///
    /// # Errors
    /// `BadArgument` (the sequence is shorter), `Corrupt`, `NoMemory`, `Busy`.
    pub fn rewind(&mut self, tokens: u64) -> Result<()> {
        // SAFETY: the session is open.
        call(|error| unsafe { sys::kv_session_rewind(self.raw(), tokens, error) })
    }

    /// Creates a session with an exact copy of the sequence and the same options. Both share the
    /// pages; each writes only its own tail.
    ///
    /// # Errors
    /// `NoMemory`, `Limit`, `Busy`.
    pub fn fork(&self) -> Result<Session> {
        let Shared { log, model, .. } = &*self.shared;
        // SAFETY: the session is open.
        Session::over(model.clone(), log.clone(), |out, error| unsafe {
            sys::kv_session_fork(self.raw(), out, error)
        })
    }

    /// Replaces the decode strategy. Other options stay.
    ///
    /// # Errors
    /// `BadArgument` (an unknown name; a parameter that does not fit), `NoMemory`, `Busy`: the
    /// strategy is as before.
    pub fn set_strategy(&mut self, decode: impl Into<Strategy>) -> Result<()> {
        let decode = decode.into().raw()?;
        // SAFETY: session and strategy are open.
        call(|error| unsafe { sys::kv_session_set_strategy(self.raw(), decode.raw(), error) })
    }

    /// Builds now what the strategy needs besides the KV cache: an index, a sketch. Otherwise the
    /// next answer or save builds it.
    ///
    /// # Errors
    /// Those of [`Session::prepare_with`].
    pub fn prepare(&mut self) -> Result<()> {
        self.prepare_with(Control::new())
    }

    /// Does what [`Session::prepare`] does, with progress.
    ///
    /// # Errors
    /// `Cancelled`, `NoMemory`, `Limit`, `Corrupt`, `Busy`.
    pub fn prepare_with(&mut self, mut control: Control) -> Result<()> {
        let control = control.raw();
        // SAFETY: the session is open; the control lives during the call.
        call(|error| unsafe { sys::kv_session_prepare(self.raw(), &control, error) })
    }

    /// Returns the state of the session and its last decode.
    ///
    /// # Errors
    /// `NoMemory`, `Busy`.
    pub fn stats(&self) -> Result<SessionStats> {
        let mut stats = sized();
        // SAFETY: the session is open; the struct has its size.
        call(|error| unsafe { sys::kv_session_get_stats(self.raw(), &mut stats, error) })?;
        Ok(SessionStats::of(&stats))
    }

    /// Returns JSON for people: the statistics, and why a strategy or a device was chosen.
    ///
    /// # Errors
    /// `NoMemory`, `Busy`.
    pub fn stats_json(&self) -> Result<String> {
        // SAFETY: as `tokens`.
        json(|out, capacity, size, error| unsafe {
            sys::kv_session_stats_json(self.raw(), out, capacity, size, error)
        })
    }

    /// Writes the sequence to a cache file, atomically and durably. After any failure, also a
    /// power cut, the path holds either the old file or the complete new one.
    ///
    /// # Errors
    /// Those of [`Session::save_with`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_with(path, Control::new())
    }

    /// Does what [`Session::save`] does, with progress.
    ///
    /// # Errors
    /// `NoSpace`, `Permission`, `Io`, `Cancelled`, `BadArgument`, `NoMemory`, `Busy`: the old file
    /// stays.
    pub fn save_with(&self, path: impl AsRef<Path>, mut control: Control) -> Result<()> {
        let (path, control) = (ffi::path(path.as_ref())?, control.raw());
        // SAFETY: the session is open; path and control live during the call.
        call(|error| unsafe { sys::kv_save(self.raw(), path.as_ptr(), &control, error) })
    }

    pub(crate) fn raw(&self) -> *mut sys::kv_session {
        self.shared.raw.raw()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (mut count, mut error) = (0, ffi::empty_error());
        // SAFETY: the session is open; without capacity the call writes only the count.
        let status =
            unsafe { sys::kv_session_tokens(self.raw(), null_mut(), 0, &mut count, &mut error) };
        let mut text = f.debug_struct("Session");
        match status as u32 {
            sys::KV_OK | sys::KV_LIMIT => text.field("tokens", &count),
            _ => text.field("tokens", &format_args!("{}", crate::status_text(status))),
        };
        text.finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn generate<F>(
        &self,
        question: &[u8],
        options: &GenerateOptions,
        mut control: Control,
        mut f: F,
    ) -> Result<Answer>
    where
        F: FnMut(&str) -> ControlFlow<()>,
    {
        let (mut text, mut thought) = (String::new(), String::new());
        let mut take_text = |piece: &str| {
            text.push_str(piece);
            f(piece)
        };
        let mut take_thought = |piece: &str| {
            thought.push_str(piece);
            options.thought(piece)
        };
        let mut texts = OnTexts { text: &mut take_text, thinking: &mut take_thought };
        let (raw, control, mut answer) = (options.raw()?, control.raw(), sized());
        let result = self.call_generate(question, &raw.value, &control, &mut texts, &mut answer);
        let answer = Answer::of(&answer, text, thought);
        match result {
            Ok(()) => Ok(answer),
            Err(error @ Error::Cancelled(_)) => Err(error.with_answer(answer)),
            Err(error) => Err(error),
        }
    }

    fn call_generate(
        &self,
        question: &[u8],
        options: &sys::kv_generate_options,
        control: &sys::kv_control,
        texts: &mut OnTexts,
        answer: &mut sys::kv_answer,
    ) -> Result<()> {
        let (session, text, size) = (self.raw.raw(), question.as_ptr().cast(), question.len());
        let user = texts as *mut OnTexts as *mut c_void;
        let mut options = *options;
        options.on_thinking = Some(on_thinking);
        // SAFETY: the session is open; all pointers are valid during the call, and only the call
        // uses `texts`.
        call(|error| unsafe {
            let (on_text, options) = (Some(on_text as _), &options);
            sys::kv_generate(session, text, size, options, control, on_text, user, answer, error)
        })
    }
}
