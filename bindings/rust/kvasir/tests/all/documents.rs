//! Files and libraries of documents.
use std::ops::ControlFlow;

use kvasir::file::{self, PackOptions};
use kvasir::{
    CancelToken, Control, Error, Library, LibraryOptions, LibrarySessionOptions, Phase, Precision,
    SessionOptions,
};

use crate::support::*;

#[test]
fn an_unpacked_document_is_the_same_bit_for_bit() {
    let folder = Folder::new();
    let (packed, back) = (folder.path("a.kvz"), folder.path("a.kv"));
    let mut phases = Vec::new();
    let control = Control::new().progress(|report| {
        phases.push(report.phase);
        ControlFlow::Continue(())
    });
    file::pack_with(saved(), &packed, PackOptions::new().level(3), control).unwrap();
    assert!(!phases.is_empty() && phases.iter().all(|&phase| phase == Phase::Pack));
    let (info, whole) = (file::inspect_packed(&packed).unwrap(), file::inspect(saved()).unwrap());
    assert_eq!((info.level, info.tokens), (3, whole.tokens));
    assert_eq!(info.document_bytes, whole.file_bytes);
    assert_eq!((info.layers, info.kv_heads, info.head_dim), (10, 2, 64));
    assert_eq!((whole.layers, whole.kv_heads, whole.head_dim), (10, 2, 64));
    assert_eq!(whole.precision, Precision::Int8);
    assert!(info.file_bytes < whole.file_bytes && info.model_name == whole.model_name);
    file::unpack(&packed, &back).unwrap();
    assert_eq!(std::fs::read(saved()).unwrap(), std::fs::read(&back).unwrap());
    file::verify(&back).unwrap();
    let wrong = file::pack_with(saved(), &packed, PackOptions::new().level(20), Control::new());
    assert!(matches!(wrong, Err(Error::BadArgument(_))));
    let cancel = CancelToken::new().unwrap();
    cancel.fire();
    let control = Control::new().cancel(&cancel);
    let cancelled = file::unpack_with(&packed, &back, control);
    assert!(matches!(cancelled, Err(Error::Cancelled(_))));
}

#[test]
fn a_library_prefills_a_text_once() {
    let (folder, model) = (Folder::new(), model());
    let library = Library::open(folder.path("library")).unwrap();
    assert!(library.list().unwrap().is_empty());
    let options = LibrarySessionOptions::new().name("gate").verify(true);
    let options = options.session(SessionOptions::new().threads(1));
    let (mut session, found) =
        library.session_with(&model, document(), &options, Control::new()).unwrap();
    assert!(found.saved && found.problem.is_none(), "{found:?}");
    assert_eq!((found.tokens_found, found.name.as_str()), (0, "gate"));
    let answer = session.ask(QUESTION).unwrap().text;
    assert!(answer.contains(ANSWER));
    drop(session);
    let (mut again, found) = library.session(&model, document()).unwrap();
    assert!(!found.saved && found.tokens_found == found.tokens && found.name == "gate");
    let listed = library.list().unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str(), listed[0].problem), (1, "gate", None));
    assert_eq!(listed[0].fingerprint, model.info().unwrap().fingerprint);
    assert!(listed[0].tokens >= found.tokens);
    assert!(listed[0].last_used.elapsed().unwrap().as_secs() < 600);
    let in_use = library.remove("gate").unwrap_err();
    assert!(matches!(in_use, Error::Busy(_)) && in_use.message().contains("gate"), "{in_use}");
    drop(library);
    assert_eq!(again.ask(QUESTION).unwrap().text, answer, "sessions stay usable");
}

#[test]
fn documents_are_renamed_replaced_and_removed() {
    let (folder, model) = (Folder::new(), model());
    let options = LibraryOptions::new().max_bytes(1 << 40);
    let library = Library::open_with(folder.path("library"), &options).unwrap();
    assert!(format!("{library:?}").starts_with("Library"));
    let named = |text: String, replace| {
        let options = LibrarySessionOptions::new().name("door").replace(replace);
        library.session_with(&model, text, &options, Control::new()).unwrap().1
    };
    named(document(), false);
    library.rename("door", "gate").unwrap();
    library.rename("gate", "door").unwrap();
    assert!(matches!(library.rename("gate", "window"), Err(Error::NotFound(_))));
    std::fs::write(folder.path("library/other.kv"), "no document").unwrap();
    std::fs::write(folder.path("library/cut.kv"), MAGIC).unwrap();
    let listed = library.list().unwrap();
    assert!(listed.iter().all(|document| document.name != "other"));
    let cut = listed.iter().find(|document| document.name == "cut").unwrap();
    assert_eq!(cut.problem.unwrap().text(), "corrupt");
    for (text, replace) in [("b", false), ("c", true)] {
        let found = named(document() + text, replace);
        assert_eq!((found.saved, found.name == "door"), (true, replace), "{found:?}");
    }
    library.remove("door").unwrap();
    assert_eq!(library.list().unwrap().len(), 2);
}

#[test]
fn a_library_refuses_bad_names_and_texts() {
    let (folder, model) = (Folder::new(), model());
    let no_folder = Library::open(folder.path("no/such")).unwrap_err();
    assert!(matches!(no_folder, Error::NotFound(_)), "{no_folder}");
    assert!(no_folder.message().contains("no/such"), "{no_folder}");
    let library = Library::open(folder.path("library")).unwrap();
    assert!(matches!(library.session(&model, ""), Err(Error::BadArgument(_))));
    let with = |options: LibrarySessionOptions, control: Control| {
        library.session_with(&model, document(), &options, control).err()
    };
    for name in ["a/b", "a\0b"] {
        let options = LibrarySessionOptions::new().name(name);
        assert!(matches!(with(options, Control::new()), Some(Error::BadArgument(_))));
    }
    assert!(matches!(library.remove("a\0b"), Err(Error::BadArgument(_))));
    let stops = Control::new().progress(|_| ControlFlow::Break(()));
    let stopped = with(LibrarySessionOptions::new(), stops);
    assert!(matches!(stopped, Some(Error::Cancelled(_))));
    std::fs::remove_dir_all(folder.path("library")).unwrap();
    let gone = library.list().unwrap_err();
    assert!(matches!(gone, Error::NotFound(_)), "{gone}");
    assert!(gone.os_error().is_some(), "a folder that is gone is no empty list: {gone}");
}
