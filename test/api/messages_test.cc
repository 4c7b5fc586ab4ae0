// Bytes of a file, a path or an option in a message, a line of the log or a field for people: only
// printable UTF-8 on one line, whatever the bytes are.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "../fuzz/tiny_model.h"
#include "helpers.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace api_test;
using kvasir::test::GgufBuilder;

namespace {

// A line break, a terminal's command, a byte that is no UTF-8, a character cut short, one that
// turns the direction, a separator of lines.
const std::string hostile = "a\nb\r\x1b[2J\x7f\xff\xe2\x82|\xe2\x80\xae|\xe2\x80\xa8|\xc2\x9b";
// As hostile as a name on the disk may be.
const std::string hostile_name = "n\nm\x1b[2J\xff\xe2\x80\xae";

// Written for this test alone: the library's own decoder could be wrong.
bool is_printable_line(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t size = lead < 0x80                   ? 1
                             : lead >= 0xC2 && lead < 0xE0 ? 2
                             : lead >= 0xE0 && lead < 0xF0 ? 3
                             : lead >= 0xF0 && lead < 0xF5 ? 4
                                                           : 0;
    if (size == 0 || i + size > text.size()) return false;
    uint32_t c = size == 1 ? lead : lead & (0xFFu >> (size + 1));
    for (std::size_t k = 1; k < size; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + k]);
      if ((byte & 0xC0) != 0x80) return false;
      c = c << 6 | (byte & 0x3F);
    }
    const bool turns = (c >= 0x200B && c <= 0x200F) || (c >= 0x2028 && c <= 0x202E) ||
                       (c >= 0x2066 && c <= 0x2069);
    if (c < 0x20 || (c >= 0x7F && c < 0xA0) || turns) return false;
    i += size;
  }
  return true;
}

void check_line(const std::string& text) {
  CAPTURE(text);
  CHECK(!text.empty());
  CHECK(is_printable_line(text));
}

// A call that must fail, and its message.
void check_refused(const std::function<kv_status(kv_error*)>& call) {
  kv_error error{};
  REQUIRE(call(&error) != KV_OK);
  check_line(error.message);
}

std::vector<std::string> messages;
void on_log(int32_t, const char* message, void*) { messages.emplace_back(message); }

struct Shape {
  std::string architecture = "llama", name = "m", pre = "gpt-2", tokenizer = "gpt2", tensor, key;
};

std::string write(const TempFolder& folder, const Shape& shape) {
  kvasir::test::TestVocabulary words = kvasir::test::byte_vocabulary();
  words.add("<|im_start|>", 3), words.add("<|im_end|>", 3);
  GgufBuilder b;
  b.key("tokenizer.ggml.model", shape.tokenizer).key("tokenizer.ggml.pre", shape.pre);
  b.key("tokenizer.ggml.tokens", words.tokens).key("tokenizer.ggml.token_type", words.types);
  b.key("tokenizer.ggml.merges", std::vector<std::string>{}).key("general.name", shape.name);
  if (!shape.key.empty()) b.key(shape.key, uint32_t{1}).key(shape.key, uint32_t{2});
  if (shape.architecture != "llama") b.key("general.architecture", shape.architecture);
  else kvasir::test::add_weights(&b, kvasir::test::tiny_size, words.tokens.size());
  if (!shape.tensor.empty()) b.tensor(shape.tensor, {8}, kvasir::TensorType::f32);
  const std::string path = folder.file("m.gguf");
  kvasir::test::write_model(path, b);
  return path;
}

kv_status try_open(const std::string& path, kv_error* error,
                   const kv_model_options* options = nullptr) {
  kv_model* model = nullptr;
  const kv_status status = kv_open(path.c_str(), options, nullptr, &model, error);
  kv_close(model);
  return status;
}

}  // namespace

TEST_CASE("a message escapes any bytes of a model's file") {
  TempFolder folder;
  Shape wrong[5];
  wrong[0].architecture = hostile, wrong[1].pre = hostile, wrong[2].tokenizer = hostile,
  wrong[3].tensor = hostile, wrong[4].key = hostile;
  for (const Shape& shape : wrong) {
    const std::string path = write(folder, shape);
    check_refused([&](kv_error* e) { return try_open(path, e); });
    // A file without tensors is inspected for its vocabulary, whatever its architecture is.
    kv_model_info info{};
    info.struct_size = sizeof info;
    kv_error refused{};
    const bool good = kv_model_inspect(path.c_str(), &info, &refused) == KV_OK;
    check_line(good ? info.architecture : refused.message);
  }
}

