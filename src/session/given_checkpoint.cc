#include "session/given_checkpoint.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "base/checked.h"

namespace kvasir {

namespace {

constexpr const char* layout_names[part_layouts] = {"keys", "values", "inputs",
                                                    "key-value matrices", "value-key matrices"};
constexpr uint32_t rows_together = 256;  // of windows, in a step

const char* layout_name(PartLayout layout) { return layout_names[static_cast<uint32_t>(layout)]; }

bool has_window(const LayerConfig& layer) {
  const bool attends = layer.mixer == MixerKind::attention || layer.mixer == MixerKind::both;
  return attends && layer.window > 0 && layer.writes_kv;
}

bool has_state(const LayerConfig& layer) {
  return layer.mixer == MixerKind::recurrent || layer.mixer == MixerKind::both;
}

Status check_cancel(const Cancel* cancel) {
  return is_cancelled(cancel) ? Status::error(Code::cancelled, "cancelled") : Status();
}

// Whether the layer keeps a part of this layout.
bool keeps_part(const ModelConfig& config, uint32_t layer, PartLayout layout) {
  const LayerConfig& l = config.layer(layer);
  const RecurrentKind kind = has_state(l) ? config.recurrent.kind : RecurrentKind::none;
  switch (layout) {
    case PartLayout::keys:
    case PartLayout::values:
      return has_window(l);
    case PartLayout::inputs:
      return kind != RecurrentKind::none;
    case PartLayout::key_value:
      return kind == RecurrentKind::delta_net;
    case PartLayout::value_key:
      return kind == RecurrentKind::mamba;
  }
  return false;
}

}  // namespace

Status GivenCheckpoint::check(const ModelConfig& config, const char* name, uint64_t tokens,
                              std::span<const GivenPart> parts, GivenCheckpoint* out) {
  GivenCheckpoint given;
  given.config_ = &config, given.name_ = name, given.tokens_ = tokens;
  given.parts_.assign(std::size_t{config.depth()} * part_layouts, nullptr);
  if (tokens == 0)
    return Status::error(Code::bad_argument, "%s->tokens is 0: use kv_prefill_tokens", name);
  for (const GivenPart& part : parts) RETURN_IF_ERROR(given.check_part(part));
  RETURN_IF_ERROR(given.check_complete());
  *out = std::move(given);
  return {};
}

Status GivenCheckpoint::check_part(const GivenPart& part) {
  const auto refused = [&](const char* what) {
    return Status::error(Code::bad_argument, "%s: layer %u, %s: %s", name_, part.layer,
                         layout_name(part.layout), what);
  };
  if (part.layer >= config_->depth()) return refused("the model has fewer layers");
  if (!keeps_part(*config_, part.layer, part.layout)) return refused("the model's layer has none");
  const GivenPart*& place = parts_[part.layer * part_layouts + static_cast<uint32_t>(part.layout)];
  if (place) return refused("it is there twice");
  place = &part;
  const RecurrentConfig& r = config_->recurrent;
  uint64_t wanted = uint64_t{r.heads} * r.key_dim * r.value_dim;
  if (part.layout == PartLayout::inputs) wanted = r.inputs_size();
  if (part.layout == PartLayout::keys || part.layout == PartLayout::values) {
    const uint32_t width = config_->windows.kv_width();
    if (rows_ == 0) rows_ = part.count / width;
    const uint64_t needed = std::min(tokens_, config_->window - 1);
    if (rows_ < needed || rows_ > tokens_)
      return Status::error(Code::bad_argument,
                           "%s: layer %u has %" PRIu64 " rows: use %" PRIu64 " to %" PRIu64, name_,
                           part.layer, rows_, needed, tokens_);
    wanted = rows_ * width;
  }
  if (part.count == wanted) return {};
  return Status::error(Code::bad_argument, "%s: layer %u, %s: count is %" PRIu64 ", not %" PRIu64,
                       name_, part.layer, layout_name(part.layout), part.count, wanted);
}

Status GivenCheckpoint::check_complete() const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const auto layer = static_cast<uint32_t>(i / part_layouts);
    const auto layout = static_cast<PartLayout>(i % part_layouts);
    if (!parts_[i] && keeps_part(*config_, layer, layout))
      return Status::error(Code::bad_argument, "%s has no %s of layer %u", name_,
                           layout_name(layout), layer);
  }
  return {};
}

