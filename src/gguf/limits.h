// The largest sizes that a model file may have. A count costs nothing to write, because a sparse
// file may have any size. So every count is compared with a plausible limit before anything is
// allocated or read by it.
//
// Each limit is at least twice the largest value in a published model, which its comment names.
// docs: .github/SECURITY.md.
#pragma once

#include <cstdint>

namespace kvasir::gguf_limits {

// The file's metadata.
constexpr uint64_t keys = 65536;     // about 60; hundreds with notes of a quantization
constexpr uint64_t tensors = 65536;  // about 1,900
// Header, keys and tensor table; 46 MiB with a copy of tokenizer.json.
constexpr uint64_t metadata_bytes = uint64_t{1} << 27;
// The names of all keys, which are compared to sort them; 4 KiB.
constexpr uint64_t key_bytes = uint64_t{1} << 22;
constexpr uint64_t array_elements = uint64_t{1} << 22;  // of one key; 446,189 merges

// The vocabulary.
constexpr uint64_t tokens = uint64_t{1} << 20;  // 262,144
constexpr uint64_t token_bytes = 4096;          // one token; 256
constexpr uint64_t special_bytes = 512;  // one special token, or one piece of SentencePiece; 100
constexpr uint64_t all_tokens_bytes = uint64_t{1} << 24;     // 2 MiB
constexpr uint64_t all_special_bytes = uint64_t{1} << 21;    // 100 KiB
constexpr uint64_t merges = uint64_t{1} << 21;               // 446,189
constexpr uint64_t all_merges_bytes = uint64_t{1} << 24;     // 6 MiB
constexpr uint64_t chat_template_bytes = uint64_t{1} << 20;  // 20 KiB

// The shape.
constexpr uint64_t layers = 1024;                     // 126
constexpr uint64_t width = uint64_t{1} << 16;         // 16,384
constexpr uint64_t feed_forward = uint64_t{1} << 18;  // 53,248
constexpr uint64_t heads = 1024;                      // 128
constexpr uint64_t experts = 1024;                    // 512
// Norms and biases of all layers, which are copied as floats: 4.2 million.
constexpr uint64_t copied_numbers = uint64_t{1} << 23;
// The states of all recurrent layers of a sequence: 47 million.
constexpr uint64_t state_numbers = uint64_t{1} << 29;

}  // namespace kvasir::gguf_limits
