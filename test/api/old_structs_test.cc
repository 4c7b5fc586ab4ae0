// Structs of version 0.1: their fields had other places, so they are refused by their size.
#include <cstddef>
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// Zeros with a struct_size. A library that took them for a newer, longer struct would accept them.
struct Old {
  explicit Old(uint32_t size) { std::memcpy(bytes, &size, sizeof size); }
  template <class Struct>
  Struct* as() {
    return reinterpret_cast<Struct*>(bytes);
  }
  alignas(8) unsigned char bytes[256] = {};
};

}  // namespace

TEST_CASE("a struct of version 0.1 is refused") {
  const TempFolder folder;
  kv_model* model = nullptr;
  CHECK(kv_open(tiny_path, Old(64).as<kv_model_options>(), nullptr, &model, nullptr) ==
        KV_BAD_ARGUMENT);
  kv_session* session = nullptr;
  CHECK(kv_session_open(tiny_model(), Old(160).as<kv_session_options>(), &session, nullptr) ==
        KV_BAD_ARGUMENT);
  const Session asked = tiny_session(10);
  CHECK(kv_generate(asked.get(), "a", 1, Old(88).as<kv_generate_options>(), nullptr, nullptr,
                    nullptr, nullptr, nullptr) == KV_BAD_ARGUMENT);
  kv_library* opened = nullptr;
  REQUIRE_OK(kv_library_open(folder.file("lib").c_str(), nullptr, &opened, error));
  const std::unique_ptr<kv_library, void (*)(kv_library*)> library(opened, kv_library_close);
  CHECK(kv_library_session(opened, tiny_model(), "abc", 3, Old(48).as<kv_library_session_options>(),
                           nullptr, &session, nullptr, nullptr) == KV_BAD_ARGUMENT);
  kv_cache_shape shape;
  kv_init(&shape, sizeof shape);
  shape.layers = shape.heads = shape.kv_heads = 1, shape.head_dim = 8, shape.max_tokens = 10;
  kv_cache* cache = nullptr;
  CHECK(kv_cache_open(&shape, Old(88).as<kv_cache_options>(), &cache, nullptr) == KV_BAD_ARGUMENT);
  REQUIRE_OK(kv_cache_open(&shape, nullptr, &cache, error));
  const float row[8] = {};
  float out[8];
  REQUIRE_OK(kv_cache_update(cache, 0, KV_F32, row, row, nullptr, 1, error));
  CHECK(kv_cache_attention(cache, 0, KV_F32, row, out, 1, Old(24).as<kv_cache_attention_options>(),
                           nullptr, nullptr) == KV_BAD_ARGUMENT);
  kv_cache_close(cache);
  CHECK(kv_strategy_list(0, Old(72).as<kv_strategy_info>(), nullptr) == KV_BAD_ARGUMENT);
  CHECK(model == nullptr);
  CHECK(session == nullptr);
}

TEST_CASE("structs that kept their layout since version 0.1 keep their size, or grew at the end") {
  CHECK(sizeof(kv_control) == 32);
  CHECK(sizeof(kv_model_info) == 424);  // 416
  CHECK(offsetof(kv_model_info, thinks) == 416);
  CHECK(sizeof(kv_answer) == 64);      // 56
  CHECK(sizeof(kv_file_info) == 704);  // 152, 168, 688, 696
  CHECK(offsetof(kv_file_info, recurrent_layers) == 152);
  CHECK(sizeof(kv_packed_info) == 120);
  CHECK(sizeof(kv_library_options) == 32);
  CHECK(sizeof(kv_library_document) == 376);
  CHECK(sizeof(kv_library_result) == 240);
  CHECK(sizeof(kv_cache_shape) == 64);
}
