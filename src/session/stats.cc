// Statistics of a session, as a struct and as JSON for people. All strings come from the library,
// except those of a driver.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "base/number_text.h"
#include "base/quoted.h"
#include "session/composition.h"

namespace kvasir {
namespace {

// JSON has no NaN and no infinity: writes null.
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
  void flag(const char* key, bool value) { add(key, "%s", value ? "true" : "false"); }
  std::string take() && { return std::move(text_) + "}"; }

 private:
  std::string text_ = "{";
};

// JSON of the comparison: means over query heads and tokens, [layers][kv_heads].
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

// JSON list of the lines of a text.
std::string quoted_lines(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    out += (out.empty() ? "" : ",") + json_string(text.substr(at, end - at));
    at = end + 1;
  }
  return "[" + out + "]";
}

// The GPUs of a session: sums, reasons for fallbacks, and a JSON object per GPU.
struct GpuReport {
  uint32_t layers = 0;
  bool output = false, attends = false, coexecutes = false, reads_pages = false;
  uint64_t weight_bytes = 0, bytes = 0, memory_limit = 0;
  std::string left, staged, shared;  // of the first GPU with a reason, or with a split
  std::string list;                  // JSON objects
  std::vector<std::string> names;
};

GpuReport report_gpus(const Model& model, const Forward& forward) {
  GpuReport r;
  const std::vector<DeviceWeights>& devices = model.device_weights();
  if (devices.empty()) return r;
  r.layers = devices.back().end_layer();
  r.output = devices.back().has_output();
  r.reads_pages = r.coexecutes = true;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const DeviceWeights& d = devices[i];
    const LayerRun& run = forward.plan().runs[i];
    const std::string& name = d.device()->name();
    const bool alone = run.fallback == Fallback::none;
    const bool attends = alone || run.attention == AttentionMode::co_execution;
    const bool reads_pages = attends && run.staging == Fallback::none;
    Json gpu;
    gpu.raw("device", json_string(name));
    gpu.count("first_layer", d.first_layer());
    gpu.count("layers", d.layers().size());
    if (run.has_experts) gpu.count("expert_layers", d.expert_layers());
    gpu.count("weight_bytes", d.bytes());
    gpu.count("bytes", d.device()->used());
    gpu.count("memory_limit", d.device()->budget());
    gpu.flag("attends", alone);
    gpu.flag("coexecutes", attends && !alone);
    gpu.flag("reads_pages", reads_pages);
    r.reads_pages = r.reads_pages && reads_pages;
    r.coexecutes = r.coexecutes && attends && !alone;
    r.list += (i > 0 ? "," : "") + std::move(gpu).take();
    r.weight_bytes += d.bytes(), r.bytes += d.device()->used();
    r.memory_limit += d.device()->budget();
    const auto note = [&](std::string* first, const std::string& text) {
      if (first->empty() && !text.empty()) *first = devices.size() > 1 ? name + ": " + text : text;
    };
    note(&r.left, text_of(run.fallback)), note(&r.shared, run.share);
    if (attends) note(&r.staged, text_of(run.staging));
    r.names.push_back(name);
  }
  r.attends = r.left.empty();
  return r;
}

void add_gpus(const Model& model, const Forward& forward, const SessionStats& stats, Json* json) {
  json->raw("device", json_string(stats.device));
  if (!model.why_no_device().empty())
    json->raw("device_because", json_string(model.why_no_device()));
  if (model.device_weights().empty()) return;
  const GpuReport r = report_gpus(model, forward);
  json->count("gpu_layers", stats.gpu_layers);
  json->flag("gpu_output", stats.gpu_output);
  json->count("gpu_weight_bytes", stats.gpu_weight_bytes);
  json->count("gpu_bytes", stats.gpu_bytes);
  json->count("gpu_memory_limit", stats.gpu_memory_limit);
  json->flag("gpu_attends", stats.gpu_attends);
  json->raw("gpu_attends_because",
            json_string(r.left.empty() ? "it attends in the layers that it has" : r.left));
  json->flag("gpu_coexecutes", stats.gpu_coexecutes);
  if (!r.shared.empty()) json->raw("gpu_coexecution_share", json_string(r.shared));
  json->flag("gpu_reads_pages", stats.gpu_reads_pages);
  if (!r.staged.empty()) json->raw("gpu_reads_pages_because", json_string(r.staged));
  json->raw("execution_plan", quoted_lines(forward.plan().text(r.names)));
  json->raw("gpus", "[" + r.list + "]");
}

