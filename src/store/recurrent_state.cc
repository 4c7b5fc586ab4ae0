#include "store/recurrent_state.h"

#include <algorithm>
#include <utility>

#include "os/os.h"

namespace kvasir {

std::shared_ptr<float[]> RecurrentState::make() const {
  std::shared_ptr<float[]> floats(Allocator<float>().allocate(size()), Deallocate());
  os::prefer_huge_pages(floats.get(), size() * sizeof(float));
  return floats;
}

uint64_t RecurrentState::bytes() const {
  uint64_t states = uint64_t{end_.floats != nullptr} + (next_ != nullptr);
  for (const Snapshot& s : checkpoints_) states += s.floats && s.floats != end_.floats;
  return states * size() * sizeof(float);
}

// The state of the end, that of the step, that of a copy to which the sequence goes back after an
// answer, and the checkpoints.
uint64_t RecurrentState::max_bytes() const {
  return (3 + uint64_t{limits_.most}) * size() * sizeof(float);
}

void RecurrentState::prepare(uint32_t open, bool in_host) {
  next_parts_.assign(std::max(open, 1u), {});  // also of a step that failed
  if (!in_host) next_.reset();
  else if (!next_) next_ = make();
  if (end_.floats || !end_.parts.empty()) return;
  std::shared_ptr<float[]> zeros = make();
  std::fill_n(zeros.get(), size(), 0.0f);
  end_.floats = std::move(zeros);
}

void RecurrentState::commit(uint64_t n) {
  Snapshot after;
  after.tokens = end_.tokens + n;
  after.parts = std::move(next_parts_[next_parts_.size() > 1 ? n - 1 : 0]);
  after.is_whole = after.parts.empty();
  next_parts_.assign(1, {});
  const bool in_host = next_ != nullptr;
  after.floats = std::move(next_);
  std::swap(end_, after);
  // What nobody else has is the room of the next step.
  if (in_host && after.floats && is_sole(after.floats))
    next_ = std::const_pointer_cast<float[]>(after.floats);
  thin_out(end_.tokens);
}

void RecurrentState::commit_span(uint64_t n) {
  end_.tokens += n;
  thin_out(end_.tokens);
}

Status RecurrentState::read_parts(float* to) const {
  for (const auto& part : end_.parts) RETURN_IF_ERROR(part->read(to + part->at()));
  return {};
}

// Copies the parts of the end to host memory too.
Status RecurrentState::fetch() {
  if (end_.is_whole) return {};
  if (end_.floats && is_sole(end_.floats)) {
    RETURN_IF_ERROR(read_parts(std::const_pointer_cast<float[]>(end_.floats).get()));
  } else {
    std::shared_ptr<float[]> floats = make();
    if (end_.floats) std::copy_n(end_.floats.get(), size(), floats.get());
    RETURN_IF_ERROR(read_parts(floats.get()));
    end_.floats = std::move(floats);
  }
  end_.is_whole = true;
  return {};
}

// The end becomes this object's own, in host memory.
Status RecurrentState::begin_span() {
  RETURN_IF_ERROR(fetch());
  end_.parts.clear();
  if (!end_.floats || is_sole(end_.floats)) return {};
  std::shared_ptr<float[]> floats = make();
  std::copy_n(end_.floats.get(), size(), floats.get());
  end_.floats = std::move(floats);
  return {};
}

Status RecurrentState::end_chunk(uint32_t layer) {
  float* const to = std::const_pointer_cast<float[]>(end_.floats).get();
  for (const auto& part : next_parts_[0]) RETURN_IF_ERROR(part->read(to + part->at()));
  if (next_parts_[0].empty()) std::copy_n(next(layer), layer_size_, to + layer * layer_size_);
  next_parts_[0].clear();
  return {};
}

Status RecurrentState::keep() {
  if (end_.tokens == 0 || limits_.most == 0 || last_checkpoint() == end_.tokens) return {};
  RETURN_IF_ERROR(fetch());
  Snapshot kept = end_;
  kept.parts.clear();  // device memory is of the end alone
  checkpoints_.push_back(std::move(kept));
  thin_out(end_.tokens);
  return {};
}

void RecurrentState::thin_out(uint64_t end) {
  kvasir::thin_out(
      limits_, end, [](const Snapshot& s) { return s.tokens; }, &checkpoints_);
}

bool RecurrentState::outlives(const CheckpointLimits& limits, uint64_t interval) const {
  std::vector<uint64_t> kept;
  for (const Snapshot& s : checkpoints_) kept.push_back(s.tokens);
  return kvasir::outlives(limits, std::move(kept), end_.tokens, interval);
}

void RecurrentState::limit_checkpoints(const CheckpointLimits& limits) {
  limits_ = limits;
  thin_out(end_.tokens);
}

uint64_t RecurrentState::resume_point(uint64_t tokens) const {
  if (tokens >= end_.tokens) return end_.tokens;
  uint64_t found = 0;
  for (const Snapshot& s : checkpoints_)
    if (s.tokens <= tokens) found = s.tokens;
  return found;
}

Status RecurrentState::rewind(uint64_t tokens, const Cancel* cancel) {
  if (tokens == end_.tokens) return {};
  Snapshot to;
  const auto at = std::find_if(checkpoints_.begin(), checkpoints_.end(),
                               [&](const Snapshot& s) { return s.tokens >= tokens; });
  if (tokens > 0) {
    if (at == checkpoints_.end() || at->tokens != tokens)
      return Status::error(Code::internal, "no recurrent state was kept at the wanted token");
    if (!at->floats) {
      std::shared_ptr<float[]> floats = make();
      RETURN_IF_ERROR(at->source->read(at->number, size(), cancel, floats.get()));
      at->floats = std::move(floats);
    }
    to = *at;
  }
  checkpoints_.erase(tokens > 0 ? at + 1 : checkpoints_.begin(), checkpoints_.end());
  end_ = std::move(to);
  return {};
}

std::size_t RecurrentState::saved() const {
  if (end_.tokens == 0) return 0;
  return checkpoints_.size() + (last_checkpoint() == end_.tokens ? 0 : 1);
}

uint64_t RecurrentState::saved_at(std::size_t i) const {
  return i < checkpoints_.size() ? checkpoints_[i].tokens : end_.tokens;
}

Status RecurrentState::read(std::size_t i, const Cancel* cancel, Array<float>* room,
                            const float** out) const {
  const Snapshot& s = i + 1 == saved() ? end_ : checkpoints_[i];
  if (!s.is_whole) {
    room->resize(size());
    if (s.floats) std::copy_n(s.floats.get(), size(), room->data());
    *out = room->data();
    return read_parts(room->data());
  }
  if (s.floats) {
    *out = s.floats.get();
    return {};
  }
  room->resize(size());
  *out = room->data();
  return s.source->read(s.number, size(), cancel, room->data());
}

void RecurrentState::restore(const std::vector<uint64_t>& tokens, uint64_t wanted,
                             std::shared_ptr<const float[]> end,
                             std::shared_ptr<const StateSource> source) {
  std::vector<Snapshot> checkpoints;
  for (std::size_t i = 0; i + 1 < tokens.size() && tokens[i] <= wanted; ++i)
    checkpoints.push_back({tokens[i], nullptr, source, i});
  Snapshot last;
  if (!tokens.empty()) last = {tokens.back(), std::move(end), nullptr, 0};
  if (last.tokens > 0 && last.tokens <= wanted) checkpoints.push_back(last);
  checkpoints_ = std::move(checkpoints);
  end_ = std::move(last);
  next_.reset();
  thin_out(std::min(wanted, end_.tokens));
}

}  // namespace kvasir
