//! Answers: right, and the same in all forms of a call.
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use kvasir::{
    Control, Error, GenerateOptions, Model, ModelOptions, SessionOptions, StopReason, Tokenize,
};

use crate::support::*;

#[test]
fn a_fact_is_found_after_prefill_and_after_loading() {
    let (model, folder) = (model(), Folder::new());
    let mut session = model.session().unwrap();
    let done = session.prefill(document()).unwrap();
    assert_eq!(done.bytes as usize, document().len());
    assert!((300..2000).contains(&done.tokens));
    assert!(session.tokens().unwrap().len() >= done.tokens as usize);
    let answer = session.ask(QUESTION).unwrap();
    assert!(answer.text.contains(ANSWER), "{answer}");
    let path = folder.path("a.kv");
    session.save(&path).unwrap();
    assert_eq!(model.load(&path).unwrap().ask(QUESTION).unwrap().text, answer.text);
    let options = SessionOptions::new().threads(1);
    let verified = model.load_with(&path, &options, Control::new().verify(true));
    assert_eq!(verified.unwrap().ask(QUESTION).unwrap().text, answer.text);
}

#[test]
fn passages_have_the_text_that_an_answer_attended() {
    let mut session = reader();
    assert!(matches!(session.passages().unwrap_err(), Error::BadState(_)));
    let options = GenerateOptions::new().trace_passages(true);
    session.ask_with(QUESTION, &options, Control::new()).unwrap();
    let (passages, tokens) = (session.passages().unwrap(), session.tokens().unwrap());
    let first = &passages[0];
    assert!(first.text.contains("482"), "{first:?}");
    let text = session.model().detokenize(&tokens[first.tokens.clone()], false).unwrap();
    assert!(String::from_utf8_lossy(&text).contains(&first.text));
    assert!(passages.windows(2).all(|pair| pair[0].share >= pair[1].share) && first.share > 0.0);
    let document = document();
    for passage in passages {
        let text = &document[passage.bytes.expect("the place of prefilled text")];
        assert!(text.contains(passage.text.trim_start()), "{text:?} {:?}", passage.text);
    }
}

/// The model was not trained to think: every thought ends at its limit.
#[test]
fn a_thought_is_no_part_of_the_answer() {
    let turns = "<|im_start|>system\n{document}<|im_end|>\n{user}<|im_start|>user\n{question}\
        <|im_end|>\n<|im_start|>assistant\n<T>{thought}</T>\n{answer}<|im_end|>\n";
    let options = ModelOptions::new().chat_format(turns);
    let model = Model::open_with(model_path(), &options, Control::new()).unwrap();
    assert!(model.info().unwrap().thinks);
    let mut session = model.session().unwrap();
    session.prefill(document()).unwrap();
    let seen = Arc::new(Mutex::new(String::new()));
    let heard = seen.clone();
    let options = GenerateOptions::new().thinking(true).thinking_tokens(5).max_tokens(4);
    let listening = options.clone().on_thinking(move |piece| {
        heard.lock().unwrap().push_str(piece);
        ControlFlow::Continue(())
    });
    let answer = session.ask_with(QUESTION, &listening, Control::new()).unwrap();
    assert_eq!(&answer.thought, &*seen.lock().unwrap());
    assert!(answer.thinking_tokens > 0 && answer.thinking_tokens <= 5);
    assert!(!answer.thought.is_empty() && !answer.text.contains(&answer.thought));
    let stopping = options.clone().on_thinking(|_| ControlFlow::Break(()));
    let error = session.ask_with(QUESTION, &stopping, Control::new()).unwrap_err();
    assert!(!error.answer().unwrap().thought.is_empty());
    let error = reader().ask_with(QUESTION, &options, Control::new()).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
}

#[test]
fn a_vocabulary_tokenizes_without_weights() {
    let options = ModelOptions::new().vocabulary_only(true);
    let vocabulary = Model::open_with(model_path(), &options, Control::new()).unwrap();
    let tokens = vocabulary.tokenize(QUESTION, Tokenize::default()).unwrap();
    assert_eq!(tokens, model().tokenize(QUESTION, Tokenize::default()).unwrap());
    assert!(matches!(vocabulary.session().unwrap_err(), Error::BadState(_)));
}

#[test]
fn instructions_are_in_the_sequence_and_in_the_file() {
    let (model, folder) = (model(), Folder::new());
    let options = SessionOptions::new().instructions("Answer with one word.");
    let mut session = model.session_with(&options).unwrap();
    session.prefill(document()).unwrap();
    let tokens = session.tokens().unwrap();
    assert!(tokens.len() > reader().tokens().unwrap().len());
    let path = folder.path("a.kv");
    session.save(&path).unwrap();
    assert_eq!(model.load(&path).unwrap().tokens().unwrap(), tokens);
    let other = SessionOptions::new().instructions("Answer at length.");
    let error = model.load_with(&path, &other, Control::new()).unwrap_err();
    assert!(matches!(error, Error::ModelMismatch(_)) && error.is_stale(), "{error}");
}

