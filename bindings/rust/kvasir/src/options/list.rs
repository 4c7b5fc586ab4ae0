//! The option structs, field by field as `kvasir.h` has them.
use super::*;

options! {
    /// How a model is opened.
    ModelOptions: kv_model_options by kv_model_options_init {
        numbers {
            /// Bytes of the GPU's memory that the model and its sessions may take; 0: what is free. Not one layer fits: `Error::NoMemory`.
            device_memory: u64,
        }
        text {
            /// Not set: recognised from the file's template; or one of "raw", "chatml", "llama3", "llama2", "mistral", "mistral-v3",
            /// "mistral-tekken", "gemma", "phi", "phi4", "deepseek", "deepseek-v2", "zephyr".
            chat_format,
            /// Where the weights are multiplied: "cpu" (the default); "cuda", "cuda:1": an NVIDIA GPU, of as many layers as fit into its memory;
            /// "cuda:0,cuda:1", "cuda:all": several, over which the layers are split; "auto": GPUs where there are any, otherwise the CPU. But
            /// for that, `Error::NotFound` without such a GPU or a driver, `Error::Unsupported` where the library was built without CUDA.
            device,
        }
        callbacks { log cancel hash_folder }
    }
}

options! {
    /// What a session keeps, and what of it decode reads.
    SessionOptions: kv_session_options by kv_session_options_init {
        numbers {
            /// 0: as many as the process has processors; the caller's thread is one of them.
            threads: u32,
            /// Tokens that the sequence may hold; 0: what the model was trained for. More is refused.
            context: u64,
            /// The precision of keys and values.
            kv_type: KvType,
            /// Newest tokens kept in full precision and always attended; 0: 64.
            window: u32,
            /// Tokens read together, 1 to 4096; 0: chosen.
            prefill_chunk: u32,
            /// Layers that attend everything; `u32::MAX`: the strategy's default.
            dense_layers: u32,
            /// Tokens a layer and head may read besides sinks and window, on average over layers; 0: the fraction counts.
            budget_tokens: u64,
            /// The same as a share of the sealed tokens, 0 to 1; 0: the strategy's default, which [`strategies`](crate::strategies) tells.
            budget_fraction: f64,
            /// `true` (the default): the query heads of a group choose together; `false`: a choice for each.
            share_heads: bool,
            /// "dipr" and "dipr-graph" read the tokens with at least this part of the largest one's attention, 0 to 1; 0: 0.012.
            alpha: f32,
            /// Of "filter-layers": what its filter layers choose by.
            filter_window: FilterWindow,
            /// For measurement, at the cost of full attention: 1: what decode reads is compared with exact attention; 2: layers with each other
            /// too. [`Session::stats`](crate::Session::stats) has it under "compared".
            compare: u32,
            /// Of "quest": neighbouring tokens that are chosen together, a multiple of 16 up to 1024; 0: 16.
            select_tokens: u32,
            /// A lower bound of the attention that was read for each decoded token; the stats have it as "last_certificate".
            certify: bool,
            /// Chosen of the tokens before, 0 to 1, where `prefill_strategy` reads sparsely; 0: 0.1; at least 2048 in any case.
            prefill_budget_fraction: f64,
            /// The last so many tokens of each prefill are read exactly all the same.
            prefill_exact_tokens: u64,
            /// Of "bounded": read what keeps the standard error of the sampled attention below 1 less this, 0 to less than 1; 0: 0.96 with the
            /// default budget, else what the budget says.
            coverage: f32,
            /// How far strategies with an index search it: tokens kept at a time, at least 64 ("ivf": clusters read); 0: as the budget needs.
            search_breadth: u32,
            /// How the budget is spread over layers.
            budget_schedule: BudgetSchedule,
            /// Of "ood" and "dipr-graph": `true`: a graph for each query head in place of one for a group.
            head_graphs: bool,
            /// Bytes of memory that keys, values and all that is kept with them may take; 0: no limit. What does not fit goes to a file in the spill folder.
            memory_budget: u64,
        }
        text {
            /// What decode reads: "auto" (the default), or the name of one of the [`strategies`](crate::strategies).
            strategy,
            /// Of "filter-layers": which layers, numbered from 0, ascending, as "2,8,18". Not set: three, spread evenly.
            filter_layers,
            /// How documents are read behind their first 4096 tokens: "full" (the default): exactly; "quest", "flat", "filter-layers" or
            /// "window": sparsely, several times faster where the text is long.
            prefill_strategy,
        }
        callbacks { log spill_folder }
    }
}

