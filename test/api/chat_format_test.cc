// The chat format of a saved sequence: saved with it, used for the next turns; others are refused.
#include <algorithm>
#include <cstring>
#include <functional>

#include "cachefile/cache_file.h"
#include "helpers.h"
#include "session/chat_record.h"
#include "temp_folder.h"
#include "text/chat.h"

using namespace api_test;
using kvasir::Array;

namespace {

constexpr const char* text = "The code of the north gate is 17.";

std::string format_of(kv_session* session) { return stats_of(session).chat_format; }

// The tokens of the sequence with a question's turn behind it, which is left before the answer.
std::vector<int32_t> asked(kv_session* session) {
  const std::string question = "Which code?";
  const Session copy = fork(session);
  const std::size_t before = sequence(copy.get()).size();
  kv_generate_options options;
  kv_init(&options, sizeof options);
  options.max_tokens = 1;
  options.flags = KV_KEEP_TURN;
  kv_answer answer{};
  answer.struct_size = sizeof answer;
  REQUIRE_OK(kv_generate(copy.get(), question.data(), question.size(), &options, nullptr, nullptr,
                         nullptr, &answer, error));
  std::vector<int32_t> tokens = sequence(copy.get());
  tokens.resize(before + answer.question_tokens);
  return tokens;
}

kv_status load_status(kv_model* model, const std::string& path, kv_error* error,
                      uint64_t tokens = 0) {
  const kv_session_options options = small_options();
  kv_session* session = nullptr;
  const kv_status status =
      kv_load_prefix(model, path.c_str(), tokens, &options, nullptr, &session, error);
  CHECK((session != nullptr) == (status == KV_OK));
  kv_session_close(session);
  return status;
}

std::string saved(kv_model* model, const TempFolder& folder, const char* name = "a.kv") {
  const Session session = open_session(model);
  read_text(session.get(), text);
  const std::string path = folder.file(name);
  save(session.get(), path);
  return path;
}

// A copy of a cache file with another record, in a section of this version. An empty record leaves
// the section out, as an older library does.
std::string with_record(const std::string& path, const std::string& copy,
                        const Array<std::byte>& record, uint32_t version = 1) {
  std::shared_ptr<const kvasir::CacheFile> file;
  REQUIRE(kvasir::CacheFile::open(path, &file).ok());
  std::unique_ptr<kvasir::CacheWriter> writer;
  REQUIRE(kvasir::CacheWriter::create(copy, file->identity(), &writer).ok());
  const auto is_chat = [](const auto& section) {
    return section.kind == kvasir::format::SectionKind::chat;
  };
  REQUIRE(std::count_if(file->sections().begin(), file->sections().end(), is_chat) == 1);
  for (const auto& section : file->sections())
    if (!is_chat(section) || !record.empty())
      REQUIRE(writer
                  ->add_section(section.kind, is_chat(section) ? version : section.version,
                                is_chat(section) ? record.size() : section.bytes)
                  .ok());
  REQUIRE(writer->begin().ok());
  for (const auto& section : file->sections()) {
    Array<std::byte> bytes(section.bytes);
    REQUIRE(file->copy(section, 0, section.bytes, bytes.data()).ok());
    const Array<std::byte>& out = is_chat(section) ? record : bytes;
    if (!out.empty()) REQUIRE(writer->write(out.data(), out.size()).ok());
  }
  REQUIRE(writer->finish().ok());
  return copy;
}

void add_field(Array<std::byte>* record, const std::string& name, const std::string& value) {
  const auto put = [&](const void* data, std::size_t size) {
    record->resize(record->size() + size);
    std::memcpy(record->data() + record->size() - size, data, size);
  };
  const uint32_t sizes[] = {static_cast<uint32_t>(name.size()),
                            static_cast<uint32_t>(value.size())};
  put(sizes, sizeof sizes);
  put(name.data(), name.size());
  put(value.data(), value.size());
}

}  // namespace

