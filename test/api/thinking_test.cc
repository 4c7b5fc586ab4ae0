// Thoughts: skipped, delivered apart from the answer, limited, and kept or not. The models of these
// tests follow scripts.
#include <cstring>

#include "helpers.h"
#include "scripted_model.h"
#include "temp_folder.h"

using namespace api_test;
using kvasir::Token;
using kvasir::test::ScriptedModel;

namespace {

constexpr const char* qwen_template =
    "{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n<|im_start|>assistant\\n' }}"
    "{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}";

// Opened once. After "\n" it thinks "thoug", after a blank line it answers "answer". Without marks
// before the answer it would think.
class Qwen {
 public:
  Qwen() {
    ScriptedModel m;
    const Token blank_line = m.merged("\n", "\n");
    m.special("<|im_start|>");
    const Token end = m.special("<|im_end|>");
    m.special("<think>", 4);
    const Token close = m.special("</think>", 4);
    m.script('\n', "thoug", close);
    m.script(blank_line, "answer", end);
    m.write(folder_.file("m.gguf"), qwen_template);
    model_ = open_model(folder_.file("m.gguf").c_str());
  }
  kv_model* get() const { return model_.get(); }

 private:
  TempFolder folder_;
  Model model_;
};

kv_model* qwen() {
  static const Qwen model;
  return model.get();
}

struct Asked {
  kv_status status = KV_OK;
  std::string thought, text;
  kv_answer answer{};
  kv_error error{};
};

// Receives both texts; `stop_at`: the character at which it stops the call.
struct Receiver {
  Asked* out;
  char stop_at = 0;
  kv_cancel* fired = nullptr;

  int32_t take(std::string* to, const char* text, std::size_t size) const {
    to->append(text, size);
    const bool stops = stop_at && std::memchr(text, stop_at, size);
    if (stops && fired) kv_cancel_fire(fired);
    return stops && !fired;
  }
};

kv_generate_options thinking(uint32_t flags = 0, uint32_t tokens = 0) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.thinking = KV_THINKING_ON;
  o.thinking_tokens = tokens;
  o.flags = flags;
  return o;
}

kv_generate_options plain(uint32_t flags = 0) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.flags = flags;
  return o;
}

// Receives both texts: kv_generate has one `user` for both callbacks.
Asked ask_with(kv_session* session, kv_generate_options o, char stop_at = 0,
               kv_cancel* fired = nullptr, const char* question = "Q?") {
  Asked out;
  kv_init(&out.answer, sizeof out.answer);
  Receiver receiver{&out, stop_at, fired};
  o.on_thinking = [](const char* text, size_t size, void* user) -> int32_t {
    const auto* r = static_cast<Receiver*>(user);
    return r->take(&r->out->thought, text, size);
  };
  const kv_control control = control_of(fired);
  out.status = kv_generate(
      session, question, std::strlen(question), &o, &control,
      [](const char* text, size_t size, void* user) -> int32_t {
        const auto* r = static_cast<Receiver*>(user);
        return r->take(&r->out->text, text, size);
      },
      &receiver, &out.answer, &out.error);
  return out;
}

std::string spelled(kv_model* model, kv_session* session) {
  const std::vector<int32_t> tokens = sequence(session);
  std::string text(8192, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(model, tokens.data(), tokens.size(), KV_TOKENIZE_SPECIAL, text.data(),
                           text.size(), &size, error));
  return text.substr(0, size);
}

Session with_document(kv_model* model) {
  Session session = open_session(model);
  read_text(session.get(), "D.");
  return session;
}

const std::string document = "<|im_start|>system\nD.",
                  asked_turn =
                      "<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n";
const std::string skipped = "<think>\n\n</think>\n\n";

}  // namespace

TEST_CASE("a thought that is off is written, or its marks are part of the answer") {
  const Session session = with_document(qwen());
  const Asked off = ask_with(session.get(), plain(KV_KEEP_TURN));
  CHECK(off.status == KV_OK);
  CHECK(off.thought.empty());
  CHECK(off.text == "answer");
  CHECK(off.answer.stop_reason == KV_STOP_END_OF_TURN);
  CHECK(off.answer.thinking_tokens == 0);
  CHECK(spelled(qwen(), session.get()) == document + asked_turn + skipped + "answer");
}

