//! Callbacks, cancels, panics, threads.
use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir::{
    CancelToken, Control, Error, GenerateOptions, Library, LibraryOptions, LibrarySessionOptions,
    LogLevel, Phase, Session, StopReason,
};

use crate::support::*;

const GO_ON: ControlFlow<()> = ControlFlow::Continue(());

/// The message of the panic of `f`.
fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).err().expect("no panic");
    match panic.downcast_ref::<&str>() {
        Some(text) => text.to_string(),
        None => panic.downcast_ref::<String>().unwrap().clone(),
    }
}

fn long_text() -> String {
    std::fs::read_to_string(examples().join("sherlock-holmes.txt")).unwrap()[2000..200_000].into()
}

/// A library folder with a damaged document, which its log reports.
fn damaged_library(folder: &Folder) -> std::path::PathBuf {
    let library = folder.path("library");
    std::fs::create_dir(&library).unwrap();
    std::fs::write(library.join("bad.kv"), MAGIC).unwrap();
    library
}

#[test]
fn a_callback_stops_an_answer_and_the_error_has_the_part() {
    let mut session = reader();
    let before = session.tokens().unwrap();
    let (mut pieces, mut text) = (0, String::new());
    let stopped = session.generate(QUESTION, &GenerateOptions::new(), Control::new(), |piece| {
        pieces += 1;
        text += piece;
        if pieces == 3 {
            ControlFlow::Break(())
        } else {
            GO_ON
        }
    });
    let error = stopped.unwrap_err();
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    let answer = error.answer().unwrap();
    assert_eq!((pieces, answer.stop_reason), (3, StopReason::Cancelled));
    assert!(answer.answer_tokens >= 3 && answer.text == text);
    assert_eq!(session.tokens().unwrap(), before);
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[test]
fn a_panic_of_a_text_callback_continues_in_the_caller() {
    let mut session = reader();
    let options = GenerateOptions::new();
    let message = panic_of(|| {
        session.generate(QUESTION, &options, Control::new(), |_| panic!("in the text callback"))
    });
    assert_eq!(message, "in the text callback");
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER), "the session is usable");
}

#[test]
fn a_panic_of_a_progress_callback_continues_in_the_caller() {
    let panics = || Control::new().progress(|_| panic!("in the progress callback"));
    let mut session = model().session().unwrap();
    let message = panic_of(|| session.prefill_with(document(), panics()));
    assert_eq!(message, "in the progress callback");
    let folder = Folder::new();
    let mut session = reader();
    let message = panic_of(|| session.save_with(folder.path("a.kv"), panics()));
    assert_eq!(message, "in the progress callback");
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[test]
fn a_panic_of_a_log_callback_continues_in_the_caller() {
    let folder = Folder::new();
    let calm = AtomicBool::new(false);
    let log = move |_, _: &str| assert!(calm.swap(true, Ordering::SeqCst), "in the log");
    let options = LibraryOptions::new().log(log);
    let library = Library::open_with(damaged_library(&folder), &options).unwrap();
    assert_eq!(panic_of(|| library.session(&model(), document())), "in the log");
    // The next call does not meet the panic.
    let (mut session, _) = library.session(&model(), document()).unwrap();
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[test]
fn log_lines_arrive() {
    let (folder, lines) = (Folder::new(), Arc::new(Mutex::new(Vec::new())));
    let kept = lines.clone();
    let log = move |level, line: &str| kept.lock().unwrap().push((level, line.to_owned()));
    let options = LibraryOptions::new().log(log);
    let library = Library::open_with(damaged_library(&folder), &options).unwrap();
    library.session(&model(), document()).unwrap();
    drop((library, options));
    let lines = Arc::try_unwrap(lines).expect("dropped with the library").into_inner().unwrap();
    let warns =
        |(level, line): &(LogLevel, String)| *level == LogLevel::Warning && line.contains("bad.kv");
    assert!(lines.iter().any(warns), "{lines:?}");
}

#[test]
fn a_progress_callback_may_change_the_callers_variables() {
    let (mut last, mut seen) = (0, Vec::new());
    let control = Control::new().progress(|report| {
        last = report.done;
        seen.push(report);
        GO_ON
    });
    let done = model().session().unwrap().prefill_with(document(), control).unwrap();
    assert!(seen.iter().all(|p| p.phase == Phase::Prefill && p.done <= p.total), "{seen:?}");
    assert!(done.tokens > 0 && last == seen.last().unwrap().total);
}

#[test]
fn a_token_fired_by_another_thread_stops_a_prefill() {
    let (cancel, text) = (CancelToken::new().unwrap(), long_text());
    let mut session = model().session().unwrap();
    let done = AtomicU64::new(0);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while done.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            cancel.fire();
        });
        let control = Control::new().cancel(&cancel).progress(|report| {
            done.store(report.done, Ordering::SeqCst);
            GO_ON
        });
        session.prefill_with(&text, control).unwrap_err()
    });
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    let part = error.prefilled().unwrap();
    assert!(part.tokens > 0 && part.bytes > 0 && (part.bytes as usize) < text.len());
    let cancelled = || Control::new().cancel(&cancel);
    let asked = session.ask_with(QUESTION, &GenerateOptions::new(), cancelled());
    assert!(matches!(asked, Err(Error::Cancelled(_))));
    let greedy = GenerateOptions::new();
    let next = session.continuation_with(&greedy, cancelled()).next();
    assert!(matches!(next, Some(Err(Error::Cancelled(_)))));
    cancel.reset();
    assert!(session.prefill_with(" It is.", cancelled()).unwrap().tokens > 0);
}

