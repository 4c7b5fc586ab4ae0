// A model whose heads have 512 dimensions: a page is one quad.
#pragma once

#include "../fuzz/tiny_model.h"
#include "temp_folder.h"

namespace kvasir::test {

// Random weights, four layers; the id of a byte is its value.
inline std::string save_wide_model(const TempFolder& folder, uint32_t head_dim = 512) {
  GgufBuilder file = bpe_file(byte_vocabulary());
  add_weights(&file, {4, 16, 2, 1, head_dim, 16, 4096}, 256);
  std::string path = folder.file("wide.gguf");
  write_model(path, file);
  return path;
}

}  // namespace kvasir::test
