//! Opening, asking and closing again and again takes no more memory, the process' resident set being the measure, and leaves no file open; in a program of
//! its own.
#![cfg(target_os = "linux")]
use std::ops::ControlFlow;
use std::path::Path;

use kvasir::{CancelToken, Error, GenerateOptions, LoadOptions, Model, SessionOptions};

const TEXT: &str = "The tower has a gate. The access code of the north gate is 4821907. It is closed at night.";

/// Bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn cycle(model: &Path, document: &Path) {
    let model = Model::open(model).unwrap();
    drop(model.session().unwrap()); // with its threads
    let mut session = model.load_with(document, &SessionOptions::new().threads(1), &LoadOptions::new()).unwrap();
    assert!(session.ask("What is the access code of the north gate?").unwrap().contains("4821907"));
    // The paths that end early.
    let cancel = CancelToken::new().unwrap();
    cancel.fire();
    let options = GenerateOptions::new().cancel(&cancel).stop("some text");
    assert!(session.generate("What?", &options, |_| ControlFlow::Continue(())).unwrap_err().answer().is_some());
    assert!(matches!(model.session_with(&SessionOptions::new().strategy("none")).err(), Some(Error::BadArgument(_))));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        session.generate("What?", &GenerateOptions::new(), |_| std::panic::resume_unwind(Box::new(vec![0u8; 4096])))
    }));
    assert!(panic.is_err());
    let mut stream = session.stream("What?", &GenerateOptions::new()).unwrap();
    stream.next().unwrap().unwrap();
}

fn cycles(count: usize) {
    let gguf = std::env::var_os("KVASIR_MODEL")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/mini-reader-q8_0.gguf"), Into::into);
    let document = std::env::temp_dir().join(format!("kvasir-rust-leaks-{}.kv", std::process::id()));
    let mut session = Model::open(&gguf).unwrap().session().unwrap();
    session.prefill(TEXT).unwrap();
    session.save(&document).unwrap();
    drop(session);
    let measure = || {
        cycle(&gguf, &document);
        resident()
    };
    // Allocators' caches come and go by some MB: the least of a time tells what is kept. The first tenth fills them.
    let mut seen: Vec<u64> = (0..count / 10).map(|_| measure()).collect();
    let files = open_files();
    seen.extend((count / 10..count).map(|_| measure()));
    std::fs::remove_file(&document).unwrap();
    let least = |part: &[u64]| part.iter().min().copied().unwrap();
    let (before, after) = (least(&seen[count / 10..count / 5]), least(&seen[count - count / 10..]));
    println!(
        "{count} cycles: at least {before} bytes resident after the first tenth, {after} in the last; {files} and {} open files",
        open_files()
    );
    // What allocators keep for a while; a leak of 7 kB a cycle is more in 1,000.
    assert!(after < before + (6 << 20), "{} bytes a cycle", (after - before) / (count as u64 * 9 / 10));
    assert_eq!(files, open_files(), "open files");
}

#[test]
fn a_few_cycles_take_no_memory() {
    cycles(40);
}

#[test]
#[ignore = "takes minutes: run by name"]
fn a_thousand_cycles_take_no_memory() {
    cycles(1000);
}
