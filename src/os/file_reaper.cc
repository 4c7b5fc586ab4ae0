#include "os/file_reaper.h"

#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "os/thread.h"

namespace kvasir::os {

constexpr uint64_t small_file = uint64_t{16} << 20;  // bytes: under a millisecond to free

struct FileReaper::State {
  std::mutex mutex;
  std::vector<File> files;  // to close
  bool running = false;     // the thread takes files until none are left
  Thread thread;

  static void run(void* context) {
    State& state = *static_cast<State*>(context);
    for (;;) {
      std::vector<File> batch;
      {
        const std::lock_guard lock(state.mutex);
        batch.swap(state.files);
        if (batch.empty()) {
          state.running = false;
          return;
        }
      }
    }
  }
};

FileReaper::FileReaper() : state_(std::make_unique<State>()) {}
FileReaper::~FileReaper() = default;  // the thread is joined before the state is destroyed

void FileReaper::close(File file) noexcept {
  uint64_t size = 0;
  if (!file.size(&size).ok() || size < small_file) return;
  const std::lock_guard lock(state_->mutex);
  try {
    state_->files.push_back(std::move(file));
    if (state_->running) return;
    state_->thread = Thread();  // joins the previous one, which has ended or is about to
    state_->running = Thread::start(State::run, state_.get(), &state_->thread).ok();
  } catch (const std::bad_alloc&) {
  }
  if (!state_->running) state_->files.clear();
}

}  // namespace kvasir::os
