// A host whose threads have small stacks: the stack that each call of the header uses, measured by
// the bytes that it overwrites.
#include <sys/mman.h>

#include <pthread.h>

#include <functional>

#include "host.h"
#include "temp_folder.h"

namespace {

// what there is to see, and what a call may take
constexpr std::size_t stack_bytes = 256 << 10, limit = 32 << 10;
constexpr unsigned char paint = 0xA5;

std::size_t most = 0;
std::string max_by;

struct Stack {
  unsigned char* low;
  const char* name;
  const std::function<void()>* work;
  std::size_t used;
};

// Paints what is free of the stack, works, and looks how far down the paint is gone.
[[gnu::noinline]] void measure(Stack* stack) {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) - 512;
  const auto low = reinterpret_cast<uintptr_t>(stack->low);
  volatile unsigned char* const begin = stack->low;
  for (std::size_t i = 0; i < here - low; ++i) begin[i] = paint;
  (*stack->work)();
  std::size_t untouched = 0;
  while (untouched < here - low && begin[untouched] == paint) ++untouched;
  stack->used = here - low - untouched;
}

void* thread_main(void* argument) {
  measure(static_cast<Stack*>(argument));
  return nullptr;
}

void call(const char* name, const std::function<void()>& work) {
  void* const memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  host::require(memory != MAP_FAILED, "a stack");
  Stack stack{static_cast<unsigned char*>(memory), name, &work, 0};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  host::require(pthread_attr_setstack(&attributes, memory, stack_bytes) == 0,
                "a thread's own stack");
  pthread_t thread;
  host::require(pthread_create(&thread, &attributes, thread_main, &stack) == 0, "a thread");
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  munmap(memory, stack_bytes);
  std::printf("%7zu bytes of stack: %s\n", stack.used, name);
  if (stack.used > most) most = stack.used, max_by = name;
}

kv_error error{};

void check(kv_status status, const char* what) { host::require_ok(status, error, what); }

void use_model(const char* path) {
  kv_model* model = nullptr;
  call("kv_open", [&] { check(kv_open(path, nullptr, nullptr, &model, &error), path); });
  call("kv_tokenize", [&] {
    const char* const text = "Some words, 1,234 of them - and a \xF0\x9F\x8C\x8D. \xFF";
    std::size_t count = 0;
    int32_t tokens[64];
    (void)kv_tokenize(model, text, std::strlen(text), 0, nullptr, tokens, 64, &count, &error);
    char back[64];
    (void)kv_detokenize(model, tokens, count < 64 ? count : 64, 0, back, sizeof back, &count,
                        &error);
  });
  call("kv_model_get_info", [&] {
    kv_model_info info{};
    info.struct_size = sizeof info;
    check(kv_model_get_info(model, &info, &error), "kv_model_get_info");
    check(kv_model_inspect(path, &info, &error), "kv_model_inspect");
  });
  call("kv_close", [&] { kv_close(model); });
}

void use_session(kv_model* model, const std::string& strategy, uint32_t threads,
                 const std::string& path) {
  kv_session_options o = host::session_options(strategy.c_str());
  o.threads = threads;
  if (strategy == "filter-layers") o.decode = strategies::filter_layers({0});
  kv_session *session = nullptr, *other = nullptr;
  call(("kv_session_open, " + strategy).c_str(),
       [&] { check(kv_session_open(model, &o, &session, &error), "kv_session_open"); });
  call("kv_prefill", [&] {
    check(kv_prefill(session, "a text", 6, nullptr, nullptr, nullptr, &error), "kv_prefill");
  });
  call("kv_prefill_tokens", [&] { host::read(session, 2200); });
  call("kv_session_prepare",
       [&] { check(kv_session_prepare(session, nullptr, &error), "kv_session_prepare"); });
  call("kv_generate", [&] {
    kv_generate_options g = host::generate_options(4);
    g.flags = KV_TRACE_PASSAGES;
    check(kv_generate(session, "a", 1, &g, nullptr, nullptr, nullptr, nullptr, &error),
          "kv_generate");
  });
  call("kv_session_passages", [&] {
    kv_passage spans[4];
    std::size_t count = 0;
    (void)kv_session_passages(session, spans, 4, &count, &error);
  });
  call("kv_generate, sampled", [&] {
    kv_generate_options g = host::generate_options(4);
    g.temperature = 1;
    g.top_k = 40;
    g.top_p = 0.9f;
    g.flags = KV_KEEP_TURN;
    check(kv_generate(session, "a", 1, &g, nullptr, nullptr, nullptr, nullptr, &error),
          "kv_generate");
  });
  call("kv_session_next", [&] {
    int32_t token = 0;
    check(kv_session_next(session, nullptr, nullptr, &token, nullptr, &error), "kv_session_next");
  });
  call("kv_session_score", [&] {
    const std::vector<int32_t> tokens = host::some_tokens(4);
    std::vector<float> scores(4);
    check(kv_session_score(session, tokens.data(), 4, scores.data(), nullptr, &error),
          "kv_session_score");
  });
  call("kv_session_get_stats", [&] {
    kv_session_stats stats;
    kv_init(&stats, sizeof stats);
    check(kv_session_get_stats(session, &stats, &error), "kv_session_get_stats");
  });
  call("kv_session_measure", [&] {
    const uint32_t all = KV_MEASURE_COMPARE | KV_MEASURE_LAYERS | KV_MEASURE_CERTIFY;
    check(kv_session_measure(session, all, &error), "kv_session_measure");
    (void)host::ask(session, "a", 2);
    check(kv_session_measure(session, 0, &error), "kv_session_measure");
  });
  call("kv_session_stats_json", [&] { (void)host::stats(session); });
  call("kv_save", [&] { check(kv_save(session, path.c_str(), nullptr, &error), "kv_save"); });
  call("kv_session_fork",
       [&] { check(kv_session_fork(session, &other, &error), "kv_session_fork"); });
  call("kv_session_rewind",
       [&] { check(kv_session_rewind(other, 1000, &error), "kv_session_rewind"); });
  call("kv_session_set_strategy",
       [&] { check(kv_session_set_strategy(other, nullptr, &error), "kv_session_set_strategy"); });
  call("kv_session_close", [&] { kv_session_close(other), kv_session_close(session); });
  kv_control c;
  kv_init(&c, sizeof c);
  c.flags = KV_VERIFY;
  call("kv_load",
       [&] { check(kv_load(model, path.c_str(), &o, &c, &session, &error), "kv_load"); });
  call("kv_generate, loaded", [&] { (void)host::ask(session); });
  kv_session_close(session);
  call("kv_load_prefix", [&] {
    check(kv_load_prefix(model, path.c_str(), 2000, &o, nullptr, &session, &error),
          "kv_load_prefix");
  });
  kv_session_close(session);
}

