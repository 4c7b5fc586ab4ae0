// kvasir inspect and kvasir verify. The content of a file says whether it is a model, a cache file
// or a packed file.
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "sessions.h"
#include "system.h"

namespace tool {
namespace {

bool is_model(const std::string& path) {
  std::error_code unknown;  // a pipe may have no end
  if (!std::filesystem::is_regular_file(system::path(path), unknown)) return false;
  std::array<char, 4> magic{};
  std::ifstream file(system::path(path), std::ios::binary);
  return file.read(magic.data(), magic.size()) && std::memcmp(magic.data(), "GGUF", 4) == 0;
}

[[noreturn]] void fail_unknown(const std::string& path, const kv_error& error) {
  Failure failure(error, "");
  failure.reword(path + " is neither a model (GGUF) nor a cache file of Kvasir");
  throw failure;
}

void row(Console& console, const char* name, const std::string& value) {
  if (!console.json) console.terminal.print(string_printf("%-18s", name) + value + "\n");
}

// A file without tensors.
void show_vocabulary(Console& console, const std::string& path, const kv_model_info& info) {
  row(console, "vocabulary of", info.name);
  row(console, "architecture", info.architecture);
  row(console, "vocabulary", grouped(info.vocabulary) + " tokens, " + info.tokenizer);
  row(console, "chat format", info.chat_format);
  console.result = {{"kind", "vocabulary"},
                    {"path", path},
                    {"name", info.name},
                    {"architecture", info.architecture},
                    {"vocabulary", info.vocabulary},
                    {"tokenizer", info.tokenizer},
                    {"chat_format", info.chat_format}};
}

void inspect_model(Console& console, const std::string& path) {
  kv_error error{};
  kv_model_info vocabulary = initialised<kv_model_info>();
  check(kv_model_inspect(path.c_str(), &vocabulary, &error), error);
  if (vocabulary.layers == 0) return show_vocabulary(console, path, vocabulary);
  ModelFlags flags;
  flags.path = path;
  // kv_model_inspect would not look up the hash.
  const kv_model_info info = info_of(open_model(console, flags, true).get());
  row(console, "model", info.name);
  row(console, "architecture", info.architecture);
  row(console, "parameters", grouped(info.parameters));
  row(console, "weights", std::string(info.weights) + ", " + byte_count(info.weight_bytes));
  row(console, "layers",
      std::to_string(info.layers) +
          (info.mtp_layers > 0 ? ", " + std::to_string(info.mtp_layers) + " MTP" : ""));
  row(console, "width", std::to_string(info.width));
  row(console, "heads",
      std::to_string(info.heads) + " query, " + std::to_string(info.kv_heads) + " KV, of " +
          std::to_string(info.head_dim));
  row(console, "FFN width", std::to_string(info.feed_forward));
  row(console, "vocabulary", grouped(info.vocabulary) + " tokens, " + info.tokenizer);
  row(console, "chat format", info.chat_format);
  row(console, "context", grouped(info.context_tokens) + " tokens");
  row(console, "KV cache",
      byte_count(info.kv_bytes_per_token) + " per token, " +
          byte_count(info.kv_bytes_per_token * info.context_tokens) + " for the whole context");
  row(console, "fingerprint", info.fingerprint);
  row(console, "hash", *info.hash ? info.hash : "unknown; `kvasir verify` computes it");
  console.result = {{"kind", "model"},
                    {"path", path},
                    {"name", info.name},
                    {"architecture", info.architecture},
                    {"parameters", info.parameters},
                    {"weights", info.weights},
                    {"weight_bytes", info.weight_bytes},
                    {"layers", info.layers},
                    {"mtp_layers", info.mtp_layers},
                    {"width", info.width},
                    {"heads", info.heads},
                    {"kv_heads", info.kv_heads},
                    {"head_dim", info.head_dim},
                    {"feed_forward", info.feed_forward},
                    {"vocabulary", info.vocabulary},
                    {"tokenizer", info.tokenizer},
                    {"chat_format", info.chat_format},
                    {"context_tokens", info.context_tokens},
                    {"kv_bytes_per_token", info.kv_bytes_per_token},
                    {"fingerprint", info.fingerprint},
                    {"hash", *info.hash ? Json(info.hash) : Json()}};
}

// The documents to which a file refers. Returns them as JSON.
Json show_documents(Console& console, const std::string& path, uint64_t count) {
  Json documents = Json::array();
  for (uint32_t i = 0; i < count; ++i) {
    kv_file_document document = initialised<kv_file_document>();
    kv_error error{};
    check(kv_file_get_document(path.c_str(), i, &document, &error), error);
    const bool is_there = document.status == KV_OK;
    const std::string why = document.status == KV_NOT_FOUND ? "missing"
                            : document.status == KV_MODEL_MISMATCH
                                ? "changed"
                                : kv_status_text(document.status);
    row(console, i == 0 ? "documents" : "",
        std::string(document.path) + ", " + grouped(document.tokens) + " tokens" +
            (is_there ? "" : ": " + why));
    documents.push_back({{"path", document.path},
                         {"tokens", document.tokens},
                         {"file_bytes", document.file_bytes},
                         {"candidate", (document.flags & KV_DOCUMENT_CANDIDATE) != 0},
                         {"attended", (document.flags & KV_DOCUMENT_ATTENDED) != 0},
                         {"status", document.status}});
    if (!is_there) documents.back()["status_text"] = why;
  }
  return documents;
}

void inspect_cache(Console& console, const std::string& path) {
  kv_error error{};
  kv_file_info info = initialised<kv_file_info>();
  const kv_status status = kv_file_inspect(path.c_str(), &info, &error);
  if (status == KV_NOT_A_CACHE) fail_unknown(path, error);
  check(status, error);
  row(console, "cache file of", info.model_name);
  const Json documents = show_documents(console, path, info.documents);
  row(console, "tokens",
      grouped(info.tokens) + ", " + grouped(info.sealed_tokens) +
          " of them in int8 pages, the newest in the window");
  row(console, "KV cache",
      byte_count(info.kv_bytes) + (info.precision == KV_PRECISION_F32 ? ", f32" : ", int8"));
  if (info.recurrent_layers > 0)
    row(console, "states",
        byte_count(info.state_bytes) + " of " + std::to_string(info.recurrent_layers) +
            " recurrent layers, at " + std::to_string(info.states) + " positions");
  std::vector<uint64_t> checkpoints(info.checkpoint_tokens,
                                    info.checkpoint_tokens + info.checkpoints);
  std::string places;
  for (const uint64_t tokens : checkpoints)
    places += (places.empty() ? "" : " ") + std::to_string(tokens);
  if (!places.empty()) row(console, "checkpoints", "after these tokens: " + places);
  if (info.mtp_tokens > 0)
    row(console, "MTP layer", "keys and values of " + grouped(info.mtp_tokens) + " tokens");
  if (info.chat_format[0] != '\0') row(console, "chat format", info.chat_format);
  row(console, "layers",
      std::to_string(info.layers) + (info.recurrent_layers > 0 ? " with keys and values" : ""));
  row(console, "heads", std::to_string(info.kv_heads) + " KV, of " + std::to_string(info.head_dim));
  row(console, "file",
      byte_count(info.file_bytes) + ", format " + std::to_string(info.format_version));
  console.result = {{"kind", "cache"},
                    {"path", path},
                    {"model_name", info.model_name},
                    {"format_version", info.format_version},
                    {"file_bytes", info.file_bytes},
                    {"tokens", info.tokens},
                    {"sealed_tokens", info.sealed_tokens},
                    {"kv_bytes", info.kv_bytes},
                    {"precision", info.precision == KV_PRECISION_F32 ? "f32" : "int8"},
                    {"chat_format", info.chat_format},
                    {"recurrent_layers", info.recurrent_layers},
                    {"states", info.states},
                    {"state_bytes", info.state_bytes},
                    {"checkpoints", checkpoints},
                    {"mtp_tokens", info.mtp_tokens},
                    {"documents", documents},
                    {"layers", info.layers},
                    {"kv_heads", info.kv_heads},
                    {"head_dim", info.head_dim}};
}

// False for another kind of file.
bool inspect_packed(Console& console, const std::string& path) {
  kv_error error{};
  kv_packed_info info = initialised<kv_packed_info>();
  const kv_status status = kv_packed_inspect(path.c_str(), &info, &error);
  if (status == KV_NOT_A_CACHE) return false;
  check(status, error);
  row(console, "packed file of", info.model_name);
  row(console, "tokens", grouped(info.tokens));
  row(console, "layers", std::to_string(info.layers));
  row(console, "heads", std::to_string(info.kv_heads) + " KV, of " + std::to_string(info.head_dim));
  row(console, "unpacked",
      byte_count(info.document_bytes) + ", format " + std::to_string(info.format_version));
  row(console, "file", byte_count(info.file_bytes) + ", level " + std::to_string(info.level));
  console.result = {{"kind", "packed"},
                    {"path", path},
                    {"model_name", info.model_name},
                    {"packed_version", info.packed_version},
                    {"file_bytes", info.file_bytes},
                    {"cache_bytes", info.document_bytes},
                    {"level", info.level},
                    {"format_version", info.format_version},
                    {"tokens", info.tokens},
                    {"layers", info.layers},
                    {"kv_heads", info.kv_heads},
                    {"head_dim", info.head_dim}};
  return true;
}

}  // namespace

void run_inspect(Console& console, const FileArguments& arguments) {
  if (is_model(arguments.path)) {
    inspect_model(console, arguments.path);
  } else if (!inspect_packed(console, arguments.path)) {
    inspect_cache(console, arguments.path);
  }
}

static std::string verify_model(Console& console, const Model& model) {
  kv_error error{};
  Progress progress(console.terminal, "Hashing the model", Unit::bytes);
  const kv_control control = control_of(console, &progress);
  const kv_status status = kv_model_hash(model.get(), &control, &error);
  if (status == KV_CANCELLED) throw Failure(exit_cancelled, "stopped before the end");
  check(status, error);
  const kv_model_info info = info_of(model.get());
  console.result["hash"] = info.hash;
  return std::string("metadata and tensor shapes are sound; weights have no checksums; hash ") +
         info.hash;
}

static bool packed(const std::string& path) {
  kv_packed_info info = initialised<kv_packed_info>();
  return kv_packed_inspect(path.c_str(), &info, nullptr) == KV_OK;
}

void run_verify(Console& console, const FileArguments& arguments) {
  console.result = {{"path", arguments.path},
                    {"kind", is_model(arguments.path) ? "model" : "cache"}};
  std::string verdict;
  if (is_model(arguments.path)) {
    ModelFlags flags;
    flags.path = arguments.path;
    verdict = verify_model(console, open_model(console, flags, true));
  } else {
    kv_error error{};
    Progress progress(console.terminal,
                      "Verifying " + system::text(system::path(arguments.path).filename()),
                      Unit::bytes);
    const kv_control control = control_of(console, &progress);
    const kv_status status = kv_file_verify(arguments.path.c_str(), &control, &error);
    if (status == KV_CANCELLED) throw Failure(exit_cancelled, "stopped before the end");
    if (status == KV_NOT_A_CACHE && !packed(arguments.path)) fail_unknown(arguments.path, error);
    check_cache(status, error, arguments.path);
    verdict = "sound, every byte of " + byte_count(progress.total());
  }
  console.result["sound"] = true;
  if (!console.json) console.terminal.print(arguments.path + ": " + verdict + "\n");
}

}  // namespace tool