Status GivenCheckpoint::read(const GivenPart& part, std::size_t first, std::size_t count,
                             ThreadPool* pool, Array<float>* to) const {
  if (read_numbers({part.type, part.numbers, first, count}, pool, to)) return {};
  return Status::error(Code::bad_argument,
                       "%s: layer %u, %s: NaN, infinity or a magnitude over 1e30", name_,
                       part.layer, layout_name(part.layout));
}

Status GivenCheckpoint::fill(ThreadPool* pool, const Cancel* cancel, KvStore* windows) const {
  const uint64_t begin = windows->begin_at(first_row());
  const std::size_t width = config_->windows.kv_width();
  Array<float> k, v;
  for (uint64_t at = begin; at < tokens_;) {
    // Rows before the first are its copies, so that pages get no other range of numbers.
    const bool filler = at < first_row();
    const auto n = static_cast<uint32_t>(
        std::min<uint64_t>(rows_together, (filler ? first_row() : tokens_) - at));
    RETURN_IF_ERROR(windows->prepare(n, KvStore::Overlap::nothing, pool));
    for (uint32_t l = 0; l < config_->depth(); ++l) {
      if (!has_window(config_->layer(l))) continue;
      RETURN_IF_ERROR(check_cancel(cancel));
      const std::size_t row = filler ? 0 : static_cast<std::size_t>(at - first_row());
      const std::size_t count = filler ? width : n * width;
      RETURN_IF_ERROR(read(part(l, PartLayout::keys), row * width, count, pool, &k));
      RETURN_IF_ERROR(read(part(l, PartLayout::values), row * width, count, pool, &v));
      if (k.size() < n * width) k.resize(n * width);
      if (v.size() < n * width) v.resize(n * width);
      for (uint32_t i = 1; filler && i < n; ++i) {
        std::copy_n(k.data(), width, k.data() + i * width);
        std::copy_n(v.data(), width, v.data() + i * width);
      }
      windows->write(config_->layer(l).kv, n, k.data(), v.data(), pool);
    }
    windows->commit(n, cpu_kernels(), pool);
    at += n;
  }
  return {};
}

// A layer's state in the order of RecurrentState.
Status GivenCheckpoint::read_state(uint32_t layer, ThreadPool* pool, Array<float>* room,
                                   float* to) const {
  const RecurrentConfig& r = config_->recurrent;
  const std::size_t channels = r.channels, inputs = r.taps > 0 ? r.taps - 1 : 0;
  RETURN_IF_ERROR(read(part(layer, PartLayout::inputs), 0, r.inputs_size(), pool, room));
  for (std::size_t c = 0; c < channels; ++c)
    for (std::size_t i = 0; i < inputs; ++i) to[i * channels + c] = (*room)[c * inputs + i];
  if (r.kind == RecurrentKind::convolution) return {};
  const bool by_key = r.kind == RecurrentKind::delta_net;
  const std::size_t keys = r.key_dim, values = r.value_dim, size = keys * values;
  RETURN_IF_ERROR(read(part(layer, by_key ? PartLayout::key_value : PartLayout::value_key), 0,
                       r.heads * size, pool, room));
  to += r.inputs_size();
  std::fill_n(to, r.heads * r.matrix_size(), 0.0f);
  for (std::size_t h = 0; h < r.heads; ++h) {
    const float* from = room->data() + h * size;
    float* panels = to + h * r.matrix_size();
    for (std::size_t k = 0; k < keys; ++k)
      for (std::size_t v = 0; v < values; ++v)
        panels[(v / state_panel * keys + k) * state_panel + v % state_panel] =
            from[by_key ? k * values + v : v * keys + k];
  }
  return {};
}

