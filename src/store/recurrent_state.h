// The states of a sequence's recurrent layers, which stand for all tokens before the next one.
//
// A state has a fixed size and no parts that belong to tokens: a sequence cannot go back to a
// position whose state nobody kept. So this class holds the state at the end of the sequence, and
// checkpoints: states at earlier positions, from which rewind() goes on. keep() adds one; where
// there are too many, checkpoints.h says which one goes.
//
// A step is prepare(), a write of next() for every layer, commit(n). Nothing is visible before
// commit(), so a failed or cancelled step leaves the states unchanged. Copies (forks) share what is
// committed, which is never written again. Threads: layers may be written at once; otherwise one at
// a time.
//
// A step may leave layers elsewhere, in a device's memory: set_next_part() before commit(). They
// come to host memory when a checkpoint needs them, or a file that is saved. Where all layers are
// elsewhere, steps take no host memory.
//
// Of a step only the first tokens may stay. Layers elsewhere then have parts after each token; the
// others are computed again, from now(), before the commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "store/checkpoints.h"

namespace kvasir {

// Where states are read from when they are needed, a loaded file.
class StateSource {
 public:
  virtual ~StateSource() = default;
  // State `number` of the file, `size` floats. Code::corrupt names the file. Code::cancelled.
  virtual Status read(std::size_t number, std::size_t size, const Cancel* cancel,
                      float* out) const = 0;
};

// Consecutive layers of a state that are not in host memory. Immutable; several sequences may have
// it.
class StatePart {
 public:
  virtual ~StatePart() = default;
  // All floats, which are at `at` of a state of all layers. Code::device.
  virtual Status read(float* out) const = 0;
  virtual std::size_t at() const = 0;
};

class RecurrentState {
 public:
  using Parts = std::vector<std::shared_ptr<const StatePart>>;

  // layer_size: floats of a layer's state.
  RecurrentState(uint32_t layers, std::size_t layer_size, uint32_t max_checkpoints)
      : layers_(layers), layer_size_(layer_size), limits_{max_checkpoints} {}
  // A fork.
  RecurrentState(const RecurrentState& other)
      : layers_(other.layers_), layer_size_(other.layer_size_), limits_(other.limits_),
        end_(other.end_), checkpoints_(other.checkpoints_) {}
  RecurrentState(RecurrentState&&) noexcept = default;
  RecurrentState& operator=(RecurrentState&&) noexcept = default;

  uint32_t layers() const { return layers_; }
  std::size_t layer_size() const { return layer_size_; }
  std::size_t size() const { return layers_ * layer_size_; }  // floats of a state of all layers
  uint64_t tokens() const { return end_.tokens; }
  uint64_t bytes() const;  // of all states in host memory
  // That they may take in host memory, with those of a copy to which the sequence goes back. Fewer
  // where layers are elsewhere.
  uint64_t max_bytes() const;
  // The same of a sequence without checkpoints and without such a copy: before and after a step.
  uint64_t step_bytes() const { return 2 * size() * sizeof(float); }

  // Room for a state of all layers, not written. Throws std::bad_alloc.
  std::shared_ptr<float[]> make() const;
  // Makes room for a step of which all tokens stay, or, if `open` > 0, the first 1 to `open` ones.
  // in_host: the step has layers in host memory. Throws std::bad_alloc.
  void prepare(uint32_t open = 0, bool in_host = true);
  // Of a layer: the state before the step, and that after it. Layers of parts() have none here
  // unless is_whole().
  const float* now(uint32_t layer) const { return end_.floats.get() + layer * layer_size_; }
  float* next(uint32_t layer) { return next_.get() + layer * layer_size_; }
  void commit(uint64_t n);

  // A span (KvStore::begin_span) instead of a step: prepare(), begin_span(), and of each layer,
  // after each chunk, end_chunk(): the state after the chunk becomes the one before the next.
  // Afterwards commit_span(), in place of commit(). Meanwhile the object is useful for the span
  // alone, as the store is. Code::device. Throws std::bad_alloc.
  Status begin_span();
  Status end_chunk(uint32_t layer);
  void commit_span(uint64_t n);

  // Layers of the state before the step that are elsewhere, and those that the step leaves there.
  const Parts& parts() const { return end_.parts; }
  bool is_whole() const { return end_.is_whole; }
  // i: the token after which it is, where not all may stay.
  void set_next_part(std::shared_ptr<const StatePart> part, uint32_t i = 0) {
    next_parts_[i].push_back(std::move(part));
  }

  // Makes the end a checkpoint. Code::device. Throws std::bad_alloc. On failure all is unchanged.
  Status keep();
  // Whether a checkpoint here stays until the sequence has these limits and ends where they say,
  // with one more every `interval`. Throws std::bad_alloc.
  bool outlives(const CheckpointLimits& limits, uint64_t interval) const;
  std::size_t checkpoints() const { return checkpoints_.size(); }
  uint64_t checkpoint_at(std::size_t i) const { return checkpoints_[i].tokens; }  // ascending
  uint64_t last_checkpoint() const { return checkpoints_.empty() ? 0 : checkpoints_.back().tokens; }

  // Those beyond are dropped, now and after each keep() and commit.
  void limit_checkpoints(const CheckpointLimits& limits);
  // The last position <= `tokens` at which the sequence can go on after rewind(); 0: at none but
  // the beginning.
  uint64_t resume_point(uint64_t tokens) const;
  // To a resume point. Code::corrupt (of a file), Code::cancelled: all is unchanged. Throws
  // std::bad_alloc.
  Status rewind(uint64_t tokens, const Cancel* cancel = nullptr);

  // ---- persistence
  // States in order: the checkpoints before the end, then the end. None of an empty sequence.
  std::size_t saved() const;
  uint64_t saved_at(std::size_t i) const;
  // The floats of one: those in memory, or else read into *room (size()). Code::corrupt,
  // Code::cancelled, Code::device.
  Status read(std::size_t i, const Cancel* cancel, Array<float>* room, const float** out) const;
  // Puts the states at these positions (ascending; the last is the end) in place of all. `end` has
  // the floats of the last; the others are read when they are needed. wanted: a rewind to at most
  // so many tokens follows. Of more than the limit some are left out; the last one that serves
  // `wanted` stays, or that of the limits.
  void restore(const std::vector<uint64_t>& tokens, uint64_t wanted,
               std::shared_ptr<const float[]> end, std::shared_ptr<const StateSource> source);

 private:
  struct Snapshot {
    uint64_t tokens = 0;
    // null: of an empty sequence, in the source, or all in the parts
    std::shared_ptr<const float[]> floats;
    std::shared_ptr<const StateSource> source;
    std::size_t number = 0;  // in the source
    Parts parts;             // of the end
    bool is_whole = true;    // the floats have the parts' layers too
  };
  Status fetch();
  Status read_parts(float* to) const;
  void thin_out(uint64_t end);

  uint32_t layers_;
  std::size_t layer_size_;
  CheckpointLimits limits_;
  Snapshot end_;
  std::vector<Snapshot> checkpoints_;  // ascending; none is of 0 tokens
  std::shared_ptr<float[]> next_;      // of no other object; may be null
  std::vector<Parts> next_parts_ = std::vector<Parts>(1);
};

}  // namespace kvasir
