#include "session/saved_checkpoints.h"

#include <algorithm>

#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "session/saved_states.h"
#include "session/saved_windows.h"

namespace kvasir {

using namespace format;

Status prefix_serves(const CachePeek& file, const StoreShape& windows, const ModelConfig& config,
                     uint64_t tokens, bool* out) {
  *out = true;
  if (windows.layers == 0 && config.recurrent_layers == 0) return {};
  SavedSequence state;
  RETURN_IF_ERROR(read_saved(file, &state));
  if (state.page_tokens == 0 || state.tokens < tokens)
    return Status::error(Code::corrupt, "%s: section 'state' has fewer tokens than its document",
                         file.path().c_str());
  SavedWindows saved;
  SavedStates states;
  RETURN_IF_ERROR(check_windows(file, windows, state, &saved));
  RETURN_IF_ERROR(check_states(file, config, state, &states));
  for (uint64_t point = state.kept_of(tokens), before = point + 1; point != before;) {
    before = point;
    if (windows.layers > 0) point = saved.resume_point(windows, state, point);
    if (config.recurrent_layers > 0) {
      const auto behind = std::upper_bound(states.begin(), states.end(), point);
      point = behind == states.begin() ? 0 : *(behind - 1);
    }
    *out = point > 0;
  }
  return {};
}

// Appends `count` numbers of a section, from byte `at` on, of `bytes` bytes that are read.
static Status read_tokens(const CachePeek& file, SectionKind kind, uint64_t bytes,
                          uint64_t count_at, uint64_t at, std::vector<uint64_t>* out) {
  Array<std::byte> head;
  RETURN_IF_ERROR(file.read(kind, bytes, &head));
  if (head.size() < bytes)
    return Status::error(Code::corrupt, "%s: section '%s': no head", file.path().c_str(),
                         name_of(kind));
  const auto* data = reinterpret_cast<const uint8_t*>(head.data());
  const uint32_t count = std::min(load32(data + count_at), max_saved_checkpoints);
  for (uint32_t i = 0; i < count; ++i) out->push_back(load64(data + at + 8 * uint64_t{i}));
  return {};
}

// Appends the mark of a section `windows` of version 1.
static Status read_mark(const CachePeek& file, std::vector<uint64_t>* out) {
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::windows, windows_1_bytes, &bytes));
  if (bytes.size() < windows_1_bytes)
    return Status::error(Code::corrupt, "%s: section 'windows': no head", file.path().c_str());
  out->push_back(load64(reinterpret_cast<const uint8_t*>(bytes.data()) + windows_1_at("mark")));
  return {};
}

Status list_checkpoints(const CachePeek& file, std::vector<uint64_t>* out) {
  out->clear();
  if (file.find(SectionKind::recurrent))
    RETURN_IF_ERROR(read_tokens(file, SectionKind::recurrent, recurrent_head_bytes,
                                recurrent_at("states"), recurrent_at("tokens of the first state"),
                                out));
  if (const CachePeek::Section* windows = file.find(SectionKind::windows)) {
    if (windows->version == windows_section_version)
      RETURN_IF_ERROR(read_tokens(file, SectionKind::windows, windows_bytes,
                                  windows_at("checkpoints"),
                                  windows_at("tokens of the first checkpoint"), out));
    else if (windows->version == 1) RETURN_IF_ERROR(read_mark(file, out));
  }
  std::erase_if(*out,
                [&](uint64_t tokens) { return tokens == 0 || tokens >= file.identity().tokens; });
  std::sort(out->begin(), out->end());
  out->erase(std::unique(out->begin(), out->end()), out->end());
  if (out->size() > max_saved_checkpoints) out->resize(max_saved_checkpoints);
  return {};
}

}  // namespace kvasir
