// Answers with drafts on GPUs: they are those of decoding alone on the same GPUs, to the bit,
// whatever the drafts are. Without a GPU the cases pass and say so.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device_helpers.h"
#include "draft_helpers.h"
#ifdef KVASIR_EMULATED_DEVICE
#include "../emulated/emulated.h"
#endif

using namespace kvasir;
using namespace kvasir::test;

namespace {

// Of an emulated device, products of several inputs round otherwise than those of one, as a GPU's.
struct SeveralDiffer {
#ifdef KVASIR_EMULATED_DEVICE
  emulated::Changed<int> changed{emulated::machine().several_differ, 1};
#endif
};

std::shared_ptr<const Model> drafting_on(const std::string& name, const DeviceOptions& device) {
  std::shared_ptr<const Model> model;
  const std::string path =
      name == "mini" ? EXAMPLES "/mini-reader-q8_0.gguf" : FIXTURES "/models/" + name + ".gguf";
  const Status s = Model::open(path, "", &model, device);
  REQUIRE_MESSAGE((s.ok() || (device.budget > 0 && s.code() == Code::no_memory)), s.message());
  if (!s.ok()) return nullptr;
  for (const DeviceWeights& d : model->device_weights()) d.device()->set_page_rates(2, {1, 1});
  return model;
}

// Some of its layers are on the devices, and some are not; null where that cannot be.
std::shared_ptr<const Model> partly_on(const char* name, const char* devices, std::size_t count) {
  for (uint64_t budget = uint64_t{1} << 19; budget < uint64_t{1} << 28; budget += budget / 8) {
    auto model = drafting_on(name, {devices, budget});
    if (!model || model->device_weights().size() < count) continue;
    const DeviceWeights& last = model->device_weights().back();
    return last.has_output() && last.expert_layers() == last.end_layer() ? nullptr : model;
  }
  return nullptr;
}

struct DraftedAnswer {
  std::string text;
  std::vector<Token> tokens;  // of the sequence
  std::vector<float> after;   // logits after one token more
  DraftCounts drafts;
  uint64_t answer_tokens = 0;
  bool gpu_attends = false, gpu_coexecutes = false;  // in its last step
};

SessionOptions drafting_options(const char* strategy) {
  SessionOptions o;
  o.threads = 2;
  o.prefill_chunk = 128;
  o.select.strategy = strategy;
  if (strategy != std::string("full")) o.select.budget_tokens = 64;
  o.drafts_always = true;
  o.lookup_tokens = 0;  // drafts are those of the cases alone
  return o;
}

DraftedAnswer drafted_answer(Session* session, const GenerateOptions& options) {
  DraftedAnswer out;
  Answer answer;
  const Status s = session->generate(
      "", options, [&](std::string_view t) { return out.text += t, 0; }, &answer);
  REQUIRE_MESSAGE(s.ok(), s.message());
  out.answer_tokens = answer.answer_tokens;
  out.drafts = session->stats().drafts;
  out.gpu_attends = attends(*session);
  out.gpu_coexecutes = says(*session, "\"gpu_coexecutes\":true");
  out.tokens.assign(session->tokens().begin(), session->tokens().end());
  out.after = logits_after(session, 100);
  return out;
}

std::unique_ptr<Session> prefilled_on(const std::shared_ptr<const Model>& model, std::size_t tokens,
                                      const SessionOptions& options) {
  auto session = open_session(model, options);
  read(session.get(), some_tokens(tokens));
  REQUIRE(session->prepare(nullptr, {}).ok());
  REQUIRE(session->prepare_devices(nullptr, {}).ok());
  return session;
}

GenerateOptions asked_for(uint32_t tokens, float temperature = 0) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.keep = true;
  options.sampling.temperature = temperature;
  options.sampling.seed = 3;
  return options;
}

void check_same_answer(const DraftedAnswer& a, const DraftedAnswer& b) {
  CHECK(a.text == b.text);
  CHECK(a.tokens == b.tokens);
  CHECK(a.after == b.after);
}

// An answer alone, and with drafts of which few, most or all are right.
DraftedAnswer check_drafts(const std::shared_ptr<const Model>& model, std::size_t tokens,
                           const SessionOptions& options, float temperature = 0) {
  const GenerateOptions asked = asked_for(60, temperature);
  const DraftedAnswer alone = drafted_answer(prefilled_on(model, tokens, options).get(), asked);
  CHECK(alone.drafts.drafted == 0);
  for (const uint32_t right : {0u, 5u, 8u}) {
    CAPTURE(right);
    const auto session = prefilled_on(model, tokens, options);
    session->draft_by(scripted_drafts(*session, alone.tokens, right));
    const DraftedAnswer drafted = drafted_answer(session.get(), asked);
    check_same_answer(drafted, alone);
    CHECK(drafted.drafts.off == DraftsOff::no);
    CHECK(drafted.gpu_attends == alone.gpu_attends);
    CHECK(drafted.gpu_coexecutes == alone.gpu_coexecutes);
    if (alone.answer_tokens > 1) CHECK(drafted.drafts.drafted > 0);
    if (right == 8 && alone.answer_tokens > 20)
      CHECK(drafted.drafts.accepted > alone.answer_tokens / 2);
  }
  return alone;
}

}  // namespace

