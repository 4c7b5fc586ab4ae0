//! Prefills a document once, saves its KV cache and answers a question about it.
use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;

use kvasir::{Control, Model};

fn main() -> Result<(), Box<dyn Error>> {
    let values: Vec<String> = std::env::args().skip(1).collect();
    let [model, document, cache, question]: [String; 4] =
        values.try_into().map_err(|_| "usage: ask MODEL.gguf DOCUMENT.txt CACHE.kv QUESTION")?;
    let model = Model::open(model)?;
    let mut session = match model.load(&cache) {
        // No file yet, or a file of another model or version: prefill the document.
        Err(error) if matches!(error, kvasir::Error::NotFound(_)) || error.is_stale() => {
            let mut session = model.session()?;
            let control = Control::new().progress(|report| {
                eprint!("\r{} of {} tokens", report.done, report.total);
                ControlFlow::Continue(())
            });
            session.prefill_with(std::fs::read(document)?, control)?; // minutes, once
            eprintln!();
            session.save(&cache)?;
            session
        }
        loaded => loaded?, // milliseconds: it maps the file
    };
    for piece in session.stream(question)? {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
