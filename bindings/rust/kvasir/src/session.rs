//! Sessions: reading, asking, going back, forking, saving.
use std::mem::size_of_val;
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvasir_sys as sys;

use crate::callback::{on_text, OnLog};
use crate::ffi::{self, call, fill, json, sized, zeros, Owned};
use crate::stream::{Continuation, Stream};
use crate::{CallOptions, Error, GenerateOptions, Model, PrefillOptions, Result, SessionOptions};

/// One sequence of tokens with its keys and values. It serves one call at a time, from any thread; what only looks takes `&self`, and gets
/// [`Error::Busy`] while another thread's call runs. A session keeps its model open.
pub struct Session {
    pub(crate) shared: Arc<Shared>,
}

/// What a session and the thread of a [`Stream`] hold.
pub(crate) struct Shared {
    raw: Owned<sys::kv_session>,
    log: Option<OnLog>, // after raw, which calls it; forks do too
    model: Model,
}

/// What a call read into the sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// That were added.
    pub tokens: u64,
    /// Of the text, at which they end: a later call with the rest of the text goes on there. 0 where tokens were given.
    pub bytes: u64,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    EndOfTurn,
    /// One of the stop strings.
    String,
    MaxTokens,
    ContextFull,
    Cancelled,
    /// One that this crate does not know, or 0 where nothing was answered.
    Other(u32),
}

/// The counts and times of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    pub stop_reason: StopReason,
    /// With the marks of the turn.
    pub question_tokens: u64,
    pub answer_tokens: u64,
    /// From the call to the first token.
    pub first_token: Duration,
    /// From the call to its end.
    pub total: Duration,
    /// Store tokens whose keys and values were read, summed over the decode steps, layers and KV heads.
    pub tokens_read: u64,
    /// And how many full attention would have read.
    pub tokens_present: u64,
}

/// A passage of the document, of [`Session::trace`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Of [`Session::tokens`]; the model's `detokenize` gives their text.
    pub first_token: u64,
    pub tokens: u64,
    /// Of all that was noted, 0 to 1.
    pub share: f32,
}

