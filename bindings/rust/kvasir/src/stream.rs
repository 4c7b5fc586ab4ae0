//! Answers as iterators.
use std::fmt;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvasir_sys as sys;

use crate::{Answer, Control, Error, GenerateOptions, Result, Session};

/// Iterator over the pieces of an answer, each of whole characters: [`Session::stream`].
///
/// An error ends it. It borrows the session. Its thread ends with the answer, or within 100 ms when
/// it is dropped. A stream that is leaked leaves the session busy until the answer ends.
#[must_use = "a stream that is dropped stops its answer"]
pub struct Stream<'s> {
    pieces: Option<Receiver<String>>,
    thread: Option<JoinHandle<Result<Answer>>>,
    dropped: Arc<AtomicBool>,
    answer: Option<Answer>,
    session: PhantomData<&'s mut Session>,
}

impl<'s> Stream<'s> {
    pub(crate) fn new(
        session: &'s mut Session,
        question: Vec<u8>,
        options: GenerateOptions,
        control: Control<'static>,
    ) -> Result<Stream<'s>> {
        options.raw()?; // an error of the options is this call's
        let dropped = Arc::new(AtomicBool::new(false));
        // Prefill of the question yields no pieces: its progress notices the drop.
        let stop = dropped.clone();
        let control = control.stop_if(move || stop.load(Ordering::Relaxed));
        let (sender, pieces) = channel();
        let shared = session.shared.clone();
        let work = move || {
            shared.generate(&question, &options, control, |piece| {
                match sender.send(piece.to_owned()) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            })
        };
        let thread = thread::Builder::new().name("kvasir stream".into()).spawn(work);
        let thread = thread.map_err(|error| {
            let message = format!("cannot start the thread of a stream: {error}");
            Error::found(sys::KV_LIMIT, message, Some(error.into()))
        })?;
        let (pieces, thread) = (Some(pieces), Some(thread));
        Ok(Stream { pieces, thread, dropped, answer: None, session: PhantomData })
    }

    /// The answer, when it has ended without an error.
    #[must_use]
    pub fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref()
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        if let Ok(piece) = self.pieces.as_ref()?.recv() {
            return Some(Ok(piece));
        }
        self.pieces = None;
        match self.thread.take()?.join() {
            Ok(Ok(answer)) => {
                self.answer = Some(answer);
                None
            }
            Ok(Err(error)) => Some(Err(error)),
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl std::iter::FusedIterator for Stream<'_> {}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
        self.pieces = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            if !thread::panicking() {
                resume_unwind(panic);
            }
        }
    }
}

impl fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ended = self.thread.is_none();
        f.debug_struct("Stream").field("ended", &ended).field("answer", &self.answer).finish()
    }
}

/// Iterator over the tokens of a raw continuation: [`Session::continuation`]. They stay in the
/// sequence. An error ends it.
#[derive(Debug)]
#[must_use = "iterators do nothing unless they are consumed"]
pub struct Continuation<'s> {
    session: &'s mut Session,
    options: GenerateOptions,
    control: Control<'s>,
    ended: bool,
}

impl<'s> Continuation<'s> {
    pub(crate) fn new(
        session: &'s mut Session,
        options: GenerateOptions,
        control: Control<'s>,
    ) -> Continuation<'s> {
        Continuation { session, options, control, ended: false }
    }
}

impl Iterator for Continuation<'_> {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        if self.ended {
            return None;
        }
        match self.session.next_with(&self.options, &mut self.control) {
            Ok(token) if !token.ends_turn => Some(Ok(token.id)),
            Ok(_) => {
                self.ended = true;
                None
            }
            Err(error) => {
                self.ended = true;
                Some(Err(error))
            }
        }
    }
}

impl std::iter::FusedIterator for Continuation<'_> {}
