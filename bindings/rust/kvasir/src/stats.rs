//! Statistics of sessions and caches.
use std::time::Duration;

use kvasir_sys as sys;

use crate::ffi::text;

/// State of a session and of its last decode (an answer, a token or a score).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionStats {
    /// Threads, including the caller's.
    pub threads: u32,
    /// Tokens of the sequence.
    pub tokens: u64,
    /// Maximum length of the sequence in tokens.
    pub context_tokens: u64,
    /// Tokens in pages.
    pub sealed_tokens: u64,
    /// Tokens per page.
    pub page_tokens: u32,
    /// First tokens, always attended.
    pub sink_tokens: u32,
    /// Newest tokens, not sealed.
    pub window_tokens: u32,
    /// Tokens per prefill step.
    pub prefill_chunk: u32,
    /// Bytes of the KV cache per token.
    pub kv_bytes_per_token: u64,
    /// Bytes of the KV cache and what is stored with it, in host memory.
    pub private_bytes: u64,
    /// The same, in the loaded file.
    pub mapped_bytes: u64,
    /// The same, in the spill file.
    pub spilled_bytes: u64,
    /// Bytes; 0: no limit.
    pub memory_limit: u64,
    /// Tokens appended by prefill in this session.
    pub prefill_tokens: u64,
    /// Time of prefill in this session.
    pub prefill: Duration,
    /// Tokens up to the last one of a sparse prefill; 0: all are exact.
    pub sparse_tokens: u64,
    /// Time of [`Model::load`](crate::Model::load); 0: not loaded.
    pub load: Duration,
    /// Tokens that decode may read, mean per layer and head.
    pub budget_tokens: u64,
    /// Tokens in the strategy's index; 0: none.
    pub index_tokens: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// Time of the index's last build in this session.
    pub index: Duration,
    /// Tokens decoded by the last decode.
    pub last_steps: u64,
    /// Time of the last decode.
    pub last_decode: Duration,
    /// As [`Answer::tokens_read`](crate::Answer::tokens_read), of the last decode.
    pub last_tokens_read: u64,
    /// As [`Answer::tokens_present`](crate::Answer::tokens_present), of the last decode.
    pub last_tokens_present: u64,
    /// Pages touched by the last decode.
    pub last_pages_touched: u64,
    /// Estimated share of attention that was read and not sampled, 0 to 1. `None`: the strategy
    /// does not estimate it.
    pub last_mass_read: Option<f64>,
    /// Layers on GPUs.
    pub gpu_layers: u32,
    /// A GPU computes the output layer.
    pub gpu_output: bool,
    /// A GPU attends alone in its layers.
    pub gpu_attends: bool,
    /// CPU and GPU attend each layer together.
    pub gpu_coexecutes: bool,
    /// A GPU reads pinned host memory; otherwise the CPU stages pages.
    pub gpu_reads_pages: bool,
    /// Bytes of weights on GPUs.
    pub gpu_weight_bytes: u64,
    /// Bytes in use on all GPUs, weights included.
    pub gpu_bytes: u64,
    /// Bytes that they may use.
    pub gpu_memory_limit: u64,
    /// Strategy of the next token; "auto" is resolved.
    pub decode_strategy: String,
    /// Chat format of the turns.
    pub chat_format: String,
    /// "cpu", "cuda:0", "cuda:0,cuda:1", truncated.
    pub device: String,
    /// Tokens prefilled again, after a rewind or for a prefix.
    pub prefilled_again: u64,
    /// Bytes of layers with a sliding window, in memory and in the loaded file; included above.
    pub windows_bytes: u64,
    /// Tokens that were drafted for the last answer.
    pub last_drafted: u64,
    /// Those of them that the answer has.
    pub last_accepted: u64,
    /// Those of `last_drafted` from the sequence's own text.
    pub last_looked_up: u64,
    /// Those of them that the answer has.
    pub last_lookup_accepted: u64,
}

