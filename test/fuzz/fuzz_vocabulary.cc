// Any vocabulary in a model file, through the public calls that meet it: the file is refused with a
// reason, or its text is tokenized, given back and read by a session.
//
// An input is one byte, byte-level BPE or SentencePiece, and a list of changes to a sound
// vocabulary; then the file is made and opened.
#include <map>
#include <memory>

#include "../temp_folder.h"
#include "tiny_model.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr ModelSize size_of_model = {1, 4, 1, 1, 4, 4, 256};
constexpr int max_changes = 64;
constexpr std::size_t max_tokens = 5000, longest_token = 1 << 16;
constexpr const char* id_keys[] = {"bos", "eos", "unknown", "eot", "eom", "padding", "seperator"};
constexpr const char* flag_keys[] = {"add_bos_token", "add_eos_token", "add_space_prefix",
                                     "remove_extra_whitespaces"};

enum Part : uint8_t {
  tokens = 1,
  types = 2,
  scores = 4,
  merges = 8,
  pre = 16,
  model = 32,
  chat = 64
};

struct Changed {
  TestVocabulary words;
  bool bpe = true;
  std::string model, pre = "gpt-2";
  std::string chat_template;
  std::map<std::string, uint32_t> ids;
  std::map<std::string, bool> flags;
  std::vector<std::string> texts = {"a b  ab\n\xC3\xA9"};
  std::size_t base = 0;            // tokens of the sound vocabulary
  uint8_t omitted = 0, wrong = 0;  // Part: not in the file, or of another type
  uint64_t rows = 0;               // of the embedding, besides the tokens'
  bool bytes_stand = true;         // what every text needs is there as it was, and nothing hides it

  void touch(std::size_t token) { bytes_stand &= token >= base; }
};

Changed sound(bool bpe) {
  Changed c;
  c.bpe = bpe;
  c.model = bpe ? "gpt2" : "llama";
  c.words = bpe ? byte_vocabulary() : spm_vocabulary();
  if (bpe) {
    c.words.merge("a", "b"), c.words.merge(" ", "a"), c.words.merge("ab", " ");
  } else {
    for (const char* piece : {"\xE2\x96\x81", "a", "b", "ab",
                              "\xE2\x96\x81"
                              "a"})
      c.words.add(piece, 1, -static_cast<float>(c.words.tokens.size()));
  }
  c.base = c.words.tokens.size();
  c.words.add("<|im_start|>", 3), c.words.add("<|im_end|>", 3);
  return c;
}

std::string repeated(std::string_view text, std::size_t times) {
  std::string out;
  while (times-- > 0 && out.size() + text.size() <= longest_token) out += text;
  return out;
}

