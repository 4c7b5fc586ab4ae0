#include "calibration.h"

#include <algorithm>
#include <filesystem>

#include "eval_random.h"
#include "failure.h"
#include "files.h"
#include "strategies.h"
#include "system.h"

namespace tool {

std::string list_text(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (const uint32_t number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

std::string calibration_path(const std::string& model_path) {
  return model_path + ".calibration.json";
}

Json model_identity(const std::string& path, const kv_model* model) {
  const kv_model_info info = info_of(model);
  return {{"name", info.name}, {"layers", info.layers}, {"fingerprint", hex(sampled_hash(path))}};
}

std::optional<std::string> calibrated_filters(Console& console, const std::string& model_path,
                                              const kv_model* model) {
  const std::string path = calibration_path(model_path);
  if (!std::filesystem::exists(system::path(path))) return {};
  try {
    const Json file = Json::parse(read_file(path));
    if (file.at("model") != model_identity(model_path, model)) {
      console.terminal.note(
          "warning: " + path +
          " belongs to another model and is ignored; run `kvasir calibrate` again");
      return {};
    }
    return list_text(file.at("filter_layers").get<std::vector<uint32_t>>());
  } catch (const Json::exception&) {
    console.terminal.note("warning: " + path +
                          " is not a result of `kvasir calibrate` and is ignored; run it again");
    return {};
  }
}

SessionFlags with_calibration(Console& console, const ModelFlags& model_flags,
                              const kv_model* model, const SessionFlags& flags,
                              const std::vector<std::string>& strategies) {
  SessionFlags found = flags;
  const bool filters = std::any_of(strategies.begin(), strategies.end(), [](const std::string& s) {
    return s == filter_strategy || s == "all";
  });
  if (!filters || !flags.filter_layers.empty()) return found;
  if (const std::optional<std::string> layers =
          calibrated_filters(console, model_flags.path, model)) {
    found.filter_layers = *layers;
    console.terminal.note("filter layers " + *layers + ", calibrated in " +
                          calibration_path(model_flags.path));
  }
  return found;
}

}  // namespace tool
