#include "eval_documents.h"

#include <filesystem>

#include "eval_random.h"
#include "failure.h"
#include "files.h"
#include "sequence_text.h"
#include "strategies.h"
#include "system.h"

namespace tool {
namespace {

// Progress of kv_prefill, converted for the progress line.
struct PrefillSteps {
  EvalProgress& progress;
  uint64_t before;  // tokens of an earlier run
  double reported;  // cost so far

  static int32_t callback(int32_t, uint64_t done, uint64_t, void* user) {
    auto& self = *static_cast<PrefillSteps*>(user);
    const double cost = prefill_cost(self.before + done);
    self.progress.step(Work::prefill, cost - self.reported);
    self.reported = cost;
    return 0;
  }
};

}  // namespace

std::string model_identity_of(Console& console, const ModelFlags& flags, kv_model* model) {
  std::string identity = hex(sampled_hash(flags.path)) + " " + flags.chat_format;
  std::string device = flags.device;  // a GPU rounds differently
  if (device == "auto") device = stats_of(open_session(console, model, {}).get()).device;
  if (!device.empty() && device != "cpu") identity += " " + device;
  return identity;
}

std::string prefill_identity_of(const SessionFlags& flags) {
  std::string prefill;  // empty: exact
  if (!flags.prefill.empty())
    prefill = " " + flags.prefill + " " + std::to_string(flags.prefill_budget) + " " +
              std::to_string(flags.prefill_exact);
  if (flags.prefill == filter_strategy) prefill += " " + flags.filter_layers;
  return Json::parse(kv_build_info()).value("cache_format", Json()).dump() + prefill;
}

SessionFlags eval_flags(const SessionFlags& flags, const std::string& strategy,
                        const Budget& budget) {
  SessionFlags own = flags_for(flags, strategy);
  own.budget = budget;
  own.no_lookup = true;  // how many tokens it drafts, and so what is read, depends on the time
  return own;
}

// The prefill of an earlier run, or null.
Session EvalDocuments::resume(const EvalDocument& document, size_t* bytes, uint64_t* tokens) {
  *bytes = *tokens = 0;
  const std::string path = path_of(document.name);
  if (!std::filesystem::exists(system::path(path))) return nullptr;
  kv_error error{};
  kv_session* loaded = nullptr;
  const SessionOptions options(p_.console, p_.flags);
  const kv_control control = control_of(p_.console);
  const kv_status status =
      kv_load(p_.model, path.c_str(), options.get(), &control, &loaded, &error);
  if (kv_status_is_stale(status) != 0 || status == KV_CORRUPT || status == KV_NOT_A_CACHE)
    return nullptr;
  if (status == KV_CANCELLED) p_.stopped();
  check(status, error);
  Session session(loaded);
  const Overlap overlap = compare(p_.console, p_.model, session.get(), p_.flags, document.text);
  if (overlap.kind != Overlap::whole && overlap.kind != Overlap::beginning) return nullptr;
  *bytes = overlap.bytes;
  *tokens = token_count(session.get());
  return session;
}

uint64_t EvalDocuments::append(kv_session* session, std::string_view text, uint64_t before,
                               bool* interrupted) {
  PrefillSteps steps{p_.progress, before, prefill_cost(before)};
  kv_control control = control_of(p_.console);
  control.progress = PrefillSteps::callback;
  control.user = &steps;
  kv_error error{};
  uint64_t added = 0;
  const kv_status status =
      kv_prefill(session, text.data(), text.size(), &control, &added, nullptr, &error);
  *interrupted = status == KV_CANCELLED;
  if (!*interrupted) check(status, error);
  return added;
}

void EvalDocuments::prefill(const EvalDocument& document) {
  p_.progress.begin("prefilling " + document.label);
  size_t bytes = 0;
  uint64_t before = 0;
  Session session = resume(document, &bytes, &before);
  if (bytes == document.text.size()) {
    p_.estimate.drop(Work::prefill, prefill_cost(document.tokens));
    return;
  }
  if (session == nullptr) session = open_session(p_.console, p_.model, p_.flags);
  p_.estimate.drop(Work::prefill, prefill_cost(before));
  p_.progress.begin("prefilling " + document.label);
  bool interrupted = false;
  const uint64_t added =
      append(session.get(), std::string_view(document.text).substr(bytes), before, &interrupted);
  if (added > 0) {
    kv_error error{};  // without cancel: it takes moments, the prefill took minutes
    const std::string path = path_of(document.name);
    p_.console.terminal.draw("Saving " + path);
    check(kv_save(session.get(), path.c_str(), nullptr, &error), error);
  }
  if (interrupted) p_.stopped();
}

Session EvalDocuments::load(const std::string& name, const SessionFlags& flags) {
  const SessionOptions options(p_.console, flags);
  const kv_control control = control_of(p_.console);
  kv_error error{};
  kv_session* session = nullptr;
  const kv_status status =
      kv_load(p_.model, path_of(name).c_str(), options.get(), &control, &session, &error);
  if (status == KV_CANCELLED) p_.stopped();
  check(status, error);
  Session loaded(session);
  prepare(session);  // a GPU then attends from the first question on
  return loaded;
}

void EvalDocuments::prepare(kv_session* session) {
  const kv_control control = control_of(p_.console);
  kv_error error{};
  const kv_status status = kv_session_prepare(session, &control, &error);
  if (status == KV_CANCELLED) p_.stopped();
  check(status, error);
}

}  // namespace tool
