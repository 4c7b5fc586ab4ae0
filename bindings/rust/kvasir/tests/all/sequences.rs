//! Sessions and models besides answers: tokens, strategies, statistics, measurements.
use std::ops::ControlFlow;

use kvasir::{Control, Error, GenerateOptions, Model, Param, SessionOptions, Strategy, Tokenize};

use crate::support::*;

#[test]
fn session_options_arrive() {
    let model = model();
    let options = SessionOptions::new().threads(1).window_tokens(32).prefill_chunk(100);
    let quest = Strategy::quest().budget_tokens(64).dense_layers(1).select_tokens(32);
    let options = options.decode(quest).prefill(Strategy::bounded().exact_tokens(100));
    let session = model.session_with(&options.context_tokens(2000)).unwrap();
    let stats = session.stats().unwrap();
    assert_eq!((stats.threads, stats.prefill_chunk, stats.context_tokens), (1, 100, 2000));
    assert_eq!(stats.decode_strategy, "quest");
    let json = session.stats_json().unwrap();
    assert!(json.starts_with('{') && json.contains("\"decode_strategy\""), "{json}");
}

#[test]
fn statistics_describe_the_last_decode() {
    let mut session = reader();
    session.ask(QUESTION).unwrap();
    let stats = session.stats().unwrap();
    assert_eq!(stats.tokens as usize, session.tokens().unwrap().len());
    assert!(stats.last_steps > 0 && stats.last_tokens_read > 0 && !stats.last_decode.is_zero());
    assert!(!stats.load.is_zero() && stats.mapped_bytes > 0);
    assert_eq!((stats.device.as_str(), stats.gpu_layers, stats.gpu_output), ("cpu", 0, false));
}

#[test]
fn the_strategy_changes() {
    let mut session = reader();
    session.set_strategy("window").unwrap();
    let blind = session.ask(QUESTION).unwrap();
    assert!(!blind.text.contains(ANSWER), "the fact is far outside the window: {blind}");
    session.set_strategy(Strategy::full()).unwrap();
    session.prepare().unwrap();
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
    session.set_strategy(Strategy::filter_layers().layers([2, 5])).unwrap();
    session.set_strategy(Strategy::window()).unwrap();
    let error = session.set_strategy(Strategy::full().alpha(0.5)).unwrap_err();
    assert!(matches!(error, Error::BadArgument(_)), "{error}");
    assert_eq!(session.ask(QUESTION).unwrap().text, blind.text, "as before the error");
}

#[test]
fn strategies_have_parameters_and_descriptions() {
    let strategy = Strategy::bounded().budget_fraction(0.05).share_heads(false);
    assert_eq!(strategy.get(Param::BudgetFraction).unwrap(), 0.05);
    assert_eq!(strategy.get(Param::ShareHeads).unwrap(), 0.0);
    assert_eq!(Strategy::quest().get(Param::DenseLayers).unwrap(), 2.0);
    assert_eq!(Strategy::dipr().alpha(0.5).get(Param::Alpha).unwrap(), 0.5);
    assert_eq!(Strategy::bounded().coverage(0.5).get(Param::Coverage).unwrap(), 0.5);
    assert!(matches!(strategy.get(Param::Alpha), Err(Error::BadArgument(_))));
    assert!(matches!(Strategy::new("none").get(Param::Alpha), Err(Error::BadArgument(_))));
    let all = kvasir::strategies().unwrap();
    let bounded = all.iter().find(|info| info.name == "bounded").unwrap();
    assert!(bounded.prefill && bounded.cache && !bounded.experimental);
    assert_eq!(bounded.budget_floor, 512);
}

#[test]
fn tokens_are_appended_one_by_one_and_removed() {
    let mut session = reader();
    let before = session.tokens().unwrap();
    let greedy = GenerateOptions::new();
    let made: Vec<i32> = session.continuation(&greedy).take(3).map(Result::unwrap).collect();
    assert_eq!(session.tokens().unwrap()[before.len()..], made);
    session.rewind(before.len() as u64).unwrap();
    assert_eq!(session.tokens().unwrap(), before);
    let again = session.next_token(&greedy).unwrap();
    assert_eq!(Some(again.id).filter(|_| !again.ends_turn), made.first().copied());
}

#[test]
fn a_fork_begins_alike_and_changes_alone() {
    let mut session = reader();
    let mut fork = session.fork().unwrap();
    let answer = session.ask(QUESTION).unwrap().text;
    let before = session.tokens().unwrap();
    fork.next_token(&GenerateOptions::new()).unwrap();
    assert_eq!(session.tokens().unwrap(), before);
    assert_eq!(fork.tokens().unwrap().len(), before.len() + 1);
    drop(session);
    fork.rewind(before.len() as u64).unwrap();
    assert_eq!(fork.ask(QUESTION).unwrap().text, answer);
}