TEST_CASE("a model's name reaches a struct, a cache or its refusal as it is") {
  TempFolder folder;
  Shape shape;
  shape.name = hostile + std::string(100, 'x');
  const std::string path = write(folder, shape), cache = folder.file("a.kv");
  const Model model = open_model(path.c_str());
  kv_model_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_get_info(model.get(), &info, error));
  check_line(info.name);
  CHECK(std::string(info.name).size() > 50);
  const Session session = open_session(model.get());
  read_text(session.get(), "abcabc");
  save(session.get(), cache);
  kv_file_info file{};
  file.struct_size = sizeof file;
  REQUIRE_OK(kv_file_inspect(cache.c_str(), &file, error));
  check_line(file.model_name);
  // And a file that another writer has made.
  std::vector<uint8_t> bytes = read_file(cache);
  std::copy(hostile.begin(), hostile.end(),
            bytes.begin() + static_cast<std::ptrdiff_t>(kvasir::format::header_at("model name")));
  samples::repair(bytes);
  write_file(cache, bytes);
  REQUIRE_OK(kv_file_inspect(cache.c_str(), &file, error));
  check_line(file.model_name);
  check_refused([&](kv_error* e) {
    kv_session* loaded = nullptr;
    return kv_load(tiny_model(), cache.c_str(), nullptr, nullptr, &loaded, e);
  });
}

TEST_CASE("a message escapes any bytes of a path or an option") {
  TempFolder folder;
  const std::string missing = folder.file("none" + hostile_name);
  check_refused([&](kv_error* e) { return try_open(missing, e); });
  kv_session* session = nullptr;
  kv_library* library = nullptr;
  check_refused([&](kv_error* e) {
    return kv_load(tiny_model(), missing.c_str(), nullptr, nullptr, &session, e);
  });
  check_refused([&](kv_error* e) {
    return kv_pack(missing.c_str(), folder.file("x").c_str(), 0, nullptr, e);
  });
  check_refused([&](kv_error* e) {
    return kv_unpack(missing.c_str(), folder.file("x").c_str(), nullptr, e);
  });
  check_refused([&](kv_error* e) { return kv_file_verify(missing.c_str(), nullptr, e); });
  check_refused([&](kv_error* e) {
    return kv_library_open((missing + "/deeper").c_str(), nullptr, &library, e);
  });
  const Session open = tiny_session(8);
  check_refused(
      [&](kv_error* e) { return kv_save(open.get(), (missing + "/deeper").c_str(), nullptr, e); });

  for (const std::string& text :
       {hostile, hostile + std::string(1000, 'x'), std::string(39, 'x') + "\xe2\x82\xac"}) {
    kv_model_options m;
    kv_init(&m, sizeof m);
    m.chat_format = text.c_str();
    check_refused([&](kv_error* e) { return try_open(tiny_path, e, &m); });
    m.chat_format = nullptr, m.device = text.c_str();
    check_refused([&](kv_error* e) { return try_open(tiny_path, e, &m); });
    kv_strategy* made = nullptr;
    check_refused([&](kv_error* e) { return kv_strategy_create(text.c_str(), &made, e); });
    kv_session_options o = small_options();
    o.memory_limit = uint64_t{1} << 30;
    o.spill_directory = text.c_str();
    check_refused([&](kv_error* e) { return kv_session_open(tiny_model(), &o, &session, e); });
  }
}

#ifndef _WIN32  // where no file has such a name
TEST_CASE("messages and the log escape any bytes of a document's name") {
  TempFolder folder;
  std::ofstream(folder.file(hostile_name + ".kv")) << "damaged";
  kv_library_options options;
  kv_init(&options, sizeof options);
  options.log = on_log;
  kv_library* library = nullptr;
  REQUIRE_OK(kv_library_open(folder.path().c_str(), &options, &library, error));
  const std::unique_ptr<kv_library, void (*)(kv_library*)> owner(library, kv_library_close);
  kv_session* session = nullptr;
  messages.clear();
  const std::string text = book(400);
  REQUIRE_OK(kv_library_session(library, tiny_model(), text.data(), text.size(), nullptr, nullptr,
                                &session, nullptr, error));
  kv_session_close(session);
  for (const std::string& line : messages)
    check_line(line);  // a file of such a name is no document
  check_refused([&](kv_error* e) {
    return kv_library_rename(library, ("x" + hostile_name).c_str(), "y", e);
  });
  check_refused(
      [&](kv_error* e) { return kv_library_remove(library, ("x" + hostile_name).c_str(), e); });
}
#endif

TEST_CASE("statistics have a line break, or bytes that no JSON may have") {
  TempFolder folder;
  Shape shape;
  shape.name = hostile;
  const Model model = open_model(write(folder, shape).c_str());
  const Session session = open_session(model.get());
  read_text(session.get(), "abcabc");
  std::string stats(1 << 16, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_session_stats_json(session.get(), stats.data(), stats.size(), &size, error));
  check_line(std::string(stats.c_str()));
}
