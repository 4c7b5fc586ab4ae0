// Creates a session from an external store: a sequence whose KV cache another engine has computed.
#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "base/number_text.h"
#include "session/external_store.h"
#include "session/given_checkpoint.h"
#include "session/session.h"

namespace kvasir {

namespace {

// tokens prefilled again if nothing is sealed
constexpr uint64_t again_tokens = 64;
// Maximum difference of keys or values from the same weights, relative L2. Measured with the mini
// model: 0.01 and 0.02 if the other engine has float32 weights. Keys with positions off by one:
// 0.57. Keys of other tokens: 0.40 (values 0.72). Keys with another channel order: 1.38.
constexpr double max_difference = 0.35;

// Difference of the newest rows of two stores over all layers: uncentred keys, and values.
struct RowsDifference {
  Difference keys, values;
};

RowsDifference newest_rows_differ(const KvStore& ours, const KvStore& given, uint32_t rows) {
  const StoreShape& shape = ours.shape();
  const uint32_t dim = shape.page.dim;
  RowsDifference found;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      const std::size_t of = (std::size_t{ours.window_count()} - rows) * dim,
                        there = (std::size_t{given.window_count()} - rows) * dim,
                        centred = (std::size_t{l} * shape.kv_heads + h) * dim;
      const KvStore::Rows a = ours.window(l, h), b = given.window(l, h);
      const auto key = [&](const KvStore& store, const float* row, std::size_t i) {
        return row[i] + (store.centre().empty() ? 0.0f : store.centre()[centred + i % dim]);
      };
      for (std::size_t i = 0; i < std::size_t{rows} * dim; ++i) {
        found.keys.add(key(ours, a.k + of, i), key(given, b.k + there, i));
        found.values.add(a.v[of + i], b.v[there + i]);
      }
    }
  }
  return found;
}

Status check_layers(const Model& model, const GivenCheckpoint* from) {
  const ModelConfig& config = model.config();
  if (model.store_shape().page.latent)
    return Status::error(Code::unsupported,
                         "the model's values are parts of its keys: a cache keeps both apart");
  const bool needed = config.windows.layers > 0 || config.recurrent_layers > 0;
  if (needed && !from)
    return Status::error(
        Code::unsupported,
        "the model has %s, of which a cache has nothing: use "
        "kv_session_from_checkpoint",
        config.recurrent_layers > 0 ? "recurrent layers" : "layers that see a window");
  if (!needed && from)
    return Status::error(Code::bad_argument,
                         "the model has neither windows nor recurrent layers: use "
                         "kv_session_from_cache");
  return {};
}

Status check_shape(const HeadShape& shape, const HeadShape& wanted) {
  if (shape.layers == wanted.layers && shape.kv_heads == wanted.kv_heads &&
      shape.head_dim == wanted.head_dim)
    return {};
  return Status::error(
      Code::model_mismatch,
      "the cache has %u layers, %u KV heads, head_dim %u: the model has %u, %u and %u",
      shape.layers, shape.kv_heads, shape.head_dim, wanted.layers, wanted.kv_heads,
      wanted.head_dim);
}

// Checks that the sequence reaches far enough behind the checkpoint. Its windows begin in an extent
// whose first tokens are unknown, and end without it.
Status check_checkpoint(const KvStore* windows, const GivenCheckpoint& from, uint64_t tokens) {
  if (from.tokens() >= tokens)
    return Status::error(Code::bad_argument,
                         "from->tokens is %" PRIu64 ": the cache has %" PRIu64
                         ", and the tokens from there on are prefilled again",
                         from.tokens(), tokens);
  if (!windows || from.first_row() == 0 || windows->window_tokens() == KvStore::keep_all) return {};
  const StoreShape& shape = windows->shape();
  const uint64_t extent = shape.page.extent_tokens(),
                 more = shape.window + windows->window_tokens() + shape.page.page_tokens,
                 last = tokens < more ? 0 : (tokens - more) / extent * extent;
  if (from.first_row() <= last) return {};
  return Status::error(Code::bad_argument,
                       "from->tokens is %" PRIu64 ", too near to the end of %" PRIu64
                       " tokens: use %" PRIu64 " or fewer",
                       from.tokens(), tokens,
                       std::max(last + from.tokens() - from.first_row(), shape.window - 1));
}

}  // namespace

// Makes the newest tokens missing, in the stores and the states, so that they are prefilled again.
Status Session::begin_again(const KvStore& given, const GivenCheckpoint* from,
                            const Cancel* cancel) {
  SequenceState& s = sequence_;
  if (!from) {
    const uint64_t tokens = s.tokens.size(), again = s.store.pages().pages() > 0
                                                         ? given.window_count()
                                                         : std::min(again_tokens, tokens);
    return cut_stores(tokens - again, cancel);
  }
  s.windows = make_windows(*model_, s.store.window_tokens(), options_.memory.checkpoints);
  s.states = make_states(model_->config(), options_.memory.checkpoints);
  RETURN_IF_ERROR(check_checkpoint(s.windows_or_null(), *from, s.tokens.size()));
  if (s.windows) RETURN_IF_ERROR(from->fill(pool_.get(), cancel, &*s.windows));
  if (s.states) RETURN_IF_ERROR(from->fill(pool_.get(), cancel, &*s.states));
  return cut_store(from->tokens());
}

