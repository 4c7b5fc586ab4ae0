//! Reading and asking: what comes back is right, and the same whichever way it is asked for.
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::Command;

use kvasir::{CallOptions, GenerateOptions, LoadOptions, Model, PrefillOptions, SessionOptions, StopReason, Tokenize};

use crate::support::*;

#[test]
fn a_fact_is_found_in_what_was_read_and_in_what_was_saved() {
    let (model, folder) = (model(), Folder::new());
    let mut session = model.session().unwrap();
    let read = session.prefill(document()).unwrap();
    assert_eq!(read.bytes as usize, document().len());
    assert!((300..2000).contains(&read.tokens) && session.tokens().unwrap().len() >= read.tokens as usize);
    let answer = session.ask(QUESTION).unwrap();
    assert!(answer.contains(ANSWER), "{answer}");
    session.save(folder.path("a.kv")).unwrap();
    assert_eq!(model.load(folder.path("a.kv")).unwrap().ask(QUESTION).unwrap(), answer);
    let verified = model.load_with(folder.path("a.kv"), &SessionOptions::new().threads(1), &LoadOptions::new().verify(true));
    assert_eq!(verified.unwrap().ask(QUESTION).unwrap(), answer);
}

#[test]
fn an_answer_tells_where_it_looked() {
    let mut session = reader();
    assert!(matches!(session.trace().unwrap_err(), kvasir::Error::BadState(_)));
    session.generate(QUESTION, &GenerateOptions::new().trace(true), |_| ControlFlow::Continue(())).unwrap();
    let (spans, tokens) = (session.trace().unwrap(), session.tokens().unwrap());
    let first = spans[0].first_token as usize;
    let text = session.model().detokenize(&tokens[first..first + spans[0].tokens as usize], false).unwrap();
    assert!(String::from_utf8_lossy(&text).contains("482"), "{text:?}");
    assert!(spans.windows(2).all(|pair| pair[0].share >= pair[1].share) && spans[0].share > 0.0);
}

#[test]
fn callback_and_stream_give_what_ask_gives() {
    let mut session = reader();
    let whole = session.ask(QUESTION).unwrap();
    let mut pieces = Vec::new();
    let answer = session.generate(QUESTION, &GenerateOptions::new(), |piece| {
        pieces.push(piece.to_owned());
        ControlFlow::Continue(())
    });
    let answer = answer.unwrap();
    assert_eq!(pieces.concat(), whole);
    assert!(pieces.len() > 3, "it comes in pieces");
    assert_eq!(answer.stop_reason, StopReason::EndOfTurn);
    assert!(answer.answer_tokens >= pieces.len() as u64 && answer.question_tokens > 5);
    assert!(answer.total >= answer.first_token && !answer.first_token.is_zero());
    let mut stream = session.stream(QUESTION, &GenerateOptions::new()).unwrap();
    let streamed: Result<Vec<String>, _> = stream.by_ref().collect();
    assert_eq!(streamed.unwrap(), pieces);
    assert_eq!(stream.answer().unwrap().answer_tokens, answer.answer_tokens);
    assert!(stream.next().is_none(), "an ended stream stays so");
}

#[test]
fn the_command_line_gives_the_same_answer() {
    let tool = match std::env::var_os("KVASIR_TOOL") {
        Some(tool) => PathBuf::from(tool),
        None => return println!("not run: KVASIR_TOOL names no command line"),
    };
    let output = Command::new(tool).arg("ask").arg("-m").arg(model_path()).arg("-c").arg(saved()).arg(QUESTION).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A line with the question, one with the answer.
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!(told.lines().last().unwrap(), reader().ask(QUESTION).unwrap());
}

#[test]
fn the_example_of_the_readme_answers() {
    let readme = include_str!("../../../README.md");
    assert!(readme.contains(include_str!("../../examples/ask.rs")), "README.md has another program than examples/ask.rs");
    let program = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples/ask");
    assert!(program.exists(), "`cargo test` without --test builds the examples");
    let folder = Folder::new();
    std::fs::write(folder.path("document.txt"), document()).unwrap();
    let ask = || {
        let mut command = Command::new(&program);
        command.arg(model_path()).arg(folder.path("document.txt")).arg(folder.path("document.kv")).arg(QUESTION);
        command.output().unwrap()
    };
    let first = ask();
    assert!(String::from_utf8_lossy(&first.stdout).contains(ANSWER), "{first:?}");
    std::fs::remove_file(folder.path("document.txt")).unwrap(); // the cache is enough
    assert_eq!(ask().stdout, first.stdout);
    std::fs::remove_file(folder.path("document.kv")).unwrap();
    assert!(!ask().status.success());
}

