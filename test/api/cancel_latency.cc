// Fires a cancel token at random times in every call of kvasir.h that takes one, and measures the
// CPU time of all threads from firing to return. It measures the whole time of calls without a
// token.
//
//     cancel-latency MODEL.gguf TOKENS REPETITIONS MAX_MS MAX_WAIT [CALL...]
//
// The document has TOKENS tokens with synthetic keys and values. Fails if a call took more than
// MAX_MS milliseconds. A token fires within MAX_WAIT seconds. CALL: the
// names of the calls to measure; without any, all calls.
#include "cancel_latency.h"

using namespace cancel_latency;

namespace {

// The cases; `session` and `cache` are those of the measured call.
class Cases {
 public:
  explicit Cases(Document& document) : d(document) {
    of_the_model();
    of_prefill();
    of_answers();
    of_indexes();
    of_files();
    of_caches();
  }
  std::vector<Case> all;

 private:
  void add(std::string name, std::function<void()> before,
           std::function<kv_status(kv_cancel*)> call, bool takes_token = true) {
    all.push_back({std::move(name), std::move(before), std::move(call),
                   [this] { session.reset(), cache.reset(), library.reset(); }, takes_token});
  }
  std::function<void()> fork(const char* strategy = "auto") {
    return [=, this] {
      kv_session* made = nullptr;
      OK(kv_session_fork(d.session.get(), &made, &error));
      session.reset(made);
      OK(kv_session_set_strategy(made, strategies::strategy(strategy), &error));
    };
  }
  std::function<void()> load(const std::function<void(kv_session_options*)>& change) {
    return [=, this] {
      auto o = defaults<kv_session_options>();
      change(&o);
      kv_session* made = nullptr;
      OK(kv_load(d.model.get(), d.saved.c_str(), &o, nullptr, &made, &error));
      session.reset(made);
    };
  }
  // That has no sketch, with a step of so many tokens.
  std::function<void()> load_cache(uint32_t step) {
    return [=, this] {
      const kv_cache_shape shape = d.shape();
      auto o = defaults<kv_cache_options>();
      o.decode = strategies::strategy("bounded");
      kv_cache* made = nullptr;
      OK(kv_cache_load(&shape, d.cache_saved.c_str(), &o, nullptr, &made, &error));
      cache.reset(made);
      for (uint32_t l = 0; step > 0 && l < d.info.layers; ++l)
        OK(kv_cache_update(made, l, KV_F32, d.some(l), d.some(l + 1), nullptr, step, &error));
    };
  }
  template <class T>
  static kv_status drop(kv_status status, T* made) {
    const Handle<T> owner(made);
    return status;
  }

  void of_the_model() {
    add("kv_open", {}, [this](kv_cancel* c) {
      const kv_control o = with(c);
      kv_model* made = nullptr;
      const kv_status s = kv_open(d.model_path.c_str(), nullptr, &o, &made, nullptr);
      return drop(s, made);
    });
    add("kv_tokenize", {}, [this](kv_cancel* c) {
      std::size_t size = 0;
      std::vector<int32_t> out(8 * d.tokens.size());
      const kv_control o = with(c);
      const std::string text = d.text + d.text + d.text + d.text + d.text + d.text;
      return kv_tokenize(d.model.get(), text.data(), text.size(), 0, &o, out.data(), out.size(),
                         &size, nullptr);
    });
    add(
        "kv_model_inspect", {},
        [this](kv_cancel*) {
          kv_model_info i{};
          i.struct_size = sizeof i;
          return kv_model_inspect(d.model_path.c_str(), &i, nullptr);
        },
        false);
    add(
        "kv_detokenize", {},
        [this](kv_cancel*) {
          std::size_t size = 0;
          std::vector<char> out(2 * d.text.size() + 1000);
          return kv_detokenize(d.model.get(), d.tokens.data(), d.tokens.size(), 0, out.data(),
                               out.size(), &size, nullptr);
        },
        false);
  }