TEST_CASE(
    "questions to a saved document get the turns that its file was read in, whatever the model's "
    "are") {
  const TempFolder folder;
  const Model llama = open_tiny_model("llama3"), plain = open_tiny_model(nullptr);
  const Session reader = open_session(llama.get());
  read_text(reader.get(), text);
  const std::string path = folder.file("a.kv"), again = folder.file("b.kv");
  save(reader.get(), path);
  CHECK(std::string(inspect_file(path).chat_format) == "llama3");
  const Session loaded = load(plain.get(), path);
  CHECK(format_of(loaded.get()) == "llama3");
  CHECK(asked(loaded.get()) == asked(reader.get()));
  const Session copy = fork(loaded.get());
  CHECK(format_of(copy.get()) == "llama3");
  CHECK(asked(copy.get()) == asked(reader.get()));
  save(loaded.get(), again);
  CHECK(std::string(inspect_file(again).chat_format) == "llama3");

  const uint64_t beginning = sequence(reader.get()).size() - 3;
  const kv_session_options options = small_options();
  kv_session* prefix = nullptr;
  REQUIRE_OK(
      kv_load_prefix(plain.get(), path.c_str(), beginning, &options, nullptr, &prefix, error));
  const Session shorter(prefix);
  CHECK(format_of(shorter.get()) == "llama3");
  REQUIRE_OK(kv_session_rewind(reader.get(), beginning, error));
  CHECK(asked(shorter.get()) == asked(reader.get()));
}

TEST_CASE(
    "a document that is saved in one chat format is refused where the model was opened with "
    "another") {
  const TempFolder folder;
  const Model llama = open_tiny_model("llama3"), chatml = open_tiny_model("chatml");
  const std::string path = saved(llama.get(), folder);
  for (const uint64_t tokens : {0u, 5u}) {
    kv_error error{};
    CHECK(load_status(chatml.get(), path, &error, tokens) == KV_MODEL_MISMATCH);
    const std::string message = error.message;
    CHECK(message.find("'llama3'") != std::string::npos);
    CHECK(message.find("'chatml'") != std::string::npos);
    CHECK(message.find("nothing was loaded") != std::string::npos);
    CHECK(load_status(llama.get(), path, &error, tokens) == KV_OK);
  }
}

TEST_CASE("a sequence into which no format has put anything is loaded with any") {
  const TempFolder folder;
  const Model raw = open_tiny_model("raw"), chatml = open_tiny_model("chatml"),
              llama = open_tiny_model("llama3");
  const Session reader = open_session(raw.get());
  read_tokens(reader.get(), some_tokens(20));
  const std::string path = folder.file("a.kv");
  save(reader.get(), path);
  CHECK(inspect_file(path).chat_format[0] == '\0');
  const Session loaded = load(chatml.get(), path);
  CHECK(format_of(loaded.get()) == "chatml");
  REQUIRE(ask(loaded.get(), "Which?", 2, KV_KEEP_TURN).status == KV_OK);  // now there is a turn
  save(loaded.get(), path);
  CHECK(std::string(inspect_file(path).chat_format) == "chatml");
  CHECK(load_status(llama.get(), path, nullptr) == KV_MODEL_MISMATCH);
  const Session talk = load(tiny_model(), path);
  REQUIRE_OK(kv_session_rewind(talk.get(), 20, error));
  save(talk.get(), path);
  CHECK(load_status(llama.get(), path, nullptr) == KV_OK);
}

TEST_CASE("a sequence that went back to nothing begins again in the model's chat format") {
  const TempFolder folder;
  const Model llama = open_tiny_model("llama3");
  const Session loaded = load(tiny_model(), saved(llama.get(), folder));
  REQUIRE_OK(kv_session_rewind(loaded.get(), 0, error));
  CHECK(format_of(loaded.get()) == "chatml");
  read_text(loaded.get(), text);
  const Session fresh = open_session(tiny_model());
  read_text(fresh.get(), text);
  CHECK(asked(loaded.get()) == asked(fresh.get()));
}

TEST_CASE(
    "a file of an older library, which does not say its chat format, is loaded with the model's") {
  const TempFolder folder;
  const std::string older = with_record(saved(tiny_model(), folder), folder.file("older.kv"), {});
  REQUIRE_OK(kv_file_verify(older.c_str(), nullptr, error));
  CHECK(inspect_file(older).chat_format[0] == '\0');
  CHECK(format_of(load(tiny_model(), older).get()) == "chatml");
  const Model llama = open_tiny_model("llama3");
  CHECK(format_of(load(llama.get(), older).get()) == "llama3");
}

