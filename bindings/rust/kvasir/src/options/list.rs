//! The option structs, with the fields of `kvasir.h`.
use super::*;

options! {
    /// Options of a model.
    ModelOptions: kv_model_options {
        numbers {
            /// Bytes of GPU memory per entry in `device`; 0: all free memory.
            device_memory: u64,
        }
        text {
            /// Chat format: a name of docs/models.md, such as "chatml", or the text of a custom
            /// format: one conversation with `{document}`, `{question}` and `{answer}`.
            /// [`Model::load`](crate::Model::load) then refuses a file of another format. Default:
            /// recognised from the file's template.
            chat_format,
            /// Where weights are multiplied: "cpu" (default); "cuda" or "cuda:1", one NVIDIA GPU;
            /// "cuda:0,cuda:1" or "cuda:all", several, over which the layers are split; "auto",
            /// GPUs where they have room, otherwise the CPU.
            device,
        }
        flags {
            /// Reads only tokenizer and chat format, no weights. The architecture need not be
            /// supported, and the file may have no tensors. The model serves
            /// [`info`](crate::Model::info), [`tokenize`](crate::Model::tokenize) and
            /// [`detokenize`](crate::Model::detokenize).
            vocabulary_only = KV_VOCABULARY_ONLY,
            /// GPUs leave room for the MTP layer, for sessions with
            /// [`draft_tokens`](SessionOptions::draft_tokens).
            plan_drafts = KV_PLAN_DRAFTS,
        }
        others { log hash_directory }
    }
}

options! {
    /// Options of a session.
    SessionOptions: kv_session_options {
        numbers {
            /// Threads, including the caller's; 0: one per CPU of the process.
            threads: u32,
            /// Maximum length of the sequence in tokens; 0: the model's, which is also the largest
            /// value.
            context_tokens: u64,
            /// Newest tokens in full precision, always attended; 0: 64. A loaded file has its own.
            window_tokens: u32,
            /// Tokens per prefill step, 1 to 4096; 0: 512, on a GPU 1024, or less where that would
            /// take much memory.
            prefill_chunk: u32,
            /// Bytes of host memory for the KV cache and everything stored with it; 0: no limit.
            /// Pages beyond the limit go to an unnamed file, or stay in the loaded file, and are
            /// read on demand. Answers are the same, bit for bit. Not with [`Precision::F32`].
            memory_limit: u64,
            /// Tokens that the model's MTP layer drafts for each step of an answer, 1 to 3; 0:
            /// none. Answers are the same. [`Error::Unsupported`](crate::Error::Unsupported) unless
            /// [`ModelInfo::mtp_layers`](crate::ModelInfo::mtp_layers).
            draft_tokens: u32,
        }
        text {
            /// System text before the document. Default: none. For a loaded file the default is the
            /// file's; another text is [`Error::ModelMismatch`](crate::Error::ModelMismatch).
            instructions,
        }
        flags {
            /// Answers have no drafts from the sequence's own text. They are the same.
            no_lookup = KV_NO_LOOKUP,
        }
        strategies {
            /// Strategy of decode. Default: "auto".
            decode,
            /// Strategy of prefill. Default: "full", exact attention.
            prefill,
        }
        others { log precision spill_directory }
    }
}

options! {
    /// Options of an answer.
    GenerateOptions: kv_generate_options {
        numbers {
            /// The same seed and input yield the same answer.
            seed: u64,
            /// Maximum tokens of the answer; 0: 512.
            max_tokens: u32,
            /// 0: greedy.
            temperature: f32,
            /// Samples from so many of the likeliest tokens; 0: off.
            top_k: u32,
            /// Samples from the likeliest tokens with this total probability; 0 or 1: off.
            top_p: f32,
            /// Samples from tokens with at least this part of the largest probability; 0: off.
            min_p: f32,
            /// Applies to the last 256 tokens; 0 or 1: off.
            repetition_penalty: f32,
            /// Maximum tokens of a thought, after which the model answers; 0: 2048.
            thinking_tokens: u32,
        }
        flags {
            /// Text of the question that spells a control token becomes that token.
            special = KV_TOKENIZE_SPECIAL,
            /// Question and answer stay in the sequence. Default: the sequence is afterwards
            /// exactly as before.
            keep_turn = KV_KEEP_TURN,
            /// Records what [`Session::passages`](crate::Session::passages) lists. The answer is
            /// the same, but slower.
            trace_passages = KV_TRACE_PASSAGES,
            /// With [`keep_turn`](Self::keep_turn), the thought stays too.
            keep_thinking = KV_KEEP_THINKING,
        }
        others { stop thinking }
    }
}

options! {
    /// Options of a library.
    LibraryOptions: kv_library_options {
        numbers {
            /// Maximum bytes of all documents; 0: no limit. A save evicts the least recently used
            /// documents.
            max_bytes: u64,
        }
        others { log }
    }
}

options! {
    /// Options of [`Library::session_with`](crate::Library::session_with).
    LibrarySessionOptions: kv_library_session_options {
        text {
            /// Name of the saved document: 1 to 200 bytes. Default: a hash.
            name,
        }
        flags {
            /// Text that spells a control token becomes that token.
            special = KV_TOKENIZE_SPECIAL,
            /// Verify a whole document before its use, not each page at its first use.
            verify = KV_VERIFY,
            /// Replace a document of the same name, whatever it holds.
            replace = KV_REPLACE,
        }
        others { session }
    }
}

options! {
    /// Options of a cache.
    CacheOptions: kv_cache_options {
        numbers {
            /// Threads, including the caller's; 0: one per CPU of the process.
            threads: u32,
            /// Newest tokens in full precision, always attended; 0: 64. A loaded file has its own.
            window_tokens: u32,
            /// Bytes, as in [`SessionOptions::memory_limit`]; 0: no limit.
            memory_limit: u64,
        }
        strategies {
            /// Strategy of steps of one token; longer steps are exact. Default: "auto". Or "full",
            /// "window", "bounded", "quest", "flat", "dipr", "filter-layers".
            decode,
        }
        others { precision spill_directory }
    }
}

options! {
    /// Options of the attention of a step.
    AttentionOptions: kv_cache_attention_options {
        numbers {
            /// Scale of q . k; 0: 1 / sqrt(head_dim).
            scale: f32,
            /// Scores become softcap * tanh(score / softcap), in slower code; 0: off.
            softcap: f32,
        }
        others {}
    }
}
