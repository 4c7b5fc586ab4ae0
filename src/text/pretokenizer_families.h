// The regular expressions for each value of tokenizer.ggml.pre. Facts about published models.
#pragma once

#include <string_view>

namespace kvasir {

struct PretokenizerFamily {
  // Each expression splits the pieces of the previous one: its matches and the gaps between them
  // become pieces. Null-terminated.
  const char* const* expressions;
  bool adds_bos = false;
  bool takes_whole_words = false;
};

// Null for an unknown name.
const PretokenizerFamily* find_pretokenizer_family(std::string_view name);

}  // namespace kvasir
