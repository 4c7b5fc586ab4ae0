// Instructions: the system text before the document, in every chat format, file and library.
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

constexpr const char* brief = "Be brief.";
constexpr const char* stated = "The code is 17.";

kv_session_options options_with(const char* instructions) {
  kv_session_options o = small_options();
  o.instructions = instructions;
  return o;
}

Session open_with(kv_model* model, const char* instructions) {
  return open_session(model, options_with(instructions));
}

// Text of the sequence, control tokens included, without begin-of-text.
std::string spelled_text(kv_model* model, kv_session* session) {
  std::vector<int32_t> tokens = sequence(session);
  int32_t bos = 0;
  std::size_t count = 0;
  REQUIRE_OK(kv_tokenize(model, nullptr, 0, KV_TOKENIZE_BOS, nullptr, &bos, 1, &count, error));
  if (count == 1 && !tokens.empty() && tokens[0] == bos) tokens.erase(tokens.begin());
  std::string out(8192, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(model, tokens.data(), tokens.size(), KV_TOKENIZE_SPECIAL, out.data(),
                           out.size(), &size, error));
  return out.substr(0, size);
}

// The text of a sequence and the turn of a question behind it, up to the answer.
std::string asked(kv_model* model, kv_session* session) {
  const std::size_t before = sequence(session).size();
  const Session copy = fork(session);
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.max_tokens = 1;
  o.flags = KV_KEEP_TURN;
  kv_answer answer;
  kv_init(&answer, sizeof answer);
  REQUIRE_OK(kv_generate(copy.get(), "Q?", 2, &o, nullptr, nullptr, nullptr, &answer, error));
  REQUIRE_OK(kv_session_rewind(copy.get(), before + answer.question_tokens, error));
  return spelled_text(model, copy.get());
}

kv_status load_with(kv_model* model, const std::string& path, const char* instructions,
                    uint64_t tokens = 0) {
  const kv_session_options o = options_with(instructions);
  kv_session* out = nullptr;
  const kv_status status = kv_load_prefix(model, path.c_str(), tokens, &o, nullptr, &out, nullptr);
  CHECK((out != nullptr) == (status == KV_OK));
  kv_session_close(out);
  return status;
}

std::string saved(kv_session* session, const TempFolder& folder, const char* name) {
  const std::string path = folder.file(name);
  save(session, path);
  return path;
}

