// Any bytes as a model: it is refused for a reason, or it runs. write_model_seeds.cc makes the
// first inputs, a model of each architecture.
#include <new>

#include "../temp_folder.h"
#include "replay.h"
#include "session/session.h"

using namespace kvasir;
using kvasir::test::require;

namespace {

// A few tokens at once, and two more.
Status run(const std::string& path) {
  std::shared_ptr<const Model> model;
  RETURN_IF_ERROR(Model::open(path, "", &model));
  require(model->config().depth() > 0, "a model has layers");
  SessionOptions options;
  options.threads = 1;
  options.context = 64;
  std::unique_ptr<Session> session;
  RETURN_IF_ERROR(Session::open(model, options, &session));
  std::vector<Token> tokens;
  for (uint32_t i = 0; i < 20; ++i)
    tokens.push_back(static_cast<Token>((7 + 31 * i) % model->config().vocabulary));
  uint64_t done = 0;
  RETURN_IF_ERROR(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done));
  require(done == tokens.size(), "all tokens of a step");
  for (int i = 0; i < 2; ++i) {
    Token token = -1;
    bool end = false;
    RETURN_IF_ERROR(session->next({}, nullptr, &token, &end));
    require(token >= 0 && static_cast<uint32_t>(token) < model->config().vocabulary,
            "an answer's tokens are of the vocabulary");
  }
  return {};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const TempFolder folder;
  static const std::string path = folder.file("model.gguf");
  write_file(path, {data, data + size});
  try {
    const Status s = run(path);
    require(s.ok() || s.message()[0] != 0, "a refusal says why");
    require(s.code() != Code::internal, "no input shows an error of the library");
  } catch (const std::bad_alloc&) {  // src/api returns it as a status
  }
  return 0;
}
