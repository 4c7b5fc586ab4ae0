//! Bad input and bad files: the library's message as an error, and usable handles afterwards.
use std::error::Error as _;
use std::io::{Seek, SeekFrom, Write};

use kvasir::{
    file, Control, Error, GenerateOptions, Model, ModelOptions, SessionOptions, Strategy,
};

use crate::support::*;

macro_rules! fails {
    ($call:expr, $kind:ident, $($part:expr),*) => {{
        let error = $call.err().expect("no error");
        assert!(matches!(error, Error::$kind(_)), "{}: {error}", error.status());
        $(assert!(error.to_string().contains($part), "{error} has no {:?}", $part);)*
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
    let options = ModelOptions::new().chat_format("raw\0");
    fails!(Model::open_with(model_path(), &options, Control::new()), BadArgument, "chat_format");
    let model = model();
    let options = SessionOptions::new().decode("qu\0est");
    fails!(model.session_with(&options), BadArgument, "strategy", "NUL");
    let options = SessionOptions::new().instructions("a\0b");
    fails!(model.session_with(&options), BadArgument, "instructions", "NUL");
    let options = SessionOptions::new().spill_directory("a\0b");
    fails!(model.session_with(&options), BadArgument, "NUL");
    let mut session = reader();
    fails!(session.set_strategy("\0"), BadArgument, "NUL");
    let options = GenerateOptions::new().stop("\0");
    fails!(session.ask_with(QUESTION, &options, Control::new()), BadArgument, "stop", "NUL");
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[cfg(unix)]
#[test]
fn a_path_may_have_any_bytes() {
    use std::os::unix::ffi::OsStrExt;
    let (folder, name) = (Folder::new(), std::ffi::OsStr::from_bytes(b"caf\xe9.kv"));
    let path = folder.path("").join(name);
    reader().save(&path).unwrap();
    assert!(path.exists());
    assert!(model().load(&path).unwrap().ask(QUESTION).unwrap().text.contains(ANSWER));
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let model = model();
    let options = ModelOptions::new().chat_format("morse");
    fails!(Model::open_with(model_path(), &options, Control::new()), BadArgument, "morse");
    let session = |options: SessionOptions| model.session_with(&options);
    fails!(session(SessionOptions::new().decode("best")), BadArgument, "best");
    fails!(session(SessionOptions::new().decode(Strategy::flat().alpha(0.1))), BadArgument,);
    fails!(session(SessionOptions::new().decode(Strategy::dipr().alpha(2.0))), BadArgument,);
    fails!(session(SessionOptions::new().prefill("hnsw")), BadArgument, "hnsw");
    let layers = Strategy::filter_layers().layers([2, 1]);
    fails!(session(SessionOptions::new().decode(layers)), BadArgument,);
    fails!(session(SessionOptions::new().context_tokens(1 << 40)), BadArgument,);
    let options = SessionOptions::new().spill_directory("/no/such").memory_limit(1 << 30);
    fails!(session(options), NotFound, "/no/such");
    let mut session = reader();
    let before = session.tokens().unwrap();
    fails!(session.rewind(1_000_000), BadArgument, "1000000");
    fails!(session.prefill_tokens(&[-1]), BadArgument, "-1");
    fails!(model.detokenize(&[6144], false), BadArgument, "6144");
    let mut ask = |options: GenerateOptions| session.ask_with(QUESTION, &options, Control::new());
    fails!(ask(GenerateOptions::new().temperature(f32::NAN)), BadArgument, "temperature");
    fails!(ask(GenerateOptions::new().stop("")), BadArgument, "stop");
    assert_eq!(session.tokens().unwrap(), before);
}

#[test]
fn a_flag_that_a_call_does_not_have_is_refused() {
    let mut session = reader();
    fails!(session.prepare_with(Control::new().verify(true)), BadArgument,);
    let control = Control::new().special(true).special(false);
    session.prepare_with(control).unwrap();
}

#[test]
fn calls_that_do_not_fit_the_state_name_it() {
    let mut session = model().session().unwrap();
    fails!(session.next_token(&GenerateOptions::new()), BadState, "empty");
    let mut continuation = session.continuation(&GenerateOptions::new());
    assert!(matches!(continuation.next(), Some(Err(Error::BadState(_)))));
    assert!(continuation.next().is_none());
    drop(continuation);
    fails!(session.score(&[5]), BadState, "empty");
    let mut short = model().session_with(&SessionOptions::new().context_tokens(50)).unwrap();
    let error = fails!(short.prefill(document()), ContextFull, "50");
    assert_eq!(error.prefilled().unwrap().tokens, 0);
    let mut asked = reader();
    let keep = GenerateOptions::new().keep_turn(true);
    asked.ask_with(QUESTION, &keep, Control::new()).unwrap();
    fails!(asked.prefill("More."), BadState,);
}

#[test]
fn bad_files_are_told_apart() {
    let (folder, model) = (Folder::new(), model());
    let path = folder.path("a.kv");
    std::fs::write(&path, "something else, long enough for a header of some bytes").unwrap();
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
    let error = fails!(file::verify(&path), Corrupt, "a.kv");
    assert!(error.offset().is_some());
    let verify = Control::new().verify(true);
    fails!(model.load_with(&path, &SessionOptions::new(), verify), Corrupt, "a.kv");
    let short = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    short.set_len(size / 3).unwrap();
    fails!(model.load(&path), Corrupt, "a.kv");
}

#[test]
fn everything_closes_in_any_order() {
    for order in 0..6 {
        let model = model();
        let clone = model.clone();
        let session = model.load(saved()).unwrap();
        let fork = session.fork().unwrap();
        let mut things: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(model), Box::new(session), Box::new(fork)];
        things.swap(0, order % 3);
        if order > 2 {
            things.swap(1, 2);
        }
        drop(things); // front to back
        assert_eq!(clone.info().unwrap().layers, 10);
        let mut last = clone.load(saved()).unwrap();
        drop(clone);
        assert!(last.ask(QUESTION).unwrap().text.contains(ANSWER));
    }
}
