// Models: open, describe, hash, tokenize.
#include <cinttypes>
#include <cstdio>
#include <string>

#include "api/handles.h"

using namespace kvasir;

namespace {

// Of a model that was opened for its vocabulary alone, the shape stays 0.
kv_model_info describe(const Model& model) {
  const ModelConfig& c = model.config();
  kv_model_info i{};
  i.layers = c.depth();
  i.width = c.width;
  i.heads = c.heads;
  i.kv_heads = c.kv_heads;
  i.head_dim = c.head_dim;
  i.feed_forward = c.feed_forward;
  i.vocabulary = c.vocabulary;
  i.context_tokens = c.context;
  i.parameters = model.weights().parameters;
  i.weight_bytes = model.weights().bytes;
  if (model.use() != ModelUse::vocabulary)
    i.kv_bytes_per_token =
        model.store_shape().slab_bytes() / model.store_shape().page.extent_tokens();
  i.thinks = model.thinking(model.chat()).exist();
  i.mtp_layers = c.skipped_layers;
  HashBytes hash;
  if (model.full_hash() && model.full_hash()->get(&hash))
    api::copy_text(i.hash, api::hexadecimal(hash));
  api::copy_shown(i.architecture, c.architecture ? c.architecture->name : model.architecture());
  api::copy_shown(i.name, c.name);
  api::copy_text(i.weights, model.weights().formats);
  api::copy_text(i.tokenizer, model.tokenizer().name());
  api::copy_text(i.chat_format, model.chat().name());
  api::copy_text(i.fingerprint, api::hexadecimal(model.fingerprint()));
  return i;
}

uint32_t count_experts(const ModelConfig& config, uint32_t first_layer, uint32_t end_layer) {
  uint32_t n = 0;
  for (uint32_t l = first_layer; l < end_layer; ++l) n += config.layer(l).has_experts();
  return n;
}

void log_devices(const Model& model, const LogFn& log) {
  char text[512];
  if (!model.why_no_device().empty()) {
    std::snprintf(text, sizeof text, "the CPU computes the model: %s",
                  model.why_no_device().c_str());
    log(KV_LOG_INFO, text);
  }
  for (const DeviceWeights& d : model.device_weights()) {
    std::string experts;
    if (const uint32_t all = count_experts(model.config(), d.first_layer(), d.end_layer()))
      experts = ", experts of " + std::to_string(d.expert_layers()) + " of " + std::to_string(all) +
                " layers";
    std::snprintf(text, sizeof text, "%s (%s) has %zu of %u layers%s%s in %" PRIu64 " bytes",
                  d.device()->name().c_str(), d.device()->info().name, d.layers().size(),
                  model.config().depth(), d.has_output() ? " and the output" : "", experts.c_str(),
                  d.bytes());
    log(KV_LOG_INFO, text);
  }
}

Status model_options(const kv_model_options* in, kv_model_options* out) {
  RETURN_IF_ERROR(api::read_options(in, out));
  RETURN_IF_ERROR(api::check_flags(out->flags, KV_VOCABULARY_ONLY | KV_PLAN_DRAFTS));
  if (out->chat_format && !*out->chat_format)
    return Status::error(Code::bad_argument, "chat_format is empty: use a format or NULL");
  if (out->hash_directory && !*out->hash_directory)
    return Status::error(Code::bad_argument, "hash_directory is empty: use a directory or NULL");
  if ((out->flags & KV_VOCABULARY_ONLY) &&
      (out->device || out->device_memory || out->hash_directory || out->flags & KV_PLAN_DRAFTS))
    return Status::error(Code::bad_argument,
                         "KV_VOCABULARY_ONLY takes no device, device_memory, hash_directory or "
                         "KV_PLAN_DRAFTS");
  if (out->device_memory && (!out->device || std::strcmp(out->device, "cpu") == 0))
    return Status::error(Code::bad_argument, "device_memory is %" PRIu64 " without a device",
                         out->device_memory);
  return {};
}

}  // namespace