struct Spelled {
  const char* format;
  const char* document;     // INSTRUCTIONS, DOCUMENT and a question
  const char* no_document;  // INSTRUCTIONS and a question
};
constexpr Spelled formats[] = {
    {"raw", "Be brief.\n\nThe code is 17.Q?", "Be brief.\n\nQ?"},
    {"chatml",
     "<|im_start|>system\nBe brief.\n\nThe code is 17.<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n"
     "<|im_start|>assistant\n",
     "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n"
     "<|im_start|>assistant\n"},
    {"llama3",
     "<|start_header_id|>system<|end_header_id|>\n\nBe brief.\n\nThe code is 17.<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\nQ?<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n",
     "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\nQ?<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"},
    {"llama2", "[INST] <<SYS>>\nBe brief.\n\nThe code is 17.\n<</SYS>>\n\nQ? [/INST]",
     "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nQ? [/INST]"},
    {"mistral", "[INST] Be brief.\n\nThe code is 17.\n\nQ? [/INST]",
     "[INST] Be brief.\n\nQ? [/INST]"},
    {"mistral-v3", "[INST] Be brief.\n\nThe code is 17.\n\nQ?[/INST]",
     "[INST] Be brief.\n\nQ?[/INST]"},
    {"mistral-tekken", "[INST]Be brief.\n\nThe code is 17.\n\nQ?[/INST]",
     "[INST]Be brief.\n\nQ?[/INST]"},
    {"gemma",
     "<start_of_turn>user\nBe brief.\n\nThe code is 17.\n\nQ?<end_of_turn>\n"
     "<start_of_turn>model\n",
     "<start_of_turn>user\nBe brief.\n\nQ?<end_of_turn>\n<start_of_turn>model\n"},
    {"phi", "<|system|>\nBe brief.\n\nThe code is 17.<|end|>\n<|user|>\nQ?<|end|>\n<|assistant|>\n",
     "<|system|>\nBe brief.<|end|>\n<|user|>\nQ?<|end|>\n<|assistant|>\n"},
    {"phi4",
     "<|im_start|>system<|im_sep|>Be brief.\n\nThe code is 17.<|im_end|>"
     "<|im_start|>user<|im_sep|>Q?<|im_end|><|im_start|>assistant<|im_sep|>",
     "<|im_start|>system<|im_sep|>Be brief.<|im_end|>"
     "<|im_start|>user<|im_sep|>Q?<|im_end|><|im_start|>assistant<|im_sep|>"},
    {"deepseek", "Be brief.\n\nThe code is 17.<｜User｜>Q?<｜Assistant｜>",
     "Be brief.<｜User｜>Q?<｜Assistant｜>"},
    {"deepseek-v2", "Be brief.\n\nThe code is 17.\n\nUser: Q?\n\nAssistant:",
     "Be brief.\n\nUser: Q?\n\nAssistant:"},
    {"zephyr", "<|system|>\nBe brief.\n\nThe code is 17.</s>\n<|user|>\nQ?</s>\n<|assistant|>\n",
     "<|system|>\nBe brief.</s>\n<|user|>\nQ?</s>\n<|assistant|>\n"},
    {"granite",
     "<|start_of_role|>system<|end_of_role|>Be brief.\n\nThe code is 17.<|end_of_text|>\n"
     "<|start_of_role|>user<|end_of_role|>Q?<|end_of_text|>\n"
     "<|start_of_role|>assistant<|end_of_role|>",
     "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
     "<|start_of_role|>user<|end_of_role|>Q?<|end_of_text|>\n"
     "<|start_of_role|>assistant<|end_of_role|>"},
    {"command-r",
     "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.\n\nThe code is 17.<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q?<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
     "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q?<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"},
    {"glm4", "[gMASK]<sop><|system|>\nBe brief.\n\nThe code is 17.<|user|>\nQ?<|assistant|>\n",
     "[gMASK]<sop><|system|>\nBe brief.<|user|>\nQ?<|assistant|>\n"},
    {"mistral-v7", "[SYSTEM_PROMPT]Be brief.\n\nThe code is 17.[/SYSTEM_PROMPT][INST]Q?[/INST]",
     "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Q?[/INST]"},
    {"hunyuan-dense",
     "Be brief.\n\nThe code is 17.<｜hy_place▁holder▁no▁3｜><｜hy_User｜>Q?<｜hy_Assistant｜>",
     "Be brief.<｜hy_place▁holder▁no▁3｜><｜hy_User｜>Q?<｜hy_Assistant｜>"},
    {"gemma4",
     "<|turn>system\nBe brief.\n\nThe code is 17.<turn|>\n<|turn>user\nQ?<turn|>\n<|turn>model\n"
     "<|channel>thought\n<channel|>",
     "<|turn>system\nBe brief.<turn|>\n<|turn>user\nQ?<turn|>\n<|turn>model\n"
     "<|channel>thought\n<channel|>"},
    {"gpt-oss",
     "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
     "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, "
     "final. Channel must be included for every message.<|end|><|start|>developer<|message|>"
     "# Instructions\n\nBe brief.\n\nThe code is 17.<|end|><|start|>user<|message|>Q?<|end|>"
     "<|start|>assistant<|channel|>final<|message|>",
     "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
     "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, "
     "final. Channel must be included for every message.<|end|><|start|>developer<|message|>"
     "# Instructions\n\nBe brief.<|end|><|start|>user<|message|>Q?<|end|>"
     "<|start|>assistant<|channel|>final<|message|>"},
    {"minicpm", "<用户>Be brief.\n\nThe code is 17.\n\nQ?<AI>", "<用户>Be brief.\n\nQ?<AI>"},
    {"<S>{document}</S>{user}<U>{question}</U><A>{answer}</A>",
     "<S>Be brief.\n\nThe code is 17.</S><U>Q?</U><A>", "<S>Be brief.</S><U>Q?</U><A>"},
};

}  // namespace

TEST_CASE("instructions stand at the start of the first turn of every chat format") {
  for (const Spelled& f : formats) {
    CAPTURE(f.format);
    const Model model = open_tiny_model(f.format);
    const Session document = open_with(model.get(), brief);
    read_text(document.get(), stated);
    CHECK(asked(model.get(), document.get()) == f.document);
    const Session bare = open_with(model.get(), brief);
    CHECK(asked(model.get(), bare.get()) == f.no_document);
  }
}