impl SessionStats {
    pub(crate) fn of(raw: &sys::kv_session_stats) -> SessionStats {
        let gpu = |flag| raw.gpu_flags & flag != 0;
        SessionStats {
            threads: raw.threads,
            tokens: raw.tokens,
            context_tokens: raw.context_tokens,
            sealed_tokens: raw.sealed_tokens,
            page_tokens: raw.page_tokens,
            sink_tokens: raw.sink_tokens,
            window_tokens: raw.window_tokens,
            prefill_chunk: raw.prefill_chunk,
            kv_bytes_per_token: raw.kv_bytes_per_token,
            private_bytes: raw.private_bytes,
            mapped_bytes: raw.mapped_bytes,
            spilled_bytes: raw.spilled_bytes,
            memory_limit: raw.memory_limit,
            prefill_tokens: raw.prefill_tokens,
            prefill: Duration::from_nanos(raw.prefill_ns),
            sparse_tokens: raw.sparse_tokens,
            load: Duration::from_nanos(raw.load_ns),
            budget_tokens: raw.budget_tokens,
            index_tokens: raw.index_tokens,
            index_bytes: raw.index_bytes,
            index: Duration::from_nanos(raw.index_ns),
            last_steps: raw.last_steps,
            last_decode: Duration::from_nanos(raw.last_decode_ns),
            last_tokens_read: raw.last_tokens_read,
            last_tokens_present: raw.last_tokens_present,
            last_pages_touched: raw.last_pages_touched,
            last_mass_read: (raw.last_mass_read >= 0.0).then_some(raw.last_mass_read),
            gpu_layers: raw.gpu_layers,
            gpu_output: gpu(sys::KV_GPU_OUTPUT),
            gpu_attends: gpu(sys::KV_GPU_ATTENDS),
            gpu_coexecutes: gpu(sys::KV_GPU_COEXECUTES),
            gpu_reads_pages: gpu(sys::KV_GPU_READS_PAGES),
            gpu_weight_bytes: raw.gpu_weight_bytes,
            gpu_bytes: raw.gpu_bytes,
            gpu_memory_limit: raw.gpu_memory_limit,
            decode_strategy: text(&raw.decode_strategy),
            chat_format: text(&raw.chat_format),
            device: text(&raw.device),
            prefilled_again: raw.prefilled_again,
            windows_bytes: raw.windows_bytes,
            last_drafted: raw.last_drafted,
            last_accepted: raw.last_accepted,
            last_looked_up: raw.last_looked_up,
            last_lookup_accepted: raw.last_lookup_accepted,
        }
    }
}

/// State of a cache. The counts of attention are sums over all calls so far.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Threads, including the caller's.
    pub threads: u32,
    /// Tokens of complete steps.
    pub tokens: u64,
    /// Maximum length of the sequence in tokens.
    pub max_tokens: u64,
    /// Tokens in pages.
    pub sealed_tokens: u64,
    /// Tokens per page.
    pub page_tokens: u32,
    /// First tokens, always attended.
    pub sink_tokens: u32,
    /// Newest tokens, not sealed.
    pub window_tokens: u32,
    /// Tokens of the current step.
    pub step_tokens: u32,
    /// Bytes of the KV cache and what is stored with it, in host memory.
    pub private_bytes: u64,
    /// The same, in the loaded file.
    pub mapped_bytes: u64,
    /// The same, in the spill file.
    pub spilled_bytes: u64,
    /// Bytes; 0: no limit.
    pub memory_limit: u64,
    /// Tokens that a step may read, mean per layer and head.
    pub budget_tokens: u64,
    /// As [`Answer::tokens_read`](crate::Answer::tokens_read).
    pub tokens_read: u64,
    /// As [`Answer::tokens_present`](crate::Answer::tokens_present).
    pub tokens_present: u64,
    /// Pages touched.
    pub pages_touched: u64,
    /// Strategy of the next token; "auto" is resolved.
    pub decode_strategy: String,
}

impl CacheStats {
    pub(crate) fn of(raw: &sys::kv_cache_stats) -> CacheStats {
        CacheStats {
            threads: raw.threads,
            tokens: raw.tokens,
            max_tokens: raw.max_tokens,
            sealed_tokens: raw.sealed_tokens,
            page_tokens: raw.page_tokens,
            sink_tokens: raw.sink_tokens,
            window_tokens: raw.window_tokens,
            step_tokens: raw.step_tokens,
            private_bytes: raw.private_bytes,
            mapped_bytes: raw.mapped_bytes,
            spilled_bytes: raw.spilled_bytes,
            memory_limit: raw.memory_limit,
            budget_tokens: raw.budget_tokens,
            tokens_read: raw.tokens_read,
            tokens_present: raw.tokens_present,
            pages_touched: raw.pages_touched,
            decode_strategy: text(&raw.decode_strategy),
        }
    }
}