TEST_CASE("turns that depend on an unknown feature are refused, and the error names it") {
  const TempFolder folder;
  const std::string path = saved(tiny_model(), folder);
  struct {
    std::vector<std::pair<std::string, std::string>> fields;
    kv_status status;
    const char* word;
  } const cases[] = {{{{"format", "martian"}}, KV_MODEL_MISMATCH, "'martian'"},
                     {{{"format", "chatml"}, {"thinking", "on"}}, KV_VERSION, "'thinking'"},
                     {{{"voice", "low"}, {"format", "chatml"}}, KV_VERSION, "'voice'"},
                     {{{"instructions", ""}, {"format", "chatml"}}, KV_CORRUPT, "section 'chat'"},
                     {{{"instructions", std::string("a\0b", 3)}, {"format", "chatml"}},
                      KV_CORRUPT,
                      "section 'chat'"},
                     {{{"format", "chat\x1Bml"}}, KV_CORRUPT, "section 'chat'"},
                     {{{"thinking", "on"}}, KV_CORRUPT, "names no format"},
                     {{{"format", "chatml"}, {"format", "llama3"}}, KV_CORRUPT, "twice"}};
  for (const auto& c : cases) {
    CAPTURE(std::string(c.word));
    Array<std::byte> record;
    for (const auto& [name, value] : c.fields) add_field(&record, name, value);
    kv_error error{};
    CHECK(load_status(tiny_model(), with_record(path, folder.file("b.kv"), record), &error) ==
          c.status);
    CHECK(std::string(error.message).find(c.word) != std::string::npos);
  }
}

TEST_CASE("a record of a chat format that is cut or changed anywhere is taken for no other") {
  const Array<std::byte> whole = kvasir::encode_chat_record("llama3");
  kvasir::ChatRecord record;
  REQUIRE(kvasir::decode_chat_record(whole, "a.kv", &record).ok());
  CHECK(record.format == "llama3");
  CHECK(record.unknown.empty());
  for (std::size_t size = 0; size < whole.size(); ++size)
    CHECK(!kvasir::decode_chat_record({whole.data(), size}, "a.kv", &record).ok());
  for (std::size_t i = 0; i < whole.size() * 8; ++i) {
    Array<std::byte> changed(whole);
    changed[i / 8] ^= std::byte{1} << (i % 8);
    if (kvasir::decode_chat_record(changed, "a.kv", &record).ok()) CHECK(record.format != "llama3");
  }
}

TEST_CASE("a caller's chat format is saved, used by a load without one, and refused by another") {
  const TempFolder folder;
  const char* const custom = "<D>{document}</D>{user}<U>{question}</U><A>{answer}</A>";
  const Model model = open_tiny_model(custom);
  kv_model_info info;
  kv_init(&info, sizeof info);
  REQUIRE_OK(kv_model_get_info(model.get(), &info, error));
  CHECK(std::string(info.chat_format) == "custom");
  const std::string path = saved(model.get(), folder);
  CHECK(std::string(inspect_file(path).chat_format) == "custom");
  const Session same = load(model.get(), path), unasked = load(tiny_model(), path);
  CHECK(format_of(unasked.get()) == "custom");
  CHECK(asked(unasked.get()) == asked(same.get()));
  const std::string again = folder.file("b.kv");
  save(unasked.get(), again);
  CHECK(load_status(model.get(), again, nullptr) == KV_OK);
  const Model other = open_tiny_model("<D>{document}</D>{user}<U>{question}</U>{answer}</A>"),
              chatml = open_tiny_model("chatml");
  kv_error error{};
  CHECK(load_status(other.get(), path, &error) == KV_MODEL_MISMATCH);
  CHECK(std::string(error.message).find("another custom") != std::string::npos);
  CHECK(load_status(chatml.get(), path, &error) == KV_MODEL_MISMATCH);
}

TEST_CASE("a caller's chat format without its parts is no chat format") {
  for (const char* text : {"{document}", "{question}{answer}", "custom", "{answer}{question}"}) {
    kv_model_options options;
    kv_init(&options, sizeof options);
    options.chat_format = text;
    kv_model* model = nullptr;
    CHECK(kv_open(tiny_path, &options, nullptr, &model, nullptr) == KV_BAD_ARGUMENT);
  }
}

TEST_CASE("marks of a saved chat format are damaged, or belong to a named format") {
  const TempFolder folder;
  const std::string path = saved(tiny_model(), folder);
  const auto status = [&](std::string_view format, std::string_view marks) {
    const Array<std::byte> record = kvasir::encode_chat_record(format, "", marks);
    return load_status(tiny_model(), with_record(path, folder.file("b.kv"), record), nullptr);
  };
  CHECK(status("custom", "{document}{question}{answer}") == KV_OK);
  CHECK(status("custom", "{document}{question}") == KV_CORRUPT);
  CHECK(status("custom", "") == KV_CORRUPT);
  CHECK(status("custom", "chatml") == KV_CORRUPT);
  CHECK(status("chatml", "{document}{question}{answer}") == KV_CORRUPT);
}