TEST_CASE("instructions are placed once, and again after a rewind to nothing") {
  const Session session = open_with(tiny_model(), brief);
  read_text(session.get(), stated);
  const std::vector<int32_t> once = sequence(session.get());
  read_text(session.get(), " More.");
  const std::string all = spelled_text(tiny_model(), session.get());
  CHECK(all.find(brief) == all.rfind(brief));
  REQUIRE_OK(kv_session_rewind(session.get(), 0, error));
  read_text(session.get(), stated);
  CHECK(sequence(session.get()) == once);
  const Session copy = fork(session.get());
  REQUIRE_OK(kv_session_rewind(copy.get(), 0, error));
  read_text(copy.get(), stated);
  CHECK(sequence(copy.get()) == once);
}

TEST_CASE("a sequence that a rewind has cut within its instructions takes no text") {
  for (const bool has_document : {true, false}) {
    CAPTURE(has_document);
    const Session session = open_with(tiny_model(), brief);
    if (has_document) read_text(session.get(), stated);
    kv_generate_options o;
    kv_init(&o, sizeof o);
    o.max_tokens = 1;
    o.flags = KV_KEEP_TURN;
    const auto ask = [&](kv_session* s) {
      return kv_generate(s, "Q?", 2, &o, nullptr, nullptr, nullptr, nullptr, nullptr);
    };
    if (!has_document) REQUIRE(ask(session.get()) == KV_OK);
    const std::size_t all = sequence(session.get()).size();
    std::size_t refused = 0;
    for (std::size_t tokens = 1; tokens < all; ++tokens) {
      const Session cut = fork(session.get());
      REQUIRE_OK(kv_session_rewind(cut.get(), tokens, error));
      const std::string left = spelled_text(tiny_model(), cut.get());
      const bool is_cut = left.find(std::string(brief) + "\n\n") == std::string::npos;
      CAPTURE(left);
      if (is_cut && has_document)
        CHECK(kv_prefill(cut.get(), stated, std::strlen(stated), nullptr, nullptr, nullptr,
                         nullptr) == KV_BAD_STATE);
      if (left.find(brief) == std::string::npos || (is_cut && has_document)) {
        CHECK(ask(cut.get()) == KV_BAD_STATE);
        CHECK(sequence(cut.get()).size() == tokens);
        REQUIRE_OK(kv_session_rewind(cut.get(), 0, error));
        ++refused;
      }
      // without a document, the mark behind the instructions may be cut too
      const kv_status asked = ask(cut.get());
      CHECK((asked == KV_OK || (asked == KV_BAD_STATE && is_cut && !has_document)));
    }
    CHECK(refused > 0);
    CHECK(refused + 1 < all);
  }
}

TEST_CASE("a prefix of a file that ends within the instructions takes no question") {
  const TempFolder folder;
  const Session session = open_with(tiny_model(), brief);
  read_text(session.get(), stated);
  const std::string path = saved(session.get(), folder, "a.kv");
  kv_session* out = nullptr;
  REQUIRE_OK(kv_load_prefix(tiny_model(), path.c_str(), 3, nullptr, nullptr, &out, error));
  const Session cut(out);
  CHECK(kv_generate(cut.get(), "Q?", 2, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) ==
        KV_BAD_STATE);
}

TEST_CASE("bytes of a prefill are counted without instructions") {
  const Session session = open_with(tiny_model(), brief);
  uint64_t tokens = 0, bytes = 0;
  REQUIRE_OK(
      kv_prefill(session.get(), stated, std::strlen(stated), nullptr, &tokens, &bytes, error));
  CHECK(bytes == std::strlen(stated));
  CHECK(tokens == sequence(session.get()).size());
}

TEST_CASE("a prefill that stops within the instructions leaves the sequence empty") {
  const std::string much(2000, 'x');
  const Session session = open_with(tiny_model(), much.c_str());
  kv_control control;
  kv_init(&control, sizeof control);
  control.progress = [](int32_t, uint64_t done, uint64_t, void*) -> int32_t { return done > 0; };
  uint64_t tokens = 7, bytes = 7;
  CHECK(kv_prefill(session.get(), stated, std::strlen(stated), &control, &tokens, &bytes,
                   nullptr) == KV_CANCELLED);
  CHECK(tokens == 0);
  CHECK(bytes == 0);
  CHECK(sequence(session.get()).empty());
}