#[test]
fn a_dropped_stream_stops_its_answer() {
    let mut session = reader();
    let options = GenerateOptions::new().max_tokens(100_000).temperature(5.0).keep_turn(true);
    let before = session.tokens().unwrap().len();
    let mut stream = session.stream_with("Go on and on.", &options, Control::new()).unwrap();
    stream.next().unwrap().unwrap();
    let begin = Instant::now();
    drop(stream);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(session.tokens().unwrap().len() < before + 10_000);
    // Also while the question is prefilled, when there are no pieces yet.
    let begin = Instant::now();
    drop(session.stream(long_text()).unwrap());
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    session.stats().expect("the session is not busy");
}

#[test]
fn a_loop_that_ends_early_frees_the_session() {
    let mut session = reader();
    if let Some(piece) = session.stream(QUESTION).unwrap().next() {
        assert!(!piece.unwrap().is_empty());
    }
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[test]
fn a_stream_has_errors_and_panics() {
    let mut session = model().session().unwrap();
    let options = GenerateOptions::new().temperature(-1.0);
    let mut stream = session.stream_with("", &options, Control::new()).unwrap();
    assert!(matches!(stream.next(), Some(Err(Error::BadArgument(_)))));
    assert!(stream.next().is_none() && stream.answer().is_none());
    drop(stream);
    let options = GenerateOptions::new().stop("a\0b");
    let refused = session.stream_with("", &options, Control::new());
    assert!(matches!(refused, Err(Error::BadArgument(_))));
    drop(refused);
    let begun = Arc::new(AtomicBool::new(false));
    let panics = || {
        let begun = begun.clone();
        Control::new().progress(move |_| {
            begun.store(true, Ordering::SeqCst);
            panic!("in the thread")
        })
    };
    let options = GenerateOptions::new();
    let next = panic_of(|| session.stream_with(QUESTION, &options, panics()).unwrap().next());
    assert_eq!(next, "in the thread");
    begun.store(false, Ordering::SeqCst);
    let dropped = panic_of(|| {
        let _stream = session.stream_with(QUESTION, &options, panics()).unwrap();
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
    let mut stream = session.stream_with(QUESTION, &options, Control::new()).unwrap();
    stream.next().unwrap().unwrap();
    std::mem::forget(stream);
    let error = session.ask(QUESTION).unwrap_err();
    assert!(matches!(error, Error::Busy(_)), "{error}");
    assert!(format!("{session:?}").contains("busy"));
}

#[test]
fn a_callback_that_calls_its_own_session_gets_busy() {
    let (folder, session) = (Folder::new(), reader());
    let mut calls = 0;
    let control = Control::new().progress(|_| {
        assert!(matches!(session.stats(), Err(Error::Busy(_))));
        calls += 1;
        GO_ON
    });
    session.save_with(folder.path("a.kv"), control).unwrap();
    assert!(calls > 0);
}

#[test]
fn a_callback_may_use_another_session() {
    let (mut session, other) = (reader(), reader());
    let mut tokens = 0;
    let result = session.generate(QUESTION, &GenerateOptions::new(), Control::new(), |_| {
        tokens = other.tokens().unwrap().len();
        GO_ON
    });
    result.unwrap();
    assert!(tokens > 0);
}

#[test]
fn a_model_serves_threads_and_sessions_move_to_them() {
    fn shared<T: Send + Sync>() {}
    shared::<kvasir::Model>();
    shared::<Library>();
    shared::<CancelToken>();
    shared::<Session>();
    shared::<kvasir::Cache>();
    shared::<kvasir::Strategy>();
    shared::<Error>();
    shared::<LibrarySessionOptions>();
    let model = model();
    let answers: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let mut session = model.load(saved()).unwrap();
                scope.spawn(move || session.ask(QUESTION).unwrap().text)
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers[0].contains(ANSWER) && answers.iter().all(|answer| *answer == answers[0]));
}