void change(Recipe* recipe, Changed* c) {
  TestVocabulary& w = c->words;
  const uint8_t what = recipe->byte() % 16;
  const std::size_t token =
      what < 6 ? recipe->number(2) % std::max<std::size_t>(w.tokens.size(), 1) : 0;
  if (what < 4 && w.tokens.empty()) return;
  switch (what) {
    case 0:
      c->touch(token), w.tokens[token] = recipe->text();
      break;
    case 1:
      c->touch(token);
      if (token < w.types.size()) w.types[token] = static_cast<int32_t>(recipe->byte()) - 1;
      break;
    case 2:
      if (token < w.scores.size()) {
        const uint32_t bits = recipe->word();
        std::memcpy(&w.scores[token], &bits, sizeof bits);
      }
      break;
    case 3:
      c->touch(token), w.tokens[token] = repeated(w.tokens[token], recipe->number(2));
      break;
    case 4: {
      // several alike, of which the first stands; together no larger than a token may be, or a run
      // is spent on their bytes
      const std::string alike = w.tokens.empty() ? "" : w.tokens[token];
      const std::size_t most = alike.empty() ? max_tokens : longest_token / alike.size();
      const std::size_t copies = std::min<std::size_t>(recipe->byte(), most);
      const auto type = static_cast<int32_t>(recipe->byte() % 7);
      for (std::size_t n = 0; n < copies && w.tokens.size() < max_tokens; ++n) w.add(alike, type);
      break;
    }
    case 5:
      c->touch(token), w.tokens.resize(token);
      w.types.resize(std::min(token, w.types.size())),
          w.scores.resize(std::min(token, w.scores.size()));
      break;
    case 6: {
      const auto type = static_cast<int32_t>(recipe->byte() % 7);
      w.add(recipe->text(), type, static_cast<float>(recipe->byte()));
      break;
    }
    case 7:
      w.merges.emplace_back(recipe->text());
      break;
    case 8: {
      const std::string left = spell(recipe->text());
      w.merges.push_back(left + " " + spell(recipe->text()));
      break;
    }
    case 9:
      if (!w.merges.empty())
        w.merges.erase(w.merges.begin() +
                       static_cast<std::ptrdiff_t>(recipe->byte() % w.merges.size()));
      break;
    case 10:
      c->ids[id_keys[recipe->byte() % std::size(id_keys)]] = recipe->word();
      break;
    case 11: {
      const uint8_t flag = recipe->byte();
      c->flags[flag_keys[flag / 2 % std::size(flag_keys)]] = flag % 2;
      break;
    }
    case 12:
      (recipe->byte() % 2 ? c->pre : c->chat_template) = recipe->text();
      break;
    case 13:
      c->texts.emplace_back(recipe->text());
      break;
    case 14: {
      const uint8_t part = recipe->byte();
      (recipe->byte() % 2 ? c->wrong : c->omitted) ^= part;
      break;
    }
    case 15: {
      const uint8_t which = recipe->byte();
      // tokens added later may fill it up again, with their types for others
      if (which < 64) c->touch(which), w.types.resize(which);
      else if (which < 128) w.scores.resize(which);
      else if (which < 192) c->model = recipe->text();
      else c->rows += which - 191;
      break;
    }
  }
}

template <class T>
void add_key(GgufBuilder* builder, const Changed& c, uint8_t part, const char* name,
             const T& value) {
  if (c.omitted & part) return;
  if (c.wrong & part) builder->key(name, uint32_t{1});
  else builder->key(name, value);
}

GgufBuilder file_of(const Changed& c) {
  GgufBuilder b;
  add_key(&b, c, model, "tokenizer.ggml.model", c.model);
  if (c.bpe || (c.omitted & pre)) add_key(&b, c, pre, "tokenizer.ggml.pre", c.pre);
  add_key(&b, c, tokens, "tokenizer.ggml.tokens", c.words.tokens);
  add_key(&b, c, types, "tokenizer.ggml.token_type", c.words.types);
  if (!c.bpe || (c.omitted & pre)) add_key(&b, c, scores, "tokenizer.ggml.scores", c.words.scores);
  if (c.bpe || (c.omitted & pre)) add_key(&b, c, merges, "tokenizer.ggml.merges", c.words.merges);
  if (!c.chat_template.empty()) add_key(&b, c, chat, "tokenizer.chat_template", c.chat_template);
  for (const auto& [name, id] : c.ids) b.key("tokenizer.ggml." + name + "_token_id", id);
  for (const auto& [name, flag] : c.flags) b.key("tokenizer.ggml." + name, flag);
  add_weights(&b, size_of_model, std::max<uint64_t>(c.words.tokens.size(), 1) + c.rows);
  return b;
}

// Whether every text comes back: each byte has a token, and no token is written in another way than
// it reads.
bool gives_back(const Changed& c) {
  if (!c.bytes_stand || c.omitted || c.wrong || c.ids.count("unknown")) return false;
  if (c.model != (c.bpe ? "gpt2" : "llama") || (!c.bpe && (c.flags.count("add_space_prefix") != 0)))
    return false;
  for (std::size_t i = 0; i < std::min(c.words.types.size(), c.words.tokens.size()); ++i) {
    const bool ascii = std::all_of(c.words.tokens[i].begin(), c.words.tokens[i].end(),
                                   [](char ch) { return static_cast<unsigned char>(ch) < 128; });
    if (c.words.types[i] == 4 && (!c.bpe || !ascii)) return false;
    if (i >= c.base && c.words.types[i] == 6) return false;  // another spelling of a byte
  }
  return true;
}

