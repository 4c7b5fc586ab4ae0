//! CPU time of a token of an answer through this crate and through C, in the calling thread:
//! `cargo bench --bench overhead [-- ROUNDS]`.
//!
//! The C program next to this file is compiled with `cc` against the same library. C, Rust's
//! callback and C again take turns, so other load affects all. "C again" shows how far two equal
//! programs differ.
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvasir::{Control, GenerateOptions, Model, Session, SessionOptions};

const TOKENS: u32 = 100;
const QUESTION: &str = "Tell me what is in the document.";

/// Nanoseconds of CPU time of this thread.
fn cpu_time() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// The C program. It answers once for each line, and prints nanoseconds and tokens.
struct C(Child, ChildStdin, BufReader<ChildStdout>);

impl C {
    fn new(program: &Path, model: &Path, document: &Path) -> C {
        let mut command = Command::new(program);
        command.arg(model).arg(document).arg(QUESTION).arg(TOKENS.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        C(child, input, output)
    }

    /// Nanoseconds per token.
    fn round(&mut self) -> f64 {
        self.1.write_all(b"\n").unwrap();
        let mut line = String::new();
        self.2.read_line(&mut line).unwrap();
        let numbers: Vec<f64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
        assert_eq!(numbers[1] as u32, TOKENS);
        numbers[0] / numbers[1]
    }
}

impl Drop for C {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rust_round(session: &mut Session) -> f64 {
    // At this temperature no turn ends early. The same seed yields the same tokens.
    let options = GenerateOptions::new().max_tokens(TOKENS).temperature(4.0).seed(1);
    let (begin, mut bytes) = (cpu_time(), 0);
    let answer = session.generate(QUESTION, &options, Control::new(), |piece| {
        bytes += piece.len();
        ControlFlow::Continue(())
    });
    let took = cpu_time() - begin;
    assert!(bytes > 0 && answer.unwrap().answer_tokens == u64::from(TOKENS));
    took as f64 / f64::from(TOKENS)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compile(folder: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library =
        std::env::var("KVASIR_LIB_DIR").expect("KVASIR_LIB_DIR names the folder of libkvasir.so");
    let program = folder.join("overhead");
    let mut cc = Command::new("cc");
    cc.arg("-O2")
        .arg("-I")
        .arg(here.join("../../../include"))
        .arg(here.join("benches/overhead.c"))
        .arg("-o")
        .arg(&program);
    cc.arg(format!("-L{library}")).arg("-lkvasir").arg(format!("-Wl,-rpath,{library}"));
    assert!(cc.status().unwrap().success());
    program
}

fn main() {
    let rounds = std::env::args().find_map(|value| value.parse().ok()).unwrap_or(40);
    let gguf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/mini-reader-q8_0.gguf");
    let folder = std::env::temp_dir().join(format!("kvasir-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (program, document) = (compile(&folder), folder.join("document.kv"));
    let options = SessionOptions::new().threads(1);
    let model = Model::open(&gguf).unwrap();
    let mut reader = model.session().unwrap();
    let text = "The tower has a gate. The access code of the north gate is 4821907. It is closed.";
    reader.prefill(text).unwrap();
    reader.save(&document).unwrap();

    let mut session = model.load_with(&document, &options, Control::new()).unwrap();
    let (mut c, mut again) =
        (C::new(&program, &gguf, &document), C::new(&program, &gguf, &document));
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..rounds + 3 {
        let taken = [c.round(), rust_round(&mut session), again.round()];
        if round >= 3 {
            times.iter_mut().zip(taken).for_each(|(times, time)| times.push(time));
        }
    }
    let [c_time, rust, c_again] = &mut times;
    let mut ratios: Vec<f64> = rust
        .iter()
        .zip(c_time.iter().zip(c_again.iter()))
        .map(|(r, (a, b))| 2.0 * r / (a + b))
        .collect();
    let (ratio, same) = (median(&mut ratios), median(c_again) / median(c_time));
    println!(
        "a token: C {:.1} us, Rust {:.1} us, C again {:.1} us",
        median(c_time) / 1e3,
        median(rust) / 1e3,
        median(c_again) / 1e3
    );
    println!("Rust / C: {ratio:.4}, median of {rounds} rounds of {TOKENS} tokens");
    println!("C again / C: {same:.4}");
    std::fs::remove_dir_all(&folder).unwrap();
}
