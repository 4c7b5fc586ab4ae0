//! Bad input and bad files: the library's whole message as an error, and everything usable afterwards.
use std::error::Error as _;
use std::io::{Seek, SeekFrom, Write};

use kvasir::{file, CallOptions, Error, GenerateOptions, LoadOptions, Model, ModelOptions, PrefillOptions, SessionOptions};

use crate::support::*;

macro_rules! fails {
    ($call:expr, $kind:ident, $($part:expr),+) => {{
        let error = $call.err().expect("no error");
        assert!(matches!(error, Error::$kind(_)), "{error:?}");
        $(assert!(error.to_string().contains($part), "{error} has no {:?}", $part);)+
        assert!(!error.status_text().is_empty() && error.message() == error.to_string());
        error
    }};
}

#[test]
fn a_missing_file_is_named_and_has_the_systems_error() {
    let error = fails!(Model::open("/no/such/model.gguf"), NotFound, "/no/such/model.gguf");
    assert_eq!(error.os_error().unwrap().kind(), std::io::ErrorKind::NotFound);
    assert!(error.source().is_some() && error.status() == 9 && error.offset().is_none());
    fails!(Model::inspect("/no/such/model.gguf"), NotFound, "model.gguf");
    fails!(model().load("/no/such/book.kv"), NotFound, "/no/such/book.kv");
    fails!(reader().save("/no/such/folder/book.kv"), NotFound, "/no/such/folder");
}

#[test]
fn strings_with_a_nul_byte_are_refused() {
    let error = fails!(Model::open("a\0b"), BadArgument, "NUL byte at 1");
    assert!(error.source().unwrap().is::<std::ffi::NulError>());
    fails!(Model::open_with(model_path(), &ModelOptions::new().chat_format("raw\0")), BadArgument, "chat_format", "NUL");
    let model = model();
    fails!(model.session_with(&SessionOptions::new().strategy("qu\0est")), BadArgument, "strategy", "NUL");
    fails!(model.session_with(&SessionOptions::new().spill_folder("a\0b")), BadArgument, "NUL");
    let mut session = reader();
    fails!(session.set_strategy("\0", 0, 0.0), BadArgument, "NUL");
    fails!(session.generate(QUESTION, &GenerateOptions::new().stop("\0"), |_| unreachable!()), BadArgument, "stop", "NUL");
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER));
}

#[cfg(unix)]
#[test]
fn a_path_that_is_not_utf_8_is_taken_as_it_is() {
    use std::os::unix::ffi::OsStrExt;
    let (folder, name) = (Folder::new(), std::ffi::OsStr::from_bytes(b"caf\xe9.kv"));
    let path = folder.path("").join(name);
    reader().save(&path).unwrap();
    assert!(path.exists());
    assert!(model().load(&path).unwrap().ask(QUESTION).unwrap().contains(ANSWER));
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let model = model();
    fails!(Model::open_with(model_path(), &ModelOptions::new().chat_format("morse")), BadArgument, "morse");
    fails!(model.session_with(&SessionOptions::new().strategy("best")), BadArgument, "best");
    fails!(model.session_with(&SessionOptions::new().compare(3)), BadArgument, "compare is 3");
    fails!(model.session_with(&SessionOptions::new().filter_layers("1;2")), BadArgument, "filter_layers", "1;2");
    fails!(model.session_with(&SessionOptions::new().context(1 << 40)), BadArgument, "context");
    fails!(model.session_with(&SessionOptions::new().spill_folder("/no/such").memory_budget(1 << 30)), NotFound, "/no/such");
    let mut session = reader();
    let before = session.tokens().unwrap();
    fails!(session.rewind(1_000_000), BadArgument, "1000000");
    fails!(session.prefill_tokens(&[-1], &CallOptions::new()), BadArgument, "-1");
    fails!(model.detokenize(&[6144], false), BadArgument, "6144");
    fails!(session.generate(QUESTION, &GenerateOptions::new().temperature(f32::NAN), |_| unreachable!()), BadArgument, "temperature");
    fails!(session.generate(QUESTION, &GenerateOptions::new().stop(""), |_| unreachable!()), BadArgument, "stop");
    assert_eq!(session.tokens().unwrap(), before);
}

#[test]
fn calls_that_do_not_fit_the_state_say_what_does() {
    let mut session = model().session().unwrap();
    fails!(session.next_token(&GenerateOptions::new()), BadState, "empty");
    let mut continuation = session.continuation(&GenerateOptions::new()).map(|token| token.map(|_| ()));
    assert!(matches!(continuation.next(), Some(Err(Error::BadState(_)))) && continuation.next().is_none());
    drop(continuation);
    fails!(session.score(&[5], &CallOptions::new()), BadState, "empty");
    let mut short = model().session_with(&SessionOptions::new().context(50)).unwrap();
    let error = fails!(short.prefill(document()), ContextFull, "50");
    assert_eq!(error.read().unwrap().tokens, 0);
    let mut asked = reader();
    let _ = asked.generate(QUESTION, &GenerateOptions::new().keep(true), |_| std::ops::ControlFlow::Continue(()));
    fails!(asked.prefill_with("More.", &PrefillOptions::new()), BadState, "");
}

#[test]
fn bad_files_are_told_apart() {
    let (folder, model) = (Folder::new(), model());
    let path = folder.path("a.kv");
    std::fs::write(&path, "something else, long enough to have a header of some bytes").unwrap();
    let error = fails!(model.load(&path), NotACache, "a.kv");
    assert!(!error.is_stale());
    fails!(Model::open(&path), Unsupported, "a.kv");
    fails!(file::inspect(&path), NotACache, "a.kv");
    fails!(file::inspect_packed(&path), NotACache, "a.kv");
    std::fs::copy(saved(), &path).unwrap();
    let size = file::inspect(&path).unwrap().file_bytes;
    assert_eq!(size, std::fs::metadata(&path).unwrap().len());
    let mut damaged = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    damaged.seek(SeekFrom::Start(size / 2)).unwrap();
    damaged.write_all(&[0xA5; 4096]).unwrap();
    drop(damaged);
    let error = fails!(file::verify(&path, &CallOptions::new()), Corrupt, "a.kv");
    assert!(error.offset().is_some());
    let verify = LoadOptions::new().verify(true);
    fails!(model.load_with(&path, &SessionOptions::new(), &verify), Corrupt, "a.kv");
    let cut = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(size / 3).unwrap();
    fails!(model.load(&path), Corrupt, "a.kv");
}

#[test]
fn everything_closes_in_any_order() {
    for order in 0..6 {
        let model = model();
        let clone = model.clone();
        let session = model.load(saved()).unwrap();
        let fork = session.fork().unwrap();
        let mut things: Vec<Box<dyn std::any::Any>> = vec![Box::new(model), Box::new(session), Box::new(fork)];
        things.swap(0, order % 3);
        if order > 2 {
            things.swap(1, 2);
        }
        drop(things); // front to back
        assert_eq!(clone.info().unwrap().layers, 10);
        let mut last = clone.load(saved()).unwrap();
        drop(clone);
        assert!(last.ask(QUESTION).unwrap().contains(ANSWER));
    }
}