void check_text(const kv_model* loaded, const Changed& c, const std::string& text) {
  for (uint32_t flags = 0; flags < 4; ++flags) {
    kv_error error{};
    std::size_t count = 7;
    const kv_status sizing =
        kv_tokenize(loaded, text.data(), text.size(), flags, nullptr, nullptr, 0, &count, &error);
    // a byte that nothing spells
    if (check_status("kv_tokenize", sizing, error, {KV_LIMIT, KV_UNSUPPORTED}) == KV_UNSUPPORTED) {
      require(count == 7, "a failed call changes no output");
      require(!gives_back(c), "every byte has a token");
      continue;
    }
    require(count <= 3 * text.size() + 4, "no text has many more tokens than bytes");
    std::vector<int32_t> ids(count);
    require(kv_tokenize(loaded, text.data(), text.size(), flags, nullptr, ids.data(), count, &count,
                        &error) == KV_OK &&
                count == ids.size(),
            "the same tokens again");
    for (const int32_t id : ids)
      require(id >= 0 && static_cast<std::size_t>(id) < c.words.tokens.size(), "ids are tokens");
    std::size_t size = 0;
    check_status(
        "kv_detokenize",
        kv_detokenize(loaded, ids.data(), count, KV_TOKENIZE_SPECIAL, nullptr, 0, &size, &error),
        error, {KV_LIMIT});
    std::string back(size, '\0');
    require(kv_detokenize(loaded, ids.data(), count, KV_TOKENIZE_SPECIAL, back.data(), size, &size,
                          &error) == KV_OK,
            "ids are text");
    // which comes back as a space
    const bool marked = !c.bpe && text.find("\xE2\x96\x81") != std::string::npos;
    if (flags == 0 && gives_back(c) && !marked) require(back == text, "text comes back");
  }
}

void read(kv_model* loaded, const std::string& text) {
  kv_session_options options;
  kv_init(&options, sizeof options);
  options.threads = 1;
  kv_error error{};
  kv_session* session = nullptr;
  require(kv_session_open(loaded, &options, &session, &error) == KV_OK, "a session");
  uint64_t done = 0;
  check_status("kv_prefill",
               kv_prefill(session, text.data(), text.size(), nullptr, &done, nullptr, &error),
               error, {KV_UNSUPPORTED, KV_CONTEXT_FULL, KV_CORRUPT});
  kv_generate_options ask;
  kv_init(&ask, sizeof ask);
  ask.max_tokens = 3;
  check_status("kv_generate",
               kv_generate(session, text.data(), text.size(), &ask, nullptr, nullptr, nullptr,
                           nullptr, &error),
               error, {KV_UNSUPPORTED, KV_CONTEXT_FULL, KV_BAD_STATE, KV_CORRUPT});
  std::size_t count = 0;
  kv_session_tokens(session, nullptr, 0, &count, nullptr);
  require(count == done, "what was read is in the sequence");
  kv_session_close(session);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static TempFolder folder;
  static const std::string path = folder.file("model.gguf");
  Recipe recipe(data, size);
  Changed c = sound(recipe.byte() % 2 == 0);
  for (int i = 0; i < max_changes && !recipe.empty(); ++i) change(&recipe, &c);
  write_model(path, file_of(c));

  kv_model* loaded = nullptr;
  kv_error error{};
  kv_status status = KV_OK;
  {
    Allocations allocations;
    status = check_status("kv_open", kv_open(path.c_str(), nullptr, nullptr, &loaded, &error),
                          error, {KV_CORRUPT, KV_UNSUPPORTED, KV_LIMIT});
    // A byte of a special token's text takes a node of 16 bytes, in an array that doubles.
    require(allocations.largest() <= 32 * std::filesystem::file_size(path) + 65536,
            "memory is bounded by the file's size");
  }
  require((status == KV_OK) == (loaded != nullptr), "a model or an error");
  if (!loaded) {
    require(std::string_view(error.message).find("model.gguf") != std::string_view::npos,
            "a refused file names itself");
    return 0;
  }
  kv_model_info info{};
  info.struct_size = sizeof info;
  require(kv_model_get_info(loaded, &info, nullptr) == KV_OK &&
              info.vocabulary == c.words.tokens.size(),
          "all tokens");
  for (const std::string& text : c.texts) check_text(loaded, c, text);
  read(loaded, c.texts.back());
  kv_close(loaded);
  return 0;
}
