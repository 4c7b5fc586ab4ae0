// Evidence of documents, from the scores of a step: E in choose.cc.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/request.h"
#include "backend/thread_pool.h"

namespace kvasir {

class Evidence {
 public:
  // documents: how many scores.documents has, with so many blocks each.
  Evidence(const DocumentScores& scores, std::span<const uint32_t> blocks, ThreadPool* pool);

  // Adds the rows of a DocumentScores::take().
  void add(std::size_t rows);

  // E of a document, and its block b. overlap: [blocks] c.
  struct Best {
    float evidence = 0;
    uint32_t block = 0;
  };
  Best of(std::size_t document, std::span<const float> overlap) const;

 private:
  const DocumentScores& scores_;
  ThreadPool* pool_;
  std::vector<std::vector<float>> blocks_;  // e, [documents][blocks]
  std::vector<float> sums_;                 // [rows]
  std::vector<double> variances_;           // [documents] sums over queries
};

}  // namespace kvasir
