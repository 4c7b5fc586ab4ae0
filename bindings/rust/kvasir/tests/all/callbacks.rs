//! Callbacks, cancelling, panics, threads.
use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir::{
    CallOptions, CancelToken, Error, GenerateOptions, Library, LibraryOptions, LibrarySessionOptions, LogLevel, Phase, PrefillOptions,
    Session, StopReason,
};

use crate::support::*;

/// The message of the panic of `f`.
fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).err().expect("no panic");
    panic.downcast_ref::<&str>().map_or_else(|| panic.downcast_ref::<String>().unwrap().clone(), |text| text.to_string())
}

fn long_text() -> String {
    std::fs::read_to_string(examples().join("sherlock-holmes.txt")).unwrap()[2000..200_000].into()
}

#[test]
fn a_callback_stops_an_answer_and_the_error_tells_how_far_it_came() {
    let mut session = reader();
    let before = session.tokens().unwrap();
    let mut pieces = 0;
    let stopped = session.generate(QUESTION, &GenerateOptions::new(), |_| {
        pieces += 1;
        if pieces == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let error = stopped.unwrap_err();
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    let answer = error.answer().unwrap();
    assert_eq!((pieces, answer.stop_reason), (3, StopReason::Cancelled));
    assert!(answer.answer_tokens >= 3);
    assert_eq!(session.tokens().unwrap(), before);
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER));
}

#[test]
fn a_panic_of_a_text_callback_goes_on_in_the_caller() {
    let mut session = reader();
    let message = panic_of(|| session.generate(QUESTION, &GenerateOptions::new(), |_| panic!("in the text callback")));
    assert_eq!(message, "in the text callback");
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER), "the session is whole");
}

#[test]
fn a_panic_of_a_progress_callback_goes_on_in_the_caller() {
    let mut session = model().session().unwrap();
    let options = PrefillOptions::new().progress(|_| panic!("in the progress callback"));
    assert_eq!(panic_of(|| session.prefill_with(document(), &options)), "in the progress callback");
    let folder = Folder::new();
    let mut session = reader();
    let options = CallOptions::new().progress(|_| panic!("while saving"));
    assert_eq!(panic_of(|| session.save_with(folder.path("a.kv"), &options)), "while saving");
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER));
}

#[test]
fn a_panic_of_a_log_callback_goes_on_in_the_caller() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("library")).unwrap();
    std::fs::write(folder.path("library/bad.kv"), MAGIC).unwrap();
    let calm = AtomicBool::new(false);
    let log = move |_, _: &str| assert!(calm.swap(true, Ordering::SeqCst), "in the log");
    let library = Library::open_with(folder.path("library"), &LibraryOptions::new().log(log)).unwrap();
    assert_eq!(panic_of(|| library.session(&model(), document())), "in the log");
    // The panic is gone: the next call does not meet it.
    assert!(library.session(&model(), document()).unwrap().0.ask(QUESTION).unwrap().contains(ANSWER));
}

#[test]
fn log_lines_arrive() {
    let (folder, lines) = (Folder::new(), Arc::new(Mutex::new(Vec::new())));
    std::fs::create_dir(folder.path("library")).unwrap();
    std::fs::write(folder.path("library/bad.kv"), MAGIC).unwrap();
    let kept = lines.clone();
    let log = move |level, line: &str| kept.lock().unwrap().push((level, line.to_owned()));
    let library = Library::open_with(folder.path("library"), &LibraryOptions::new().log(log)).unwrap();
    library.session(&model(), document()).unwrap();
    drop(library);
    let lines = Arc::try_unwrap(lines).expect("the callback is dropped with the library").into_inner().unwrap();
    assert!(lines.iter().any(|(level, line)| *level == LogLevel::Warning && line.contains("bad.kv")), "{lines:?}");
}

