//! The bindings agree with the headers: bindgen's output where bindgen is installed, layouts by the
//! C compiler in any case.
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
    let folder = env::temp_dir().join(format!("kvasir-bindings-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let run = Command::new(binding().join("generate")).arg(&folder).output().unwrap();
    if run.status.code() == Some(77) {
        return println!("not run: {}", String::from_utf8_lossy(&run.stdout));
    }
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for (name, current) in [
        ("bindings.rs", include_str!("../src/bindings.rs")),
        ("experimental.rs", include_str!("../src/experimental.rs")),
    ] {
        let fresh = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(fresh == current, "{name}: a header has changed: run bindings/rust/generate");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// C that compiles only if each struct has this size, these offsets and no other field.
macro_rules! layouts {
    ($($name:ident { $($field:ident)* })*) => {{
        let mut c = String::from("#include <stddef.h>\n#include \"kvasir.h\"\n");
        $({
            let it = std::mem::MaybeUninit::<$name>::zeroed();
            let base = it.as_ptr();
            let (name, size) = (stringify!($name), size_of::<$name>());
            c += &format!("_Static_assert(sizeof({name}) == {size}, \"{name}\");\n");
            $({
                let field = stringify!($field).trim_end_matches('_'); // a word of Rust has one
                // SAFETY: takes addresses within `it` only.
                let at = unsafe { std::ptr::addr_of!((*base).$field) as usize } - base as usize;
                let place = format!("offsetof({name}, {field}) == {at}");
                c += &format!("_Static_assert({place}, \"{name}.{field}\");\n");
            })*
            // Exhaustive: does not compile if a field is missing above.
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
        kv_control { struct_size flags cancel progress user }
        kv_model_options { struct_size flags log log_user chat_format device device_memory
            hash_directory }
        kv_session_options { struct_size threads context_tokens window_tokens prefill_chunk
            precision flags decode prefill memory_limit spill_directory instructions log log_user
            draft_tokens reserved }
        kv_generate_options { struct_size flags seed max_tokens temperature top_k top_p min_p
            repetition_penalty stop_count thinking stop on_thinking thinking_tokens reserved }
        kv_answer { struct_size stop_reason question_tokens answer_tokens first_token_ns total_ns
            tokens_read tokens_present thinking_tokens }
        kv_model_info { struct_size layers width heads kv_heads head_dim feed_forward vocabulary
            context_tokens parameters weight_bytes kv_bytes_per_token architecture name weights
            tokenizer chat_format fingerprint hash thinks mtp_layers }
        kv_passage { first_token tokens first_byte bytes share document }
        kv_compose_options { struct_size max_documents session }
        kv_session_document { struct_size flags tokens score path }
        kv_session_stats { struct_size threads tokens context_tokens sealed_tokens page_tokens
            sink_tokens window_tokens prefill_chunk kv_bytes_per_token private_bytes mapped_bytes
            spilled_bytes memory_limit prefill_tokens prefill_ns sparse_tokens load_ns
            budget_tokens index_tokens index_bytes index_ns last_steps last_decode_ns
            last_tokens_read last_tokens_present last_pages_touched last_mass_read gpu_layers
            gpu_flags gpu_weight_bytes gpu_bytes gpu_memory_limit decode_strategy chat_format
            device prefilled_again windows_bytes last_drafted last_accepted last_looked_up
            last_lookup_accepted }
        kv_file_info { struct_size format_version file_bytes tokens sealed_tokens kv_bytes layers
            kv_heads head_dim precision model_name chat_format recurrent_layers states
            state_bytes checkpoints checkpoint_tokens mtp_tokens documents }
        kv_file_document { struct_size flags tokens file_bytes status reserved path }
        kv_packed_info { struct_size packed_version file_bytes document_bytes tokens
            format_version level layers kv_heads head_dim reserved model_name }
        kv_library_options { struct_size flags max_bytes log log_user }
        kv_library_document { struct_size status file_bytes tokens last_used name model_name
            fingerprint }
        kv_library_session_options { struct_size flags name session }
        kv_library_result { struct_size save_status tokens tokens_found saved name }
        kv_strategy_info { struct_size flags budget_floor name }
        kv_cache_shape { struct_size layers heads kv_heads head_dim reserved max_tokens identity }
        kv_cache_options { struct_size threads window_tokens precision decode memory_limit
            spill_directory }
        kv_cache_attention_options { struct_size flags scale softcap }
        kv_layer_state { layer layout type_ reserved numbers count }
        kv_checkpoint { struct_size count tokens states }
        kv_cache_stats { struct_size threads tokens max_tokens sealed_tokens page_tokens
            sink_tokens window_tokens step_tokens private_bytes mapped_bytes spilled_bytes
            memory_limit budget_tokens tokens_read tokens_present pages_touched decode_strategy }
    };
    for (name, value) in [
        ("KV_VERSION_NUMBER", KV_VERSION_NUMBER),
        ("KV_DEVICE", KV_DEVICE),
        ("KV_VERIFY", KV_VERIFY),
        ("KV_REPLACE", KV_REPLACE),
        ("KV_TRACE_PASSAGES", KV_TRACE_PASSAGES),
        ("KV_VOCABULARY_ONLY", KV_VOCABULARY_ONLY),
        ("KV_KEEP_THINKING", KV_KEEP_THINKING),
        ("KV_PLAN_DRAFTS", KV_PLAN_DRAFTS),
        ("KV_NO_LOOKUP", KV_NO_LOOKUP),
        ("KV_THINKING_ON", KV_THINKING_ON),
        ("KV_PARAM_EXACT_TOKENS", KV_PARAM_EXACT_TOKENS),
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
    // SAFETY: kv_init fills the struct, for which there is room.
    unsafe {
        let mut options = std::mem::MaybeUninit::<kv_session_options>::zeroed();
        kv_init(options.as_mut_ptr().cast(), size_of::<kv_session_options>());
        assert_eq!((*options.as_ptr()).struct_size as usize, size_of::<kv_session_options>());
        assert_eq!(kv_version(), KV_VERSION_NUMBER);
    }
}