Status GivenCheckpoint::fill(ThreadPool* pool, const Cancel* cancel, RecurrentState* states) const {
  std::shared_ptr<float[]> floats(Allocator<float>().allocate(states->size()), Deallocate());
  Array<float> room;
  for (uint32_t l = 0; l < config_->depth(); ++l) {
    if (!has_state(config_->layer(l))) continue;
    RETURN_IF_ERROR(check_cancel(cancel));
    RETURN_IF_ERROR(
        read_state(l, pool, &room, floats.get() + config_->layer(l).state * states->layer_size()));
  }
  states->restore({tokens_}, tokens_, std::move(floats), nullptr);
  return {};
}

// ours: the state of all layers.
Status GivenCheckpoint::compare_state(uint32_t layer, std::span<const float> ours, ThreadPool* pool,
                                      Difference* difference) const {
  Array<float> room, given(config_->recurrent.state_size());
  RETURN_IF_ERROR(read_state(layer, pool, &room, given.data()));
  ours = ours.subspan(config_->layer(layer).state * given.size(), given.size());
  for (std::size_t i = 0; i < given.size(); ++i) difference->add(ours[i], given[i]);
  return {};
}

Status GivenCheckpoint::compare_window(uint32_t layer, PartLayout layout, const KvStore& store,
                                       ThreadPool* pool, Difference* difference) const {
  const bool keys = layout == PartLayout::keys;
  const uint32_t heads = config_->windows.kv_heads, dim = config_->windows.head_dim,
                 stride = store.shape().page.dim, kv = config_->layer(layer).kv;
  const std::size_t width = config_->windows.kv_width(),
                    rows =
                        static_cast<std::size_t>(std::min<uint64_t>(store.window_count(), rows_)),
                    first = static_cast<std::size_t>(rows_) - rows;
  Array<float> given;
  RETURN_IF_ERROR(read(part(layer, layout), first * width, rows * width, pool, &given));
  for (uint32_t h = 0; h < heads; ++h) {
    const KvStore::Rows window = store.window(kv, h);
    const float* ours = (keys ? window.k : window.v) + (store.window_count() - rows) * stride;
    const float* centre = keys && !store.centre().empty()
                              ? store.centre().data() + (std::size_t{kv} * heads + h) * stride
                              : nullptr;
    for (std::size_t i = 0; i < rows; ++i, ours += stride)
      for (uint32_t d = 0; d < dim; ++d)
        difference->add(ours[d] + (centre ? centre[d] : 0.0f), given[i * width + h * dim + d]);
  }
  return {};
}

Status GivenCheckpoint::compare(const Computed& computed, ThreadPool* pool, const Cancel* cancel,
                                double* difference) const {
  *difference = 0;
  Array<float> room;
  const float* ours = nullptr;
  if (const RecurrentState* states = computed.states)
    RETURN_IF_ERROR(states->read(states->saved() - 1, cancel, &room, &ours));
  for (uint32_t l = 0; l < config_->depth(); ++l) {
    Difference state, keys, values;
    RETURN_IF_ERROR(check_cancel(cancel));
    if (computed.states && has_state(config_->layer(l)))
      RETURN_IF_ERROR(compare_state(l, {ours, computed.states->size()}, pool, &state));
    if (computed.windows && has_window(config_->layer(l))) {
      RETURN_IF_ERROR(compare_window(l, PartLayout::keys, *computed.windows, pool, &keys));
      RETURN_IF_ERROR(compare_window(l, PartLayout::values, *computed.windows, pool, &values));
    }
    *difference = std::max({*difference, state.relative(), keys.relative(), values.relative()});
  }
  return {};
}

}  // namespace kvasir
