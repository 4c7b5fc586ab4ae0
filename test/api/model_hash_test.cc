// The hash of a model's whole file, and wrong files that the hash or the samples detect.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#ifdef __linux__
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

Model open_hashed(const std::string& path, const std::string& folder) {
  kv_model_options options;
  kv_init(&options, sizeof options);
  options.hash_directory = folder.empty() ? nullptr : folder.c_str();
  kv_model* model = nullptr;
  REQUIRE_OK(kv_open(path.c_str(), &options, nullptr, &model, error));
  return Model(model);
}

kv_model_info info_of(const Model& model) {
  kv_model_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_model_get_info(model.get(), &info, error));
  return info;
}

std::string hash_of(const Model& model) { return info_of(model).hash; }

void compute(const Model& model) { REQUIRE_OK(kv_model_hash(model.get(), nullptr, error)); }

// Waits for the thread. The file's times must be two seconds old before it begins.
std::string awaited_hash(const Model& model) {
  for (int i = 0; i < 6000 && hash_of(model).empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return hash_of(model);
}

void change(const std::string& path, std::streamoff at, const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(at);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(file.good());
}

std::string bytes_at(const std::string& path, std::streamoff at, std::size_t size) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(size, '\0');
  file.seekg(at);
  file.read(bytes.data(), static_cast<std::streamsize>(size));
  REQUIRE(file.good());
  return bytes;
}

// A copy of the trained model, 18 MB.
struct Copy {
  TempFolder folder;
  std::string path = folder.file("a.gguf");
  Copy() { std::filesystem::copy_file(mini_path, path); }
  std::streamoff size() const {
    return static_cast<std::streamoff>(std::filesystem::file_size(path));
  }
};

kv_status try_load(kv_model* model, const std::string& path) {
  kv_session* session = nullptr;
  const kv_status status = kv_load(model, path.c_str(), nullptr, nullptr, &session, nullptr);
  kv_session_close(session);
  return status;
}

}  // namespace

TEST_CASE("weights that no sample reads are changed, and a cache of the others is loaded") {
  Copy copy;
  const std::string cache = copy.folder.file("a.kv"), unhashed = copy.folder.file("b.kv");
  std::string fingerprint, hash;
  {
    const Model model = open_hashed(copy.path, "");
    const Session session = open_session(model.get());
    read_text(session.get(), book(2000));
    save(session.get(), unhashed);
    CHECK(hash_of(model).empty());
    compute(model);
    save(session.get(), cache);
    fingerprint = info_of(model).fingerprint, hash = hash_of(model);
    CHECK(hash.size() == 32);
  }
  // Somewhere that no sample is: at the first try or the second.
  Model changed;
  for (std::streamoff at = copy.size() / 3; !changed; at += 16384) {
    REQUIRE(at < copy.size());
    const std::string there = bytes_at(copy.path, at, 16);
    change(copy.path, at, std::string(16, '!'));
    changed = open_hashed(copy.path, "");
    if (info_of(changed).fingerprint == fingerprint) break;
    changed.reset();
    change(copy.path, at, there);
  }
  CHECK(try_load(changed.get(), cache) == KV_OK);  // not known to be another one yet
  compute(changed);
  CHECK(hash_of(changed) != hash);
  CHECK(try_load(changed.get(), cache) == KV_MODEL_MISMATCH);
  CHECK(try_load(changed.get(), unhashed) == KV_OK);
}

TEST_CASE("a hash is computed again where it is kept, or found where the file was changed") {
  Copy copy;
  const std::string folder = copy.folder.file("hashes");
  std::string hash;
  {
    const Model model = open_hashed(copy.path, folder);
    hash = awaited_hash(model);
    REQUIRE(hash.size() == 32);
  }
  CHECK(std::filesystem::file_size(folder + "/model-hashes") == 16 + 56);
  CHECK(hash_of(open_hashed(copy.path, folder)) == hash);
  const Model other = open_hashed(tiny_path, folder);  // one more in the same folder
  compute(other);
  CHECK(hash_of(open_hashed(copy.path, folder)) == hash);
  change(copy.path, copy.size() / 3, "!");
  CHECK(hash_of(open_hashed(copy.path, folder)).empty());
}