TEST_CASE("a thought reaches the answer's callback, or counts as a part of the answer") {
  const Session session = with_document(qwen());
  const std::vector<int32_t> before = sequence(session.get());
  const Asked on = ask_with(session.get(), thinking());
  CHECK(on.status == KV_OK);
  CHECK(on.thought == "thoug");
  CHECK(on.text == "answer");
  CHECK(on.answer.thinking_tokens == 5);
  CHECK(on.answer.answer_tokens == 6);
  CHECK(on.answer.stop_reason == KV_STOP_END_OF_TURN);
  CHECK(stats_of(session.get()).last_steps == 11);
  CHECK(sequence(session.get()) == before);
  kv_generate_options o = thinking();  // without a callback for it
  o.max_tokens = 2;
  const Reply reply = [&] {
    Reply out{};
    out.status = kv_generate(
        session.get(), "Q?", 2, &o, nullptr,
        [](const char* text, size_t size, void* user) -> int32_t {
          static_cast<std::string*>(user)->append(text, size);
          return 0;
        },
        &out.text, nullptr, &out.error);
    return out;
  }();
  CHECK(reply.status == KV_OK);
  CHECK(reply.text == "an");  // max_tokens are the answer's
}

TEST_CASE("drafts by lookup change a thought or an answer, or cannot be turned off") {
  kv_session_options off;
  kv_init(&off, sizeof off);
  off.flags = KV_NO_LOOKUP;
  const Session drafting = open_session(qwen()), alone = open_session(qwen(), off);
  read_text(drafting.get(), "D."), read_text(alone.get(), "D.");
  uint64_t looked_up = 0;
  for (int turn = 0; turn < 4; ++turn) {  // each turn is as the one before
    const Asked a = ask_with(drafting.get(), thinking(KV_KEEP_TURN | KV_KEEP_THINKING)),
                b = ask_with(alone.get(), thinking(KV_KEEP_TURN | KV_KEEP_THINKING));
    CHECK((a.status == KV_OK && b.status == KV_OK));
    CHECK(a.thought == "thoug");
    CHECK(a.text == b.text);
    CHECK(a.thought == b.thought);
    CHECK(stats_of(alone.get()).last_looked_up == 0);
    looked_up += stats_of(drafting.get()).last_looked_up;
  }
  CHECK(looked_up > 0);
  CHECK(sequence(drafting.get()) == sequence(alone.get()));
}

TEST_CASE("a thought that reaches its limit does not end, or ends the answer") {
  const Session session = with_document(qwen());
  const Asked cut = ask_with(session.get(), thinking(KV_KEEP_TURN | KV_KEEP_THINKING, 3));
  CHECK(cut.status == KV_OK);
  CHECK(cut.thought == "tho");
  CHECK(cut.answer.thinking_tokens == 3);
  CHECK(cut.text == "answer");
  CHECK(spelled(qwen(), session.get()) ==
        document + asked_turn + "<think>\ntho\n</think>\n\nanswer");
}

TEST_CASE("a kept turn has its thought unasked, or loses its answer") {
  const Session on = with_document(qwen()), off = with_document(qwen()),
                kept = with_document(qwen());
  CHECK(ask_with(on.get(), thinking(KV_KEEP_TURN)).text == "answer");
  CHECK(ask_with(off.get(), plain(KV_KEEP_TURN)).text == "answer");
  CHECK(ask_with(kept.get(), thinking(KV_KEEP_TURN | KV_KEEP_THINKING)).text == "answer");
  CHECK(sequence(on.get()) == sequence(off.get()));
  CHECK(spelled(qwen(), kept.get()) == document + asked_turn + "<think>\nthoug</think>\n\nanswer");
  // the conversation goes on, and a rewind goes back to the document
  const std::size_t turn = sequence(on.get()).size();
  CHECK(ask_with(on.get(), thinking(KV_KEEP_TURN)).thought == "thoug");
  CHECK(spelled(qwen(), on.get()) ==
        document + asked_turn + skipped + "answer" + asked_turn + skipped + "answer");
  REQUIRE_OK(kv_session_rewind(on.get(), turn, error));
  CHECK(sequence(on.get()) == sequence(off.get()));
  CHECK(kv_prefill(on.get(), "x", 1, nullptr, nullptr, nullptr, nullptr) == KV_BAD_STATE);
  REQUIRE_OK(kv_session_rewind(on.get(), 5, error));
  CHECK(kv_prefill(on.get(), "x", 1, nullptr, nullptr, nullptr, nullptr) == KV_OK);
}