void use_files(const std::string& path, const std::string& packed) {
  kv_file_info file{};
  file.struct_size = sizeof file;
  call("kv_file_inspect",
       [&] { check(kv_file_inspect(path.c_str(), &file, &error), "kv_file_inspect"); });
  call("kv_file_verify",
       [&] { check(kv_file_verify(path.c_str(), nullptr, &error), "kv_file_verify"); });
  for (const uint32_t level : {1u, 3u, 9u, 19u}) {
    call(("kv_pack, level " + std::to_string(level)).c_str(),
         [&] { check(kv_pack(path.c_str(), packed.c_str(), level, nullptr, &error), "kv_pack"); });
  }
  kv_packed_info info{};
  info.struct_size = sizeof info;
  call("kv_packed_inspect",
       [&] { check(kv_packed_inspect(packed.c_str(), &info, &error), "kv_packed_inspect"); });
  call("kv_unpack",
       [&] { check(kv_unpack(packed.c_str(), path.c_str(), nullptr, &error), "kv_unpack"); });
}

void use_library(kv_model* model, const std::string& folder) {
  kv_library* library = nullptr;
  kv_session_options o = host::session_options();
  kv_library_session_options lo;
  kv_init(&lo, sizeof lo);
  lo.session = &o;
  lo.name = "a";
  std::string text;
  for (int i = 0; i < 300; ++i) text += "word " + std::to_string(i) + " ";
  call("kv_library_open", [&] {
    check(kv_library_open(folder.c_str(), nullptr, &library, &error), "kv_library_open");
  });
  for (int i = 0; i < 2; ++i) {  // read, then found
    kv_session* session = nullptr;
    call("kv_library_session", [&] {
      check(kv_library_session(library, model, text.data(), text.size(), &lo, nullptr, &session,
                               nullptr, &error),
            "kv_library_session");
    });
    kv_session_close(session);
  }
  call("kv_library_list", [&] {
    kv_library_document d{};
    d.struct_size = sizeof d;
    check(kv_library_list(library, 0, &d, &error), "kv_library_list");
  });
  call("kv_library_rename",
       [&] { check(kv_library_rename(library, "a", "b", &error), "kv_library_rename"); });
  call("kv_library_remove",
       [&] { check(kv_library_remove(library, "b", &error), "kv_library_remove"); });
  call("kv_library_close", [&] { kv_library_close(library); });
}

