//! Answers as iterators.
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvasir_sys as sys;

use crate::callback::OnProgress;
use crate::{Answer, Error, GenerateOptions, Result, Session};

/// The pieces of an answer, whole characters each, as [`Session::stream`] gives them; an error ends it. While it lives the session is
/// borrowed. Its thread ends with the answer, or when it is dropped, within 100 ms. (A stream that is leaked leaves the session busy until the
/// answer ends.)
pub struct Stream<'s> {
    pieces: Option<Receiver<String>>,
    thread: Option<JoinHandle<Result<Answer>>>,
    unwanted: Arc<AtomicBool>,
    answer: Option<Answer>,
    session: PhantomData<&'s mut Session>,
}

impl<'s> Stream<'s> {
    pub(crate) fn new(session: &'s mut Session, question: Vec<u8>, mut options: GenerateOptions) -> Result<Stream<'s>> {
        let unwanted = Arc::new(AtomicBool::new(false));
        // While the question is read there are no pieces: then dropping is noticed by the progress callback.
        let (given, dropped) = (options.extra.progress.take(), unwanted.clone());
        options.extra.progress = Some(OnProgress::new(move |progress| match &given {
            _ if dropped.load(Ordering::Relaxed) => ControlFlow::Break(()),
            Some(f) => f.call(progress),
            None => ControlFlow::Continue(()),
        }));
        options.raw()?; // bad options are this call's error
        let (sender, pieces) = channel();
        let shared = session.shared.clone();
        let work = move || {
            shared.generate(&question, &options, |piece| match sender.send(piece.to_owned()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            })
        };
        let thread = thread::Builder::new()
            .name("kvasir stream".into())
            .spawn(work)
            .map_err(|error| Error::found(sys::KV_LIMIT, format!("a stream's thread cannot be started: {error}"), Some(error.into())))?;
        Ok(Stream { pieces: Some(pieces), thread: Some(thread), unwanted, answer: None, session: PhantomData })
    }

    /// The counts of the answer, when it has ended well.
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

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.unwanted.store(true, Ordering::Relaxed);
        self.pieces = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            if !thread::panicking() {
                resume_unwind(panic);
            }
        }
    }
}

/// The tokens of [`Session::continuation`]. They stay in the sequence.
pub struct Continuation<'s> {
    session: &'s mut Session,
    options: GenerateOptions,
    ended: bool,
}

impl<'s> Continuation<'s> {
    pub(crate) fn new(session: &'s mut Session, options: GenerateOptions) -> Continuation<'s> {
        Continuation { session, options, ended: false }
    }
}

impl Iterator for Continuation<'_> {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        if self.ended {
            return None;
        }
        let next = self.session.next_token(&self.options);
        self.ended = next.as_ref().map_or(true, |next| next.end);
        Some(next.map(|next| next.token))
    }
}
