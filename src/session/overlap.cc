#include "session/overlap.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <unordered_map>

#include "base/letters.h"

namespace kvasir {
namespace {

constexpr std::size_t most_tokens = 512;  // of a question

struct Hit {
  uint32_t feature, block;
};

// A token's text in small letters, without a space before it.
std::string plain_text(const Tokenizer& tokenizer, Token token) {
  std::string out(tokenizer.piece(token, false));
  if (out.size() > 1) out.erase(0, std::min(out.find_first_not_of(' '), out.size() - 1));
  for (char& c : out) c = small_letter(c);
  return out;
}

// Features are numbered from 0: first tokens, then pairs.
class Features {
 public:
  Features(const Tokenizer& tokenizer, std::span<const Token> question)
      : of_token_(tokenizer.size(), none) {
    std::map<std::string, uint32_t> known;
    std::vector<uint32_t> in_order;
    for (Token token : question) {
      const std::string text = plain_text(tokenizer, token);
      const auto [at, is_new] = known.emplace(text, count_);
      if (is_new) add_spellings(tokenizer, text, count_++);
      of_token_[static_cast<std::size_t>(token)] = at->second;
      in_order.push_back(at->second);
    }
    for (std::size_t i = 1; i < in_order.size(); ++i)
      if (pairs_.emplace(key(in_order[i - 1], in_order[i]), count_).second) ++count_;
  }

  uint32_t count() const { return count_; }

  // Each feature of a block once, blocks ascending.
  std::vector<Hit> find(const BlockText& document, const Cancel* cancel) const {
    std::vector<Hit> out;
    std::vector<uint32_t> last(count_, none);  // block where it was found last
    const auto note = [&](uint32_t feature, uint32_t block) {
      if (std::exchange(last[feature], block) != block) out.push_back({feature, block});
    };
    const auto scan = [&](std::size_t begin, std::size_t end, uint32_t block_tokens) {
      uint32_t before = none;
      for (std::size_t t = begin; t < end; ++t) {
        if (t % 65536 == 0 && is_cancelled(cancel)) return;
        const auto token = static_cast<std::size_t>(document.tokens[t]);
        const uint32_t feature = token < of_token_.size() ? of_token_[token] : none;
        if (feature != none) {
          const uint32_t block = block_tokens > 0 ? static_cast<uint32_t>(t / block_tokens) : 0;
          note(feature, block);
          if (before != none)
            if (const auto pair = pairs_.find(key(before, feature)); pair != pairs_.end())
              note(pair->second, block);
        }
        before = feature;
      }
    };
    const auto all = document.tokens.size();
    const std::size_t sealed = std::min<uint64_t>(document.sealed, all),
                      first = std::min<uint64_t>(document.first, all);
    scan(std::max(first, sealed), all, 0);
    scan(std::min(first, sealed), sealed, document.block_tokens);
    return out;
  }

 private:
  static constexpr uint32_t none = UINT32_MAX;
  static uint64_t key(uint32_t first, uint32_t second) { return uint64_t{first} << 32 | second; }

  void add_spellings(const Tokenizer& tokenizer, const std::string& text, uint32_t feature) {
    std::string first = text, all = text;
    for (char& c : all) c = capital_letter(c);
    first[0] = all[0];
    Array<Token> tokens;
    for (const std::string& spelled : {text, first, all})
      for (const char* before : {"", " "}) {
        tokens.clear();
        if (!tokenizer.encode(before + spelled, false, false, &tokens).ok() || tokens.size() != 1)
          continue;
        uint32_t& of = of_token_[static_cast<std::size_t>(tokens[0])];
        if (of == none) of = feature;
      }
  }

  uint32_t count_ = 0;
  std::vector<uint32_t> of_token_;  // [vocabulary]
  std::unordered_map<uint64_t, uint32_t> pairs_;
};

// c of a document. found: its hits.
std::vector<float> covered(std::span<const Hit> found, std::span<const float> idf, uint32_t blocks,
                           float all) {
  std::vector<float> out(blocks);
  std::vector<uint32_t> last(idf.size(), UINT32_MAX);
  for (const Hit& hit : found) {
    if (hit.block >= blocks) continue;
    const float part = idf[hit.feature] / all;
    out[hit.block] += part;
    if (hit.block > 0 && std::exchange(last[hit.feature], hit.block) != hit.block - 1)
      out[hit.block - 1] += part;
    last[hit.feature] = hit.block;
  }
  return out;
}

}  // namespace

Status find_overlap(const Tokenizer& tokenizer, std::span<const Token> question,
                    std::span<const BlockText> documents, const Cancel* cancel, ThreadPool* pool,
                    std::vector<std::vector<float>>* c) {
  const Features features(tokenizer, question.last(std::min(question.size(), most_tokens)));
  const auto count = static_cast<uint32_t>(documents.size());
  std::vector<std::vector<Hit>> hits(count);
  pool->run(count, [&](uint32_t d, uint32_t) { hits[d] = features.find(documents[d], cancel); });
  if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
  std::vector<float> idf(features.count());
  float blocks = 1, all = 0;
  for (uint32_t d = 0; d < count; ++d) {
    blocks += static_cast<float>(documents[d].blocks);
    for (const Hit& hit : hits[d]) ++idf[hit.feature];
  }
  for (float& x : idf) all += x = std::max(0.0f, std::log(blocks / (x + 0.5f)));
  c->assign(count, {});
  pool->run(count, [&](uint32_t d, uint32_t) {
    (*c)[d] = covered(hits[d], idf, documents[d].blocks, all > 0 ? all : 1);
  });
  return {};
}

}  // namespace kvasir
