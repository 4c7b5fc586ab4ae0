//! Cycles of opening, asking and closing take no memory and leave no file open. The measure is the
//! resident set, so this is a program of its own.
#![cfg(target_os = "linux")]
use std::ops::ControlFlow;
use std::path::Path;

use kvasir::{CancelToken, Control, Error, GenerateOptions, Model, SessionOptions};

const TEXT: &str =
    "The tower has a gate. The access code of the north gate is 4821907. It is closed.";
const MAX_GROWTH: u64 = 6 << 20; // bytes that allocators keep; 7 kB a cycle are more in 1,000

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
    let options = SessionOptions::new().threads(1).decode("bounded");
    let mut session = model.load_with(document, &options, Control::new()).unwrap();
    let answer = session.ask("What is the access code of the north gate?").unwrap();
    assert!(answer.text.contains("4821907"));
    // Calls that end early.
    let cancel = CancelToken::new().unwrap();
    cancel.fire();
    let options = GenerateOptions::new().stop("some text");
    let control = Control::new().cancel(&cancel).progress(|_| ControlFlow::Continue(()));
    assert!(session.ask_with("What?", &options, control).unwrap_err().answer().is_some());
    let none = model.session_with(&SessionOptions::new().decode("none"));
    assert!(matches!(none, Err(Error::BadArgument(_))));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let f = |_: &str| std::panic::resume_unwind(Box::new(vec![0u8; 4096]));
        session.generate("What?", &GenerateOptions::new(), Control::new(), f)
    }));
    assert!(panic.is_err());
    let mut stream = session.stream("What?").unwrap();
    stream.next().unwrap().unwrap();
}

fn cycles(count: usize) {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/mini-reader-q8_0.gguf");
    let gguf = std::env::var_os("KVASIR_MODEL").unwrap_or_else(|| bundled.into());
    let gguf = Path::new(&gguf);
    let name = format!("kvasir-rust-leaks-{}.kv", std::process::id());
    let document = std::env::temp_dir().join(name);
    let mut session = Model::open(gguf).unwrap().session().unwrap();
    session.prefill(TEXT).unwrap();
    session.save(&document).unwrap();
    drop(session);
    let measure = || {
        cycle(gguf, &document);
        resident()
    };
    // Caches of allocators vary by some MB, so the minimum counts. The first tenth fills them.
    let mut seen: Vec<u64> = (0..count / 10).map(|_| measure()).collect();
    let files = open_files();
    seen.extend((count / 10..count).map(|_| measure()));
    std::fs::remove_file(&document).unwrap();
    let minimum = |part: &[u64]| part.iter().min().copied().unwrap();
    let before = minimum(&seen[count / 10..count / 5]);
    let after = minimum(&seen[count - count / 10..]);
    println!("{count} cycles: at least {before} bytes resident after the first tenth, {after} in");
    println!("the last; {files} and {} open files", open_files());
    let growth = after.saturating_sub(before);
    assert!(growth < MAX_GROWTH, "{} bytes a cycle", growth / (count as u64 * 9 / 10));
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