void add_store(const KvStore& store, const SessionStats& stats, Json* json) {
  json->count("page_tokens", stats.page_tokens);
  json->count("sealed_pages", store.pages().pages());
  json->count("sealed_tokens", stats.sealed_tokens);
  json->count("sink_tokens", stats.sink_tokens);
  json->count("window_tokens", stats.window_tokens);
  json->count("prefill_chunk", stats.prefill_chunk);
  json->count("kv_bytes_per_token", stats.kv_bytes_per_token);
  json->count("private_bytes", stats.private_bytes);
  json->count("mapped_bytes", stats.mapped_bytes);
  json->count("spilled_bytes", stats.spilled_bytes);
  json->count("memory_limit", stats.memory_limit);
}

// Adds what the plan assigns to each layer.
void add_plan(const Plan& plan, const StoreShape& shape, std::span<const float> layer_errors,
              Json* json) {
  const auto add_item = [](std::string* list, const std::string& item) {
    *list += (list->empty() ? "" : ",") + item;
  };
  std::string dense, filters, errors, budgets;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    if (plan.is_dense(l)) add_item(&dense, std::to_string(l));
    if (plan.is_filter(l)) add_item(&filters, std::to_string(l));
  }
  for (float e : layer_errors) add_item(&errors, number(e, 3));
  for (uint64_t b : plan.layer_budgets) add_item(&budgets, std::to_string(b));
  json->list("dense_layers", dense);
  if (!plan.filter.empty()) json->list("filter_layers", filters);
  json->list("layer_errors", errors);
  json->count("budget_tokens", plan.budget_tokens);
  if (plan.coverage > 0) json->real("coverage", static_cast<double>(plan.coverage));
  json->add("budget_schedule", "\"%s\"", name_of(plan.schedule));
  json->list("layer_budgets", budgets);
  if (plan.strategy->has(StrategyInfo::takes_unit))
    json->count("select_tokens", plan.unit_tokens ? plan.unit_tokens : shape.page.block_tokens);
}

void add_index(const TokenIndexes::Entry& entry, const SessionStats& stats, Json* json) {
  const bool grown = entry.index && entry.valid > entry.index->built();
  json->count("index_tokens", stats.index_tokens);
  json->count("index_bytes", stats.index_bytes);
  json->count("index_inserted", grown ? entry.valid - entry.index->built() : 0);
  json->count("index_graphs", entry.index ? entry.index->graphs() : 0);
  json->count("index_ns", stats.index_ns);
}

// JSON of a composed session's documents.
std::string documents_json(const std::vector<DocumentReport>& documents) {
  std::string out;
  for (const DocumentReport& document : documents) {
    Json json;
    json.raw("path", json_string(document.path));
    json.count("tokens", document.tokens);
    json.flag("candidate", document.is_candidate);
    json.flag("chosen", document.is_chosen);
    if (document.score >= 0) json.real("score", document.score);
    out += (out.empty() ? "" : ",") + std::move(json).take();
  }
  return "[" + out + "]";
}

// Adds the last answer. read: its reads.
void add_last(const ReadCounts& read, const SessionStats& stats, bool has_gpus, Json* json) {
  json->count("last_steps", stats.last_steps);
  json->count("last_tokens_read", stats.last_tokens_read);
  json->count("last_tokens_present", stats.last_tokens_present);
  json->count("last_pages_touched", stats.last_pages_touched);
  if (has_gpus) json->count("last_tokens_on_gpu", read.tokens_hot);
  json->count("last_summary_bytes", read.summary_bytes);
  json->count("last_keys_scanned", read.keys_scanned);
  if (stats.last_mass_read < 0) json->raw("last_mass_read", "null");
  else json->real("last_mass_read", stats.last_mass_read);
  if (read.certified > 0) {
    json->real("last_certificate", read.certificate / static_cast<double>(read.certified));
    json->real("last_least_certificate", read.min_certificate);
  }
  json->count("last_decode_ns", stats.last_decode_ns);
}

}  // namespace

