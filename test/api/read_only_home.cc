// A host whose home, library and folder for temporary files are read-only. Existing files load and
// answer, calls that would write return KV_PERMISSION and name the place, and nothing changes.
// It runs twice: by the folders' modes, as the user `nobody`, and by a file system that is mounted
// read-only. Root starts it; otherwise it is skipped. The argument is the command line's program.
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "host.h"
#include "temp_folder.h"

using namespace host;

namespace {

namespace fs = std::filesystem;

const std::string text(700, 'x');

// Every file below the folder, with its size.
std::map<std::string, uint64_t> contents(const std::string& folder) {
  std::map<std::string, uint64_t> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    out[entry.path()] = entry.is_regular_file() ? entry.file_size() : 0;
  return out;
}

void fill(const std::string& home) {
  kv_model* model = nullptr;
  kv_session* session = nullptr;
  kv_library* library = nullptr;
  kv_error error{};
  fs::copy_file(FIXTURES "/models/llama-q8_0.gguf", home + "/model.gguf");
  fs::create_directory(home + "/tmp");
  require_status(kv_open((home + "/model.gguf").c_str(), nullptr, nullptr, &model, &error), KV_OK,
                 error, "a model");
  require_status(kv_session_open(model, nullptr, &session, &error), KV_OK, error, "a session");
  require_status(kv_prefill(session, text.data(), text.size(), nullptr, nullptr, nullptr, &error),
                 KV_OK, error, "reading");
  require_status(kv_save(session, (home + "/book.kv").c_str(), nullptr, &error), KV_OK, error,
                 "saving");
  require_status(
      kv_pack((home + "/book.kv").c_str(), (home + "/book.kvz").c_str(), 0, nullptr, &error), KV_OK,
      error, "packing");
  kv_session_close(session);
  kv_library_session_options how;
  kv_init(&how, sizeof how);
  how.name = "a";
  require_status(kv_library_open((home + "/library").c_str(), nullptr, &library, &error), KV_OK,
                 error, "a library");
  require_status(kv_library_session(library, model, text.data(), text.size(), &how, nullptr,
                                    &session, nullptr, &error),
                 KV_OK, error, "a document");
  kv_session_close(session);
  kv_library_close(library);
  kv_close(model);
}

void must_refuse(kv_status status, const kv_error& error, const std::string& place,
                 const char* what) {
  require_status(status, KV_PERMISSION, error, what);
  if (std::strstr(error.message, place.c_str())) return;
  std::fprintf(stderr, "%s does not name %s: %s\n", what, place.c_str(), error.message);
  std::_Exit(1);
}

void answers(kv_session* session) {
  kv_error error{};
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = 3;
  require_status(kv_generate(session, "q", 1, &o, nullptr, nullptr, nullptr, nullptr, &error),
                 KV_OK, error, "an answer");
}

void use_files(const std::string& home, kv_model* model) {
  kv_error error{};
  kv_session* session = nullptr;
  const std::string book = home + "/book.kv", packed = home + "/book.kvz", fresh = home + "/new.kv",
                    spill = home + "/tmp";
  require_status(kv_load(model, book.c_str(), nullptr, nullptr, &session, &error), KV_OK, error,
                 "loading");
  answers(session);
  for (const std::string& path : {book, fresh})
    must_refuse(kv_save(session, path.c_str(), nullptr, &error), error, path, "saving");
  answers(session);
  kv_session_close(session);
  must_refuse(kv_pack(book.c_str(), packed.c_str(), 0, nullptr, &error), error, packed, "packing");
  must_refuse(kv_unpack(packed.c_str(), fresh.c_str(), nullptr, &error), error, fresh, "unpacking");
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.memory_limit = 64 << 20;
  o.spill_directory = spill.c_str();
  must_refuse(kv_session_open(model, &o, &session, &error), error, spill, "spilling");
  must_refuse(kv_load(model, book.c_str(), &o, nullptr, &session, &error), error, spill,
              "spilling what is loaded");
}

void use_library(const std::string& home, kv_model* model, uint64_t max_bytes) {
  kv_error error{};
  kv_library* library = nullptr;
  kv_session* session = nullptr;
  kv_library_options o;
  kv_init(&o, sizeof o);
  o.max_bytes = max_bytes;
  must_refuse(kv_library_open((home + "/other").c_str(), &o, &library, &error), error,
              home + "/other", "a new library");
  require_status(kv_library_open((home + "/library").c_str(), &o, &library, &error), KV_OK, error,
                 "a library that is there");
  kv_library_document document{};
  document.struct_size = sizeof document;
  require_status(kv_library_list(library, 0, &document, &error), KV_OK, error, "listing");
  require_status(document.status, KV_OK, error, "a listed document");
  for (const std::string& wanted : {text, text + "more", std::string(300, 'y')}) {
    kv_library_result result{};
    result.struct_size = sizeof result;
    require_status(kv_library_session(library, model, wanted.data(), wanted.size(), nullptr,
                                      nullptr, &session, &result, &error),
                   KV_OK, error, "a text");
    require(result.tokens_found > 0 || wanted[0] == 'y', "finding what is there");
    require_status(result.save_status, wanted == text ? KV_OK : KV_PERMISSION, error,
                   "a text that cannot be kept");
    answers(session);
    kv_session_close(session);
  }
  must_refuse(kv_library_remove(library, "a", &error), error, home, "removing");
  must_refuse(kv_library_rename(library, "a", "b", &error), error, home, "renaming");
  kv_library_close(library);
}

int exit_code(const char* program, const std::vector<std::string>& arguments) {
  const pid_t child = fork();
  if (child == 0) {
    std::vector<char*> values{const_cast<char*>(program)};
    for (const std::string& argument : arguments)
      values.push_back(const_cast<char*>(argument.c_str()));
    values.push_back(nullptr);
    execv(program, values.data());
    std::_Exit(skipped);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && WIFEXITED(status), "the command line");
  return WEXITSTATUS(status);
}

// In a home of which nothing can be written.
void use(const std::string& home, const char* program) {
  for (const char* name : {"HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"})
    setenv(name, home.c_str(), 1);
  setenv("TMPDIR", (home + "/tmp").c_str(), 1);
  require(chdir(home.c_str()) == 0, "going home");
  const auto before = contents(home);
  kv_model* model = nullptr;
  kv_error error{};
  require_status(kv_open("model.gguf", nullptr, nullptr, &model, &error), KV_OK, error, "a model");
  use_files(home, model);
  use_library(home, model, 0);
  use_library(home, model, 1);
  kv_close(model);
  const int answered = exit_code(
      program, {"ask", "-q", "-m", "model.gguf", "-c", "book.kv", "--max-tokens", "2", "question"});
  require(answered == 0 || answered == skipped,
          "the command line answers");  // skipped: this user may not start it
  const int found = exit_code(program, {"library", "list", "library"});
  require(found == 0 || found == skipped, "the command line lists");
  const int saved = exit_code(program, {"pack", "-q", "book.kv", "-o", "other.kvz"});
  require(saved == 3 || saved == skipped, "the command line says that it cannot write a file");
  require(contents(home) == before, "nothing changed");
}

// False where the system does not let it be tried.
bool in_child(void (*prepare)(const std::string& home), const std::string& home,
              const char* program) {
  const pid_t child = fork();
  if (child == 0) {
    prepare(home);
    use(home, program);
    std::_Exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && WIFEXITED(status), "a child");
  require(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == skipped, "a home that is read-only");
  return WEXITSTATUS(status) == 0;
}

void by_modes(const std::string& home) {
  const passwd* nobody = getpwnam("nobody");
  require(nobody != nullptr, "nobody");
  std::vector<std::string> paths{home};
  for (const auto& entry : fs::recursive_directory_iterator(home)) paths.push_back(entry.path());
  for (const std::string& path : paths) {
    require(chown(path.c_str(), nobody->pw_uid, nobody->pw_gid) == 0, "giving away");
    require(chmod(path.c_str(), fs::is_directory(path) ? 0555 : 0600) == 0, "modes");
  }
  become_nobody();
}

void by_mount(const std::string& home) {
  const char* path = home.c_str();
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount(path, path, nullptr, MS_BIND, nullptr) != 0 ||
      mount("none", path, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0)
    std::_Exit(skipped);
}

}  // namespace

int main(int count, char** values) {
  if (geteuid() != 0 || count != 2) return skipped;
  TempFolder temporary;
  const std::string home = temporary.file("home");
  require(mkdir(home.c_str(), 0755) == 0 && chmod(temporary.path().c_str(), 0755) == 0, "a home");
  fill(home);
  if (!in_child(by_mount, home, values[1]))
    std::puts("not tried: this system lets nobody mount a folder read-only");
  require(in_child(by_modes, home, values[1]), "modes are tried everywhere");
  return 0;
}