options! {
    /// How text is read.
    PrefillOptions: kv_call_options by kv_call_options_init {
        flags {
            /// Text that spells a control token becomes that token.
            special = KV_TOKENIZE_SPECIAL,
        }
        callbacks { cancel progress }
    }
}

options! {
    /// How a saved document is loaded.
    LoadOptions: kv_call_options by kv_call_options_init {
        flags {
            /// Check the whole file now, not each part when it is first used.
            verify = KV_LOAD_VERIFY,
        }
        callbacks { cancel progress }
    }
}

options! {
    /// What other long calls take.
    CallOptions: kv_call_options by kv_call_options_init {
        callbacks { cancel progress }
    }
}

options! {
    /// How a question is answered.
    GenerateOptions: kv_generate_options by kv_generate_options_init {
        numbers {
            /// Of the answer; 0: 512.
            max_tokens: u32,
            /// 0 (the default): greedy.
            temperature: f32,
            /// 0: off.
            top_k: u32,
            /// 1: off.
            top_p: f32,
            /// 0: off.
            min_p: f32,
            /// 1: off; over the last 256 tokens.
            repetition_penalty: f32,
            /// `false` (the default): afterwards the sequence is back where it was, exactly; `true`: the turn stays in it.
            keep: bool,
            /// The same seed and input give the same answer.
            seed: u64,
            /// `true`: what the answer attends of the document is noted, for `Session::trace`, at some cost; a GPU leaves attention to the CPU.
            trace: bool,
        }
        flags {
            /// Text of the question that spells a control token becomes that token.
            special = KV_TOKENIZE_SPECIAL,
        }
        callbacks { stop cancel progress }
    }
}

options! {
    /// How a saved document is packed or restored.
    PackOptions: kv_pack_options by kv_pack_options_init {
        numbers {
            /// Of compression, 1 to 19: slower and a little smaller; 0: 1. To unpack: 0.
            level: u32,
        }
        callbacks { cancel progress }
    }
}

options! {
    /// How a library of documents is opened.
    LibraryOptions: kv_library_options by kv_library_options_init {
        numbers {
            /// All documents together, in bytes: the least recently used ones go for a new one; 0: no limit.
            max_bytes: u64,
        }
        callbacks { log }
    }
}

options! {
    /// How a library reads a text.
    LibrarySessionOptions: kv_library_session_options by kv_library_session_options_init {
        text {
            /// Of the document that is saved: 1 to 200 bytes without slashes, with an ending where it is
            /// taken. Not set: a hash.
            name,
        }
        flags {
            /// Text that spells a control token becomes that token.
            special = KV_TOKENIZE_SPECIAL,
            /// Check all of a document before it is used, not each part when it is first used.
            verify = KV_LIBRARY_VERIFY,
            /// The document that has the name is replaced, whatever it holds.
            replace = KV_LIBRARY_REPLACE,
        }
        callbacks { session cancel progress }
    }
}

options! {
    /// What a cache keeps, and what of it a step of one token reads: as the [`SessionOptions`] of the same names.
    CacheOptions: kv_cache_options by kv_cache_options_init {
        numbers {
            /// 0: as many as the process has processors; the caller's thread is one of them.
            threads: u32,
            /// The precision of keys and values.
            kv_type: KvType,
            /// Newest tokens kept in full precision and always attended.
            window: u32,
            /// Layers that attend everything, the first ones; `u32::MAX`: the strategy's default.
            dense_layers: u32,
            /// `true` (the default): the query heads of a group choose together; `false`: a choice for each.
            share_heads: bool,
            /// Tokens a layer and head may read besides sinks and window, on average over layers; 0: the fraction counts.
            budget_tokens: u64,
            /// The same as a share of the sealed tokens, 0 to 1; 0: the strategy's default.
            budget_fraction: f64,
            /// Of "dipr".
            alpha: f32,
            /// Of "bounded".
            coverage: f32,
            /// Of "quest".
            select_tokens: u32,
            /// Bytes; 0: no limit.
            memory_budget: u64,
        }
        text {
            /// "auto" (the default), "full", "window", "quest", "flat", "dipr", "bounded", "filter-layers" or "infllm".
            strategy,
            /// Of "filter-layers".
            filter_layers,
        }
        callbacks { spill_folder }
    }
}

options! {
    /// How a step is attended.
    AttentionOptions: kv_cache_attention_options by kv_cache_attention_options_init {
        numbers {
            /// Of q . k; 0: 1 / sqrt(head_dim).
            scale: f32,
            /// Scores become softcap * tanh(score / softcap), which is slower; 0: as they are.
            softcap: f32,
        }
        callbacks { cancel }
    }
}
