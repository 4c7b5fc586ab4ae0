// The hash of a model's whole file; the fingerprint only samples it. The hash distinguishes files
// of equal samples: an unfinished download, or weights that were changed in part.
//
// Reading a whole model takes long. The hash is computed once, by a thread of low priority or on
// demand. A folder of the caller keeps it with the file's identity (os::FileIdentity), as long as
// the file has that identity. It guards against damage and mistakes, not against an adversary.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "os/os.h"

namespace kvasir {

using HashBytes = std::array<uint8_t, 16>;

// The folder's file of known hashes.
constexpr const char* hash_records_name = "model-hashes";
constexpr std::size_t max_hash_records = 256;

class FullHash {
 public:
  // `folder` keeps the hash; "": nothing does. A folder that cannot be read has no hash.
  static Status open(os::File file, const std::string& folder, std::unique_ptr<FullHash>* out);
  // The thread ends within a read of 1 MiB.
  ~FullHash();
  FullHash(const FullHash&) = delete;
  FullHash& operator=(const FullHash&) = delete;

  // Computes it in a thread of this object, unless it is known. A failure to start leaves it
  // unknown.
  void begin();
  // Computes it on the calling thread and keeps it, unless it is known. A folder that cannot be
  // written is no failure. Code::cancelled, Code::io, Code::corrupt (the file was changed
  // meanwhile). Any thread, one at a time.
  Status compute(const Cancel* cancel, Progress* progress);
  // Code::corrupt where the file was cut since it was opened.
  Status check_size() const { return file_.check_size(identity_.bytes); }
  // False while it is unknown. Any thread.
  bool get(HashBytes* out) const;

 private:
  // Returns false to stop. `took_ns`: how long the last read and its hash took.
  using Step = std::function<bool(uint64_t done, uint64_t took_ns)>;
  // On the heap: the child of a fork() must leave it as it is. It has no such thread, and perhaps
  // locks that no thread unlocks.
  struct Worker {
    std::mutex mutex;  // guards stop
    std::condition_variable stopping;
    bool stop = false;
    uint64_t process = 0;
    std::thread thread;
    bool wait(uint64_t ns);  // false when the thread is to end
  };
  FullHash() = default;
  void run(Worker* worker);
  void stop();
  Status hash(const Step& step, HashBytes* out) const;
  void publish(const HashBytes& hash, bool keep);
  // The file's times are so old that a later write will change them.
  bool is_settled() const;

  os::File file_;
  os::FileIdentity identity_;
  std::string folder_;
  std::atomic<bool> known_{false};
  HashBytes hash_{};  // written before known_

  std::mutex computing_;  // of compute()
  std::unique_ptr<Worker> worker_;
};

}  // namespace kvasir
