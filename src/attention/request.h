// Attention of a step's queries in one layer: what it is of and by what it chooses.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

struct AttentionRequest {
  uint32_t layer = 0;
  uint32_t first = 0;                  // the first token of the step that is attended
  uint32_t tokens = 0;                 // of the step
  const float* q = nullptr;            // [tokens][heads][head_dim] after RoPE
  const KvStore& store;                // has the step's rows of this layer, uncommitted
  const Selector* selector = nullptr;  // null: every token is attended
  const Plan& plan;
  const StepMemory* memory = nullptr;  // the selector's own, where it has one
  const CancelLatch& cancel;           // once it has fired, results are meaningless
};

// What a layer computes of a step's tokens, after RoPE.
struct LayerRows {
  const float *q, *k, *v;      // [tokens][heads or kv_heads][head_dim]
  const float* lse = nullptr;  // [tokens][heads] ln of the sum of e^score, where it is known
  // [..][heads][head_dim] attention's output, where it is asked for
  const float* attended = nullptr;
};

}  // namespace kvasir