TEST_CASE("keys and values of a kept turn are those of its thought") {
  // A random model, whose logits depend on the whole sequence. Its thoughts reach their limit.
  kv_model_options o;
  kv_init(&o, sizeof o);
  o.chat_format = "{document}\n{question}\n<t>{thought}</t>\n{answer}\n";
  kv_model* opened = nullptr;
  REQUIRE_OK(kv_open(tiny_path, &o, nullptr, &opened, error));
  const Model model(opened);
  kv_session_options full = small_options();
  full.decode = nullptr;
  const Session session = open_session(model.get(), full);
  read_text(session.get(), "A document of some length, so that there is something to attend.");
  const Session again = fork(session.get());
  const std::size_t before = sequence(session.get()).size();
  kv_generate_options how = thinking(KV_KEEP_TURN, 20);
  how.max_tokens = 12;
  const Asked answer = ask_with(session.get(), how);
  REQUIRE(answer.status == KV_OK);
  CHECK(answer.answer.thinking_tokens == 20);
  const std::vector<int32_t> tokens = sequence(session.get());
  CHECK(tokens.size() < before + 20 + answer.answer.question_tokens + 12);
  // the same tokens, prefilled
  const std::vector<int32_t> turn(tokens.begin() + static_cast<std::ptrdiff_t>(before),
                                  tokens.end());
  read_tokens(again.get(), turn);
  const std::vector<int32_t> next = some_tokens(8);
  std::vector<float> a(8), b(8);
  REQUIRE_OK(kv_session_score(session.get(), next.data(), 8, a.data(), nullptr, error));
  REQUIRE_OK(kv_session_score(again.get(), next.data(), 8, b.data(), nullptr, error));
  CHECK(a == b);
}

TEST_CASE("a turn that is stopped in its answer keeps a thought, or is lost") {
  const Session session = with_document(qwen());
  const Asked stopped = ask_with(session.get(), thinking(KV_KEEP_TURN), 'w');
  CHECK(stopped.status == KV_CANCELLED);
  CHECK(stopped.answer.stop_reason == KV_STOP_CANCELLED);
  CHECK(stopped.text == "answ");
  CHECK(spelled(qwen(), session.get()) == document + asked_turn + skipped + "answ");
}

TEST_CASE("a turn that is stopped in its thought, or by a token, leaves something") {
  const Cancel cancel = make_cancel();
  for (const bool by_token : {false, true}) {
    for (const char at : {'o', 'w'}) {
      if (at == 'w' && !by_token) continue;
      const Session session = with_document(qwen());
      const std::vector<int32_t> before = sequence(session.get());
      kv_cancel_reset(cancel.get());
      const Asked stopped =
          ask_with(session.get(), thinking(KV_KEEP_TURN), at, by_token ? cancel.get() : nullptr);
      CHECK(stopped.status == KV_CANCELLED);
      CHECK(sequence(session.get()) == before);
      CHECK(ask_with(session.get(), thinking()).text == "answer");
    }
  }
}

TEST_CASE("a model that ends its turn in its thought does not answer") {
  const TempFolder folder;
  ScriptedModel m;
  const Token blank_line = m.merged("\n", "\n");
  m.special("<|im_start|>");
  const Token end = m.special("<|im_end|>");
  m.special("<think>", 4), m.special("</think>", 4);
  m.script('\n', "hm", end);
  m.script(blank_line, "ok", end);
  m.write(folder.file("m.gguf"), qwen_template);
  const Model model = open_model(folder.file("m.gguf").c_str());
  const Session session = with_document(model.get());
  const Asked on = ask_with(session.get(), thinking());
  CHECK(on.thought == "hm");
  CHECK(on.text == "ok");
}