/// One token, of [`Session::next_token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub token: i32,
    /// It ends the turn.
    pub end: bool,
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

    /// The model that it is of.
    pub fn model(&self) -> &Model {
        &self.shared.model
    }

    /// Changes what decode reads from now on, as the options of the same names do; other options stay. `Error::BadArgument` leaves it as it was.
    pub fn set_strategy(&mut self, strategy: &str, budget_tokens: u64, budget_fraction: f64) -> Result<()> {
        let strategy = ffi::string(strategy, "strategy")?;
        // SAFETY: the session is open, the string is terminated.
        call(|error| unsafe { sys::kv_session_set_strategy(self.raw(), strategy.as_ptr(), budget_tokens, budget_fraction, error) })
    }

    /// Makes now what the strategy needs beside keys and values: an index, a sketch. Otherwise it is made before the next question or save.
    pub fn prepare(&mut self, options: &CallOptions) -> Result<()> {
        let raw = options.raw()?;
        // SAFETY: the session is open, the options live during the call.
        call(|error| unsafe { sys::kv_prepare(self.raw(), &raw.value, error) })
    }

    /// Adds document text at the end of the sequence, in the turn that the model's chat format has for it. Several calls continue one
    /// document. Bytes that are not UTF-8 are read as bytes.
    pub fn prefill(&mut self, text: impl AsRef<[u8]>) -> Result<Read> {
        self.prefill_with(text, &PrefillOptions::new())
    }

    /// The same with options. When it is cancelled it keeps whole chunks, as [`Error::read`] tells. `Error::Cancelled`, `Error::ContextFull`
    /// (nothing was added), `Error::BadState` (a conversation has begun), `Error::NoMemory`, `Error::Corrupt`.
    pub fn prefill_with(&mut self, text: impl AsRef<[u8]>, options: &PrefillOptions) -> Result<Read> {
        let (text, raw, mut read) = (text.as_ref(), options.raw()?, Read::default());
        // SAFETY: the session is open, text, options and outputs live during the call.
        call(|error| unsafe {
            sys::kv_prefill(self.raw(), text.as_ptr().cast(), text.len(), &raw.value, &mut read.tokens, &mut read.bytes, error)
        })
        .map_err(|error| error.after_reading(read))?;
        Ok(read)
    }

    /// The same with the caller's own tokens: no turn is opened, no special token added.
    pub fn prefill_tokens(&mut self, tokens: &[i32], options: &CallOptions) -> Result<Read> {
        let (raw, mut read) = (options.raw()?, Read::default());
        // SAFETY: as above.
        call(|error| unsafe { sys::kv_prefill_tokens(self.raw(), tokens.as_ptr(), tokens.len(), &raw.value, &mut read.tokens, error) })
            .map_err(|error| error.after_reading(read))?;
        Ok(read)
    }

    /// As [`Session::prefill_tokens`]; returns the logits at each token, `[tokens][vocabulary]`. For measurement. When it fails midway, whole
    /// chunks stay in the sequence.
    pub fn prefill_logits(&mut self, tokens: &[i32], options: &CallOptions) -> Result<Vec<f32>> {
        let raw = options.raw()?;
        let vocabulary = self.model().info()?.vocabulary as usize;
        let mut logits = zeros(tokens.len().saturating_mul(vocabulary))?;
        // SAFETY: as above; the library writes as many logits as that.
        call(|error| unsafe { sys::kv_prefill_logits(self.raw(), tokens.as_ptr(), tokens.len(), logits.as_mut_ptr(), &raw.value, error) })?;
        Ok(logits)
    }

    /// Asks, and returns the whole answer. The sequence is afterwards where it was.
    pub fn ask(&mut self, question: impl AsRef<[u8]>) -> Result<String> {
        let mut text = String::new();
        self.generate(question, &GenerateOptions::new(), |piece| {
            text.push_str(piece);
            ControlFlow::Continue(())
        })?;
        Ok(text)
    }

    /// Puts the question in the model's turn and answers it through `f`, whole characters at a time; `ControlFlow::Break(())` stops the
    /// answer, which is then `Error::Cancelled` ([`Error::answer`] tells how far it came). A panic of `f` stops it too and goes on here.
    ///
    /// `Error::Cancelled`, `Error::ContextFull` (the question does not fit), `Error::BadState` (sequence and question are empty),
    /// `Error::NoMemory`, `Error::Limit` (the memory budget has no room), `Error::Corrupt` (a damaged page of a mapped file).
    pub fn generate<F>(&mut self, question: impl AsRef<[u8]>, options: &GenerateOptions, f: F) -> Result<Answer>
    where
        F: FnMut(&str) -> ControlFlow<()>,
    {
        self.shared.generate(question.as_ref(), options, f)
    }

    /// The same as an iterator over the pieces of the answer, which a thread of this call's makes meanwhile. Dropping it stops the answer.
    pub fn stream(&mut self, question: impl Into<Vec<u8>>, options: &GenerateOptions) -> Result<Stream<'_>> {
        Stream::new(self, question.into(), options.clone())
    }

    /// One more token after what is in the sequence (raw continuation; no turn is opened), sampled as the options say (`max_tokens`, `stop`,
    /// `keep` and callbacks are not used), appended to the sequence. `Error::BadState` on an empty sequence; `Error::ContextFull`.
    pub fn next_token(&mut self, options: &GenerateOptions) -> Result<Next> {
        let (raw, mut token, mut end) = (options.raw()?, 0, 0);
        // SAFETY: the session is open, options and outputs live during the call.
        call(|error| unsafe { sys::kv_next(self.raw(), &raw.value, &mut token, &mut end, error) })?;
        Ok(Next { token, end: end != 0 })
    }

    /// An iterator over [`Session::next_token`], up to the one that ends the turn or the first error.
    pub fn continuation(&mut self, options: &GenerateOptions) -> Continuation<'_> {
        Continuation::new(self, options.clone())
    }

    /// The natural logarithm of the probability of each token after everything before it, each read as decode reads. The sequence is
    /// afterwards where it was. For measurement: exp(-mean) is the perplexity.
    pub fn score(&mut self, tokens: &[i32], options: &CallOptions) -> Result<Vec<f32>> {
        let (raw, mut out) = (options.raw()?, zeros(tokens.len())?);
        // SAFETY: the session is open; the output is as long as the tokens.
        call(|error| unsafe { sys::kv_score(self.raw(), tokens.as_ptr(), tokens.len(), out.as_mut_ptr(), &raw.value, error) })?;
        Ok(out)
    }

    /// The tokens in the sequence.
    pub fn tokens(&self) -> Result<Vec<i32>> {
        // SAFETY: the session is open; the output is as long as it is said to be.
        fill(4096, |out, capacity, count, error| unsafe { sys::kv_session_tokens(self.raw(), out, capacity, count, error) })
    }

    /// Goes back to the first `tokens` tokens. Tokens that had left the window come back with the precision of their pages.
    /// `Error::BadArgument` when there are fewer.
    pub fn rewind(&mut self, tokens: u64) -> Result<()> {
        // SAFETY: the session is open.
        call(|error| unsafe { sys::kv_rewind(self.raw(), tokens, error) })
    }

    /// A second sequence that begins as an exact copy, with the same options: pages are shared, each session writes only its own tail.
    pub fn fork(&self) -> Result<Session> {
        let Shared { log, model, .. } = &*self.shared;
        // SAFETY: the session is open.
        Session::over(model.clone(), log.clone(), |out, error| unsafe { sys::kv_fork(self.raw(), out, error) })
    }

    /// The passages of the document that the last answer attended, the largest share first: where the model looked, which is no proof of what it says.
    /// For answers with [`GenerateOptions::trace`]; `Error::BadState` for others, and when the sequence has changed since.
    pub fn trace(&self) -> Result<Vec<Span>> {
        let nothing = sys::kv_span { first_token: 0, tokens: 0, share: 0.0, reserved: 0 };
        let mut spans = vec![nothing; 64]; // the library tells no more
        let mut count = 0;
        // SAFETY: the session is open; there is room for as many as are said.
        call(|error| unsafe { sys::kv_trace(self.raw(), spans.as_mut_ptr(), spans.len(), &mut count, error) })?;
        spans.truncate(count);
        Ok(spans.iter().map(|span| Span { first_token: span.first_token, tokens: span.tokens, share: span.share }).collect())
    }

    /// JSON about the sequence and the last decode: tokens, pages, strategy, budget, memory, times.
    pub fn stats(&self) -> Result<String> {
        // SAFETY: as `tokens`.
        json(|out, capacity, size, error| unsafe { sys::kv_stats(self.raw(), out, capacity, size, error) })
    }

    /// Writes the sequence to a file, atomically: the path holds the old file or the complete new one, durably, whatever happens.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_with(path, &CallOptions::new())
    }

    /// The same with options. `Error::NoSpace`, `Error::Permission`, `Error::Io`, `Error::Cancelled`: the old file stays.
    pub fn save_with(&self, path: impl AsRef<Path>, options: &CallOptions) -> Result<()> {
        let (path, raw) = (ffi::path(path.as_ref())?, options.raw()?);
        // SAFETY: the session is open, path and options live during the call.
        call(|error| unsafe { sys::kv_save(self.raw(), path.as_ptr(), &raw.value, error) })
    }

    fn raw(&self) -> *mut sys::kv_session {
        self.shared.raw.raw()
    }
}

