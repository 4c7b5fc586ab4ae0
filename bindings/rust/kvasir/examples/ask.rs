//! Reads a document once, keeps it, answers a question about it: ask MODEL.gguf DOCUMENT.txt CACHE.kv "Question?"
use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;

use kvasir::{GenerateOptions, Model};

fn main() -> Result<(), Box<dyn Error>> {
    let values: Vec<String> = std::env::args().skip(1).collect();
    let [model, document, cache, question]: [String; 4] = values.try_into().map_err(|_| "ask MODEL.gguf DOCUMENT.txt CACHE.kv QUESTION")?;
    let model = Model::open(model)?;
    let mut session = match model.load(&cache) {
        // Not there yet, or of another model or version: nothing is broken, the document is read again.
        Err(error) if matches!(error, kvasir::Error::NotFound(_)) || error.is_stale() => {
            let mut session = model.session()?;
            session.prefill(std::fs::read(document)?)?;
            session.save(&cache)?;
            session
        }
        loaded => loaded?,
    };
    session.generate(question, &GenerateOptions::new(), |piece| {
        print!("{piece}");
        match std::io::stdout().flush() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    println!();
    Ok(())
}
