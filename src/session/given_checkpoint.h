// Windows and states of a sequence at one token, as another engine has them: what its layers keep
// of the tokens before and no page holds.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/status.h"
#include "model/config.h"
#include "session/number_arrays.h"
#include "store/kv_store.h"
#include "store/recurrent_state.h"

namespace kvasir {

// Order of the numbers of a part. keys, values: the newest rows of a layer that sees a window.
enum class PartLayout : uint32_t {
  keys = 0,       // [rows][kv_heads][head_dim], after RoPE
  values = 1,     // likewise
  inputs = 2,     // of a convolution, [channels][taps - 1], the newest last
  key_value = 3,  // matrices of a gated delta net, [heads][key_dim][value_dim]
  value_key = 4,  // matrices of Mamba-2, [heads][value_dim][key_dim]
};
constexpr uint32_t part_layouts = 5;

struct GivenPart {
  uint32_t layer = 0;  // of the model
  PartLayout layout = PartLayout::keys;
  Numbers type = Numbers::f32;
  const void* numbers = nullptr;
  uint64_t count = 0;
};

// Relative L2 difference.
struct Difference {
  double off = 0, norm = 0;  // sums of squares

  void add(float ours, float given) {
    const double x = double{ours}, y = double{given};
    off += (x - y) * (x - y), norm += x * x;
  }
  double relative() const {  // large where a number was NaN or infinite
    if (!std::isfinite(off) || !std::isfinite(norm)) return 1e9;
    return norm > 0 ? std::sqrt(off / norm) : off > 0 ? 1e9 : 0;
  }
};

class GivenCheckpoint {
 public:
  // Checks which parts there are and their sizes, not their numbers. name: the caller's word for
  // the checkpoint. The model's config and the arrays must outlive *out. Code::bad_argument.
  static Status check(const ModelConfig& config, const char* name, uint64_t tokens,
                      std::span<const GivenPart> parts, GivenCheckpoint* out);

  uint64_t tokens() const { return tokens_; }
  // The first token of the windows' rows: they go up to tokens().
  uint64_t first_row() const { return tokens_ - rows_; }

  // Writes the rows to an empty store with windows. Copies of the first row fill its extent before
  // first_row(); no query may see them (KvStore::drop_before()).
  // Code::bad_argument (NaN, infinity or a magnitude over 1e30). Code::cancelled, here and below:
  // tested between layers, and between rows that are sealed together.
  Status fill(ThreadPool* pool, const Cancel* cancel, KvStore* windows) const;
  // Replaces the states by those of the checkpoint. Codes likewise.
  Status fill(ThreadPool* pool, const Cancel* cancel, RecurrentState* states) const;

  // The largest relative L2 difference of a layer's newest rows, or of its state, to these; null:
  // the model has none. Code::bad_argument as fill().
  struct Computed {
    const KvStore* windows = nullptr;
    const RecurrentState* states = nullptr;
  };
  Status compare(const Computed& computed, ThreadPool* pool, const Cancel* cancel,
                 double* difference) const;

 private:
  const GivenPart& part(uint32_t layer, PartLayout layout) const {
    return *parts_[layer * part_layouts + static_cast<uint32_t>(layout)];
  }
  Status check_part(const GivenPart& part);
  Status check_complete() const;
  Status read(const GivenPart& part, std::size_t first, std::size_t count, ThreadPool* pool,
              Array<float>* to) const;
  Status read_state(uint32_t layer, ThreadPool* pool, Array<float>* room, float* to) const;
  Status compare_state(uint32_t layer, std::span<const float> ours, ThreadPool* pool,
                       Difference* difference) const;
  Status compare_window(uint32_t layer, PartLayout layout, const KvStore& store, ThreadPool* pool,
                        Difference* difference) const;

  const ModelConfig* config_ = nullptr;
  const char* name_ = "";
  uint64_t tokens_ = 0;
  uint64_t rows_ = 0;                    // of windows
  std::vector<const GivenPart*> parts_;  // [layers][part_layouts]
};

}  // namespace kvasir