// Adds the memory of a composed session's documents, and how they are attended.
void Session::add_documents(SessionStats* stats) const {
  if (!sequence_.is_composed()) return;
  if (documents_planned_ && !document_plans_.empty())
    stats->decode_strategy = document_plans_[0].strategy->name;
  for (const ComposedDocument& document : sequence_.composed.documents->documents) {
    const KvStore& store = document.session->store();
    stats->private_bytes += store.private_bytes();
    stats->mapped_bytes += store.pages().mapped_bytes();
  }
}

SessionStats Session::stats() const {
  const StoreShape& shape = sequence_.store.shape();
  const Plan plan = next_plan();
  SessionStats s;
  s.threads = options_.threads;
  s.tokens = sequence_.tokens.size();
  s.context_tokens = options_.context;
  s.sealed_tokens = sequence_.store.sealed_tokens();
  s.page_tokens = shape.page.page_tokens;
  s.sink_tokens = sequence_.store.sink_count();
  s.window_tokens = sequence_.store.window_count();
  s.prefill_chunk = options_.prefill_chunk;
  s.kv_bytes_per_token = shape.slab_bytes() / shape.page.extent_tokens();
  s.private_bytes = sequence_.store.private_bytes();
  s.mapped_bytes = sequence_.store.pages().mapped_bytes();
  if (const KvStore* windows = sequence_.windows_or_null()) {
    s.windows_layers = windows->shape().layers;
    s.checkpoints = static_cast<uint32_t>(windows->checkpoints().size());
    s.windows_bytes = windows->private_bytes() + windows->pages().mapped_bytes();
    s.private_bytes += windows->private_bytes();
    s.mapped_bytes += windows->pages().mapped_bytes();
  }
  if (const auto& states = sequence_.states) {
    s.recurrent_layers = states->layers();
    s.checkpoints = static_cast<uint32_t>(states->checkpoints());
    s.states_bytes = states->bytes();
    s.private_bytes += s.states_bytes;
  }
  if (const auto& drafts = sequence_.drafts) {
    s.drafts_first = drafts->first;
    s.private_bytes += drafts->private_bytes();
    s.mapped_bytes += drafts->store.pages().mapped_bytes();
  }
  s.draft_tokens = options_.draft_tokens;
  if (drafter_) s.drafts_device = drafter_->device_names();
  if (drafter_) s.drafts_device_because = drafter_->why_cpu();
  s.lookup_tokens = options_.lookup_tokens;
  s.drafts = drafts_;
  s.spans = spans_, s.span_tokens = span_tokens_;
  s.prefilled_again = prefilled_again_;
  s.spilled_bytes = sequence_.store.pages().spilled_bytes();
  s.memory_limit = sequence_.is_composed() ? options_.memory.bytes : sequence_.store.budget().bytes;
  s.prefill_tokens = prefill_tokens_, s.prefill_ns = prefill_ns_;
  s.sparse_tokens = sequence_.sparse_tokens;
  s.load_ns = load_ns_;
  s.budget_tokens = plan.budget_tokens;
  if (plan.strategy->index) {
    const TokenIndexes::Entry& entry = sequence_.store.indexes().of(*plan.strategy->index);
    s.index_tokens = entry.index ? entry.valid : 0;
    s.index_bytes = entry.index ? entry.index->bytes() : 0;
    s.index_ns = index_ns_;
  }
  s.last_steps = last_.steps, s.last_decode_ns = last_.ns;
  s.last_tokens_read = last_.read.tokens_read;
  s.last_tokens_present = last_.read.tokens_present;
  s.last_pages_touched = last_.read.pages_touched;
  if (last_.read.queries > 0)
    s.last_mass_read = last_.read.mass / static_cast<double>(last_.read.queries);
  const GpuReport gpus = report_gpus(*model_, *forward_);
  s.gpu_layers = gpus.layers;
  s.gpu_output = gpus.output, s.gpu_attends = gpus.attends;
  s.gpu_coexecutes = gpus.coexecutes, s.gpu_reads_pages = gpus.reads_pages;
  s.gpu_weight_bytes = gpus.weight_bytes, s.gpu_bytes = gpus.bytes;
  s.gpu_memory_limit = gpus.memory_limit;
  s.decode_strategy = plan.strategy->name;
  add_documents(&s);
  s.chat_format = sequence_.chat.name();
  s.device = model_->device_names();
  return s;
}