TEST_CASE("a mark of several tokens does not end a thought, or is delivered with it") {
  const TempFolder folder;
  ScriptedModel m;  // "</think>" is text, as in Granite's vocabulary
  m.special("<|start_of_role|>"), m.special("<|end_of_role|>");
  const Token end = m.special("<|end_of_text|>"), blank_line = m.merged("\n", "\n");
  m.script('\n', "am</think>", blank_line);
  m.script(blank_line, "or", end);
  m.write(folder.file("m.gguf"), "{{ '<|start_of_role|>' }}{{ '<think></think>' }}");
  const Model model = open_model(folder.file("m.gguf").c_str());
  const Session session = with_document(model.get());
  const Asked on = ask_with(session.get(), thinking());
  CHECK(on.status == KV_OK);
  CHECK(on.thought == "am");
  CHECK(on.text == "or");
}

TEST_CASE("channels of gpt-oss are mixed up, or its message does not end the answer") {
  const TempFolder folder;
  ScriptedModel m;
  const Token message = m.special("<|message|>"), end = m.special("<|end|>");
  m.special("<|start|>"), m.special("<|channel|>");
  m.special("<|return|>"), m.special("<|call|>");
  m.script(message, "tex", end);
  m.write(folder.file("m.gguf"), "{{ '<|start|>assistant<|channel|>final<|message|>' }}");
  const Model model = open_model(folder.file("m.gguf").c_str());
  const Session session = with_document(model.get());
  const Asked on = ask_with(session.get(), thinking(KV_KEEP_TURN));
  CHECK(on.status == KV_OK);
  CHECK(on.thought == "tex");
  CHECK(on.text == "tex");
  CHECK(on.answer.stop_reason == KV_STOP_END_OF_TURN);
  const std::string text = spelled(model.get(), session.get());
  const std::string turn = "<|start|>assistant<|channel|>final<|message|>tex";
  CHECK(text.substr(text.size() - turn.size()) == turn);
  CHECK(text.find("analysis<|message|>") == std::string::npos);
  CHECK(text.find("Reasoning: medium") != std::string::npos);
}

TEST_CASE("a model that does not think is asked to, or says that it does") {
  const Session session = tiny_session(20);
  const kv_generate_options o = thinking();
  CHECK(kv_generate(session.get(), "Q?", 2, &o, nullptr, nullptr, nullptr, nullptr, nullptr) ==
        KV_UNSUPPORTED);
  const auto thinks = [](kv_model* model) {
    kv_model_info info;
    kv_init(&info, sizeof info);
    REQUIRE_OK(kv_model_get_info(model, &info, error));
    return info.thinks;
  };
  CHECK(thinks(tiny_model()) == 0);
  CHECK(thinks(qwen()) == 1);
}

TEST_CASE("passages of an answer are lost with its thought") {
  const Session session = with_document(qwen());
  read_text(session.get(), book(400));
  const Asked on = ask_with(session.get(), thinking(KV_KEEP_TURN | KV_TRACE_PASSAGES));
  CHECK(on.text == "answer");
  kv_passage passages[64];
  std::size_t count = 0;
  REQUIRE_OK(kv_session_passages(session.get(), passages, 64, &count, error));
  CHECK(count > 0);
}

TEST_CASE("a caller's format thinks otherwise than its text has it") {
  kv_model_options o;
  kv_init(&o, sizeof o);
  o.chat_format =
      "<|im_start|>{document}<|im_end|>{user}{question}\n<think>\n{thought}</think>\n\n{answer}"
      "<|im_end|>";
  const TempFolder folder;
  ScriptedModel m;
  const Token blank_line = m.merged("\n", "\n");
  m.special("<|im_start|>");
  const Token end = m.special("<|im_end|>");
  m.special("<think>", 4);
  const Token close = m.special("</think>", 4);
  m.script('\n', "thoug", close);
  m.script(blank_line, "answer", end);
  m.write(folder.file("m.gguf"), "");
  kv_model* opened = nullptr;
  REQUIRE_OK(kv_open(folder.file("m.gguf").c_str(), &o, nullptr, &opened, error));
  const Model model(opened);
  const Session session = with_document(model.get());
  CHECK(ask_with(session.get(), plain()).text == "answer");
  const Asked on = ask_with(session.get(), thinking(KV_KEEP_TURN));
  CHECK(on.thought == "thoug");
  CHECK(on.text == "answer");
  CHECK(spelled(model.get(), session.get()) ==
        "<|im_start|>D.<|im_end|>Q?\n<think>\n</think>\n\nanswer");
}