#[test]
fn a_prefix_is_the_beginning() {
    let model = model();
    let whole = model.load(saved()).unwrap().tokens().unwrap();
    let prefix = model.load_prefix(saved(), 100, &SessionOptions::new(), Control::new()).unwrap();
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

#[cfg(feature = "experimental")]
#[test]
fn logits_agree_with_scores_and_samples() {
    let model = model();
    let text = "The gate is closed at night. The gate is";
    let tokens = model.tokenize(text, Tokenize::default()).unwrap();
    let mut session = model.session().unwrap();
    let vocabulary = model.info().unwrap().vocabulary as usize;
    let logits = session.prefill_logits(&tokens, Control::new()).unwrap();
    assert_eq!(logits.len(), tokens.len() * vocabulary);
    let last = &logits[logits.len() - vocabulary..];
    let best = (0..vocabulary).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as i32;
    let scores = session.score(&[best, tokens[0]]).unwrap();
    let sum: f64 = last.iter().map(|&x| f64::from(x).exp()).sum();
    let expected = f64::from(last[best as usize]) - sum.ln();
    assert!((f64::from(scores[0]) - expected).abs() < 1e-3, "{scores:?} {expected}");
    assert_eq!(session.next_token(&GenerateOptions::new()).unwrap().id, best);
}

#[cfg(feature = "experimental")]
#[test]
fn a_decode_is_measured() {
    use kvasir::experimental::{Measure, KV_PARAM_SEARCH_BREADTH};
    let mut session = reader();
    session.set_strategy(Strategy::quest().budget_tokens(64)).unwrap();
    session.measure(Measure { compare: true, ..Measure::default() }).unwrap();
    session.ask(QUESTION).unwrap();
    assert!(session.stats_json().unwrap().contains("\"compared\""));
    session.set_strategy(Strategy::hnsw().experimental(KV_PARAM_SEARCH_BREADTH, 100.0)).unwrap();
}

#[test]
fn scores_are_log_probabilities() {
    let mut session = reader();
    let token = session.fork().unwrap().next_token(&GenerateOptions::new()).unwrap().id;
    let scores = session.score(&[token, 5]).unwrap();
    assert!(scores.len() == 2 && scores.iter().all(|&score| score < 0.0), "{scores:?}");
    assert!(scores[0].exp() > 1.0 / 6144.0, "the likeliest token");
}

#[test]
fn a_text_is_prefilled_in_parts() {
    let (text, model) = (document(), model());
    let (first, rest) = text.split_at(text.find(" The access").unwrap());
    let mut session = model.session().unwrap();
    session.prefill(first).unwrap();
    let done = session.prefill_with(rest, Control::new().special(true)).unwrap();
    assert_eq!(done.bytes as usize, rest.len());
    assert!(session.ask(QUESTION).unwrap().text.contains(ANSWER));
    let mut again = model.session().unwrap();
    let tokens = session.tokens().unwrap();
    assert_eq!(again.prefill_tokens(&tokens).unwrap().tokens as usize, tokens.len());
    assert_eq!(again.tokens().unwrap(), tokens);
}

#[test]
fn a_model_has_the_hash_of_its_file() {
    let folder = Folder::new();
    let options = kvasir::ModelOptions::new().hash_directory(folder.path("hashes"));
    let model = Model::open_with(model_path(), &options, Control::new()).unwrap();
    model.hash().unwrap();
    assert_eq!(model.info().unwrap().hash.len(), 32);
}

#[test]
fn model_and_library_are_described() {
    let info = model().info().unwrap();
    assert_eq!(info, Model::inspect(model_path()).unwrap());
    assert_eq!((info.architecture.as_str(), info.vocabulary), ("llama", 6144));
    assert_eq!(info.context_tokens, 131_072);
    assert_eq!((info.layers, info.heads, info.kv_heads, info.head_dim), (10, 6, 2, 64));
    assert_eq!(info.fingerprint.len(), 64);
    assert_eq!(kvasir::version(), kvasir_sys::KV_VERSION_NUMBER);
    assert!(kvasir::build_info().contains("\"cache_format\""));
    assert_eq!((kvasir::status_text(13), kvasir::status_text(-1)), ("corrupt", "unknown status"));
}

#[test]
fn public_types_debug() {
    #[derive(Debug)]
    #[allow(dead_code)]
    struct App {
        model: Model,
        session: kvasir::Session,
    }
    let session = reader();
    let mut app = App { model: session.model().clone(), session };
    let text = format!("{app:?}");
    assert!(text.contains("\"llama\"") && text.contains("tokens: "), "{text}");
    assert!(format!("{:?}", app.session.stream(QUESTION).unwrap()).starts_with("Stream"));
    let continuation = app.session.continuation(&GenerateOptions::new());
    assert!(format!("{continuation:?}").starts_with("Continuation"));
    let control = Control::new().progress(|_| ControlFlow::Continue(()));
    assert!(format!("{control:?}").starts_with("Control"));
    let error = Model::open("/no/such/model.gguf").unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}
