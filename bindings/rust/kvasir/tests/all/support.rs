//! A model, a document with a fact, and temporary folders.
use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use kvasir::{Model, Session};

pub const QUESTION: &str = "What is the access code of the north gate?";
pub const ANSWER: &str = "4821907";
/// First bytes of a cache file.
pub const MAGIC: &[u8] = b"\x8bKVC\r\n\x1a\n";

/// `KVASIR_MODEL`, or the bundled one.
pub fn model_path() -> PathBuf {
    let bundled = || examples().join("mini-reader-q8_0.gguf");
    env::var_os("KVASIR_MODEL").map_or_else(bundled, PathBuf::from)
}

pub fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples")
}

pub fn model() -> Model {
    Model::open(model_path()).unwrap()
}

/// About 600 tokens of a book, with the fact in their middle.
pub fn document() -> String {
    let book = std::fs::read_to_string(examples().join("sherlock-holmes.txt")).unwrap();
    let (before, after) = (&book[2000..3000], &book[3000..4000]);
    format!("{before} The access code of the north gate is {ANSWER}. {after}")
}

/// A session over the document, from a file that is made once in this process.
pub fn reader() -> Session {
    model().load(saved()).unwrap()
}

/// The cache file of the document.
pub fn saved() -> PathBuf {
    static FILE: Mutex<Option<Folder>> = Mutex::new(None);
    let mut file = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = file.get_or_insert_with(|| {
        let folder = Folder::new();
        let mut session = model().session().unwrap();
        session.prefill(document()).unwrap();
        session.save(folder.path("document.kv")).unwrap();
        folder
    });
    folder.path("document.kv")
}

pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvasir-rust-{}-{number}", std::process::id());
        let folder = env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