// Of the largest heads, which take most: pages are sealed, sketched and scored by the calling
// thread.
void use_cache(uint32_t head_dim, const char* strategy, const std::string& path) {
  kv_cache_shape shape{};
  shape.struct_size = sizeof shape;
  shape.layers = 1, shape.heads = 8, shape.kv_heads = 1, shape.head_dim = head_dim,
  shape.max_tokens = 4096;
  kv_cache_options o;
  kv_init(&o, sizeof o);
  o.threads = 1;
  o.decode = strategies::budgeted(strategy, 64);
  kv_cache* cache = nullptr;
  std::printf("a cache, heads of %u, %s\n", head_dim, strategy);
  call("kv_cache_open", [&] { check(kv_cache_open(&shape, &o, &cache, &error), "kv_cache_open"); });
  std::vector<float> k(std::size_t{1024} * head_dim), q(std::size_t{1024} * 8 * head_dim);
  for (std::size_t i = 0; i < q.size(); ++i)
    q[i] = static_cast<float>(i * 7919 % 1009) / 1009 - 0.5f;
  std::copy_n(q.begin(), k.size(), k.begin());
  for (const uint32_t n : {1024u, 1024u, 1u}) {
    call("kv_cache_update", [&] {
      check(kv_cache_update(cache, 0, KV_F32, k.data(), k.data(), q.data(), n, &error),
            "kv_cache_update");
    });
    call("kv_cache_attention", [&] {
      std::vector<float> out(q.size());
      check(kv_cache_attention(cache, 0, KV_F32, q.data(), out.data(), n, nullptr, nullptr, &error),
            "kv_cache_attention");
    });
  }
  kv_cache* other = nullptr;
  call("kv_cache_fork",
       [&] { check(kv_cache_fork(cache, nullptr, &other, &error), "kv_cache_fork"); });
  call("kv_cache_truncate",
       [&] { check(kv_cache_truncate(other, 100, &error), "kv_cache_truncate"); });
  kv_cache_close(other);
  call("kv_cache_save",
       [&] { check(kv_cache_save(cache, path.c_str(), nullptr, &error), "kv_cache_save"); });
  call("kv_cache_close", [&] { kv_cache_close(cache); });
  call("kv_cache_load", [&] {
    check(kv_cache_load(&shape, path.c_str(), &o, nullptr, &cache, &error), "kv_cache_load");
  });
  call("kv_cache_get_stats", [&] {
    kv_cache_stats stats;
    kv_init(&stats, sizeof stats);
    check(kv_cache_get_stats(cache, &stats, &error), "kv_cache_get_stats");
  });
  call("kv_cache_stats_json", [&] {
    std::string text(4096, '\0');
    std::size_t size = 0;
    check(kv_cache_stats_json(cache, text.data(), text.size(), &size, &error),
          "kv_cache_stats_json");
  });
  kv_cache_close(cache);
}

}  // namespace

int main() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::puts("skipped: a sanitizer makes frames larger");
  return 77;
#endif
  const TempFolder folder;
  call("kv_build_info", [] { (void)kv_build_info(); });
  for (const char* path : {"llama-q8_0", "llama-q4_k_m", "llama-hd128", "qwen2-f16", "qwen3-f16"})
    use_model((std::string(FIXTURES "/models/") + path + ".gguf").c_str());
  for (const char* path : {"ggml-vocab-gpt-2", "ggml-vocab-llama-spm"}) {
    kv_model* model = nullptr;
    call(path, [&] {
      (void)kv_open((std::string(FIXTURES "/tokenizers/") + path + ".gguf").c_str(), nullptr,
                    nullptr, &model, &error);
    });
    kv_close(model);
  }
  call("kv_open of a file that is none", [&] {
    kv_model* model = nullptr;
    host::require(kv_open("/dev/null", nullptr, nullptr, &model, &error) != KV_OK,
                  "a device is no model");
  });
  for (const char* path : {"llama-q8_0", "llama-q6_k", "llama-hd128"}) {
    kv_model* const model =
        host::open_model((std::string(FIXTURES "/models/") + path + ".gguf").c_str());
    for (const std::string& strategy : host::strategy_names()) {
      if (std::strcmp(path, "llama-q8_0") != 0 && strategy != "bounded") continue;
      use_session(model, strategy, strategy == "quest" ? 2 : 1, folder.file("a.kv"));
    }
    use_library(model, folder.file("library"));
    kv_close(model);
  }
  use_files(folder.file("a.kv"), folder.file("a.kvz"));
  for (const uint32_t head_dim : {32u, 128u, 256u})
    for (const char* strategy : {"quest", "bounded", "full"})
      use_cache(head_dim, strategy, folder.file("c.kv"));
  call("kv_strategy_create", [] {
    kv_strategy* strategy = nullptr;
    double value = 0;
    const uint32_t layers[] = {0, 2};
    check(kv_strategy_create("filter-layers", &strategy, &error), "kv_strategy_create");
    check(kv_strategy_set(strategy, KV_PARAM_BUDGET_TOKENS, 9, &error), "kv_strategy_set");
    check(kv_strategy_get(strategy, KV_PARAM_BUDGET_TOKENS, &value, &error), "kv_strategy_get");
    check(kv_strategy_set_layers(strategy, layers, 2, &error), "kv_strategy_set_layers");
    kv_strategy_destroy(strategy);
  });
  call("kv_cancel_create", [] {
    kv_cancel* cancel = nullptr;
    check(kv_cancel_create(&cancel, &error), "kv_cancel_create");
    kv_cancel_fire(cancel), kv_cancel_reset(cancel), kv_cancel_release(cancel);
  });
  std::printf("the most: %zu bytes, %s\n", most, max_by.c_str());
  host::require(most < limit, "a call takes less than 32 KiB of the caller's stack");
  return 0;
}