TEST_CASE("answers with drafts on a GPU have the bits of those without, by every strategy") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  for (const char* name : {"mini", "llama-q4_k_m", "llama-fused"}) {
    CAPTURE(std::string(name));
    const auto model = drafting_on(name, {"cuda"});
    REQUIRE(model->device_weights().front().has_output());
    for (const char* strategy : {"full", "bounded", "quest", "window"}) {
      CAPTURE(std::string(strategy));
      const DraftedAnswer alone = check_drafts(model, 700, drafting_options(strategy));
      const bool by_gpu = strategy == std::string("bounded") || strategy == std::string("full");
      const bool gpu = name != std::string("llama-fused");  // the GPU has kernels for its heads
      CHECK(alone.gpu_attends == (gpu && by_gpu));
      CHECK(alone.gpu_coexecutes == (gpu && !by_gpu));
    }
    check_drafts(model, 700, drafting_options("bounded"), 0.9f);
    check_drafts(model, 60, drafting_options("bounded"));  // no page is sealed
    SessionOptions precise = drafting_options("full");
    precise.full_precision = true;
    check_drafts(model, 150, precise);
  }
}

TEST_CASE("recurrent layers and windows on a GPU follow drafts as they follow single tokens") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  for (const char* name : {"qwen35-mtp", "qwen3next", "granitehybrid", "falcon-h1", "lfm2",
                           "gemma3", "gemma2", "gpt-oss", "nemotron_h"}) {
    CAPTURE(std::string(name));
    const auto model = drafting_on(name, {"cuda"});
    for (const char* strategy : {"full", "bounded"}) {
      CAPTURE(std::string(strategy));
      check_drafts(model, 300, drafting_options(strategy));
      check_drafts(model, 300, drafting_options(strategy), 0.9f);
    }
  }
}

TEST_CASE("experts on a GPU give drafts the bits of single tokens") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  for (const char* name : {"qwen3moe-q4_k", "qwen35moe", "glm4moe-mtp", "lfm2moe", "gemma4-moe",
                           "granitehybrid-moe"}) {
    CAPTURE(std::string(name));
    const auto model = drafting_on(name, {"cuda"});
    for (const char* strategy : {"full", "bounded"})
      check_drafts(model, 300, drafting_options(strategy));
  }
}

TEST_CASE("answers with drafts have the same bits where GPUs have some of the layers") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  uint32_t in_part = 0;
  for (const char* name : {"llama-q4_k_m", "qwen35-mtp", "glm4moe-mtp", "qwen35moe", "gemma3"})
    for (const auto& [devices, count] : {std::pair("cuda", 1), std::pair("cuda:0,cuda:0", 2)}) {
      CAPTURE(std::string(name));
      CAPTURE(std::string(devices));
      const auto model = partly_on(name, devices, static_cast<std::size_t>(count));
      if (!model) continue;
      ++in_part;
      for (const char* strategy : {"full", "bounded"})
        check_drafts(model, 300, drafting_options(strategy));
    }
  CHECK(in_part >= 5);
}

TEST_CASE("answers with drafts have the same bits where several GPUs have all layers") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  for (const char* name : {"mini", "qwen35-mtp", "glm4moe-mtp", "gemma3"}) {
    CAPTURE(std::string(name));
    const auto model = drafting_on(name, {"cuda:0,cuda:0"});
    REQUIRE(model->device_weights().size() == 2);
    REQUIRE(model->device_weights().back().has_output());
    for (const char* strategy : {"full", "bounded"})
      check_drafts(model, 300, drafting_options(strategy));
  }
}

TEST_CASE("answers with drafts on a GPU have the same bits under a memory limit") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  const TempFolder folder;
  for (const char* name : {"mini", "qwen35-mtp"}) {
    CAPTURE(std::string(name));
    SessionOptions options = drafting_options("bounded");
    options.memory.bytes = uint64_t{64} << 20;
    options.memory.spill_folder = folder.path();
    check_drafts(drafting_on(name, {"cuda"}), 300, options);
  }
}

