// What every command has: the terminal, Ctrl-C, and the JSON result.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "arguments.h"
#include "interrupt.h"
#include "terminal.h"

namespace tool {

using Json = nlohmann::ordered_json;

struct Console {
  explicit Console(const GlobalFlags& flags)
      : json(flags.json), command(flags.command), terminal(flags.quiet, flags.json) {}

  const bool json;
  const std::string command;  // the program and its arguments, as given
  Terminal terminal;
  Interrupt interrupt;
  Json result = Json::object();  // printed at the end with --json, also with an error
};

// JSON for standard output. Bytes that are not UTF-8 are replaced, control characters escaped.
std::string json_text(const Json& value);

}  // namespace tool