// Compares what the prefill computed with the caller's.
Status Session::check_adopted(const KvStore& given, uint64_t again, const Adopted& how,
                              const Cancel* cancel) {
  const auto rows = static_cast<uint32_t>(
      std::min<uint64_t>({again, given.window_count(), sequence_.store.window_count()}));
  const RowsDifference difference = newest_rows_differ(sequence_.store, given, rows);
  const double keys = difference.keys.relative(), values = difference.values.relative();
  if (!(keys < max_difference && values < max_difference))
    return Status::error(
        Code::model_mismatch,
        "the cache's newest %u tokens have keys and values that differ from the model's by %s and "
        "%s: other weights, tokens or positions made them, or their channels have another order",
        rows, fixed_text(keys, 2).c_str(), fixed_text(values, 2).c_str());
  if (!how.end) return {};
  double others = 0;
  RETURN_IF_ERROR(how.end->compare(
      {sequence_.windows_or_null(), sequence_.states ? &*sequence_.states : nullptr}, pool_.get(),
      cancel, &others));
  if (others < max_difference) return {};
  return Status::error(Code::model_mismatch,
                       "the windows or states at the end differ from the model's by %s: other "
                       "weights, tokens or positions made them, or their channels have another "
                       "order",
                       fixed_text(others, 2).c_str());
}

Status Session::adopt(std::shared_ptr<const Model> model, ExternalStore& cache,
                      std::span<const Token> tokens, SessionOptions options, Adopted how,
                      const Cancel* cancel, Progress::Report report,
                      std::unique_ptr<Session>* out) {
  RETURN_IF_ERROR(resolve(*model, &options));
  if (options.instructions && !options.instructions->empty())
    return Status::error(Code::bad_argument,
                         "instructions is set, but the tokens of a cache have none: use NULL");
  RETURN_IF_ERROR(check_layers(*model, how.from));
  RETURN_IF_ERROR(check_shape(cache.shape(), model->config()));
  const KvStore* given = nullptr;
  RETURN_IF_ERROR(cache.finish(&given));
  KvStore store(*given);
  if (tokens.empty() || tokens.size() != store.tokens())
    return Status::error(Code::bad_argument, "count is %zu: the cache holds %" PRIu64 " tokens",
                         tokens.size(), store.tokens());
  if (how.end && how.end->tokens() != tokens.size())
    return Status::error(Code::bad_argument,
                         "end->tokens is %" PRIu64 ": the cache holds %zu tokens",
                         how.end->tokens(), tokens.size());
  if (tokens.size() > options.context)
    return Status::error(Code::context_full,
                         "%zu tokens do not fit: the session's context is %" PRIu64, tokens.size(),
                         options.context);
  options.full_precision = store.window_tokens() == KvStore::keep_all;
  if (!options.full_precision) options.window = store.window_tokens();
  RETURN_IF_ERROR(check_memory_budget(options.memory, options.full_precision));
  RETURN_IF_ERROR(set_budget(
      &options, [&] { return store.set_budget(options.memory, tokens.size(), cancel); }));
  store.forget_sketch();  // the session builds one with the moments of its queries
  SequenceState sequence(model->config(), model->chat(), std::move(store), {}, {});
  std::unique_ptr<Session> session(new Session(std::move(model), options, std::move(sequence)));
  RETURN_IF_ERROR(session->check_tokens(tokens));
  RETURN_IF_ERROR(session->start(cancel));
  SequenceState& s = session->sequence_;
  s.tokens.assign(tokens.begin(), tokens.end());
  s.prefilled_tokens = tokens.size();
  s.turn = how.document ? Turn::document : Turn::tokens;
  const uint32_t pages = s.store.pages_after(tokens.size()), sealed = s.store.pages().pages();
  if (pages != sealed)
    return Status::error(Code::internal, "the cache has %u sealed pages where %u are expected",
                         sealed, pages);
  RETURN_IF_ERROR(session->begin_again(*given, how.from, cancel));
  const uint64_t again = s.missing();
  RETURN_IF_ERROR(session->prefill_missing(cancel, std::move(report)));
  if (how.from && s.windows) s.windows->drop_before(how.from->first_row());
  if (how.compared) RETURN_IF_ERROR(session->check_adopted(*given, again, how, cancel));
  *out = std::move(session);
  return {};
}

}  // namespace kvasir