TEST_CASE("a folder that is damaged or cannot be written refuses a model") {
  Copy copy;
  const std::string folder = copy.folder.file("hashes");
  std::ofstream(copy.folder.file("file")) << "x";
  for (const std::string& wrong : {copy.folder.file("file"), copy.folder.file("missing/hashes")}) {
    const Model model = open_hashed(copy.path, wrong);
    compute(model);
    CHECK(hash_of(model).size() == 32);
  }
  std::filesystem::create_directory(folder);
  for (const std::string& content :
       {std::string(), std::string(8, 'x'), std::string(72, '\0'), std::string(1 << 20, 'x')}) {
    std::ofstream(folder + "/model-hashes", std::ios::binary | std::ios::trunc) << content;
    CHECK(hash_of(open_hashed(copy.path, folder)).empty());
  }
  kv_model_options options;
  kv_init(&options, sizeof options);
  options.hash_directory = "";
  kv_model* model = nullptr;
  CHECK(kv_open(mini_path, &options, nullptr, &model, nullptr) == KV_BAD_ARGUMENT);
}

TEST_CASE("a hash that was cancelled is taken for known, or cannot be had any more") {
  const Model model = open_hashed(mini_path, "");
  kv_control options;
  kv_init(&options, sizeof options);
  options.progress = [](int32_t phase, uint64_t, uint64_t total, void*) -> int32_t {
    CHECK(phase == KV_PHASE_VERIFY);
    CHECK(total > 1000000);
    return 1;
  };
  CHECK(kv_model_hash(model.get(), &options, nullptr) == KV_CANCELLED);
  CHECK(hash_of(model).empty());
  const Cancel cancel = make_cancel();
  kv_cancel_fire(cancel.get());
  options.progress = nullptr, options.cancel = cancel.get();
  CHECK(kv_model_hash(model.get(), &options, nullptr) == KV_CANCELLED);
  compute(model);
  CHECK(hash_of(model).size() == 32);
  CHECK(kv_model_hash(model.get(), &options, nullptr) ==
        KV_OK);  // known: nothing is left to cancel
  CHECK(kv_model_hash(nullptr, nullptr, nullptr) == KV_BAD_ARGUMENT);
}

TEST_CASE("a model that is not closed takes the same call from two threads") {
  const Model model = open_hashed(mini_path, "");
  kv_status other = KV_INTERNAL;
  std::thread thread([&] { other = kv_model_hash(model.get(), nullptr, nullptr); });
  compute(model);
  thread.join();
  CHECK(other == KV_OK);
}

#ifdef __linux__
TEST_CASE("a thread is left when the model is closed, or closing waits for the whole file") {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                         std::filesystem::directory_iterator());
  };
  Copy copy;
  const auto before = threads();
  for (int i = 0; i < 20; ++i) {
    const Model model = open_hashed(copy.path, copy.folder.file("hashes"));
    CHECK(threads() == before + 1);
    if (i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK(threads() == before);
}

TEST_CASE("the child of a fork waits for a thread that it does not have") {
  Copy copy;
  const Model model = open_hashed(copy.path, copy.folder.file("hashes"));
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(20);
    kv_close(kv_model_retain(model.get()));
    kv_close(model.get());
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
#endif

TEST_CASE("a model of which half is downloaded is opened") {
  for (const double begin : {0.5, 0.9, 0.3}) {
    Copy copy;
    const auto at = static_cast<std::streamoff>(static_cast<double>(copy.size()) * begin);
    change(copy.path, at,
           std::string(static_cast<std::size_t>(begin == 0.3 ? 6 << 20 : copy.size() - at), '\0'));
    kv_model* model = nullptr;
    kv_error error{};
    CHECK(kv_open(copy.path.c_str(), nullptr, nullptr, &model, &error) == KV_CORRUPT);
    CHECK(std::string(error.message).find("downloaded") != std::string::npos);
    kv_model_info info{};
    info.struct_size = sizeof info;
    CHECK(kv_model_inspect(copy.path.c_str(), &info, nullptr) == KV_CORRUPT);
  }
}