TEST_CASE("a library does not take a document for another chat format's that has the same tokens") {
  const TempFolder folder;
  kv_library* opened = nullptr;
  REQUIRE_OK(kv_library_open(folder.file("lib").c_str(), nullptr, &opened, error));
  const std::unique_ptr<kv_library, void (*)(kv_library*)> library(opened, kv_library_close);
  const auto found = [&](kv_model* model, const std::string& read, const char* name) {
    kv_library_session_options options;
    kv_init(&options, sizeof options);
    options.name = name;
    kv_library_result result;
    kv_init(&result, sizeof result);
    kv_session* session = nullptr;
    REQUIRE_OK(kv_library_session(library.get(), model, read.data(), read.size(), &options, nullptr,
                                  &session, &result, error));
    kv_session_close(session);
    CHECK(result.save_status == KV_OK);
    return result.tokens_found;
  };
  const Model one = open_tiny_model("mistral"), other = open_tiny_model("mistral-v3");
  const std::pair<const char*, std::string> names[] = {{nullptr, text}, {"book", "A book."}};
  for (const auto& [name, read] : names) {
    CHECK(found(one.get(), read, name) == 0);
    CHECK(found(other.get(), read, name) == 0);
    CHECK(found(one.get(), read, name) > 0);  // neither took the other's place
    CHECK(found(other.get(), read, name) > 0);
  }
  // two custom formats that differ after the question
  const Model first = open_tiny_model("<D>{document}{question}<A>{answer}"),
              second = open_tiny_model("<D>{document}{question}<B>{answer}");
  CHECK(found(first.get(), text, nullptr) == 0);
  CHECK(found(second.get(), text, nullptr) == 0);
  CHECK(found(first.get(), text, nullptr) > 0);
}

TEST_CASE("a document that another engine has read is saved in the model's chat format") {
  const TempFolder folder;
  const Session reader = open_session(tiny_model());
  read_text(reader.get(), text);
  kv_model_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_get_info(tiny_model(), &info, error));
  kv_cache_shape shape{};
  shape.struct_size = sizeof shape;
  shape.layers = info.layers, shape.heads = info.heads, shape.kv_heads = info.kv_heads,
  shape.head_dim = info.head_dim, shape.max_tokens = 4096;
  kv_cache* made = nullptr;
  REQUIRE_OK(kv_cache_open(&shape, nullptr, &made, error));
  const std::unique_ptr<kv_cache, void (*)(kv_cache*)> cache(made, kv_cache_close);
  const std::vector<int32_t> tokens = sequence(reader.get());
  const std::vector<float> rows(tokens.size() * info.kv_heads * info.head_dim, 0.5f);
  for (uint32_t l = 0; l < info.layers; ++l)
    REQUIRE_OK(kv_cache_update(cache.get(), l, KV_F32, rows.data(), rows.data(), nullptr,
                               static_cast<uint32_t>(tokens.size()), error));
  kv_control how;
  kv_init(&how, sizeof how);
  how.flags = KV_CACHE_UNCHECKED | KV_TOKENIZE_DOCUMENT;
  const Model llama = open_tiny_model("llama3");
  kv_session* session = nullptr;
  REQUIRE_OK(kv_session_from_cache(llama.get(), cache.get(), tokens.data(), tokens.size(), nullptr,
                                   &how, &session, error));
  const Session adopted(session);
  const std::string path = folder.file("a.kv");
  save(adopted.get(), path);
  CHECK(std::string(inspect_file(path).chat_format) == "llama3");
}

TEST_CASE("a record of another version, or with too long instructions, is refused") {
  const TempFolder folder;
  const std::string path = saved(tiny_model(), folder);
  const Array<std::byte> record = kvasir::encode_chat_record("chatml");
  const std::string same = with_record(path, folder.file("1.kv"), record),
                    later = with_record(path, folder.file("2.kv"), record, 2);
  CHECK(load_status(tiny_model(), same, nullptr) == KV_OK);
  CHECK(load_status(tiny_model(), later, nullptr) == KV_VERSION);
  const std::string most(kvasir::max_instructions, 'x');
  const std::string longest = with_record(path, folder.file("3.kv"),
                                          kvasir::encode_chat_record("chatml", most)),
                    longer = with_record(path, folder.file("4.kv"),
                                         kvasir::encode_chat_record("chatml", most + "x"));
  CHECK(load_status(tiny_model(), longest, nullptr) == KV_OK);
  CHECK(load_status(tiny_model(), longer, nullptr) == KV_CORRUPT);
}