TEST_CASE("an MTP layer drafts for a model on GPUs, also after rewinds, forks, saves and loads") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  const TempFolder folder;
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"})
    for (const float temperature : {0.0f, 1.0f}) {
      CAPTURE(std::string(name));
      CAPTURE(temperature);
      const auto model = drafting_on(name, {"cuda"});
      SessionOptions plain = drafting_options("bounded"), drafting = plain;
      drafting.draft_tokens = 3;
      const GenerateOptions asked = asked_for(60, temperature);
      const auto alone = prefilled_on(model, 300, plain),
                 session = prefilled_on(model, 300, drafting);
      REQUIRE(alone->save(folder.file("alone.kv"), nullptr, {}).ok());
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
      const DraftedAnswer first = drafted_answer(session.get(), asked);
      check_same_answer(first, drafted_answer(alone.get(), asked));
      if (first.answer_tokens > 4) CHECK(first.drafts.drafted > 0);
      CHECK(session->stats().drafts_first == 1);
      CHECK(session->stats().drafts_device == model->device_weights().back().device()->name());
      CHECK(session->stats().drafts_device_because.empty());
      REQUIRE(session->rewind(300).ok());
      REQUIRE(alone->rewind(300).ok());
      std::unique_ptr<Session> fork;
      REQUIRE(session->fork(&fork).ok());
      const DraftedAnswer again = drafted_answer(session.get(), asked);
      check_same_answer(again, drafted_answer(alone.get(), asked));
      check_same_answer(again, drafted_answer(fork.get(), asked));
      const auto loaded = load(model, folder.file("a.kv"), drafting),
                 loaded_alone = load(model, folder.file("alone.kv"), plain);
      CHECK(loaded->stats().drafts_first == 1);
      const DraftedAnswer after = drafted_answer(loaded.get(), asked);
      check_same_answer(after, drafted_answer(loaded_alone.get(), asked));
      if (after.answer_tokens > 4) CHECK(after.drafts.drafted > 0);
    }
}

TEST_CASE("a plan for drafts takes no output from a GPU, and gives the MTP layer no less") {
  if (!device_model()) return;
  SessionOptions drafting = drafting_options("bounded");
  drafting.draft_tokens = 2;
  uint32_t on_gpu = 0;
  for (uint64_t budget = uint64_t{24} << 20; budget < uint64_t{1} << 28; budget += budget / 8) {
    CAPTURE(budget);
    const auto with = drafting_on("glm4moe-mtp", {"cuda", budget, true}),
               without = drafting_on("glm4moe-mtp", {"cuda", budget, false});
    REQUIRE(!with == !without);
    if (!with) continue;
    CHECK(with->device_weights().back().has_output() ==
          without->device_weights().back().has_output());
    const auto planned = open_session(with, drafting), other = open_session(without, drafting);
    if (other->stats().drafts_device == "cuda:0") CHECK(planned->stats().drafts_device == "cuda:0");
    on_gpu += planned->stats().drafts_device == "cuda:0";
    CHECK(planned->stats().drafts_device_because.empty() ==
          (planned->stats().drafts_device != "cpu"));
  }
  CHECK(on_gpu > 0);
}

TEST_CASE("an MTP layer follows a document whose weights come to the GPU layer by layer") {
  if (!device_model()) return;
  [[maybe_unused]] const SeveralDiffer differ;
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(std::string(name));
    const auto model = partly_on(name, "cuda", 1);
    REQUIRE(model);
    SessionOptions plain = drafting_options("bounded");
    plain.prefill_chunk = 100, plain.span_tokens = 300;
    SessionOptions drafting = plain;
    drafting.draft_tokens = 3;
    const auto alone = prefilled_on(model, 650, plain),
               session = prefilled_on(model, 650, drafting);
    CHECK(stat_of(*alone, "prefill_spans") > 0);
    CHECK(stat_of(*session, "prefill_spans") == stat_of(*alone, "prefill_spans"));
    CHECK(session->stats().drafts_first == 1);
    CHECK(session->stats().drafts_device_because.empty() ==
          (session->stats().drafts_device != "cpu"));
    const DraftedAnswer drafted = drafted_answer(session.get(), asked_for(40));
    check_same_answer(drafted, drafted_answer(alone.get(), asked_for(40)));
    if (drafted.answer_tokens > 4) CHECK(drafted.drafts.drafted > 0);
  }
}

namespace {

// A clock by which a step takes a microsecond, and one that records graphs a hundred more.
struct RecordingClock {
  static inline uint64_t now = 0;
  static inline bool records = false;
  static uint64_t read() {
    now += 1000;
    if (std::exchange(records, false)) now += 100000;
    return now;
  }
};

}  // namespace

TEST_CASE("graphs that a GPU takes long to record stop drafts for a while only") {
  if (!device_model()) return;
  const auto model = drafting_on("mini", {"cuda:0"});
  SessionOptions options = drafting_options("bounded");
  options.clock = RecordingClock::read;
  options.drafts_always = false;
  const DraftedAnswer alone =
      drafted_answer(prefilled_on(model, 300, options).get(), asked_for(60));
  auto session = prefilled_on(model, 300, options);
  std::map<uint32_t, uint32_t> uses;  // by numbers of drafts; the third one records
  const Session::DraftFn drafts = scripted_drafts(*session, alone.tokens, 8);
  session->draft_by([&](Token next, uint32_t count, Array<Token>* out) {
    RecordingClock::records = ++uses[count] == 3;
    drafts(next, count, out);
  });
  const DraftedAnswer drafted = drafted_answer(session.get(), asked_for(60));
  CHECK(drafted.text == alone.text);
  CHECK(drafted.drafts.accepted > 20);
}