  void of_prefill() {
    const auto read = [this](kv_cancel* c) {
      const kv_control o = with(c);
      return kv_prefill(session.get(), d.text.data(), std::min<std::size_t>(d.text.size(), 4000),
                        &o, nullptr, nullptr, nullptr);
    };
    add("kv_prefill", fork(), read);
    add("kv_prefill, bounded",
        load([](kv_session_options* o) { o->prefill = strategies::strategy("bounded"); }), read);
    add("kv_prefill, flat",
        load([](kv_session_options* o) { o->prefill = strategies::strategy("flat"); }), read);
    add("kv_prefill, memory_limit",
        load([this](kv_session_options* o) { o->memory_limit = budget(); }), read);
    add(
        "kv_prefill_tokens, first chunk",
        [this] {
          kv_session* made = nullptr;
          OK(kv_session_open(d.model.get(), nullptr, &made, &error));
          session.reset(made);
        },
        [this](kv_cancel* c) {
          const kv_control o = with(c);
          return kv_prefill_tokens(session.get(), d.tokens.data(),
                                   std::min<std::size_t>(d.tokens.size(), 700), &o, nullptr,
                                   nullptr);
        });
    add("kv_prefill_tokens, chunk of 4096",
        load([](kv_session_options* o) { o->prefill_chunk = 4096; }), [this](kv_cancel* c) {
          const kv_control o = with(c);
          return kv_prefill_tokens(session.get(), d.tokens.data(),
                                   std::min<std::size_t>(d.tokens.size(), 4096), &o, nullptr,
                                   nullptr);
        });
    add("kv_prefill_logits", fork(), [this](kv_cancel* c) {
      const kv_control o = with(c);
      std::vector<float> logits(std::size_t{100} * d.info.vocabulary);
      return kv_prefill_logits(session.get(), d.tokens.data(), 100, logits.data(), &o, nullptr);
    });
  }

  void of_answers() {
    const auto ask = [this](uint32_t flags) {
      return [=, this](kv_cancel* c) {
        auto o = defaults<kv_generate_options>();
        const kv_control control = with(c);
        o.flags = flags;
        o.max_tokens = 8;
        return kv_generate(session.get(), "what is in it?", 14, &o, &control, nullptr, nullptr,
                           nullptr, nullptr);
      };
    };
    add("kv_generate", fork(), ask(0));
    add("kv_generate, keep", fork(), ask(KV_KEEP_TURN));
    add("kv_generate, trace", fork(), ask(KV_TRACE_PASSAGES));
    for (const char* strategy : {"full", "quest", "flat", "dipr", "filter-layers", "snapkv"})
      add(std::string("kv_generate, ") + strategy, fork(strategy), ask(KV_KEEP_TURN));
    add(
        "kv_generate, measured",
        [begin = fork(), this] {
          begin();
          OK(kv_session_measure(session.get(), KV_MEASURE_CERTIFY | KV_MEASURE_LAYERS, &error));
        },
        ask(0));
    add("kv_generate, full, memory_limit", load([this](kv_session_options* o) {
          o->memory_limit = budget(), o->decode = strategies::strategy("full");
        }),
        ask(0));
    add("kv_session_next", fork(), [this](kv_cancel* c) {
      const kv_control o = with(c);
      int32_t token;
      return kv_session_next(session.get(), nullptr, &o, &token, nullptr, nullptr);
    });
    add("kv_session_score", fork(), [this](kv_cancel* c) {
      const kv_control o = with(c);
      float out[8];
      return kv_session_score(session.get(), d.tokens.data(), 8, out, &o, nullptr);
    });
  }

  void of_indexes() {
    for (const char* strategy : {"hnsw", "ood", "ivf", "infllm"})
      add(std::string("kv_session_prepare, ") + strategy, fork(strategy), [this](kv_cancel* c) {
        const kv_control o = with(c);
        return kv_session_prepare(session.get(), &o, nullptr);
      });
    add("kv_save, ivf", fork("ivf"), [this](kv_cancel* c) {
      const kv_control o = with(c);
      return kv_save(session.get(), d.folder.file("ivf.kv").c_str(), &o, nullptr);
    });
  }

