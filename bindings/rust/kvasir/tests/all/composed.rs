//! Several documents at once.
use std::fs;

use kvasir::{
    file, Control, Error, GenerateOptions, Library, LibrarySessionOptions, SessionOptions,
};

use crate::support::*;

const OTHER: &str = "The access code of the south gate is 5530914.";
const OTHER_QUESTION: &str = "What is the access code of the south gate?";

#[test]
fn several_documents_are_asked_at_once() {
    let (model, folder) = (model(), Folder::new());
    let paths = [folder.path("b.kv"), folder.path("a.kv")];
    for (path, text) in paths.iter().zip([document().replace(ANSWER, "5530914"), document()]) {
        let mut session = model.session().unwrap();
        session.prefill(format!("{text} {}", if path == &paths[0] { OTHER } else { "" })).unwrap();
        session.save(path).unwrap();
    }
    let options = SessionOptions::new().threads(2);
    let mut session = model.compose_with(&paths, 1, &options, Control::new()).unwrap();
    let asking = GenerateOptions::new().trace_passages(true).keep_turn(true).max_tokens(24);
    let answer = session.ask_with(OTHER_QUESTION, &asking, Control::new()).unwrap();
    assert!(answer.text.contains("5530914"), "{answer}");
    let documents = session.documents().unwrap();
    assert_eq!(documents.len(), 2);
    assert_eq!(documents[0].path, paths[0].to_string_lossy());
    assert!(documents[0].is_candidate && documents[0].is_attended && !documents[1].is_attended);
    assert!(documents[0].score.unwrap() > documents[1].score.unwrap());
    let passage = &session.passages().unwrap()[0];
    assert_eq!(passage.document, 0);
    assert!(passage.text.contains("5530914"), "{passage:?}");
    assert_eq!(session.document_tokens(1).unwrap().len() as u64, documents[1].tokens);
    assert!(matches!(session.document_tokens(2).unwrap_err(), Error::NotFound(_)));
    session.limit_documents(&[1]).unwrap();
    assert!(!session.documents().unwrap()[0].is_candidate);
    assert!(matches!(session.limit_documents(&[1, 0]).unwrap_err(), Error::BadArgument(_)));
    session.limit_documents(&[]).unwrap();

    session.set_documents(&paths[1..]).unwrap();
    assert_eq!(session.documents().unwrap()[0].path, paths[1].to_string_lossy());
    let error = session.set_documents([folder.path("none.kv")]).unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error}");
    session.set_documents(&paths).unwrap();
    let briefly = GenerateOptions::new().max_tokens(2);
    session.ask_with(OTHER_QUESTION, &briefly, Control::new()).unwrap();

    // a small file refers to them
    let over = folder.path("over.kv");
    session.save(&over).unwrap();
    assert_eq!(file::inspect(&over).unwrap().documents, 2);
    let loaded = model.load(&over).unwrap();
    assert_eq!(loaded.tokens().unwrap(), session.tokens().unwrap());
    assert_eq!(loaded.documents().unwrap()[1].tokens, documents[1].tokens);
    fs::remove_file(&paths[1]).unwrap();
    let found = file::documents(&over).unwrap();
    assert_eq!(found[0].path, documents[0].path);
    assert!(found[0].problem.is_none() && found[0].is_attended && !found[1].is_attended);
    assert_eq!(found[1].problem.unwrap().text(), "not found");
    let error = model.load(&over).unwrap_err();
    assert!(matches!(error, Error::NotFound(_)) && error.to_string().contains("a.kv"), "{error}");
    assert!(model.session().unwrap().documents().unwrap().is_empty());
}

#[test]
fn all_documents_of_a_library_are_asked_at_once() {
    let (model, folder) = (model(), Folder::new());
    let library = Library::open(folder.path("library")).unwrap();
    assert!(matches!(library.compose(&model, &[]).unwrap_err(), Error::NotFound(_)));
    for name in ["b", "a"] {
        let options = LibrarySessionOptions::new().name(name);
        let text = format!("{name} {}", document());
        library.session_with(&model, text, &options, Control::new()).unwrap();
    }
    let names = |names: &[&str]| -> Vec<String> {
        let documents = library.compose(&model, names).unwrap().documents().unwrap();
        documents.iter().map(|d| d.path.rsplit(['/', '\\']).next().unwrap().into()).collect()
    };
    assert_eq!(names(&[]), ["a.kv", "b.kv"]);
    assert_eq!(names(&["b", "a"]), ["b.kv", "a.kv"]);
    assert!(matches!(library.compose(&model, &["c"]).unwrap_err(), Error::NotFound(_)));
}