#[test]
fn progress_is_told() {
    let (last, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (to_last, to_seen) = (last.clone(), seen.clone());
    let options = PrefillOptions::new().progress(move |p| {
        to_last.store(p.done, Ordering::SeqCst);
        to_seen.lock().unwrap().push(p);
        ControlFlow::Continue(())
    });
    let read = model().session().unwrap().prefill_with(document(), &options).unwrap();
    let seen = seen.lock().unwrap();
    assert!(seen.iter().all(|p| p.phase == Phase::Prefill && p.done <= p.total), "{seen:?}");
    assert_eq!(last.load(Ordering::SeqCst), seen.last().unwrap().total);
    assert!(read.tokens > 0);
}

#[test]
fn a_token_fired_by_another_thread_stops_reading_and_what_was_read_is_told() {
    let (cancel, text) = (CancelToken::new().unwrap(), long_text());
    let mut session = model().session().unwrap();
    let far = Arc::new(AtomicU64::new(0));
    let (fires, seen) = (cancel.clone(), far.clone());
    let thread = std::thread::spawn(move || {
        while seen.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        fires.fire();
    });
    let counts = far.clone();
    let options = PrefillOptions::new().cancel(&cancel).progress(move |p| {
        counts.store(p.done, Ordering::SeqCst);
        ControlFlow::Continue(())
    });
    let error = session.prefill_with(&text, &options).unwrap_err();
    thread.join().unwrap();
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    let read = error.read().unwrap();
    assert!(read.tokens > 0 && read.bytes > 0 && (read.bytes as usize) < text.len());
    assert!(matches!(
        session.generate(QUESTION, &GenerateOptions::new().cancel(&cancel), |_| ControlFlow::Continue(())),
        Err(Error::Cancelled(_))
    ));
    cancel.reset();
    assert!(session.prefill_with(" It is.", &PrefillOptions::new().cancel(&cancel)).unwrap().tokens > 0);
}

#[test]
fn a_dropped_stream_stops_its_answer() {
    let mut session = reader();
    let options = GenerateOptions::new().max_tokens(100_000).temperature(5.0).keep(true);
    let before = session.tokens().unwrap().len();
    let mut stream = session.stream("Go on and on.", &options).unwrap();
    stream.next().unwrap().unwrap();
    let begin = Instant::now();
    drop(stream);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(session.tokens().unwrap().len() < before + 10_000);
    // And while the question is read, when nothing comes yet.
    let begin = Instant::now();
    drop(session.stream(long_text(), &GenerateOptions::new()).unwrap());
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    session.stats().expect("the session is not busy");
}

#[test]
fn a_stream_brings_errors_and_panics() {
    let mut session = model().session().unwrap();
    let mut stream = session.stream("", &GenerateOptions::new().temperature(-1.0)).unwrap();
    assert!(matches!(stream.next(), Some(Err(Error::BadArgument(_)))));
    assert!(stream.next().is_none() && stream.answer().is_none());
    drop(stream);
    assert!(matches!(session.stream("", &GenerateOptions::new().stop("a\0b")).err(), Some(Error::BadArgument(_))));
    let begun = Arc::new(AtomicBool::new(false));
    let begins = begun.clone();
    let options = GenerateOptions::new().progress(move |_| {
        begins.store(true, Ordering::SeqCst);
        panic!("in the thread")
    });
    assert_eq!(panic_of(|| session.stream(QUESTION, &options).unwrap().next()), "in the thread");
    begun.store(false, Ordering::SeqCst);
    let dropped = panic_of(|| {
        let _stream = session.stream(QUESTION, &options).unwrap();
        while !begun.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    assert_eq!(dropped, "in the thread");
}

#[test]
fn a_leaked_stream_leaves_the_session_busy_and_no_more() {
    let mut session = reader();
    let options = GenerateOptions::new().max_tokens(300).temperature(5.0);
    let mut stream = session.stream(QUESTION, &options).unwrap();
    stream.next().unwrap().unwrap();
    std::mem::forget(stream);
    let error = session.ask(QUESTION).unwrap_err();
    assert!(matches!(error, Error::Busy(_)), "{error}");
}

#[test]
fn a_callback_that_calls_its_own_session_gets_busy() {
    let (folder, session) = (Folder::new(), Arc::new(reader()));
    let (itself, met) = (session.clone(), Arc::new(AtomicU64::new(0)));
    let counts = met.clone();
    let options = CallOptions::new().progress(move |_| {
        assert!(matches!(itself.stats(), Err(Error::Busy(_))));
        counts.fetch_add(1, Ordering::SeqCst);
        ControlFlow::Continue(())
    });
    session.save_with(folder.path("a.kv"), &options).unwrap();
    assert!(met.load(Ordering::SeqCst) > 0);
}

#[test]
fn a_callback_may_use_another_session() {
    let (mut session, other) = (reader(), reader());
    let mut tokens = 0;
    let result = session.generate(QUESTION, &GenerateOptions::new(), |_| {
        tokens = other.tokens().unwrap().len();
        ControlFlow::Continue(())
    });
    result.unwrap();
    assert!(tokens > 0);
}

#[test]
fn a_model_serves_threads_and_sessions_go_to_them() {
    fn shared<T: Send + Sync>() {}
    shared::<kvasir::Model>();
    shared::<Library>();
    shared::<CancelToken>();
    shared::<Session>();
    shared::<kvasir::Cache>();
    shared::<Error>();
    shared::<LibrarySessionOptions>();
    let model = model();
    let answers: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let mut session = model.load(saved()).unwrap();
                scope.spawn(move || session.ask(QUESTION).unwrap())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers[0].contains(ANSWER) && answers.iter().all(|answer| *answer == answers[0]));
}
