//! The bindings are of the header beside them: bindgen's output is compared where bindgen is there, layouts by the C compiler in any case.
use std::env;
use std::mem::size_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvasir_sys::*;

fn binding() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn include() -> PathBuf {
    env::var_os("KVASIR_INCLUDE_DIR").map_or_else(|| binding().join("../../include"), PathBuf::from)
}

#[test]
fn bindings_are_current() {
    let output = env::temp_dir().join(format!("kvasir-bindings-{}.rs", std::process::id()));
    let run = Command::new(binding().join("generate")).arg(&output).output().unwrap();
    if run.status.code() == Some(77) {
        return println!("not run: {}", String::from_utf8_lossy(&run.stdout));
    }
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let fresh = std::fs::read_to_string(&output).unwrap();
    std::fs::remove_file(&output).unwrap();
    assert!(fresh == include_str!("../src/bindings.rs"), "include/kvasir.h has changed: run bindings/rust/generate");
}

/// C that compiles only if a struct has this size and these offsets, and no field besides.
macro_rules! layouts {
    ($($name:ident { $($field:ident)* })*) => {{
        let mut c = String::from("#include <stddef.h>\n#include \"kvasir.h\"\n");
        $({
            let it = std::mem::MaybeUninit::<$name>::zeroed();
            let base = it.as_ptr();
            let size = size_of::<$name>();
            c += &format!("_Static_assert(sizeof({0}) == {1}, \"{0}\");\n", stringify!($name), size);
            // SAFETY: addresses alone; all of them are within `it`.
            $(let at = unsafe { std::ptr::addr_of!((*base).$field) as usize } - base as usize;
            c += &format!("_Static_assert(offsetof({0}, {1}) == {2}, \"{0}.{1}\");\n", stringify!($name), stringify!($field), at);)*
            // Exhaustive: a field that is missing above does not compile.
            #[allow(unused_variables, clippy::no_effect_underscore_binding)]
            let _whole = |it: $name| { let $name { $($field),* } = it; };
        })*
        c
    }};
}

#[test]
fn layouts_are_those_of_the_header() {
    let mut c = layouts! {
        kv_error { status sys_errno offset message }
        kv_model_options { struct_size flags log log_user chat_format device device_memory cancel
            hash_folder }
        kv_model_information { struct_size layers width heads kv_heads head_dim feed_forward vocabulary context parameters weight_bytes
            kv_bytes_per_token architecture name weights tokenizer chat_format fingerprint hash }
        kv_session_options { struct_size threads context kv_type window prefill_chunk dense_layers strategy budget_tokens budget_fraction
            share_heads alpha log log_user filter_layers filter_window compare select_tokens certify prefill_strategy
            prefill_budget_fraction prefill_exact_tokens coverage search_breadth budget_schedule head_graphs memory_budget spill_folder }
        kv_strategy_information { struct_size dense_layers budget_fraction budget_floor takes_budget takes_select_tokens name takes_coverage
            takes_head_graphs }
        kv_call_options { struct_size flags cancel progress progress_user }
        kv_generate_options { struct_size max_tokens temperature top_k top_p min_p repetition_penalty keep seed stop stop_count flags cancel
            progress progress_user trace reserved }
        kv_answer { struct_size stop_reason question_tokens answer_tokens first_token_ns total_ns tokens_read tokens_present }
        kv_file_information { struct_size format_version file_bytes tokens sealed_tokens kv_bytes layers kv_heads head_dim kv_type model_name chat_format }
        kv_pack_options { struct_size level cancel progress progress_user }
        kv_packed_information { struct_size packed_version file_bytes document_bytes tokens format_version level layers kv_heads head_dim
            reserved model_name }
        kv_span { first_token tokens share reserved }
        kv_library_options { struct_size flags max_bytes log log_user }
        kv_library_document { struct_size status file_bytes tokens last_used name model_name fingerprint }
        kv_library_session_options { struct_size flags name session cancel progress progress_user }
        kv_library_result { struct_size save_status tokens tokens_found saved name }
        kv_cache_shape { struct_size layers heads kv_heads head_dim reserved max_tokens identity }
        kv_cache_options { struct_size threads kv_type window dense_layers share_heads strategy budget_tokens budget_fraction filter_layers
            alpha coverage select_tokens reserved memory_budget spill_folder }
        kv_cache_attention_options { struct_size flags scale softcap cancel }
    };
    for (name, value) in [
        ("KV_VERSION_NUMBER", KV_VERSION_NUMBER),
        ("KV_DEVICE", KV_DEVICE),
        ("KV_LIBRARY_VERIFY", KV_LIBRARY_VERIFY),
        ("KV_LIBRARY_REPLACE", KV_LIBRARY_REPLACE),
    ] {
        c += &format!("_Static_assert({name} == {value}, \"{name}\");\n");
    }
    let source = env::temp_dir().join(format!("kvasir-layouts-{}.c", std::process::id()));
    std::fs::write(&source, c).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut words = compiler.split_whitespace(); // as "ccache gcc"
    let run = Command::new(words.next().unwrap())
        .args(words)
        .arg("-std=c11")
        .arg("-fsyntax-only")
        .arg("-I")
        .arg(include())
        .arg(&source)
        .output()
        .unwrap();
    std::fs::remove_file(&source).unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn the_library_has_the_structs_of_the_header() {
    // SAFETY: init functions fill the struct, for which there is room.
    unsafe {
        let mut options = std::mem::MaybeUninit::<kv_session_options>::zeroed();
        kv_session_options_init(options.as_mut_ptr(), size_of::<kv_session_options>());
        assert_eq!((*options.as_ptr()).struct_size as usize, size_of::<kv_session_options>());
        assert_eq!((*options.as_ptr()).dense_layers, u32::MAX);
        assert_eq!(kv_version(), KV_VERSION_NUMBER);
    }
}
