// What `kvasir calibrate` has found of a model, kept beside it: which layers choose for the others
// with the strategy filter-layers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "console.h"

namespace tool {

constexpr const char* filter_strategy = "filter-layers";

std::string calibration_path(const std::string& model_path);

// How a model is known again.
Json model_identity(const std::string& path, const kv_model* model);

// The layers, as "2,8,18"; none where there is no file. A file that cannot be read or is of another
// model is ignored, which a warning says.
std::optional<std::string> calibrated_filters(Console& console, const std::string& model_path,
                                              const kv_model* model);

// The flags, with the calibrated layers where one of the strategies takes them and none are given;
// says so.
SessionFlags with_calibration(Console& console, const ModelFlags& model_flags,
                              const kv_model* model, const SessionFlags& flags,
                              const std::vector<std::string>& strategies);

std::string list_text(const std::vector<uint32_t>& numbers);  // "2,8,18"

}  // namespace tool
