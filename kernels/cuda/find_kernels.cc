// Finds the kernels of the loaded modules by their names, and allows them the shared memory that
// they take.
#include <initializer_list>
#include <utility>

#include "launch.h"
#include "matmul_wide.h"

namespace kvasir::cuda {
namespace {

// All types of weights.
#define KVASIR_TYPE(name) TensorType::name,
constexpr TensorType weight_types[] = {TensorType::f32, TensorType::f16, TensorType::bf16,
                                       KVASIR_QUANTISED_TYPES(KVASIR_TYPE)};
#undef KVASIR_TYPE

// The first error of several calls stays; after it, calls do nothing.
class Finder {
 public:
  explicit Finder(DeviceContext* context) : c_(context) {}
  int error() const { return error_; }
  bool has(KernelModule module) const { return of(module); }

  void find(KernelModule module, const char* name) {
    CUfunction function = nullptr;
    if (error_ || (error_ = driver().cuModuleGetFunction(&function, of(module), name))) return;
    c_->kernels.emplace(name, function);
  }
  void find(KernelModule module, std::initializer_list<const char*> names) {
    for (const char* name : names) find(module, name);
  }
  // Of each type that is_wanted(type) names.
  void find_types(KernelModule module, std::initializer_list<const char*> kinds,
                  bool (*is_wanted)(TensorType)) {
    for (TensorType type : weight_types)
      for (const char* kind : kinds)
        if (is_wanted(type)) find(module, Name(kind, type).text);
  }
  // Dynamic shared memory of a kernel that was found.
  void allow(const char* name, uint32_t bytes) {
    if (!error_)
      error_ = driver().cuFuncSetAttribute(c_->kernels.find(name)->second,
                                           CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           static_cast<int>(bytes));
  }

 private:
  CUmodule of(KernelModule module) const { return c_->modules[static_cast<unsigned>(module)]; }

  DeviceContext* const c_;
  int error_ = 0;
};

bool is_float(TensorType type) { return !is_quantised(type); }

void find_products(Finder* f) {
  f->find_types(KernelModule::matmul, {"lay_out_", "row_"}, is_quantised);
  f->find_types(KernelModule::matmul, {"row_", "rows_", "tile_"}, is_float);
  f->find_types(KernelModule::matmul_few, {"few_"}, is_quantised);
  f->find_types(KernelModule::matmul_few, {"rows_"}, is_common);
  f->find_types(KernelModule::matmul_many, {"some_"}, is_quantised);
  f->find_types(KernelModule::matmul_many, {"many_"}, has_many);
  if (f->has(KernelModule::matmul_wide)) {
    f->find_types(KernelModule::matmul_wide, {"halves_"}, is_quantised);
    f->find(KernelModule::matmul_wide, "halves_of_inputs");
    for (const char* name : {"multiply_wide", "multiply_wide_silu", "multiply_wide_gelu"}) {
      f->find(KernelModule::matmul_wide, name);
      f->allow(name, wide_shared_bytes);
    }
  }
  f->find_types(KernelModule::matmul_experts, {"experts_row_", "experts_few_"}, is_quantised);
  f->find_types(KernelModule::matmul_experts, {"experts_row_", "experts_tile_"}, is_float);
}

void find_attention(Finder* f) {
  f->find(KernelModule::attention,
          {"attention_begin", "attention_gather", "attention_gather_group", "attention_finish"});
  f->find(KernelModule::select, {"attention_shares", "attention_choose"});
  f->find(KernelModule::prefill_attention, {"prefill_largest", "prefill_queries", "prefill_merge"});
  f->find(KernelModule::prefill_tiles, "prefill_choose_tiles");
  for (const uint32_t dim : attended_dims) {
    f->find(KernelModule::prefill_attention, LayOutName(dim).text);
    f->find(KernelModule::prefill_tiles, TilesName(false, dim).text);
    if (f->has(KernelModule::prefill_wide))
      f->find(KernelModule::prefill_wide, TilesName(true, dim).text);
    for (const char* part : {"near", "chosen"})
      f->find(KernelModule::attention, AttentionName(part, dim).text);
    f->find(KernelModule::select, AttentionName("scan", dim).text);
    for (const bool windowed : {false, true}) {
      f->find(KernelModule::prefill_attention, PrefillName(false, windowed, dim).text);
      if (f->has(KernelModule::prefill_wide))
        f->find(KernelModule::prefill_wide, PrefillName(true, windowed, dim).text);
    }
  }
  for (const uint32_t dim : nearest_dims) f->find(KernelModule::knn, NearestName(dim).text);
  f->find(KernelModule::knn, "nearest_choose");
  for (const uint32_t dim : window_dims)
    f->find(KernelModule::window_attention, WindowName(dim).text);
  f->find(KernelModule::window_attention, {"window_finish", "window_keep"});
}

void allow_shared_memory(Finder* f, uint32_t most) {
  f->allow("prefill_choose_tiles", max_prefill_tiles * sizeof(float));
  for (const uint32_t dim : attended_dims) {
    f->allow(TilesName(false, dim).text, prefill_choosing_bytes(dim));
    if (f->has(KernelModule::prefill_wide))
      f->allow(TilesName(true, dim).text, prefill_wide_choosing_bytes(dim));
    for (const bool windowed : {false, true}) {
      f->allow(PrefillName(false, windowed, dim).text, prefill_shared_bytes(dim));
      if (f->has(KernelModule::prefill_wide))
        f->allow(PrefillName(true, windowed, dim).text, prefill_wide_shared_bytes(dim));
    }
  }
  for (const TensorType type : weight_types) {
    if (!is_quantised(type)) continue;
    f->allow(Name("some_", type).text, 2 * many_tile_bytes(type, some_rows));
    if (has_many(type)) f->allow(Name("many_", type).text, 2 * many_tile_bytes(type, many_rows));
    for (const char* kind : {"few_", "experts_few_"}) f->allow(Name(kind, type).text, most);
    if (is_common(type)) f->allow(Name("rows_", type).text, most);
  }
}

}  // namespace

int find_kernels(DeviceContext* context) {
  Finder f(context);
  f.find(KernelModule::elementwise,
         {"quantize", "rms_norm", "add_rms_norm", "short_rms_norm", "add_short_rms_norm",
          "layer_norm", "activate", "scale", "find_largest", "rotate"});
  f.find(KernelModule::experts,
         {"experts_route", "experts_tiles", "experts_place", "experts_gather", "experts_sum"});
  f.find(KernelModule::recurrent,
         {"sigmoid_gate", "recurrent_convolve", "recurrent_prepare", "recurrent_gate",
          "recurrent_advance_8", "recurrent_advance_16", "recurrent_advance_32"});
  find_products(&f);
  find_attention(&f);
  allow_shared_memory(&f, context->block_shared_bytes);
  return f.error();
}

}  // namespace kvasir::cuda