  void of_files() {
    const auto save_to = [this](kv_session* from) {
      return [=, this](kv_cancel* c) {
        const kv_control o = with(c);
        return kv_save(from ? from : session.get(), d.folder.file("b.kv").c_str(), &o, nullptr);
      };
    };
    add("kv_save", {}, save_to(d.session.get()));
    add("kv_save, mapped", load([](kv_session_options*) {}), save_to(nullptr));
    for (const uint32_t flags : {0u, KV_VERIFY})
      add(flags ? "kv_load, verify" : "kv_load", {}, [=, this](kv_cancel* c) {
        const kv_control o = with(c, flags);
        kv_session* made = nullptr;
        const kv_status s = kv_load(d.model.get(), d.saved.c_str(), nullptr, &o, &made, nullptr);
        return session.reset(made), s;
      });
    add("kv_load_prefix", {}, [this](kv_cancel* c) {
      const kv_control o = with(c);
      kv_session* made = nullptr;
      const kv_status s =
          kv_load_prefix(d.model.get(), d.saved.c_str(), d.count / 2, nullptr, &o, &made, nullptr);
      return session.reset(made), s;
    });
    add("kv_file_verify", {}, [this](kv_cancel* c) {
      const kv_control o = with(c);
      return kv_file_verify(d.saved.c_str(), &o, nullptr);
    });
    for (const uint32_t level : {1u, 19u})
      add("kv_pack, level " + std::to_string(level), {}, [=, this](kv_cancel* c) {
        const kv_control o = with(c);
        return kv_pack(d.saved.c_str(), d.folder.file("b.packed").c_str(), level, &o, nullptr);
      });
    add("kv_unpack", {}, [this](kv_cancel* c) {
      const kv_control o = with(c);
      return kv_unpack(d.packed.c_str(), d.folder.file("u.kv").c_str(), &o, nullptr);
    });
    const auto open_library = [this] {
      kv_library* made = nullptr;
      OK(kv_library_open(d.library.c_str(), nullptr, &made, &error));
      library.reset(made);
    };
    for (const uint32_t flags : {0u, KV_VERIFY})
      add(flags ? "kv_library_session, verify" : "kv_library_session", open_library,
          [=, this](kv_cancel* c) {
            auto o = defaults<kv_library_session_options>();
            o.flags = flags;
            const kv_control control = with(c);
            kv_session* made = nullptr;
            const kv_status s =
                kv_library_session(library.get(), d.model.get(), d.text.data(), d.text.size(), &o,
                                   &control, &made, nullptr, nullptr);
            return session.reset(made), s;
          });
    const auto whole = [this](const char* name, std::function<void()> before,
                              std::function<kv_status()> call) {
      add(
          name, std::move(before), [=](kv_cancel*) { return call(); }, false);
    };
    whole("kv_library_list", open_library, [this] {
      kv_library_document document{};
      document.struct_size = sizeof document;
      return kv_library_list(library.get(), 0, &document, nullptr);
    });
    whole("kv_session_open", {}, [this] {
      kv_session* made = nullptr;
      const kv_status s = kv_session_open(d.model.get(), nullptr, &made, nullptr);
      return session.reset(made), s;
    });
    whole("kv_session_fork", {}, [this] {
      kv_session* made = nullptr;
      const kv_status s = kv_session_fork(d.session.get(), &made, nullptr);
      return session.reset(made), s;
    });
    whole("kv_session_rewind", fork(),
          [this] { return kv_session_rewind(session.get(), d.count / 2, nullptr); });
    whole("kv_session_get_stats", fork(), [this] {
      auto stats = defaults<kv_session_stats>();
      return kv_session_get_stats(session.get(), &stats, nullptr);
    });
    whole("kv_session_stats_json", fork(), [this] {
      std::vector<char> out(1 << 20);
      std::size_t size = 0;
      return kv_session_stats_json(session.get(), out.data(), out.size(), &size, nullptr);
    });
    whole("kv_file_inspect", {}, [this] {
      kv_file_info i{};
      i.struct_size = sizeof i;
      return kv_file_inspect(d.saved.c_str(), &i, nullptr);
    });
  }

