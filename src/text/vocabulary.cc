// Reads tokenizer.ggml.*: checks every length and id here, so that later code relies on them.
#include "text/vocabulary.h"

#include <algorithm>
#include <array>
#include <cinttypes>

#include "base/checksum.h"
#include "gguf/limits.h"
#include "os/os.h"

namespace kvasir {
namespace {

constexpr uint32_t kFreeNumber = UINT32_MAX;

// A token that ends a model's turn, in a family's spelling; metadata often name only one of
// several. In some vocabularies such a spelling means something else.
struct TurnEnd {
  std::string_view name;
  std::array<std::string_view, 2> unless = {};  // the vocabulary has all of these tokens; "": none
  std::string_view only_with = {};              // only if the vocabulary has this token
};
constexpr TurnEnd kTurnEnds[] = {
    {"<|im_end|>"},
    {"<|eot_id|>"},
    {"<|end|>", {"<|return|>", "<|call|>"}},  // there it ends one message of a turn
    {"<end_of_turn>"},
    {"<|endoftext|>"},
    {"</s>", {"<|tool_response>"}},  // there it is HTML
    {"<|eom_id|>"},
    {"<|return|>"},
    {"<|call|>"},
    {"<|calls|>"},
    {"<|flush|>"},
    {"<|end_of_text|>"},
    {"<EOT>"},
    {"_<EOT>"},
    {"<|EOT|>"},
    {"[EOT]"},
    {"[EOS]"},
    {"<eos>"},
    {"<end_of_utterance>"},
    {"<|endofturn|>"},
    {"[|endofturn|]"},
    {"<|fim_pad|>"},
    {"<|file_sep|>"},
    {"<|repo_name|>"},
    {"<｜end▁of▁sentence｜>"},
    {"<turn|>"},
    {"<|tool_response>"},
    {"[e~["},
    {"<|END_OF_TURN_TOKEN|>"},
    {"<|eot|>"},
    {"<seed:eos>"},
    {"<｜hy_place▁holder▁no▁2｜>"},
    {"<|role_end|>"},
    {"<|endofresponse|>"},
    // GLM ends a turn by the mark of the next one.
    {.name = "<|user|>", .only_with = "[gMASK]"},
    {.name = "<|observation|>", .only_with = "[gMASK]"},
};

uint32_t hash_of(std::string_view text) {
  return static_cast<uint32_t>(checksum(text.data(), text.size(), os::hash_seed()));
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

void StringList::reserve(std::size_t strings, std::size_t bytes) {
  ends_.reserve(strings);
  bytes_.reserve(bytes);
}

void StringList::add(std::string_view text) {
  bytes_.insert(bytes_.end(), text.begin(), text.end());
  ends_.push_back(bytes_.size());
}

std::string_view StringList::operator[](std::size_t i) const {
  const uint64_t begin = i == 0 ? 0 : ends_[i - 1];
  return {bytes_.data() + begin, static_cast<std::size_t>(ends_[i] - begin)};
}

// The strings of an index differ, so a moved slot only needs a free place.
void TextIndex::grow(std::size_t capacity) {
  Array<Slot> old(capacity);
  old.swap(slots_);
  for (const Slot& slot : old) {
    if (slot.number == kFreeNumber) continue;
    std::size_t i = slot.hash & (capacity - 1);
    while (slots_[i].number != kFreeNumber) i = (i + 1) & (capacity - 1);
    slots_[i] = slot;
  }
}

void TextIndex::reserve(std::size_t strings) {
  std::size_t capacity = 16;
  while (capacity < strings * 2) capacity *= 2;
  if (capacity > slots_.size()) grow(capacity);
}

std::size_t TextIndex::place(const StringList& list, std::string_view text, uint32_t hash) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t i = hash & mask;
  while (slots_[i].number != kFreeNumber &&
         (slots_[i].hash != hash || list[slots_[i].number] != text))
    i = (i + 1) & mask;
  return i;
}

bool TextIndex::add(const StringList& list, uint32_t number) {
  if ((used_ + 1) * 2 > slots_.size()) reserve(used_ * 2 + 8);
  const uint32_t hash = hash_of(list[number]);
  Slot& slot = slots_[place(list, list[number], hash)];
  if (slot.number != kFreeNumber) return false;
  slot = {number, hash};
  ++used_;
  return true;
}

const void* TextIndex::first_slot(std::string_view text) const {
  return slots_.empty() ? nullptr : &slots_[hash_of(text) & (slots_.size() - 1)];
}

uint32_t TextIndex::find(const StringList& list, std::string_view text) const {
  return slots_.empty() ? kFreeNumber : slots_[place(list, text, hash_of(text))].number;
}

Status Vocabulary::load(const Gguf& gguf, SpecialIds defaults, bool adds_bos, Vocabulary* out) {
  Vocabulary vocabulary;
  if (Status status = vocabulary.load_texts(gguf); !status.ok()) return status;
  if (Status status = vocabulary.load_kinds(gguf); !status.ok()) return status;
  if (Status status = vocabulary.load_special(gguf, defaults); !status.ok()) return status;
  if (Status status = vocabulary.load_suppressed(gguf); !status.ok()) return status;
  vocabulary.adds_bos_ = gguf.get_bool("tokenizer.ggml.add_bos_token").value_or(adds_bos) &&
                         vocabulary.special_.bos >= 0;
  vocabulary.adds_eos_ =
      gguf.get_bool("tokenizer.ggml.add_eos_token").value_or(false) && vocabulary.special_.eos >= 0;
  *out = std::move(vocabulary);
  return {};
}

Status Vocabulary::load_texts(const Gguf& gguf) {
  const auto tokens = gguf.get_strings("tokenizer.ggml.tokens");
  if (!tokens)
    return Status::error(Code::corrupt, "tokenizer.ggml.tokens is missing or no array of strings");
  if (tokens->empty()) return Status::error(Code::corrupt, "tokenizer.ggml.tokens is empty");
  if (tokens->size() > gguf_limits::tokens)
    return Status::error(Code::limit,
                         "tokenizer.ggml.tokens has %" PRIu64 " tokens: at most %" PRIu64
                         " can be read",
                         tokens->size(), gguf_limits::tokens);
  uint64_t bytes = 0, number = 0;
  for (const std::string_view token : *tokens) {
    if (token.size() > gguf_limits::token_bytes)
      return Status::error(Code::limit,
                           "tokenizer.ggml.tokens: token %" PRIu64
                           " has %zu bytes: at most %" PRIu64 " can be read",
                           number, token.size(), gguf_limits::token_bytes);
    bytes += token.size();
    ++number;
  }
  if (bytes > gguf_limits::all_tokens_bytes)
    return Status::error(Code::limit,
                         "tokenizer.ggml.tokens has %" PRIu64 " bytes of text: at most %" PRIu64
                         " can be read",
                         bytes, gguf_limits::all_tokens_bytes);
  texts_.reserve(tokens->size(), bytes);
  for (const std::string_view token : *tokens) texts_.add(token);
  return {};
}

Status Vocabulary::load_kinds(const Gguf& gguf) {
  const std::size_t n = texts_.size();
  kinds_.assign(n, TokenKind::normal);
  if (gguf.find("tokenizer.ggml.token_type")) {
    const auto types =
        gguf.get_ints("tokenizer.ggml.token_type");  // at most gguf_limits::array_elements
    if (!types)
      return Status::error(Code::corrupt, "tokenizer.ggml.token_type is no array of integers");
    if (types->size() != n)
      return Status::error(Code::corrupt,
                           "tokenizer.ggml.token_type has %zu entries for %zu tokens",
                           types->size(), n);
    for (std::size_t i = 0; i < n; ++i) {
      switch ((*types)[i]) {
        case 1:
          break;
        case 2:
          kinds_[i] = TokenKind::unknown;
          break;
        case 3:
          kinds_[i] = TokenKind::control;
          break;
        case 4:
          kinds_[i] = TokenKind::user_defined;
          break;
        case 0:  // undefined: padding of the table
        case 5:
          kinds_[i] = TokenKind::unused;
          break;
        case 6:
          kinds_[i] = TokenKind::byte;
          break;
        default:
          return Status::error(Code::corrupt, "tokenizer.ggml.token_type of token %zu is %" PRId32,
                               i, (*types)[i]);
      }
    }
  }
  std::size_t spelled = 0;  // tokens with a text: empty ones take no space in a sparse file
  for (std::size_t i = 0; i < n; ++i) spelled += texts_[i].empty() ? 0u : 1u;
  index_.reserve(spelled);
  constexpr std::size_t ahead = 16;
  for (std::size_t i = 0; i < n; ++i) {
    if (i + ahead < n) __builtin_prefetch(index_.first_slot(texts_[i + ahead]));
    if (!texts_[i].empty() && !index_.add(texts_, static_cast<uint32_t>(i)))
      repeated_.push_back(static_cast<uint32_t>(i));
  }
  find_turn_ends();
  // In some files they are marked as ordinary text.
  for (const Token token : turn_ends_) {
    if (kind(token) != TokenKind::unknown)
      kinds_[static_cast<std::size_t>(token)] = TokenKind::control;
  }
  uint64_t special_bytes = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool special = kinds_[i] == TokenKind::unknown || kinds_[i] == TokenKind::control ||
                         kinds_[i] == TokenKind::user_defined;
    if (!special) continue;
    // The length bounds a step of the search for special tokens; the sum bounds the memory of its
    // trie.
    if (texts_[i].size() > gguf_limits::special_bytes)
      return Status::error(
          Code::limit,
          "tokenizer.ggml.tokens: token %zu is special and has %zu bytes: at most %" PRIu64
          " can be read",
          i, texts_[i].size(), gguf_limits::special_bytes);
    special_bytes += texts_[i].size();
  }
  if (special_bytes > gguf_limits::all_special_bytes)
    return Status::error(Code::limit,
                         "the special tokens have %" PRIu64 " bytes of text: at most %" PRIu64
                         " can be read",
                         special_bytes, gguf_limits::all_special_bytes);
  for (const uint32_t i : repeated_)
    if (is_plain(kinds_[i]) && !is_plain(kinds_[index_.find(texts_, texts_[i])]))
      plain_index_.add(texts_, i);
  return {};
}

Status Vocabulary::load_special(const Gguf& gguf, SpecialIds defaults) {
  Token eot = -1, eom = -1;
  const struct {
    const char* key;
    Token standard;
    Token* id;
  } roles[] = {
      {"tokenizer.ggml.bos_token_id", defaults.bos, &special_.bos},
      {"tokenizer.ggml.eos_token_id", defaults.eos, &special_.eos},
      {"tokenizer.ggml.unknown_token_id", defaults.unknown, &special_.unknown},
      {"tokenizer.ggml.eot_token_id", -1, &eot},
      {"tokenizer.ggml.eom_token_id", -1, &eom},
  };
  for (const auto& role : roles) {
    *role.id = contains(role.standard) ? role.standard : -1;
    if (!gguf.find(role.key)) continue;
    const auto id = gguf.get_uint(role.key);
    if (!id) return Status::error(Code::corrupt, "%s is not a token id", role.key);
    if (*id >= size())
      return Status::error(Code::corrupt, "%s is %" PRIu64 " of %" PRIu32 " tokens", role.key, *id,
                           size());
    *role.id = static_cast<Token>(*id);
  }
  for (const Token token : {special_.eos, eot, eom}) {
    if (token >= 0) turn_ends_.push_back(token);
  }
  std::sort(turn_ends_.begin(), turn_ends_.end());
  return {};
}

Status Vocabulary::load_suppressed(const Gguf& gguf) {
  constexpr const char* key = "tokenizer.ggml.suppress_tokens";
  if (!gguf.find(key)) return {};
  auto ids = gguf.get_ints(key);  // at most gguf_limits::array_elements
  if (!ids) return Status::error(Code::corrupt, "%s is no array of token ids", key);
  for (const Token token : *ids) {
    if (!contains(token))
      return Status::error(Code::corrupt, "%s has %" PRId32 " of %" PRIu32 " tokens", key, token,
                           size());
  }
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
  if (ids->size() == size()) return Status::error(Code::corrupt, "%s has every token", key);
  suppressed_ = std::move(*ids);
  return {};
}

void Vocabulary::find_turn_ends() {
  const auto has = [&](std::string_view name) { return name.empty() || find(name) >= 0; };
  for (const TurnEnd& end : kTurnEnds) {
    const Token token = find(end.name);
    const bool means_other = !end.unless[0].empty() && has(end.unless[0]) && has(end.unless[1]);
    if (token >= 0 && !means_other && has(end.only_with)) turn_ends_.push_back(token);
  }
}

Token Vocabulary::find(std::string_view text) const {
  const uint32_t number = index_.find(texts_, text);
  return number == kFreeNumber ? -1 : static_cast<Token>(number);
}

Token Vocabulary::find_plain(std::string_view text) const {
  const Token first = find(text);
  if (first < 0 || is_plain(kind(first))) return first;
  const uint32_t number = plain_index_.find(texts_, text);
  return number == kFreeNumber ? -1 : static_cast<Token>(number);
}

bool Vocabulary::ends_turn(Token token) const {
  return std::binary_search(turn_ends_.begin(), turn_ends_.end(), token);
}

int Vocabulary::byte_of(std::string_view spelling) {
  if (spelling.size() != 6 || spelling.substr(0, 3) != "<0x" || spelling[5] != '>') return -1;
  const int high = hex_digit(spelling[3]), low = hex_digit(spelling[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

Symbol SymbolTable::find(std::string_view text) const {
  const Token token = vocabulary_.find_plain(text);
  if (token >= 0) return static_cast<Symbol>(token);
  const uint32_t number = index_.find(extra_, text);
  return number == kFreeNumber ? kNoSymbol : vocabulary_.size() + number;
}

Symbol SymbolTable::find_or_add(std::string_view text, Symbol guess) {
  if (guess < vocabulary_.size() && vocabulary_.is_found_plain(static_cast<Token>(guess)) &&
      vocabulary_.text(static_cast<Token>(guess)) == text)
    return guess;
  const Symbol known = find(text);
  if (known != kNoSymbol) return known;
  const auto number = static_cast<uint32_t>(extra_.size());
  extra_.add(text);
  index_.add(extra_, number);
  return vocabulary_.size() + number;
}

std::string_view SymbolTable::text(Symbol symbol) const {
  return is_token(symbol) ? vocabulary_.text(static_cast<Token>(symbol))
                          : extra_[symbol - vocabulary_.size()];
}

}  // namespace kvasir