TEST_CASE("tokens of the caller do not begin a session that has instructions") {
  const Session session = open_with(tiny_model(), brief);
  const std::vector<int32_t> some = some_tokens(4);
  CHECK(kv_prefill_tokens(session.get(), some.data(), some.size(), nullptr, nullptr, nullptr) ==
        KV_BAD_STATE);
  read_text(session.get(), stated);
  CHECK(kv_prefill_tokens(session.get(), some.data(), some.size(), nullptr, nullptr, nullptr) ==
        KV_OK);
  const Session none = open_with(tiny_model(), "");
  read_tokens(none.get(), some);
}

TEST_CASE("a cache file keeps its instructions and is refused with others") {
  const TempFolder folder;
  const Session session = open_with(tiny_model(), brief);
  read_text(session.get(), stated);
  const std::string path = saved(session.get(), folder, "a.kv");
  for (const uint64_t tokens : {uint64_t{0}, uint64_t{sequence(session.get()).size() - 2}}) {
    CHECK(load_with(tiny_model(), path, nullptr, tokens) == KV_OK);
    CHECK(load_with(tiny_model(), path, brief, tokens) == KV_OK);
    CHECK(load_with(tiny_model(), path, "Be long.", tokens) == KV_MODEL_MISMATCH);
    CHECK(load_with(tiny_model(), path, "", tokens) == KV_MODEL_MISMATCH);
  }
  const Session loaded = load(tiny_model(), path);  // NULL: the file's
  CHECK(asked(tiny_model(), loaded.get()) == asked(tiny_model(), session.get()));
  const std::string again = saved(loaded.get(), folder, "b.kv");
  CHECK(load_with(tiny_model(), again, brief) == KV_OK);
  CHECK(load_with(tiny_model(), again, "Be long.") == KV_MODEL_MISMATCH);
  REQUIRE_OK(kv_session_rewind(loaded.get(), 0, error));
  read_text(loaded.get(), stated);
  CHECK(sequence(loaded.get()) == sequence(session.get()));
}

TEST_CASE("a cache file without instructions is refused with some") {
  const TempFolder folder;
  const Session session = open_session(tiny_model());
  read_text(session.get(), stated);
  const std::string path = saved(session.get(), folder, "a.kv");
  CHECK(load_with(tiny_model(), path, nullptr) == KV_OK);
  CHECK(load_with(tiny_model(), path, "") == KV_OK);
  CHECK(load_with(tiny_model(), path, brief) == KV_MODEL_MISMATCH);
  const std::string tokens = saved(tiny_session(20).get(), folder, "b.kv");
  CHECK(load_with(tiny_model(), tokens, brief) == KV_MODEL_MISMATCH);
}

TEST_CASE("instructions that are too long for a file are refused") {
  const std::string long_text(1'000'001, 'x');
  const kv_session_options o = options_with(long_text.c_str());
  kv_session* out = nullptr;
  CHECK(kv_session_open(tiny_model(), &o, &out, nullptr) == KV_BAD_ARGUMENT);
}

TEST_CASE("a library takes no document for that of other instructions") {
  const TempFolder folder;
  kv_library* opened = nullptr;
  REQUIRE_OK(kv_library_open(folder.file("lib").c_str(), nullptr, &opened, error));
  const std::unique_ptr<kv_library, void (*)(kv_library*)> library(opened, kv_library_close);
  const Model raw = open_tiny_model("raw");
  const auto found = [&](const char* instructions, const std::string& document) {
    const kv_session_options session_options = options_with(instructions);
    kv_library_session_options o;
    kv_init(&o, sizeof o);
    o.session = &session_options;
    kv_library_result result;
    kv_init(&result, sizeof result);
    kv_session* session = nullptr;
    REQUIRE_OK(kv_library_session(library.get(), raw.get(), document.data(), document.size(), &o,
                                  nullptr, &session, &result, error));
    kv_session_close(session);
    CHECK(result.save_status == KV_OK);
    return result.tokens_found;
  };
  // both spell the same tokens
  CHECK(found(brief, stated) == 0);
  CHECK(found(nullptr, std::string(brief) + "\n\n" + stated) == 0);
  CHECK(found(brief, stated) > 0);
  CHECK(found(nullptr, std::string(brief) + "\n\n" + stated) > 0);
  CHECK(found("Be long.", stated) == 0);
}