std::string Session::stats_json() const {
  const KvStore& store = sequence_.store;
  const Plan plan = next_plan();
  const SessionStats stats = this->stats();
  Json json;
  json.count("tokens", stats.tokens);
  json.count("context_tokens", stats.context_tokens);
  json.count("threads", stats.threads);
  add_gpus(*model_, *forward_, stats, &json);
  json.raw("chat_format", json_string(stats.chat_format));
  json.add("precision", "\"%s\"", options_.full_precision ? "f32" : "int8");
  add_store(store, stats, &json);
  json.raw("strategy_asked", json_string(options_.select.strategy));
  json.raw("decode_strategy", json_string(stats.decode_strategy));
  json.add("decode_strategy_because", "\"%s\"", plan.why);
  add_plan(plan, store.shape(), sequence_.layer_errors, &json);
  json.count("sketch_pages", store.sketch().pages());
  if (plan.strategy->index) {
    json.add("index", "\"%s\"", name_of(*plan.strategy->index));
    add_index(store.indexes().of(*plan.strategy->index), stats, &json);
    if (!nearest_by_.names.empty()) json.raw("index_nearest_by", json_string(nearest_by_.names));
    if (!nearest_by_.because.empty())
      json.raw("index_nearest_because", json_string(nearest_by_.because));
    json.count("search_breadth", plan.search_breadth);
  }
  json.flag("share_heads", plan.share_heads);
  add_last(last_.read, stats, !model_->device_weights().empty(), &json);
  json.count("prefill_tokens", stats.prefill_tokens);
  json.count("prefill_spans", stats.spans);
  json.count("prefill_span_tokens", stats.span_tokens);
  json.raw("prefill_spans_because", json_string(text_of(forward_->span_fallback())));
  json.count("prefilled_again", stats.prefilled_again);
  if (stats.windows_layers > 0) {
    json.count("windows_layers", stats.windows_layers);
    json.count("windows_bytes", stats.windows_bytes);
  }
  if (stats.recurrent_layers > 0) {
    json.count("recurrent_layers", stats.recurrent_layers);
    json.count("states_bytes", stats.states_bytes);
  }
  if (stats.windows_layers > 0 || stats.recurrent_layers > 0)
    json.count("checkpoints", stats.checkpoints);
  if (stats.draft_tokens > 0) {
    json.count("draft_tokens", stats.draft_tokens);
    json.count("drafts_first", stats.drafts_first);
    json.raw("drafts_device", json_string(stats.drafts_device));
    json.raw("drafts_device_because", json_string(stats.drafts_device_because));
  }
  if (stats.draft_tokens > 0 || stats.lookup_tokens > 0) {
    json.count("lookup_tokens", stats.lookup_tokens);
    json.count("last_draft_steps", stats.drafts.steps);
    json.count("last_drafted", stats.drafts.drafted);
    json.count("last_accepted", stats.drafts.accepted);
    json.count("last_looked_up", stats.drafts.looked_up);
    json.count("last_lookup_accepted", stats.drafts.lookup_accepted);
    json.count("draft_step_ns", stats.drafts.step_ns);
    json.count("alone_step_ns", stats.drafts.alone_ns);
    json.add("last_drafts_off", "\"%s\"", name_of(stats.drafts.off));
  }
  json.count("sparse_tokens", stats.sparse_tokens);
  json.count("prefill_ns", stats.prefill_ns);
  json.count("load_ns", stats.load_ns);
  if (sequence_.composed.documents) json.raw("documents", documents_json(documents()));
  if (options_.compare != CompareLevel::none)
    json.raw("compared", compared_json(forward_->attention().comparison()));
  json.add("kernels", "\"%s\"", cpu_kernels().name);
  return std::move(json).take();
}

}  // namespace kvasir
