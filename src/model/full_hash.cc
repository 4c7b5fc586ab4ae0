#include "model/full_hash.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "base/checksum.h"
#include "base/little_endian.h"
#include "base/memory.h"
#include "cachefile/atomic_file.h"
#include "os/signals.h"

namespace kvasir {
namespace {

constexpr std::size_t read_bytes = std::size_t{1} << 20;
constexpr uint64_t settled_ns = 2'000'000'000;  // the coarsest times of a file system in use, FAT's
// The thread rests so many times as long as it worked: a quarter of a core's time, and of a disk's,
// at most.
constexpr uint64_t rest = 3;

// The records' file: magic, records, checksum of both. Integers are little-endian.
constexpr uint8_t magic[8] = {'K', 'V', 'H', 'A', 'S', 'H', '\n', 1};
constexpr std::size_t record_bytes = 5 * 8 + 16;
constexpr uint64_t records_seed = 0x6861736865735F31;

struct Record {
  os::FileIdentity identity;
  HashBytes hash;
};

// Nothing where the file is missing, damaged or of another version: then they are computed again.
std::vector<Record> read_records(const std::string& path) {
  os::File file;
  uint64_t bytes = 0;
  if (!os::File::open_read(path, &file).ok() || !file.size(&bytes).ok()) return {};
  constexpr std::size_t frame = sizeof magic + 8;
  if (bytes < frame || bytes > frame + max_hash_records * record_bytes ||
      (bytes - frame) % record_bytes != 0)
    return {};
  std::vector<uint8_t> content(static_cast<std::size_t>(bytes));
  if (!file.read(0, content.data(), content.size()).ok()) return {};
  const std::size_t end = content.size() - 8;
  if (std::memcmp(content.data(), magic, sizeof magic) != 0 ||
      load64(content.data() + end) != checksum(content.data(), end, records_seed))
    return {};
  std::vector<Record> records;
  for (const uint8_t* p = content.data() + sizeof magic; p != content.data() + end;
       p += record_bytes) {
    Record& r = records.emplace_back();
    r.identity = {load64(p), load64(p + 8), load64(p + 16), load64(p + 24), load64(p + 32)};
    std::copy_n(p + 40, r.hash.size(), r.hash.begin());
  }
  return records;
}

Status write_records(const std::string& path, const std::vector<Record>& records) {
  std::vector<uint8_t> content(sizeof magic + records.size() * record_bytes + 8);
  std::memcpy(content.data(), magic, sizeof magic);
  uint8_t* p = content.data() + sizeof magic;
  for (const Record& r : records) {
    const uint64_t fields[] = {r.identity.device, r.identity.number, r.identity.bytes,
                               r.identity.modified_ns, r.identity.changed_ns};
    for (const uint64_t field : fields) store64(p, field), p += 8;
    p = std::copy(r.hash.begin(), r.hash.end(), p);
  }
  store64(p, checksum(content.data(), content.size() - 8, records_seed));
  AtomicFile file;
  RETURN_IF_ERROR(file.create(path));
  RETURN_IF_ERROR(file.file().write(0, content.data(), content.size()));
  return file.finish();
}

std::string records_path(const std::string& folder) { return folder + "/" + hash_records_name; }

// What another process keeps at the same time may get lost: it is computed again.
Status keep_record(const std::string& folder, const Record& record) {
  RETURN_IF_ERROR(os::make_folder(folder));
  std::vector<Record> records = read_records(records_path(folder));
  std::erase_if(records, [&](const Record& r) {
    return r.identity.device == record.identity.device &&
           r.identity.number == record.identity.number;
  });
  if (records.size() >= max_hash_records)
    records.erase(records.begin(), records.end() - (max_hash_records - 1));
  records.push_back(record);
  return write_records(records_path(folder), records);
}

uint64_t since_1970_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

Status FullHash::open(os::File file, const std::string& folder, std::unique_ptr<FullHash>* out) {
  std::unique_ptr<FullHash> made(new FullHash);
  RETURN_IF_ERROR(file.identity(&made->identity_));
  made->file_ = std::move(file);
  made->folder_ = folder;
  if (!folder.empty()) {
    for (const Record& r : read_records(records_path(folder)))
      if (r.identity == made->identity_) made->publish(r.hash, false);
  }
  *out = std::move(made);
  return {};
}

FullHash::~FullHash() { stop(); }

bool FullHash::get(HashBytes* out) const {
  if (!known_.load(std::memory_order_acquire)) return false;
  *out = hash_;
  return true;
}

void FullHash::begin() {
  if (known_.load(std::memory_order_acquire)) return;
  worker_ = std::make_unique<Worker>();
  worker_->process = os::process_id();
  const os::SignalsHeld held;
  try {
    worker_->thread = std::thread([this, worker = worker_.get()] { run(worker); });
  } catch (const std::system_error&) {
    worker_.reset();  // the system has no thread to give: the hash stays unknown until compute()
  }
}

void FullHash::stop() {
  if (!worker_) return;
  if (worker_->process != os::process_id()) {
    (void)worker_.release();
    return;
  }
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->stop = true;
  }
  worker_->stopping.notify_all();
  worker_->thread.join();
  worker_.reset();
}

bool FullHash::Worker::wait(uint64_t ns) {
  std::unique_lock lock(mutex);
  return !stopping.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return stop; });
}