impl Shared {
    pub(crate) fn generate<F>(&self, question: &[u8], options: &GenerateOptions, mut f: F) -> Result<Answer>
    where
        F: FnMut(&str) -> ControlFlow<()>,
    {
        let (raw, mut answer) = (options.raw()?, sized::<sys::kv_answer>());
        let (text, size) = (question.as_ptr().cast(), question.len());
        let user = &mut f as *mut F as *mut c_void;
        // SAFETY: the session is open, what is pointed to lives during the call, and only the call uses `f`.
        let result =
            call(|error| unsafe { sys::kv_generate(self.raw.raw(), text, size, &raw.value, Some(on_text::<F>), user, &mut answer, error) });
        debug_assert_eq!(answer.struct_size as usize, size_of_val(&answer));
        match result {
            Ok(()) => Ok(Answer::of(&answer)),
            Err(error @ Error::Cancelled(_)) => Err(error.after_answering(Answer::of(&answer))),
            Err(error) => Err(error),
        }
    }
}

impl Answer {
    fn of(raw: &sys::kv_answer) -> Answer {
        Answer {
            stop_reason: match raw.stop_reason {
                sys::KV_STOP_END_OF_TURN => StopReason::EndOfTurn,
                sys::KV_STOP_STRING => StopReason::String,
                sys::KV_STOP_MAX_TOKENS => StopReason::MaxTokens,
                sys::KV_STOP_CONTEXT_FULL => StopReason::ContextFull,
                sys::KV_STOP_CANCELLED => StopReason::Cancelled,
                other => StopReason::Other(other),
            },
            question_tokens: raw.question_tokens,
            answer_tokens: raw.answer_tokens,
            first_token: Duration::from_nanos(raw.first_token_ns),
            total: Duration::from_nanos(raw.total_ns),
            tokens_read: raw.tokens_read,
            tokens_present: raw.tokens_present,
        }
    }
}