#[test]
fn options_arrive() {
    let mut session = reader();
    let ask = |session: &mut kvasir::Session, options: GenerateOptions| {
        let mut text = String::new();
        let answer = session.generate(QUESTION, &options, |piece| {
            text.push_str(piece);
            ControlFlow::Continue(())
        });
        (text, answer.unwrap())
    };
    let (whole, _) = ask(&mut session, GenerateOptions::new());
    let (short, answer) = ask(&mut session, GenerateOptions::new().max_tokens(2));
    assert_eq!((answer.answer_tokens, answer.stop_reason), (2, StopReason::MaxTokens));
    assert!(whole.starts_with(&short));
    let (stopped, answer) = ask(&mut session, GenerateOptions::new().stop("no such words").stop("north gate"));
    assert_eq!(answer.stop_reason, StopReason::String);
    assert_eq!(stopped, whole.split("north gate").next().unwrap());
    let sampled = |seed| GenerateOptions::new().temperature(5.0).top_k(1000).top_p(0.99).min_p(0.0001).seed(seed).max_tokens(12);
    let (one, _) = ask(&mut session, sampled(1));
    assert_eq!(one, ask(&mut session, sampled(1)).0, "the same seed");
    assert_ne!(one, ask(&mut session, sampled(2)).0, "another seed");
    let before = session.tokens().unwrap().len();
    ask(&mut session, GenerateOptions::new());
    assert_eq!(session.tokens().unwrap().len(), before, "the sequence is where it was");
    ask(&mut session, GenerateOptions::new().keep(true));
    assert!(session.tokens().unwrap().len() > before, "the turn was kept");
}

#[test]
fn session_options_arrive() {
    let model = model();
    let options = SessionOptions::new().threads(1).strategy("quest").budget_tokens(64).dense_layers(1).window(32).prefill_chunk(100);
    let session = model.session_with(&options.context(2000)).unwrap();
    let stats = session.stats().unwrap();
    assert!(stats.contains("\"quest\"") && stats.contains("64"), "{stats}");
    let mut session = reader();
    session.set_strategy("window", 0, 0.0).unwrap();
    let blind = session.ask(QUESTION).unwrap();
    assert!(!blind.contains(ANSWER), "the fact is far outside the window: {blind}");
    session.set_strategy("full", 0, 0.0).unwrap();
    session.prepare(&CallOptions::new()).unwrap();
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER));
    let names: Vec<String> = kvasir::strategies().unwrap().into_iter().map(|s| s.name).collect();
    assert!(names.contains(&"bounded".into()) && names.contains(&"full".into()), "{names:?}");
}

#[test]
fn tokens_come_one_by_one_and_can_be_taken_back() {
    let mut session = reader();
    let before = session.tokens().unwrap();
    let greedy = GenerateOptions::new();
    let made: Vec<i32> = session.continuation(&greedy).take(5).map(Result::unwrap).collect();
    assert_eq!(session.tokens().unwrap()[before.len()..], made);
    session.rewind(before.len() as u64).unwrap();
    assert_eq!(session.tokens().unwrap(), before);
    assert_eq!(session.next_token(&greedy).unwrap().token, made[0]);
}

#[test]
fn a_fork_begins_alike_and_goes_its_own_way() {
    let mut session = reader();
    let mut fork = session.fork().unwrap();
    let answer = session.ask(QUESTION).unwrap();
    let before = session.tokens().unwrap();
    fork.next_token(&GenerateOptions::new()).unwrap();
    assert_eq!(session.tokens().unwrap(), before);
    assert_eq!(fork.tokens().unwrap().len(), before.len() + 1);
    drop(session);
    fork.rewind(before.len() as u64).unwrap();
    assert_eq!(fork.ask(QUESTION).unwrap(), answer);
}

