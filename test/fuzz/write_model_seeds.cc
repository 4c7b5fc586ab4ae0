// Writes corpus/model: write-model-seeds FOLDER writes a small model of each architecture, named
// after it. Run it again for a new one.
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "../made_model.h"

using namespace kvasir;
using namespace kvasir::test;

int main(int count, char** values) {
  if (count != 2) return 2;
  static constexpr TensorType types[] = {TensorType::q4_0, TensorType::q8_0, TensorType::mxfp4,
                                         TensorType::q5_1, TensorType::iq4_nl};
  for (ModelRecipe& r : recipes_of_all_architectures()) {
    r.width = 32, r.heads = 2, r.kv_heads = 1, r.feed_forward = 32, r.tied = true;
    if (r.experts > 0) r.experts = 4, r.expert_width = 32;
    r.shared_width = std::min(r.shared_width, 32u);
    r.latent_rank = std::min(r.latent_rank, 32u);
    r.type_of = [](const MadeTensor& t) {
      if (t.cols() % 32) return TensorType::f16;
      return t.role == TensorRole::embedding ? TensorType::q4_0
                                             : types[(t.name.size() + t.cols()) % std::size(types)];
    };
    const std::vector<std::byte> bytes = make_model(r).build();
    std::ofstream out(std::string(values[1]) + "/" + r.architecture, std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
    if (!out) return std::fprintf(stderr, "%s: not written\n", r.architecture.c_str()), 1;
  }
  return 0;
}
