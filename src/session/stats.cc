// What a session says of itself, as JSON. All names and texts are the library's own, but for what a
// driver says.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "base/number_text.h"
#include "base/quoted.h"
#include "session/session.h"

namespace kvasir {
namespace {

// JSON has no word for what is not finite.
std::string number(double value, int digits = 6) {
  return std::isfinite(value) ? number_text(value, digits).c_str() : "null";
}

class Json {
 public:
  [[gnu::format(printf, 3, 4)]] void add(const char* key, const char* format, ...) {
    char value[256];
    va_list args;
    va_start(args, format);
    std::vsnprintf(value, sizeof value, format, args);
    va_end(args);
    text_ += text_.size() > 1 ? ",\"" : "\"";
    text_ += key;
    text_ += "\":";
    text_ += value;
  }
  // A list of numbers of any length.
  void list(const char* key, const std::string& numbers) {
    add(key, "[");
    text_ += numbers + "]";
  }
  void raw(const char* key, const std::string& value) {
    add(key, "%s", "");
    text_ += value;
  }
  void count(const char* key, uint64_t value) { add(key, "%" PRIu64, value); }
  void real(const char* key, double value) { raw(key, number(value)); }
  std::string take() && { return std::move(text_) + "}"; }

 private:
  std::string text_ = "{";
};

// Means over query heads and tokens, [layers][kv_heads].
std::string compared_json(const Comparison& comparison) {
  std::string layers, covered;
  for (uint32_t l = 0; l < comparison.layers(); ++l) {
    layers += l > 0 ? ",[" : "[";
    for (uint32_t h = 0; h < comparison.kv_heads(); ++h) {
      const Compared& c = comparison.of(l, h);
      const double n = static_cast<double>(std::max<uint64_t>(c.queries, 1));
      Json json;
      json.count("queries", c.queries);
      json.real("mass", c.mass / n);
      json.real("min_mass", c.min_mass);
      json.real("error", c.error / n);
      json.real("largest_error", c.largest_error);
      json.real("recall", c.recall / n);
      json.real("min_recall", c.min_recall);
      json.real("tokens", c.tokens / n);
      if (c.searches > 0) {
        json.real("search_keys", c.search_keys / static_cast<double>(c.searches));
        json.real("search_recall", c.search_recall / static_cast<double>(c.searches));
      }
      if (c.estimates > 0) {
        json.real("mass_estimated", c.mass_estimated / static_cast<double>(c.estimates));
        json.real("estimate_error", c.estimate_error / static_cast<double>(c.estimates));
      }
      if (c.certified > 0) {
        json.real("certificate", c.certificate / static_cast<double>(c.certified));
        json.real("certificate_excess", c.certificate_excess);
      }
      layers += (h > 0 ? "," : "") + std::move(json).take();
    }
    layers += "]";
  }
  for (uint32_t i = 0; comparison.covered_steps() > 0 && i < comparison.layers(); ++i) {
    covered += i > 0 ? ",[" : "[";
    for (uint32_t j = 0; j < comparison.layers(); ++j)
      covered += (j > 0 ? "," : "") + number(comparison.covered(i, j));
    covered += "]";
  }
  return "{\"layers\":[" + layers +
         "],\"covered_steps\":" + std::to_string(comparison.covered_steps()) + ",\"covered\":[" +
         covered + "]}";
}

// A list of the lines.
std::string quoted_lines(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    out += (out.empty() ? "" : ",") + json_string(text.substr(at, end - at));
    at = end + 1;
  }
  return "[" + out + "]";
}

// Where the model is computed: sums over its GPUs, then each of them.
void add_devices(const Model& model, const Forward& forward, Json* json) {
  json->raw("device", json_string(model.device_names()));
  if (!model.why_no_device().empty())
    json->raw("device_because", json_string(model.why_no_device()));
  const std::vector<DeviceWeights>& devices = model.device_weights();
  if (devices.empty()) return;
  uint64_t weight_bytes = 0, bytes = 0, memory = 0;
  bool reads = true;
  std::string list, left, staged, shared;  // of the first GPU that has a reason, or a share
  std::vector<std::string> names;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const DeviceWeights& d = devices[i];
    const LayerRun& run = forward.plan().runs[i];
    const std::string& name = d.device()->name();
    const bool alone = run.fallback == Fallback::none;
    const bool attends = alone || run.attention == AttentionMode::co_execution;
    const bool reads_pages = attends && run.staging == Fallback::none;
    Json its;
    its.raw("device", json_string(name));
    its.count("first_layer", d.first_layer());
    its.count("layers", d.layers().size());
    its.count("weight_bytes", d.bytes());
    its.count("bytes", d.device()->used());
    its.count("memory", d.device()->budget());
    its.add("attends", alone ? "true" : "false");
    its.add("co_execution", attends && !alone ? "true" : "false");
    its.add("reads_pages", reads_pages ? "true" : "false");
    reads = reads && reads_pages;
    list += (i > 0 ? "," : "") + std::move(its).take();
    weight_bytes += d.bytes(), bytes += d.device()->used(), memory += d.device()->budget();
    const auto note = [&](std::string* first, const std::string& text) {
      if (first->empty() && !text.empty()) *first = devices.size() > 1 ? name + ": " + text : text;
    };
    note(&left, text_of(run.fallback)), note(&shared, run.share);
    if (attends) note(&staged, text_of(run.staging));
    names.push_back(name);
  }
  json->count("device_layers", devices.back().end_layer());
  json->count("device_output", devices.back().has_output() ? 1 : 0);
  json->count("device_weight_bytes", weight_bytes);
  json->count("device_bytes", bytes);
  json->count("device_memory", memory);
  json->add("device_attends", left.empty() ? "true" : "false");
  json->raw("device_attends_because",
            json_string(left.empty() ? "it attends in the layers that it has" : left));
  json->add("co_execution", shared.empty() ? "false" : "true");
  if (!shared.empty()) json->raw("co_execution_share", json_string(shared));
  json->add("device_reads_pages", reads ? "true" : "false");
  if (!staged.empty()) json->raw("device_reads_pages_because", json_string(staged));
  json->raw("execution_plan", quoted_lines(forward.plan().text(names)));
  json->raw("devices", "[" + list + "]");
}

}  // namespace