#[test]
fn a_prefix_is_the_beginning() {
    let model = model();
    let whole = model.load(saved()).unwrap().tokens().unwrap();
    let prefix = model.load_prefix(saved(), 100, &SessionOptions::new(), &LoadOptions::new()).unwrap();
    assert_eq!(prefix.tokens().unwrap(), whole[..100]);
}

#[test]
fn tokens_spell_text_and_back() {
    let model = model();
    let text = "Caf\u{e9} \u{1f511} and tabs\t\u{0}in between";
    let tokens = model.tokenize(text, Tokenize::default()).unwrap();
    assert_eq!(model.detokenize(&tokens, false).unwrap(), text.as_bytes());
    let bytes = b"not \xff\xfe UTF-8";
    let tokens = model.tokenize(bytes, Tokenize::default()).unwrap();
    assert_eq!(model.detokenize(&tokens, false).unwrap(), bytes);
    assert!(model.tokenize("", Tokenize::default()).unwrap().is_empty());
    let mark = Tokenize { special: true, bos: true, document: false };
    assert_eq!(model.tokenize("<|im_end|>", mark).unwrap(), [2]);
    assert!(model.tokenize("<|im_end|>", Tokenize::default()).unwrap().len() > 1);
    assert_eq!(model.detokenize(&[2], true).unwrap(), b"<|im_end|>");
    assert!(model.detokenize(&[2], false).unwrap().is_empty());
}

#[test]
fn measurements_agree_with_each_other() {
    let model = model();
    let tokens = model.tokenize("The gate is closed at night. The gate is", Tokenize::default()).unwrap();
    let mut session = model.session().unwrap();
    let vocabulary = model.info().unwrap().vocabulary as usize;
    let logits = session.prefill_logits(&tokens, &CallOptions::new()).unwrap();
    assert_eq!(logits.len(), tokens.len() * vocabulary);
    let last = &logits[logits.len() - vocabulary..];
    let best = (0..vocabulary).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as i32;
    let scores = session.score(&[best, tokens[0]], &CallOptions::new()).unwrap();
    let sum: f64 = last.iter().map(|&x| f64::from(x).exp()).sum();
    let expected = f64::from(last[best as usize]) - sum.ln();
    assert!((f64::from(scores[0]) - expected).abs() < 1e-3, "{scores:?} {expected}");
    assert_eq!(session.next_token(&GenerateOptions::new()).unwrap().token, best);
}

#[test]
fn a_text_is_read_in_parts() {
    let (text, model) = (document(), model());
    let (first, rest) = text.split_at(text.find(" The access").unwrap());
    let mut session = model.session().unwrap();
    session.prefill(first).unwrap();
    let read = session.prefill_with(rest, &PrefillOptions::new().special(true)).unwrap();
    assert_eq!(read.bytes as usize, rest.len());
    assert!(session.ask(QUESTION).unwrap().contains(ANSWER));
    let mut again = model.session().unwrap();
    let tokens = session.tokens().unwrap();
    assert_eq!(again.prefill_tokens(&tokens, &CallOptions::new()).unwrap().tokens as usize, tokens.len());
    assert_eq!(again.tokens().unwrap(), tokens);
}

#[test]
fn a_model_has_the_hash_of_its_file_when_it_was_asked_for() {
    let folder = Folder::new();
    let model = Model::open_with(model_path(), &kvasir::ModelOptions::new().hash_folder(folder.path("hashes"))).unwrap();
    model.hash(&CallOptions::new()).unwrap();
    assert_eq!(model.info().unwrap().hash.len(), 32);
}

#[test]
fn what_the_model_and_the_library_are() {
    let info = model().info().unwrap();
    assert_eq!(info, Model::inspect(model_path()).unwrap());
    assert_eq!((info.architecture.as_str(), info.vocabulary, info.context), ("llama", 6144, 131_072));
    assert_eq!((info.layers, info.heads, info.kv_heads, info.head_dim), (10, 6, 2, 64));
    assert_eq!(info.fingerprint.len(), 64);
    assert_eq!(kvasir::version(), kvasir_sys::KV_VERSION_NUMBER);
    assert!(kvasir::build_info().contains("\"cache_format\""));
    assert_eq!((kvasir::status_text(13), kvasir::status_text(-1)), ("corrupt", "unknown status"));
}