bool FullHash::is_settled() const {
  const uint64_t now = since_1970_ns(),
                 newest = std::max(identity_.modified_ns, identity_.changed_ns);
  return newest <= now && now - newest >= settled_ns;
}

void FullHash::run(Worker* worker) {
  os::name_this_thread("kvasir-hash");
  os::lower_this_thread();
  try {
    if (!is_settled() && !worker->wait(settled_ns)) return;
    const bool keep = is_settled();
    HashBytes hash;
    if (this->hash([&](uint64_t, uint64_t took_ns) { return worker->wait(took_ns * rest); }, &hash)
            .ok())
      publish(hash, keep);
  } catch (const std::bad_alloc&) {
    // It stays unknown.
  }
}

Status FullHash::compute(const Cancel* cancel, Progress* progress) {
  const std::lock_guard lock(computing_);
  if (known_.load(std::memory_order_acquire)) return {};
  stop();
  if (known_.load(std::memory_order_acquire)) return {};  // by the thread, at last
  const bool keep = is_settled();
  HashBytes hash;
  Status s = this->hash(
      [&](uint64_t done, uint64_t) {
        return !is_cancelled(cancel) && progress->update(done, identity_.bytes);
      },
      &hash);
  if (s.ok()) publish(hash, keep);
  return s;
}

Status FullHash::hash(const Step& step, HashBytes* out) const {
  const Buffer<std::byte> buffer = make_buffer<std::byte>(read_bytes);
  RunningChecksum halves[] = {RunningChecksum(0), RunningChecksum(1)};
  for (uint64_t at = 0; at < identity_.bytes;) {
    const uint64_t begin = os::now_ns();
    const auto size =
        static_cast<std::size_t>(std::min<uint64_t>(read_bytes, identity_.bytes - at));
    RETURN_IF_ERROR(file_.read(at, buffer.get(), size));
    for (RunningChecksum& half : halves) half.add(buffer.get(), size);
    at += size;
    if (!step(at, os::now_ns() - begin))
      return Status::error(Code::cancelled, "cancelled; the hash of the model stays unknown");
  }
  os::FileIdentity after;
  RETURN_IF_ERROR(file_.identity(&after));
  if (after != identity_)
    return Status::error(Code::corrupt, "%s was changed while it was open", file_.path().c_str());
  for (std::size_t i = 0; i < 2; ++i) store64(out->data() + 8 * i, halves[i].value());
  return {};
}

void FullHash::publish(const HashBytes& hash, bool keep) {
  hash_ = hash;
  known_.store(true, std::memory_order_release);
  if (keep && !folder_.empty())
    (void)keep_record(folder_, {identity_, hash});  // a folder that cannot be written is no failure
}

}  // namespace kvasir
