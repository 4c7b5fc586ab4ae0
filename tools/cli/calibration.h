// The result of `kvasir calibrate`, a file next to the model: the filter layers of the strategy
// "filter-layers".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sessions.h"

namespace tool {

std::string calibration_path(const std::string& model_path);

// Identifies the model in the file.
Json model_identity(const std::string& path, const kv_model* model);

// The layers, such as "2,8,18"; none without a file. Warns about a file that is damaged or of
// another model, and ignores it.
std::optional<std::string> calibrated_filters(Console& console, const std::string& model_path,
                                              const kv_model* model);

// The flags with the calibrated layers, if one of the strategies has filter layers and the flags
// have none. Reports that to the terminal.
SessionFlags with_calibration(Console& console, const ModelFlags& model_flags,
                              const kv_model* model, const SessionFlags& flags,
                              const std::vector<std::string>& strategies);

std::string list_text(const std::vector<uint32_t>& numbers);  // "2,8,18"

}  // namespace tool
