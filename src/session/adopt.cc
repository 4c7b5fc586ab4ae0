// Creates a session from an external store: a sequence whose KV cache another engine has computed.
#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "base/number_text.h"
#include "session/external_store.h"
#include "session/session.h"

namespace kvasir {

namespace {

// tokens prefilled again if nothing is sealed
constexpr uint64_t again_tokens = 64;
// Maximum difference of keys or values from the same weights, relative L2. Measured with the mini
// model: 0.01 and 0.02 if the other engine has float32 weights. Keys with positions off by one:
// 0.57. Keys of other tokens: 0.40 (values 0.72). Keys with another channel order: 1.38.
constexpr double max_difference = 0.35;

// Relative L2 difference of the newest rows of two stores over all layers: uncentred keys, and
// values.
struct Difference {
  double keys = 0, values = 0;
};

Difference newest_rows_differ(const KvStore& ours, const KvStore& given, uint32_t rows) {
  const StoreShape& shape = ours.shape();
  const uint32_t dim = shape.page.dim;
  double off[2] = {}, norm[2] = {};
  for (uint32_t l = 0; l < shape.layers; ++l) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      const std::size_t of = (std::size_t{ours.window_count()} - rows) * dim,
                        there = (std::size_t{given.window_count()} - rows) * dim;
      const KvStore::Rows a = ours.window(l, h), b = given.window(l, h);
      const float* centre = ours.centre().empty() ? nullptr
                                                  : ours.centre().data() +
                                                        (std::size_t{l} * shape.kv_heads + h) * dim;
      for (std::size_t i = 0; i < std::size_t{rows} * dim; ++i) {
        const double k = static_cast<double>(a.k[of + i]) +
                         (centre ? static_cast<double>(centre[i % dim]) : 0),
                     v = static_cast<double>(a.v[of + i]);
        off[0] += std::pow(static_cast<double>(a.k[of + i] - b.k[there + i]), 2);
        off[1] += std::pow(static_cast<double>(a.v[of + i] - b.v[there + i]), 2);
        norm[0] += k * k;
        norm[1] += v * v;
      }
    }
  }
  const auto relative = [&](int i) {
    return norm[i] > 0 ? std::sqrt(off[i] / norm[i]) : off[i] > 0 ? 1e9 : 0;
  };
  return {relative(0), relative(1)};
}

}  // namespace

Status Session::adopt(std::shared_ptr<const Model> model, ExternalStore& cache,
                      std::span<const Token> tokens, SessionOptions options, Adopted how,
                      const Cancel* cancel, Progress::Report report,
                      std::unique_ptr<Session>* out) {
  RETURN_IF_ERROR(resolve(*model, &options));
  if (options.instructions && !options.instructions->empty())
    return Status::error(Code::bad_argument,
                         "instructions is set, but the tokens of a cache have none: use NULL");
  if (model->config().windows.layers > 0)
    return Status::error(Code::unsupported,
                         "the model has layers that see a window: a cache keeps all layers alike");
  if (model->config().recurrent_layers > 0)
    return Status::error(Code::unsupported,
                         "the model has recurrent layers: a cache has keys and values only");
  if (model->store_shape().page.latent)
    return Status::error(Code::unsupported,
                         "the model's values are parts of its keys: a cache keeps both apart");
  const HeadShape &shape = cache.shape(), &wanted = model->config();
  if (shape.layers != wanted.layers || shape.kv_heads != wanted.kv_heads ||
      shape.head_dim != wanted.head_dim)
    return Status::error(
        Code::model_mismatch,
        "the cache has %u layers, %u KV heads, head_dim %u: the model has %u, %u and %u",
        shape.layers, shape.kv_heads, shape.head_dim, wanted.layers, wanted.kv_heads,
        wanted.head_dim);
  const KvStore* given = nullptr;
  RETURN_IF_ERROR(cache.finish(&given));
  KvStore store(*given);
  if (tokens.empty() || tokens.size() != store.tokens())
    return Status::error(Code::bad_argument, "count is %zu: the cache holds %" PRIu64 " tokens",
                         tokens.size(), store.tokens());
  if (tokens.size() > options.context)
    return Status::error(Code::context_full,
                         "%zu tokens do not fit: the session's context is %" PRIu64, tokens.size(),
                         options.context);
  options.full_precision = store.window_tokens() == KvStore::keep_all;
  if (!options.full_precision) options.window = store.window_tokens();
  RETURN_IF_ERROR(check_memory_budget(options.memory, options.full_precision));
  RETURN_IF_ERROR(store.set_budget(options.memory, tokens.size(), cancel));
  store.forget_sketch();  // the session builds one with the moments of its queries
  SequenceState sequence(model->config(), model->chat(), std::move(store), {}, {});
  std::unique_ptr<Session> session(new Session(std::move(model), options, std::move(sequence)));
  RETURN_IF_ERROR(session->check_tokens(tokens));
  RETURN_IF_ERROR(session->start());
  session->sequence_.tokens.assign(tokens.begin(), tokens.end());
  session->sequence_.prefilled_tokens = tokens.size();
  session->sequence_.turn = how.document ? Turn::document : Turn::tokens;
  const uint32_t pages = session->sequence_.store.pages_after(tokens.size()),
                 sealed = session->sequence_.store.pages().pages();
  const uint64_t again =
      sealed > 0 ? given->window_count() : std::min<uint64_t>(again_tokens, tokens.size());
  if (pages != sealed)
    return Status::error(Code::internal, "the cache has %u sealed pages where %u are expected",
                         sealed, pages);
  RETURN_IF_ERROR(session->cut_stores(tokens.size() - again, cancel));
  RETURN_IF_ERROR(session->prefill_missing(cancel, std::move(report)));
  const Difference difference = how.compared ? newest_rows_differ(session->sequence_.store, *given,
                                                                  static_cast<uint32_t>(again))
                                             : Difference();
  if (!(difference.keys < max_difference && difference.values < max_difference))
    return Status::error(
        Code::model_mismatch,
        "the cache's newest %" PRIu64
        " tokens have keys and values that differ from the model's by %s and %s: other weights, "
        "tokens or positions made them, or their channels have another order",
        again, fixed_text(difference.keys, 2).c_str(), fixed_text(difference.values, 2).c_str());
  *out = std::move(session);
  return {};
}

}  // namespace kvasir
