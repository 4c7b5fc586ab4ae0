#include "session/saved_states.h"

#include <algorithm>
#include <array>

#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/section_rules.h"

namespace kvasir {

using namespace format;

namespace {

using Head = std::array<uint8_t, recurrent_head_bytes>;

Head encode(const RecurrentState& states) {
  Head head{};
  store32(head.data() + recurrent_at("layers"), states.layers());
  store32(head.data() + recurrent_at("states"), static_cast<uint32_t>(states.saved()));
  store64(head.data() + recurrent_at("numbers of a layer"), states.layer_size());
  for (std::size_t i = 0; i < states.saved(); ++i)
    store64(head.data() + recurrent_at("tokens of the first state") + 8 * i, states.saved_at(i));
  return head;
}

// Reads a file's checkpoints.
class FileStates final : public StateSource {
 public:
  explicit FileStates(std::shared_ptr<const CacheFile> file) : file_(std::move(file)) {}
  Status read(std::size_t number, std::size_t size, const Cancel* cancel,
              float* out) const override {
    return copy_floats(
        *file_, section(), offset_of(number, size), 1, size, nullptr, cancel,
        [&](uint64_t) { return out; }, wrong_state_floats);
  }
  Status read(std::size_t number, std::size_t size, ThreadPool* pool, const Cancel* cancel,
              std::shared_ptr<const float[]>* out) const {
    return read_floats(*file_, section(), offset_of(number, size), size, pool, cancel, out,
                       wrong_state_floats);
  }

 private:
  const CacheFile::Section& section() const { return *file_->find(SectionKind::recurrent); }
  static uint64_t offset_of(std::size_t number, std::size_t size) {
    return recurrent_head_bytes + uint64_t{number} * size * sizeof(float);
  }

  std::shared_ptr<const CacheFile> file_;
};

// Returns the first contradiction, or null.
const char* wrong_head(const Head& head, const ModelConfig& config, const SavedSequence& state,
                       SavedStates* out) {
  const uint32_t states = load32(head.data() + recurrent_at("states"));
  if (load32(head.data() + recurrent_at("layers")) != config.recurrent_layers ||
      load64(head.data() + recurrent_at("numbers of a layer")) != config.recurrent.state_size())
    return "states of another shape";
  if (states > max_saved_states) return "too many states";
  if ((states == 0) != (state.tokens == 0)) return "no state of the sequence's end";
  SavedStates tokens(states);
  for (uint32_t i = 0; i < states; ++i) {
    tokens[i] = load64(head.data() + recurrent_at("tokens of the first state") + 8 * i);
    if (tokens[i] == 0 || (i > 0 && tokens[i] <= tokens[i - 1]))
      return "states whose tokens do not ascend";
  }
  for (uint32_t i = states; i < max_saved_states; ++i)
    if (load64(head.data() + recurrent_at("tokens of the first state") + 8 * i) != 0)
      return "more tokens than states";
  if (states > 0 && tokens.back() != state.tokens) return "other tokens than the sequence";
  if (find_used_reserve(recurrent_fields, head.data())) return "reserved bytes that are not zero";
  *out = std::move(tokens);
  return nullptr;
}

}  // namespace

uint64_t states_section_bytes(const RecurrentState& states) {
  return recurrent_head_bytes + states.saved() * states.size() * sizeof(float);
}

Status write_states(const RecurrentState& states, const Cancel* cancel,
                    const std::function<Status(const void* data, std::size_t size)>& write) {
  const Head head = encode(states);
  RETURN_IF_ERROR(write(head.data(), head.size()));
  Array<float> room;
  for (std::size_t i = 0; i < states.saved(); ++i) {
    const float* floats = nullptr;
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; no file was changed");
    RETURN_IF_ERROR(states.read(i, cancel, &room, &floats));
    RETURN_IF_ERROR(write(floats, states.size() * sizeof(float)));
  }
  return {};
}

Status find_wrong_state(const RecurrentState& states, const Cancel* cancel, const char** what) {
  Array<float> room;
  *what = nullptr;
  for (std::size_t i = 0; i < states.saved() && !*what; ++i) {
    const float* floats = nullptr;
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; no file was changed");
    RETURN_IF_ERROR(states.read(i, cancel, &room, &floats));
    *what = wrong_state_floats({floats, states.size()});
  }
  return {};
}

Status check_states(const CachePeek& file, const ModelConfig& config, const SavedSequence& state,
                    SavedStates* out) {
  out->clear();
  const auto refused = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'recurrent': %s; nothing was loaded",
                         file.path().c_str(), what);
  };
  const CachePeek::Section* section = file.find(SectionKind::recurrent);
  if (config.recurrent_layers == 0)
    return section ? refused("states of a model without recurrent layers") : Status();
  Array<std::byte> bytes;
  Head head;
  RETURN_IF_ERROR(file.read(SectionKind::recurrent, head.size(), &bytes));
  if (bytes.size() < head.size()) return refused("no head");
  std::copy_n(reinterpret_cast<const uint8_t*>(bytes.data()), head.size(), head.data());
  if (const char* what = wrong_head(head, config, state, out)) return refused(what);
  return expect_section(
      file, SectionKind::recurrent,
      recurrent_head_bytes + uint64_t{out->size()} * config.state_size() * sizeof(float));
}

Status summarise_states(const CachePeek& file, StatesSummary* out) {
  *out = {};
  const CachePeek::Section* section = file.find(SectionKind::recurrent);
  if (!section) return {};
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::recurrent, recurrent_head_bytes, &bytes));
  if (bytes.size() < recurrent_head_bytes)
    return Status::error(Code::corrupt, "%s: section 'recurrent': no head", file.path().c_str());
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  out->layers = load32(at + recurrent_at("layers"));
  out->states = load32(at + recurrent_at("states"));
  out->bytes = section->bytes - recurrent_head_bytes;
  return {};
}

Status load_states(const std::shared_ptr<const CacheFile>& file, const SavedStates& saved,
                   const WantedCheckpoints& wanted, ThreadPool* pool, const Cancel* cancel,
                   RecurrentState* out) {
  if (saved.empty()) return {};
  const auto source = std::make_shared<FileStates>(file);
  std::shared_ptr<const float[]> end;
  RETURN_IF_ERROR(source->read(saved.size() - 1, out->size(), pool, cancel, &end));
  out->limit_checkpoints(wanted.limits);
  out->restore(saved, wanted.tokens, std::move(end), source);
  return {};
}

}  // namespace kvasir
