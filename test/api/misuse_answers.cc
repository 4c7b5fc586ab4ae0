// Wrong calls of prefill, answers and sequences.
#include "misuse.h"

namespace api_test {

void Misuses::add_prefill() {
  kv_session* const s = session_.get();
  static const int32_t ids[] = {5, 6};
  add("kv_prefill", "session",
      [](kv_error* e) { return kv_prefill(nullptr, "a", 1, nullptr, nullptr, nullptr, e); });
  add("kv_prefill", "text",
      [s](kv_error* e) { return kv_prefill(s, nullptr, 1, nullptr, nullptr, nullptr, e); });
  add("kv_prefill_tokens", "session",
      [](kv_error* e) { return kv_prefill_tokens(nullptr, ids, 2, nullptr, nullptr, e); });
  add("kv_prefill_tokens", "tokens",
      [s](kv_error* e) { return kv_prefill_tokens(s, nullptr, 2, nullptr, nullptr, e); });
  add(
      "kv_prefill_tokens", "more than the context",
      [s](kv_error* e) {
        const std::vector<int32_t> many(5'000'000, 5);
        return kv_prefill_tokens(s, many.data(), many.size(), nullptr, nullptr, e);
      },
      KV_CONTEXT_FULL);
  add("kv_prefill_logits", "session",
      [&](kv_error* e) { return kv_prefill_logits(nullptr, ids, 2, out_.logits, nullptr, e); });
  add("kv_prefill_logits", "tokens",
      [&, s](kv_error* e) { return kv_prefill_logits(s, nullptr, 2, out_.logits, nullptr, e); });
  add("kv_prefill_logits", "logits",
      [s](kv_error* e) { return kv_prefill_logits(s, ids, 2, nullptr, nullptr, e); });
  add_control("kv_prefill", [s](const kv_control* c, kv_error* e) {
    return kv_prefill(s, "a", 1, c, nullptr, nullptr, e);
  });
  add_control("kv_prefill_tokens", [s](const kv_control* c, kv_error* e) {
    return kv_prefill_tokens(s, ids, 2, c, nullptr, e);
  });
  add_control("kv_prefill_logits", [&, s](const kv_control* c, kv_error* e) {
    return kv_prefill_logits(s, ids, 2, out_.logits, c, e);
  });
}

void Misuses::add_generate_option(const char* how,
                                  std::function<void(kv_generate_options*)> change) {
  const auto changed = [change] {
    kv_generate_options o;
    kv_init(&o, sizeof o);
    o.max_tokens = 2;
    change(&o);
    return o;
  };
  add("kv_generate", how, [&, changed](kv_error* e) {
    const kv_generate_options o = changed();
    return kv_generate(session_.get(), "a", 1, &o, nullptr, nullptr, nullptr, &out_.answer, e);
  });
  const std::string_view option = how;
  // kv_session_next does not use these
  if (option.substr(0, 4) == "stop" || option == "reserved") return;
  add("kv_session_next", how, [&, changed](kv_error* e) {
    const kv_generate_options o = changed();
    return kv_session_next(session_.get(), &o, nullptr, &out_.token, &out_.end, e);
  });
}

void Misuses::add_generate() {
  add("kv_generate", "session", [&](kv_error* e) {
    return kv_generate(nullptr, "a", 1, nullptr, nullptr, nullptr, nullptr, &out_.answer, e);
  });
  add("kv_generate", "question", [&](kv_error* e) {
    return kv_generate(session_.get(), nullptr, 1, nullptr, nullptr, nullptr, nullptr, &out_.answer,
                       e);
  });
  add(
      "kv_generate", "nothing to answer",
      [&](kv_error* e) {
        kv_model_options o;
        kv_init(&o, sizeof o);
        o.chat_format = "raw";
        kv_model* raw = nullptr;
        // wants no begin-of-text token
        REQUIRE(kv_open(FIXTURES "/models/qwen2-f16.gguf", &o, nullptr, &raw, nullptr) == KV_OK);
        const Model owner(raw);
        const Session empty = open_session(raw);
        return kv_generate(empty.get(), nullptr, 0, nullptr, nullptr, nullptr, nullptr,
                           &out_.answer, e);
      },
      KV_BAD_STATE);
  add_generate_option("flags", [](auto* o) { o->flags = 8; });
  add_generate_option("struct_size of kv_generate_options", [](auto* o) { o->struct_size = 3; });
  add("kv_generate", "struct_size of kv_answer", [&](kv_error* e) {
    kv_answer bad{};
    return kv_generate(session_.get(), "a", 1, nullptr, nullptr, nullptr, nullptr, &bad, e);
  });
  add_control("kv_generate", [&](const kv_control* c, kv_error* e) {
    return kv_generate(session_.get(), "a", 1, nullptr, c, nullptr, nullptr, &out_.answer, e);
  });
  add_control("kv_session_next", [&](const kv_control* c, kv_error* e) {
    return kv_session_next(session_.get(), nullptr, c, &out_.token, &out_.end, e);
  });
  add_control("kv_session_score", [&](const kv_control* c, kv_error* e) {
    return kv_session_score(session_.get(), known_tokens, 2, out_.logits, c, e);
  });
  for (float x : {-1.0f, 101.0f, nan_f, inf_f})
    add_generate_option("temperature", [x](auto* o) { o->temperature = x; });
  for (float x : {-1.0f, 1.5f, nan_f}) add_generate_option("top_p", [x](auto* o) { o->top_p = x; });
  for (float x : {-0.5f, 1.0f, nan_f}) add_generate_option("min_p", [x](auto* o) { o->min_p = x; });
  for (float x : {-1.0f, 1000.0f, nan_f})
    add_generate_option("repetition_penalty", [x](auto* o) { o->repetition_penalty = x; });
  static const char* const with_null[] = {"a", nullptr};
  static const char* const with_empty[] = {"a", ""};
  add_generate_option("reserved", [](auto* o) { o->reserved = 1; });
  add_generate_option("thinking", [](auto* o) { o->thinking = 2; });
  add_generate_option("thinking_tokens without thinking", [](auto* o) { o->thinking_tokens = 5; });
  for (const uint32_t flags : {KV_KEEP_THINKING, KV_KEEP_THINKING | KV_KEEP_TURN})
    add_generate_option("KV_KEEP_THINKING", [flags](auto* o) { o->flags = flags; });
  add_generate_option("KV_KEEP_THINKING without KV_KEEP_TURN",
                      [](auto* o) { o->flags = KV_KEEP_THINKING, o->thinking = KV_THINKING_ON; });
  add_generate_option("stop: no strings", [](auto* o) { o->stop_count = 1; });
  add_generate_option("stop: a NULL string",
                      [](auto* o) { o->stop = with_null, o->stop_count = 2; });
  add_generate_option("stop: an empty string",
                      [](auto* o) { o->stop = with_empty, o->stop_count = 2; });
  add("kv_session_next", "session", [&](kv_error* e) {
    return kv_session_next(nullptr, nullptr, nullptr, &out_.token, &out_.end, e);
  });
  add("kv_session_next", "token", [&](kv_error* e) {
    return kv_session_next(session_.get(), nullptr, nullptr, nullptr, &out_.end, e);
  });
  add("kv_session_score", "session", [&](kv_error* e) {
    return kv_session_score(nullptr, known_tokens, 2, out_.logits, nullptr, e);
  });
  add("kv_session_score", "tokens", [&](kv_error* e) {
    return kv_session_score(session_.get(), nullptr, 2, out_.logits, nullptr, e);
  });
  add("kv_session_score", "log_probabilities", [&](kv_error* e) {
    return kv_session_score(session_.get(), known_tokens, 2, nullptr, nullptr, e);
  });
  add("kv_session_score", "a token of no vocabulary", [&](kv_error* e) {
    static const int32_t wild[] = {5, 259};
    return kv_session_score(session_.get(), wild, 2, out_.logits, nullptr, e);
  });
  add(
      "kv_session_score", "empty sequence",
      [&](kv_error* e) {
        return kv_session_score(empty_.get(), known_tokens, 2, out_.logits, nullptr, e);
      },
      KV_BAD_STATE);
  add(
      "kv_session_next", "empty sequence",
      [&](kv_error* e) {
        return kv_session_next(empty_.get(), nullptr, nullptr, &out_.token, &out_.end, e);
      },
      KV_BAD_STATE);
}

void Misuses::add_sequence() {
  kv_session* const s = session_.get();
  add("kv_session_tokens", "session",
      [&](kv_error* e) { return kv_session_tokens(nullptr, out_.tokens, 4, &out_.count, e); });
  add("kv_session_tokens", "tokens",
      [&, s](kv_error* e) { return kv_session_tokens(s, nullptr, 4, &out_.count, e); });
  add("kv_session_tokens", "count",
      [&, s](kv_error* e) { return kv_session_tokens(s, out_.tokens, 4, nullptr, e); });
  add("kv_session_rewind", "session", [](kv_error* e) { return kv_session_rewind(nullptr, 0, e); });
  add("kv_session_rewind", "beyond the end",
      [s](kv_error* e) { return kv_session_rewind(s, 201, e); });
  add("kv_session_rewind", "far beyond the end",
      [s](kv_error* e) { return kv_session_rewind(s, UINT64_MAX, e); });
  add("kv_session_fork", "session",
      [&](kv_error* e) { return kv_session_fork(nullptr, &out_.session, e); });
  add("kv_session_fork", "out", [s](kv_error* e) { return kv_session_fork(s, nullptr, e); });
  add("kv_session_passages", "session",
      [&](kv_error* e) { return kv_session_passages(nullptr, out_.passages, 4, &out_.count, e); });
  add("kv_session_passages", "passages",
      [&](kv_error* e) { return kv_session_passages(traced_.get(), nullptr, 4, &out_.count, e); });
  add("kv_session_passages", "count", [&](kv_error* e) {
    return kv_session_passages(traced_.get(), out_.passages, 4, nullptr, e);
  });
  add(
      "kv_session_passages", "nothing traced",
      [&, s](kv_error* e) { return kv_session_passages(s, out_.passages, 4, &out_.count, e); },
      KV_BAD_STATE);
  add("kv_session_get_document", "session", [](kv_error* e) {
    kv_session_document document;
    kv_init(&document, sizeof document);
    return kv_session_get_document(nullptr, 0, &document, e);
  });
  add("kv_session_get_document", "document",
      [s](kv_error* e) { return kv_session_get_document(s, 0, nullptr, e); });
  add("kv_session_get_document", "struct_size of kv_session_document", [s](kv_error* e) {
    kv_session_document bad{};
    bad.struct_size = 4;
    return kv_session_get_document(s, 0, &bad, e);
  });
  add(
      "kv_session_get_document", "one document",
      [s](kv_error* e) {
        kv_session_document document;
        kv_init(&document, sizeof document);
        return kv_session_get_document(s, 0, &document, e);
      },
      KV_BAD_STATE);
  add("kv_session_document_tokens", "session", [&](kv_error* e) {
    return kv_session_document_tokens(nullptr, 0, nullptr, 0, &out_.count, e);
  });
  add(
      "kv_session_document_tokens", "one document",
      [&, s](kv_error* e) { return kv_session_document_tokens(s, 0, nullptr, 0, &out_.count, e); },
      KV_BAD_STATE);
  add("kv_session_limit_documents", "session",
      [](kv_error* e) { return kv_session_limit_documents(nullptr, nullptr, 0, e); });
  add("kv_session_limit_documents", "documents",
      [s](kv_error* e) { return kv_session_limit_documents(s, nullptr, 1, e); });
  add(
      "kv_session_limit_documents", "one document",
      [s](kv_error* e) { return kv_session_limit_documents(s, nullptr, 0, e); }, KV_BAD_STATE);
  add("kv_session_stats_json", "session",
      [&](kv_error* e) { return kv_session_stats_json(nullptr, out_.text, 64, &out_.count, e); });
  add("kv_session_stats_json", "json",
      [&, s](kv_error* e) { return kv_session_stats_json(s, nullptr, 64, &out_.count, e); });
  add("kv_session_stats_json", "size",
      [&, s](kv_error* e) { return kv_session_stats_json(s, out_.text, 64, nullptr, e); });
  add("kv_session_get_stats", "session",
      [&](kv_error* e) { return kv_session_get_stats(nullptr, &out_.stats, e); });
  add("kv_session_get_stats", "stats",
      [s](kv_error* e) { return kv_session_get_stats(s, nullptr, e); });
  add("kv_session_get_stats", "struct_size of kv_session_stats", [s](kv_error* e) {
    kv_session_stats bad{};
    return kv_session_get_stats(s, &bad, e);
  });
}

}  // namespace api_test
