//! Files and libraries of documents.
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use kvasir::{file, CancelToken, Error, Library, LibraryOptions, LibrarySessionOptions, PackOptions, Phase, SessionOptions};

use crate::support::*;

#[test]
fn a_packed_document_comes_back_bit_for_bit() {
    let folder = Folder::new();
    let (packed, back) = (folder.path("a.kvz"), folder.path("a.kv"));
    let calls = Arc::new(AtomicU64::new(0));
    let counts = calls.clone();
    let options = PackOptions::new().level(3).progress(move |p| {
        assert!(p.phase == Phase::Pack || p.phase == Phase::Unpack);
        counts.fetch_add(1, Ordering::SeqCst);
        ControlFlow::Continue(())
    });
    file::pack(saved(), &packed, &options).unwrap();
    let (info, whole) = (file::inspect_packed(&packed).unwrap(), file::inspect(saved()).unwrap());
    assert_eq!((info.level, info.tokens, info.document_bytes), (3, whole.tokens, whole.file_bytes));
    assert_eq!((info.layers, info.kv_heads, info.head_dim), (10, 2, 64));
    assert_eq!((whole.layers, whole.kv_heads, whole.head_dim, whole.kv_type), (10, 2, 64, Some(kvasir::KvType::Int8)));
    assert!(info.file_bytes < whole.file_bytes && info.model_name == whole.model_name);
    file::unpack(&packed, &back, &PackOptions::new()).unwrap();
    assert_eq!(std::fs::read(saved()).unwrap(), std::fs::read(&back).unwrap());
    file::verify(&back, &Default::default()).unwrap();
    assert!(calls.load(Ordering::SeqCst) > 0);
    let wrong = file::pack(saved(), &packed, &PackOptions::new().level(20)).unwrap_err();
    assert!(matches!(wrong, Error::BadArgument(_)) && wrong.message().contains("20"), "{wrong}");
    let cancel = CancelToken::new().unwrap();
    cancel.fire();
    assert!(matches!(file::pack(saved(), &packed, &PackOptions::new().cancel(&cancel)), Err(Error::Cancelled(_))));
}

#[test]
fn a_library_reads_a_text_once() {
    let (folder, model) = (Folder::new(), model());
    let library = Library::open(folder.path("library")).unwrap();
    assert!(library.list().unwrap().is_empty());
    let options = LibrarySessionOptions::new().name("gate").session(SessionOptions::new().threads(1)).verify(true);
    let (mut session, found) = library.session_with(&model, document(), &options).unwrap();
    assert!(found.saved && found.tokens_found == 0 && found.problem.is_none() && found.name == "gate", "{found:?}");
    let answer = session.ask(QUESTION).unwrap();
    assert!(answer.contains(ANSWER));
    drop(session);
    let (mut again, found) = library.session(&model, document()).unwrap();
    assert!(!found.saved && found.tokens_found == found.tokens && found.name == "gate", "{found:?}");
    let listed = library.list().unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str(), listed[0].problem), (1, "gate", None));
    assert_eq!(listed[0].fingerprint, model.info().unwrap().fingerprint);
    assert!(listed[0].tokens >= found.tokens && listed[0].last_used.elapsed().unwrap().as_secs() < 600);
    let in_use = library.remove("gate").unwrap_err();
    assert!(matches!(in_use, Error::Busy(_)) && in_use.message().contains("gate"), "{in_use}");
    drop(library);
    assert_eq!(again.ask(QUESTION).unwrap(), answer, "sessions stay usable");
    drop(again);
    let library = Library::open_with(folder.path("library"), &LibraryOptions::new().max_bytes(1 << 40)).unwrap();
    library.rename("gate", "door").unwrap();
    assert!(matches!(library.rename("gate", "window"), Err(Error::NotFound(_))));
    std::fs::write(folder.path("library/other.kv"), "no document").unwrap();
    std::fs::write(folder.path("library/cut.kv"), MAGIC).unwrap();
    let listed = library.list().unwrap();
    assert!(listed.iter().all(|document| document.name != "other"));
    let cut = listed.iter().find(|document| document.name == "cut").unwrap();
    assert_eq!(cut.problem.unwrap().text(), "corrupt");
    for (text, replace) in [("b", false), ("c", true)] {
        let options = LibrarySessionOptions::new().name("door").replace(replace);
        let (_, found) = library.session_with(&model, document() + text, &options).unwrap();
        assert_eq!((found.saved, found.name == "door"), (true, replace), "{found:?}");
    }
    library.remove("door").unwrap();
    assert_eq!(library.list().unwrap().len(), 2);
}

#[test]
fn what_a_library_cannot_do_is_an_error() {
    let (folder, model) = (Folder::new(), model());
    let no_folder = Library::open(folder.path("no/such")).err().unwrap();
    assert!(matches!(no_folder, Error::NotFound(_)) && no_folder.message().contains("no/such"), "{no_folder}");
    let library = Library::open(folder.path("library")).unwrap();
    assert!(matches!(library.session(&model, ""), Err(Error::BadArgument(_))));
    let named = |name: &str| library.session_with(&model, document(), &LibrarySessionOptions::new().name(name)).err();
    assert!(matches!(named("a/b"), Some(Error::BadArgument(_))));
    assert!(matches!(named("a\0b"), Some(Error::BadArgument(_))));
    assert!(matches!(library.remove("a\0b"), Err(Error::BadArgument(_))));
    let stops = LibrarySessionOptions::new().progress(|_| ControlFlow::Break(()));
    assert!(matches!(library.session_with(&model, document(), &stops), Err(Error::Cancelled(_))));
    std::fs::remove_dir_all(folder.path("library")).unwrap();
    let gone = library.list().unwrap_err();
    assert!(matches!(gone, Error::NotFound(_)) && gone.os_error().is_some(), "a folder that is gone is no empty list: {gone}");
}
