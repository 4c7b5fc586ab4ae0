#include "calibration.h"

#include <algorithm>
#include <filesystem>

#include "eval_random.h"
#include "failure.h"
#include "files.h"
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
  kv_model_information info{};
  kv_error error{};
  info.struct_size = sizeof info;
  check(kv_model_info(model, &info, &error), error);
  return {{"name", info.name}, {"layers", info.layers}, {"fingerprint", hex(sampled_hash(path))}};
}

std::optional<std::string> calibrated_filters(Console& console, const std::string& model_path,
                                              const kv_model* model) {
  const std::string path = calibration_path(model_path);
  if (!std::filesystem::exists(system::path(path))) return {};
  try {
    const Json file = Json::parse(read_file(path));
    if (file.at("model") != model_identity(model_path, model)) {
      console.terminal.note("warning: " + path +
                            " is of another model and is not used; run `kvasir calibrate` again");
      return {};
    }
    return list_text(file.at("filter_layers").get<std::vector<uint32_t>>());
  } catch (const Json::exception&) {
    console.terminal.note("warning: " + path +
                          " is no calibration and is not used; run `kvasir calibrate` again");
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
    console.terminal.note("filter layers " + *layers + ", as calibrated in " +
                          calibration_path(model_flags.path));
  }
  return found;
}

}  // namespace tool
