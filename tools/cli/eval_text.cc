#include "eval_text.h"

#include <algorithm>
#include <cmath>

#include "failure.h"
#include "number_text.h"

namespace tool {
namespace {

// bytes; beyond them a sentence ends at a space, or at any character
constexpr size_t long_sentence = 600, max_sentence = 2000;

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Bytes of a closing quote or bracket at a place; 0: none.
size_t closing_at(std::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  if (std::string_view("\"')]").find(text[at]) != std::string_view::npos) return 1;
  const std::string_view rest = text.substr(at, 3);
  return rest == "\xE2\x80\x9D" || rest == "\xE2\x80\x99" ? 3 : 0;
}

// The end of the sentence that begins at `begin`, and of the space after it.
size_t sentence_end(std::string_view text, size_t begin) {
  for (size_t at = begin; at < text.size(); ++at) {
    size_t after = at + 1;
    const bool stop = text[at] == '.' || text[at] == '!' || text[at] == '?';
    for (size_t size; stop && (size = closing_at(text, after)) > 0;) after += size;
    const bool space_follows = after < text.size() && is_space(text[after]);
    const size_t size = after - begin;
    const bool character_ends =
        after >= text.size() || (static_cast<unsigned char>(text[after]) & 0xC0) != 0x80;
    if (!((stop && space_follows) || (size > long_sentence && space_follows) ||
          (size > max_sentence && character_ends)))
      continue;
    while (after < text.size() && is_space(text[after])) ++after;
    return after;
  }
  return text.size();
}

std::string_view without_end_space(std::string_view text) {
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace

Haystack::Haystack(std::string text, CountTokens count)
    : text_(std::move(text)), count_(std::move(count)) {
  starts_.push_back(0);
  tokens_before_.push_back(0);
  for (size_t at = 0; at < text_.size();) {
    const size_t end = sentence_end(text_, at);
    tokens_before_.push_back(tokens_before_.back() +
                             count_(std::string_view(text_).substr(at, end - at)));
    starts_.push_back(end);
    at = end;
  }
}

size_t Haystack::end_after(size_t first, size_t tokens) const {
  const auto end = std::lower_bound(tokens_before_.begin() + static_cast<ptrdiff_t>(first),
                                    tokens_before_.end(), tokens_before_[first] + tokens);
  return std::min(static_cast<size_t>(end - tokens_before_.begin()), sentences());
}

size_t Haystack::random_start(size_t tokens, Random* random) const {
  const size_t all = tokens_before_.back();
  if (all < tokens)
    throw Failure(exit_file, "the text has " + grouped(all) + " tokens where " + grouped(tokens) +
                                 " are needed; name more texts with -f, or a shorter --length");
  const auto last = std::upper_bound(tokens_before_.begin(), tokens_before_.end(), all - tokens) -
                    tokens_before_.begin() - 1;
  return random->below(static_cast<size_t>(last) + 1);
}

// Puts each needle before the sentence that begins nearest to its depth.
static Passage assemble(const Haystack& haystack, size_t first, size_t end,
                        std::span<const Needle> needles) {
  Passage passage;
  passage.first = first;
  passage.end = end;
  const auto size = static_cast<double>(haystack.between(first, end).size());
  std::vector<std::vector<size_t>> at(end - first);  // needles before each sentence
  for (size_t i = 0; i < needles.size(); ++i) {
    size_t best = first;
    double nearest = 2;
    for (size_t s = first; s < end; ++s) {
      const double away = std::abs(static_cast<double>(haystack.between(first, s).size()) / size -
                                   needles[i].depth);
      if (away < nearest) nearest = away, best = s;
    }
    at[best - first].push_back(i);
    passage.before.push_back(best);
  }
  std::vector<size_t> starts(needles.size());
  for (size_t s = first; s < end; ++s) {
    for (const size_t i : at[s - first]) {
      starts[i] = passage.text.size();
      passage.text += needles[i].sentence + " ";
    }
    passage.text += haystack.sentence(s);
  }
  passage.text.resize(without_end_space(passage.text).size());
  for (const size_t start : starts)
    passage.depths.push_back(static_cast<double>(start) / static_cast<double>(passage.text.size()));
  return passage;
}

Passage hide(const Haystack& haystack, size_t first, size_t tokens,
             std::span<const Needle> needles) {
  size_t hidden = 0;
  for (const Needle& needle : needles) hidden += haystack.count(needle.sentence + " ");
  if (hidden * 2 > tokens)
    throw Failure(exit_usage,
                  grouped(tokens) + " tokens are too few to hide " + grouped(hidden) +
                      " tokens in them; ask for a longer --length or fewer --questions");
  size_t wanted = tokens - hidden;
  Passage best;
  size_t min_off = SIZE_MAX;
  // Sentences have fewer tokens together than one by one: the rest is added.
  for (int attempt = 0; attempt < 4; ++attempt) {
    const size_t end = std::max(haystack.end_after(first, wanted), first + 1);
    Passage passage = assemble(haystack, first, end, needles);
    const size_t size = haystack.count(passage.text);
    const size_t off = size > tokens ? size - tokens : tokens - size;
    if (off < min_off) min_off = off, best = std::move(passage);
    if (min_off * 200 <= tokens) break;
    wanted = size > tokens ? wanted - std::min(off, wanted - 1) : wanted + off;
  }
  return best;
}

}  // namespace tool
