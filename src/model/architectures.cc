#include "model/architectures.h"

#include <algorithm>
#include <iterator>

namespace kvasir {
namespace {

// The second norm of these is named like the first one's output norm of others.
constexpr TensorNames second_norm_after_attention{.ffn_norm = "post_attention_norm"};

constexpr Architecture architectures[] = {
    // Mistral, Mixtral, Yi, SmolLM 2 and TinyLlama files say llama as well.
    {.name = "llama"},
    {.name = "llama4",
     .no_rope_every = 4,
     .qk_norm = QkNorm::plain,
     .qk_norm_after_rope = true,
     .gating = Gating::sigmoid,
     .normalises_experts = false,
     .expert_weighs_input = true,
     .chooses_by_logits = true,
     .full_every = 4,
     .window = 8192,
     .chunked = true,
     .temperature = 0.1f},
    {.name = "mistral3"},
    {.name = "smollm3", .no_rope_every = 4},
    {.name = "internlm2"},
    {.name = "ernie4_5"},
    {.name = "ernie4_5-moe"},
    {.name = "qwen2", .rope_neox = true},
    {.name = "qwen2moe",
     .rope_neox = true,
     .normalises_experts = false,
     .gates_shared_expert = true},
    {.name = "qwen3", .rope_neox = true, .qk_norm = QkNorm::head},
    {.name = "qwen3moe", .rope_neox = true, .qk_norm = QkNorm::head},
    {.name = "dots1", .rope_neox = true, .qk_norm = QkNorm::head, .normalises_experts = false},
    {.name = "bailingmoe2",
     .rope_neox = true,
     .qk_norm = QkNorm::head,
     .gating = Gating::sigmoid,
     .normalises_experts = false},
    {.name = "hunyuan-dense",
     .rope_neox = true,
     .qk_norm = QkNorm::head,
     .qk_norm_after_rope = true},
    {.name = "seed_oss", .rope_neox = true, .names = second_norm_after_attention},
    {.name = "phi3", .rope_neox = true, .ignores_window = true},
    {.name = "gpt-oss",
     .rope_neox = true,
     .sinks = true,
     .activation = Activation::clamped_silu,
     .gating = Gating::softmax_chosen,
     .normalises_experts = false,
     .full_every = 2,
     .rounds_yarn = false,
     .names = second_norm_after_attention},
    {.name = "gemma2",
     .rope_neox = true,
     .norms = NormPlacement::both,
     .activation = Activation::gelu,
     .full_every = 2,
     .window = 4096,
     .attention_softcap = 50,
     .final_softcap = 30,
     .softcaps = true,
     .wide_scale_layers = 46,
     .scales = Scales::gemma},
    {.name = "gemma3",
     .rope_neox = true,
     .norms = NormPlacement::both,
     .qk_norm = QkNorm::head,
     .activation = Activation::gelu,
     .full_every = 6,
     .scaling_in_full_only = true,
     .windowed_base = 10000,
     .softcaps = true,
     .wide_scale_layers = 62,
     .scales = Scales::gemma},
    {.name = "gemma4",
     .rope_neox = true,
     .norms = NormPlacement::both,
     .qk_norm = QkNorm::head,
     .activation = Activation::gelu,
     .full_every = 6,
     .freqs_in_full_only = true,
     .windowed_base = 10000,
     .final_softcap = 30,
     .softcaps = true,
     .scales = Scales::gemma,
     .unit_scale = true,
     .norms_values = true},
    {.name = "olmo2",
     .rope_neox = true,
     .norms = NormPlacement::after,
     .qk_norm = QkNorm::projection,
     .biases = false,
     .full_every = 4,
     .scaling_in_full_only = true},
    {.name = "exaone4",
     .rope_neox = true,
     .norms = NormPlacement::after,
     .qk_norm = QkNorm::head,
     .full_every = 4,
     .rope_in_windows_only = true},
    {.name = "cohere2",
     .norm = NormKind::layer,
     .norms = NormPlacement::parallel,
     .full_every = 4,
     .rope_in_windows_only = true,
     .scales = Scales::cohere},
    {.name = "command-r",
     .norm = NormKind::layer,
     .norms = NormPlacement::parallel,
     .qk_norm = QkNorm::own,
     .optional_qk_norm = true,
     .scales = Scales::cohere},
    {.name = "granite", .finetuned_rope = true, .scales = Scales::granite},
    {.name = "granitemoe", .finetuned_rope = true, .scales = Scales::granite},
    {.name = "minicpm", .scales = Scales::minicpm},
    {.name = "glm4", .norms = NormPlacement::both},
    {.name = "glm4moe",
     .rope_neox = true,
     .qk_norm = QkNorm::head,
     .optional_qk_norm = true,
     .gating = Gating::sigmoid,
     .normalises_experts = false,
     .names = second_norm_after_attention},
    {.name = "starcoder2",
     .rope_neox = true,
     .norm = NormKind::layer,
     .activation = Activation::gelu,
     .gated = false,
     .ignores_window = true},
    {.name = "stablelm",
     .rope_neox = true,
     .norm = NormKind::layer,
     .qk_norm = QkNorm::own,
     .optional_qk_norm = true,
     .optional_ffn_norm = true},
    {.name = "nemotron",
     .rope_neox = true,
     .norm = NormKind::layer,
     .activation = Activation::relu_squared,
     .gated = false},
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