extern "C" {

kv_status kv_open(const char* path, const kv_model_options* options, const kv_control* control,
                  kv_model** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_model_options o;
    api::Control c;
    RETURN_IF_ERROR(model_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    auto handle = std::make_unique<kv_model>();
    const char* const chat_format = o.chat_format ? o.chat_format : "";
    if (o.flags & KV_VOCABULARY_ONLY) {
      RETURN_IF_ERROR(Model::open_vocabulary(path, chat_format, &handle->model));
      *out = handle.release();
      return {};
    }
    DeviceOptions device;
    if (o.device) device.name = o.device;
    device.budget = o.device_memory;
    device.drafts = (o.flags & KV_PLAN_DRAFTS) != 0;
    RETURN_IF_ERROR(Model::open(path, chat_format, &handle->model, device,
                                o.hash_directory ? o.hash_directory : "", c.cancel));
    const LogFn log = api::log_function(o.log, o.log_user);
    if (log) log_devices(*handle->model, log);
    if (log && handle->model->chat().format() == ChatFormat::raw && !o.chat_format)
      log(KV_LOG_WARNING,
          "the model's chat format was not recognised: documents and questions are put as raw "
          "text");
    *out = handle.release();
    return {};
  });
}

kv_model* kv_model_retain(kv_model* model) {
  if (model) model->references.fetch_add(1, std::memory_order_relaxed);
  return model;
}

void kv_close(kv_model* model) {
  if (model && model->references.fetch_sub(1, std::memory_order_acq_rel) == 1) api::close(model);
}

kv_status kv_model_get_info(const kv_model* model, kv_model_info* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    return api::write_result(describe(*model->model), info, "info");
  });
}

kv_status kv_model_inspect(const char* path, kv_model_info* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    std::shared_ptr<const Model> model;
    if (Status s = Model::inspect(path, &model); !s.ok()) return s;
    return api::write_result(describe(*model), info, "info");
  });
}

kv_status kv_model_hash(kv_model* model, const kv_control* control, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    Progress progress(c.report(KV_PHASE_VERIFY));
    return model->model->full_hash()->compute(c.cancel, &progress);
  });
}

kv_status kv_tokenize(const kv_model* model, const char* text, size_t size, uint32_t flags,
                      const kv_control* control, int32_t* tokens, size_t capacity, size_t* count,
                      kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    if (Status s = api::check_text(text, size, "text"); !s.ok()) return s;
    if (Status s =
            api::check_flags(flags, KV_TOKENIZE_SPECIAL | KV_TOKENIZE_BOS | KV_TOKENIZE_DOCUMENT);
        !s.ok())
      return s;
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    const Tokenizer& tokenizer = model->model->tokenizer();
    Array<Token> ids;
    if (flags & KV_TOKENIZE_DOCUMENT) {
      if (Status s = Session::encode_first(*model->model, model->model->chat(), {text, size},
                                           flags & KV_TOKENIZE_SPECIAL, c.cancel, &ids, nullptr);
          !s.ok())
        return s;
    } else {
      if ((flags & KV_TOKENIZE_BOS) && tokenizer.add_bos()) ids.push_back(tokenizer.bos());
      const Tokenizer::Part part = {{text, size}, (flags & KV_TOKENIZE_SPECIAL) != 0};
      if (Status s = tokenizer.encode({&part, 1}, true, &ids, {nullptr, c.cancel}); !s.ok())
        return s;
    }
    return api::write_array(ids.data(), ids.size(), tokens, capacity, count);
  });
}

kv_status kv_detokenize(const kv_model* model, const int32_t* tokens, size_t count, uint32_t flags,
                        char* text, size_t capacity, size_t* size, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    if (!tokens && count)
      return Status::error(Code::bad_argument, "tokens is NULL and count is %zu", count);
    if (Status s = api::check_flags(flags, KV_TOKENIZE_SPECIAL); !s.ok()) return s;
    std::string out;
    for (std::size_t i = 0; i < count; ++i) {
      if (tokens[i] < 0 || static_cast<uint32_t>(tokens[i]) >= model->model->config().vocabulary)
        return Status::error(Code::bad_argument, "token %zu is %d: the vocabulary has %u", i,
                             tokens[i], model->model->config().vocabulary);
      out += model->model->tokenizer().piece(tokens[i], flags & KV_TOKENIZE_SPECIAL);
    }
    if (model->model->tokenizer().strips_leading_space() && !out.empty() && out[0] == ' ')
      out.erase(0, 1);
    return api::write_array(out.data(), out.size(), text, capacity, size);
  });
}

}  // extern "C"
