#include "model/architectures.h"

#include <algorithm>
#include <iterator>

namespace kvasir {
namespace {

constexpr Architecture architectures[] = {
    // Mistral, Yi, SmolLM 2 and TinyLlama files say llama as well.
    {.name = "llama"},
    {.name = "qwen2", .rope_neox = true},
    {.name = "qwen3", .rope_neox = true, .qk_norm = QkNorm::head},
    {.name = "smollm3", .no_rope_every = 4},
    {.name = "olmo2",
     .rope_neox = true,
     .norms = NormPlacement::after,
     .qk_norm = QkNorm::projection,
     .biases = false,
     .full_every = 4},
};

}  // namespace

const Architecture* find_architecture(std::string_view name) {
  const auto* found = std::find_if(std::begin(architectures), std::end(architectures),
                                   [&](const Architecture& a) { return name == a.name; });
  return found == std::end(architectures) ? nullptr : found;
}

std::string architecture_names() {
  std::string names;
  for (const Architecture& a : architectures) {
    if (&a != std::begin(architectures))
      names += &a + 1 == std::end(architectures) ? " and " : ", ";
    names += a.name;
  }
  return names;
}

}  // namespace kvasir