std::string Session::stats_json() const {
  const StoreShape& shape = store_.shape();
  const Plan plan =
      planned_ ? plan_
               : make_plan(options_.select, store_.sealed_tokens(), shape.layers, layer_errors_);
  Json json;
  json.count("tokens", tokens_.size());
  json.count("context", options_.context);
  json.count("threads", options_.threads);
  add_devices(*model_, *forward_, &json);
  json.add("chat_format", "\"%s\"", chat_format_name(chat_));
  json.add("kv_type", "\"%s\"", options_.full_precision ? "f32" : "int8");
  json.count("page_tokens", shape.page.page_tokens);
  json.count("sealed_pages", store_.pages().pages());
  json.count("sealed_tokens", store_.sealed_tokens());
  json.count("sink_tokens", store_.sink_count());
  json.count("window_tokens", store_.window_count());
  json.count("prefill_chunk", options_.prefill_chunk);
  json.count("kv_bytes_per_token", shape.slab_bytes() / shape.page.extent_tokens());
  json.count("private_bytes", store_.private_bytes());
  json.count("mapped_bytes", store_.pages().mapped_bytes());
  json.count("spilled_bytes", store_.pages().spilled_bytes());
  json.count("memory_budget", store_.budget().bytes);
  json.raw("strategy_asked", json_string(options_.select.strategy));
  json.add("strategy_planned", "\"%s\"", plan.strategy->name.data());
  json.add("planned_because", "\"%s\"", plan.why);
  std::string dense, errors;
  for (uint32_t l = 0; l < shape.layers; ++l)
    if (plan.is_dense(l)) dense += (dense.empty() ? "" : ",") + std::to_string(l);
  for (float e : layer_errors_) errors += (errors.empty() ? "" : ",") + number(e, 3);
  json.list("dense_layers", dense);
  if (!plan.filter.empty()) {
    std::string filters;
    for (uint32_t l = 0; l < shape.layers; ++l)
      if (plan.is_filter(l)) filters += (filters.empty() ? "" : ",") + std::to_string(l);
    json.list("filter_layers", filters);
  }
  json.list("layer_errors", errors);
  json.count("budget_tokens", plan.budget_tokens);
  if (plan.coverage > 0) json.real("coverage", static_cast<double>(plan.coverage));
  json.add("budget_schedule", "\"%s\"", name_of(plan.schedule));
  std::string budgets;
  for (uint64_t b : plan.layer_budgets) budgets += (budgets.empty() ? "" : ",") + std::to_string(b);
  json.list("layer_budgets", budgets);
  if (plan.strategy->has(StrategyInfo::takes_unit))
    json.count("select_tokens", plan.unit_tokens ? plan.unit_tokens : shape.page.block_tokens);
  json.count("sketch_pages", store_.sketch().pages());
  if (plan.strategy->index) {
    const TokenIndexes::Entry& entry = store_.indexes().of(*plan.strategy->index);
    json.add("index", "\"%s\"", name_of(*plan.strategy->index));
    json.count("index_tokens", entry.index ? entry.valid : 0);
    json.count("index_bytes", entry.index ? entry.index->bytes() : 0);
    json.count("index_inserted", entry.index && entry.valid > entry.index->built()
                                     ? entry.valid - entry.index->built()
                                     : 0);
    json.count("index_graphs", entry.index ? entry.index->graphs() : 0);
    json.real("index_ms", index_ms_);
    if (!nearest_by_.names.empty()) json.raw("index_nearest_by", json_string(nearest_by_.names));
    if (!nearest_by_.because.empty())
      json.raw("index_nearest_because", json_string(nearest_by_.because));
    json.count("search_breadth", plan.search_breadth);
  }
  json.add("share_heads", plan.share_heads ? "true" : "false");
  json.count("last_steps", last_steps_);
  json.count("last_tokens_read", last_read_.tokens_read);
  json.count("last_tokens_present", last_read_.tokens_present);
  json.count("last_pages_touched", last_read_.pages_touched);
  if (!model_->device_weights().empty()) json.count("last_tokens_in_device", last_read_.tokens_hot);
  json.count("last_summary_bytes", last_read_.summary_bytes);
  json.count("last_keys_scanned", last_read_.keys_scanned);
  if (last_read_.queries > 0)
    json.real("last_mass_read", last_read_.mass / static_cast<double>(last_read_.queries));
  if (last_read_.certified > 0) {
    json.real("last_certificate",
              last_read_.certificate / static_cast<double>(last_read_.certified));
    json.real("last_least_certificate", last_read_.min_certificate);
  }
  json.real("last_decode_ms", static_cast<double>(last_decode_ns_) / 1e6);
  json.count("prefill_tokens", prefill_tokens_);
  json.count("sparse_tokens", sparse_tokens_);
  json.real("prefill_ms", static_cast<double>(prefill_ns_) / 1e6);
  json.real("load_ms", load_ms_);
  if (options_.compare != CompareLevel::none)
    json.raw("compared", compared_json(forward_->attention().comparison()));
  json.add("kernels", "\"%s\"", cpu_kernels().name);
  return std::move(json).take();
}

}  // namespace kvasir
