#include "cachefile/section_rules.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/magnitude.h"
#include "cachefile/format_fields.h"

namespace kvasir {

using format::SectionKind;

namespace {

std::span<const float> floats_in(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

template <class T>
T number_at(std::span<const std::byte> bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

const char* wrong_floats(std::span<const float> values) {
  return all_finite(values) ? nullptr : "holds a number that is not finite";
}

const char* wrong_state_floats(std::span<const float> values) {
  if (all_below(values, max_state_number)) return nullptr;
  const char* what = wrong_floats(values);
  return what ? what : "holds a number of 1e30 or more";
}

const char* wrong_count(uint64_t count, const SectionFacts& facts) {
  return count <= facts.tokens ? nullptr : "counts more tokens than the sequence has";
}

const char* wrong_observed(uint64_t end, uint64_t pages, const SectionFacts& facts) {
  const bool fits = end > 0 && end <= facts.tokens && pages <= end / facts.page_tokens;
  return fits ? nullptr : "belongs to another sequence";
}

// Pairs of a token, ascending, and its bytes. UINT64_MAX bytes end the list.
static const char* wrong_spelling(std::span<const std::byte> bytes, const SectionFacts& facts) {
  constexpr std::size_t pair = 2 * sizeof(uint64_t);
  if (bytes.size() % pair) return "ends within a pair";
  if (bytes.size() / pair > max_spelling_pairs) return "has too many pairs";
  for (std::size_t at = 0; at < bytes.size(); at += pair) {
    const auto token = number_at<uint64_t>(bytes, at), size = number_at<uint64_t>(bytes, at + 8);
    if (token >= facts.tokens || (at > 0 && token <= number_at<uint64_t>(bytes, at - pair)))
      return "names tokens that do not ascend, or that the sequence does not have";
    const bool last = at + pair == bytes.size();
    if (size > UINT32_MAX && !(last && size == UINT64_MAX)) return "has a token of too many bytes";
  }
  return nullptr;
}

// An entry of `documents`, or its path.
static const char* wrong_document(std::span<const std::byte> entry, std::string_view path,
                                  bool has_scores) {
  const auto field = [](uint64_t at) { return at - format::documents_head_bytes; };
  const auto flags = number_at<uint32_t>(entry, field(format::documents_at("flags")));
  const auto score = number_at<float>(entry, field(format::documents_at("score")));
  if (flags & ~(format::document_is_candidate | format::document_is_chosen) ||
      number_at<uint32_t>(entry, field(format::documents_at("reserved entry"))) != 0)
    return "has an unknown flag of a document";
  const bool is_scored = has_scores && (flags & format::document_is_candidate);
  if (is_scored ? !(score >= 0 && score <= 1) : !(score == -1.0f)) return "has an impossible score";
  if (number_at<uint64_t>(entry, field(format::documents_at("tokens"))) == 0)
    return "has a document without tokens";
  const auto bad = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
  if (path.front() == '/' || std::any_of(path.begin(), path.end(), bad))
    return "has a path that begins with a slash or has a control character";
  return nullptr;
}

const char* wrong_documents(std::span<const std::byte> bytes, uint64_t tokens) {
  constexpr uint64_t head = format::documents_head_bytes, each = format::document_entry_bytes;
  if (bytes.size() < head) return "is too short";
  const uint64_t count = number_at<uint32_t>(bytes, format::documents_at("documents"));
  const auto scores = number_at<uint32_t>(bytes, format::documents_at("scores"));
  if (count == 0 || count > (bytes.size() - head) / each)
    return "has another number of documents than it says";
  if (scores & ~format::documents_have_scores ||
      number_at<uint32_t>(bytes, format::documents_at("reserved")) != 0)
    return "has an unknown flag";
  uint64_t paths = head + count * each;  // where the next path begins
  uint32_t all_flags = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const auto entry = bytes.subspan(head + i * each, each);
    const uint64_t size = number_at<uint32_t>(entry, format::documents_at("path bytes") - head);
    if (size == 0 || size > format::max_document_path || size > bytes.size() - paths)
      return "has a path of an impossible size";
    const std::string_view path(reinterpret_cast<const char*>(bytes.data() + paths), size);
    if (const char* wrong = wrong_document(entry, path, scores != 0)) return wrong;
    all_flags |= number_at<uint32_t>(entry, format::documents_at("flags") - head);
    paths += size;
  }
  if (paths != bytes.size()) return "has bytes after its paths";
  if (!(all_flags & format::document_is_candidate)) return "has no candidate";
  return tokens == 0 || (all_flags & format::document_is_chosen)
             ? nullptr
             : "has no document that the sequence attends";
}

const char* wrong_section(SectionKind kind, std::span<const std::byte> bytes,
                          const SectionFacts& facts) {
  if (bytes.empty()) return nullptr;
  switch (kind) {
    case SectionKind::centre:
    case SectionKind::sinks:
    case SectionKind::window:
    case SectionKind::windows_centre:
    case SectionKind::windows_rows:
    case SectionKind::logits:
    case SectionKind::errors:
    case SectionKind::queries:
      return wrong_floats(floats_in(bytes));
    case SectionKind::tokens: {
      const auto is_token = [&](int32_t t) {
        return t >= 0 && static_cast<uint32_t>(t) < facts.vocabulary;
      };
      const auto* tokens = reinterpret_cast<const int32_t*>(bytes.data());
      const bool all = std::all_of(tokens, tokens + bytes.size() / sizeof *tokens, is_token);
      return all ? nullptr : "holds a token that the model does not have";
    }
    case SectionKind::observed: {
      if (bytes.size() < format::observed_head_bytes) return "is too short";
      const auto end = number_at<uint64_t>(bytes, 0), pages = number_at<uint64_t>(bytes, 8);
      if (const char* wrong = wrong_observed(end, pages, facts)) return wrong;
      return wrong_floats(floats_in(bytes.subspan(format::observed_head_bytes)));
    }
    case SectionKind::sparse:
    case SectionKind::read:
      return bytes.size() == sizeof(uint64_t) ? wrong_count(number_at<uint64_t>(bytes, 0), facts)
                                              : "is too short";
    case SectionKind::spelling:
      return wrong_spelling(bytes, facts);
    case SectionKind::documents:
      return wrong_documents(bytes, facts.tokens);
    default:
      return nullptr;
  }
}

const char* wrong_sketch(uint32_t built, uint32_t covered, uint32_t sealed) {
  return covered == sealed && built > 0 && built <= sealed ? nullptr
                                                           : "has another number of pages";
}

// A block is decided when all its tokens are sealed. Undecided tokens are in the window or in the
// last block.
const char* wrong_representatives(uint64_t blocks, uint64_t undecided, uint64_t tokens,
                                  uint64_t window_count) {
  const bool fits = blocks * representatives_block_tokens + undecided == tokens &&
                    undecided < window_count + representatives_block_tokens;
  return fits ? nullptr : "is of another number of tokens";
}

const char* wrong_index(const IndexFacts& i, SectionKind kind, uint32_t page_tokens,
                        uint64_t sealed, uint32_t group) {
  if (i.first_token != page_tokens || i.first_token >= i.tokens || i.valid <= i.first_token ||
      i.valid > i.tokens || i.valid > sealed || i.valid % page_tokens != 0)
    return "is of other tokens";
  if (i.built <= i.first_token || i.built > i.tokens ||
      (i.graphs != 1 && (i.graphs != group || kind != SectionKind::ood)))
    return "is of other tokens or heads";
  return nullptr;
}

}  // namespace kvasir