  void of_caches() {
    const auto attend = [this](uint32_t tokens) {
      return [=, this](kv_cancel* c) {
        const kv_control o = with(c);
        std::vector<float> out(std::size_t{tokens} * d.info.heads * d.info.head_dim);
        return kv_cache_attention(cache.get(), 0, KV_F32, d.some(5), out.data(), tokens, nullptr,
                                  &o, nullptr);
      };
    };
    add("kv_cache_attention, sketch", load_cache(1), attend(1));
    add("kv_cache_attention, 512 tokens", load_cache(step_tokens), attend(step_tokens));
    add("kv_cache_fork", load_cache(0), [this](kv_cancel* c) {
      const kv_control o = with(c);
      kv_cache* made = nullptr;
      const kv_status s = kv_cache_fork(cache.get(), &o, &made, nullptr);
      return drop(s, made);
    });
    add("kv_cache_save", load_cache(0), [this](kv_cancel* c) {
      const kv_control o = with(c);
      return kv_cache_save(cache.get(), d.folder.file("c2.kv").c_str(), &o, nullptr);
    });
    add("kv_cache_load, verify", {}, [this](kv_cancel* c) {
      const kv_cache_shape shape = d.shape();
      const kv_control o = with(c, KV_VERIFY);
      kv_cache* made = nullptr;
      const kv_status s = kv_cache_load(&shape, d.cache_saved.c_str(), nullptr, &o, &made, nullptr);
      return cache.reset(made), s;
    });
    for (const bool limited : {false, true})
      add(limited ? "kv_session_from_cache, memory_limit" : "kv_session_from_cache", {},
          [=, this](kv_cancel* c) {
            const kv_control o = with(c, KV_CACHE_UNCHECKED | KV_TOKENIZE_DOCUMENT);
            auto so = defaults<kv_session_options>();
            if (limited) so.memory_limit = budget();
            kv_session* made = nullptr;
            const kv_status s = kv_session_from_cache(d.model.get(), d.cache.get(), d.tokens.data(),
                                                      d.count, &so, &o, &made, nullptr);
            return session.reset(made), s;
          });
    for (const uint32_t tokens : {1u, step_tokens})
      add(
          "kv_cache_update, after " + std::to_string(tokens), load_cache(tokens),
          [=, this](kv_cancel*) {
            return kv_cache_update(cache.get(), 0, KV_F32, d.some(1), d.some(2), nullptr, tokens,
                                   nullptr);
          },
          false);
    add(
        "kv_cache_update, after the first 512",
        [this] {
          const kv_cache_shape shape = d.shape();
          kv_cache* made = nullptr;
          OK(kv_cache_open(&shape, nullptr, &made, &error));
          cache.reset(made);
          for (uint32_t l = 0; l < d.info.layers; ++l)
            OK(kv_cache_update(made, l, KV_F32, d.some(l), d.some(l + 1), nullptr, step_tokens,
                               &error));
        },
        [this](kv_cancel*) {
          return kv_cache_update(cache.get(), 0, KV_F32, d.some(1), d.some(2), nullptr, step_tokens,
                                 nullptr);
        },
        false);
    add(
        "kv_cache_truncate", load_cache(1),
        [this](kv_cancel*) { return kv_cache_truncate(cache.get(), d.count / 2, nullptr); }, false);
  }

  // Enough for the summaries and a step, not for the pages.
  uint64_t budget() const { return d.info.kv_bytes_per_token * (d.count / 2 + 4096); }

  Document& d;
  Handle<kv_session> session;
  Handle<kv_cache> cache;
  Handle<kv_library> library;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6)
    return std::fprintf(stderr,
                        "cancel-latency MODEL.gguf TOKENS REPETITIONS MAX_MS MAX_WAIT [CALL...]\n"),
           2;
  Document document(argv[1], static_cast<std::size_t>(std::atoll(argv[2])));
  Bench bench(document, std::atoi(argv[3]), std::atof(argv[4]), std::atof(argv[5]));
  const Cases cases(document);
  for (const Case& c : cases.all) {
    const auto wanted = [&](const char* name) { return c.name == name; };
    if (argc == 6 || std::any_of(argv + 6, argv + argc, wanted)) bench.run(c);
  }
  return bench.failed() ? 1 : 0;
}