#[test]
fn callback_and_stream_have_the_text_of_ask() {
    let mut session = reader();
    let whole = session.ask(QUESTION).unwrap();
    assert_eq!(whole.to_string(), whole.text);
    let mut pieces = Vec::new();
    let answer = session.generate(QUESTION, &GenerateOptions::new(), Control::new(), |piece| {
        pieces.push(piece.to_owned());
        ControlFlow::Continue(())
    });
    let answer = answer.unwrap();
    assert_eq!((pieces.concat(), &answer.text), (whole.text.clone(), &whole.text));
    assert!(pieces.len() > 3, "several pieces");
    assert_eq!(answer.stop_reason, StopReason::EndOfTurn);
    assert!(answer.answer_tokens >= pieces.len() as u64 && answer.question_tokens > 5);
    assert!(answer.total >= answer.first_token && !answer.first_token.is_zero());
    let mut stream = session.stream(QUESTION).unwrap();
    let streamed: Result<Vec<String>, _> = stream.by_ref().collect();
    assert_eq!(streamed.unwrap(), pieces);
    assert_eq!(stream.answer().unwrap().text, answer.text);
    assert!(stream.next().is_none(), "an ended stream stays ended");
}

#[test]
fn the_command_line_has_the_same_answer() {
    let tool = match std::env::var_os("KVASIR_TOOL") {
        Some(tool) => PathBuf::from(tool),
        None => return println!("not run: KVASIR_TOOL names no command line"),
    };
    let mut command = Command::new(tool);
    command.arg("ask").arg("-m").arg(model_path()).arg("-c").arg(saved()).arg(QUESTION);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().last().unwrap(), reader().ask(QUESTION).unwrap().text);
}

#[test]
fn the_program_of_the_readme_answers() {
    let (readme, program) =
        (include_str!("../../../README.md"), include_str!("../../examples/ask.rs"));
    assert!(readme.contains(program), "README.md has another program than examples/ask.rs");
    let target = std::env::current_exe().unwrap();
    let program = target.ancestors().nth(2).unwrap().join("examples/ask");
    assert!(program.exists(), "`cargo test` without --test builds the examples");
    let folder = Folder::new();
    let (document_path, cache_path) = (folder.path("document.txt"), folder.path("document.kv"));
    std::fs::write(&document_path, document()).unwrap();
    let ask = || {
        let mut command = Command::new(&program);
        command.arg(model_path()).arg(&document_path).arg(&cache_path).arg(QUESTION);
        command.output().unwrap()
    };
    let first = ask();
    assert!(String::from_utf8_lossy(&first.stdout).contains(ANSWER), "{first:?}");
    std::fs::remove_file(&document_path).unwrap(); // the cache is enough
    assert_eq!(ask().stdout, first.stdout);
    std::fs::write(&cache_path, "damaged").unwrap();
    let failed = ask();
    let text = String::from_utf8_lossy(&failed.stderr);
    assert!(!failed.status.success(), "{text}");
    assert!(text.starts_with("Error: ") && !text.contains('{'), "the message alone: {text}");
}

#[test]
fn options_arrive() {
    let mut session = reader();
    let mut ask =
        |options: &GenerateOptions| session.ask_with(QUESTION, options, Control::new()).unwrap();
    let whole = ask(&GenerateOptions::new()).text;
    let short = ask(&GenerateOptions::new().max_tokens(2));
    assert_eq!((short.answer_tokens, short.stop_reason), (2, StopReason::MaxTokens));
    assert!(whole.starts_with(&short.text));
    let stopped = ask(&GenerateOptions::new().stop("no such words").stop("north gate"));
    assert_eq!(stopped.stop_reason, StopReason::String);
    assert_eq!(stopped.text, whole.split("north gate").next().unwrap());
    let hot = GenerateOptions::new().temperature(5.0).top_k(1000).top_p(0.99).min_p(0.0001);
    let sampled = |seed| hot.clone().seed(seed).max_tokens(12);
    let one = ask(&sampled(1)).text;
    assert_eq!(one, ask(&sampled(1)).text, "the same seed");
    assert_ne!(one, ask(&sampled(2)).text, "another seed");
    let before = session.tokens().unwrap().len();
    session.ask(QUESTION).unwrap();
    assert_eq!(session.tokens().unwrap().len(), before, "the sequence is as before");
    let keep = GenerateOptions::new().keep_turn(true);
    session.ask_with(QUESTION, &keep, Control::new()).unwrap();
    assert!(session.tokens().unwrap().len() > before, "the turn stays");
}
