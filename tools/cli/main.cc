// kvasir: the command line. It uses the library's public headers only.
#include <new>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "commands.h"
#include "failure.h"
#include "system.h"

namespace {

using namespace tool;

Json error_json(const Failure& failure) {
  Json error;
  error["exit_code"] = failure.exit_code();
  error["message"] = failure.what();
  const kv_error& of_library = failure.library_error();
  if (of_library.status != KV_OK) {
    error["status"] = of_library.status;
    error["status_text"] = kv_status_text(of_library.status);
    if (of_library.sys_errno != 0) error["errno"] = of_library.sys_errno;
    if (of_library.offset != UINT64_MAX) error["offset"] = of_library.offset;
  }
  return error;
}

int report(const Failure& failure, Terminal& terminal, bool json, Json result) {
  if (failure.exit_code() == exit_pipe) return exit_pipe;
  terminal.error(failure.what());
  if (!json) return failure.exit_code();
  result["error"] = error_json(failure);
  try {
    terminal.print(json_text(result));
  } catch (const Failure&) {
    // The reader of the JSON is gone; standard error has the message.
  }
  return failure.exit_code();
}

int run(const Invocation& invocation) {
  Console console(invocation.global);
  try {
    invocation.command(console);
    if (console.json) console.terminal.print(json_text(console.result));
    return exit_ok;
  } catch (const Failure& failure) {
    return report(failure, console.terminal, console.json, console.result);
  } catch (const std::bad_alloc&) {
    return report(Failure(exit_resources, "out of memory"), console.terminal, console.json,
                  console.result);
  } catch (const nlohmann::json::exception&) {
    // its text names no subject that a person knows
    return report(Failure(exit_failure,
                          "statistics or results without an expected value; this is "
                          "a bug in Kvasir: please report it"),
                  console.terminal, console.json, console.result);
  } catch (const std::exception& error) {
    return report(Failure(exit_failure, error.what()), console.terminal, console.json,
                  console.result);
  }
}

// Known even if the arguments cannot be parsed.
bool asks_for_json(const std::vector<std::string>& arguments) {
  for (size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i)
    if (arguments[i] == "--json") return true;
  return false;
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> given = system::begin(count, values);
  std::vector<const char*> arguments;
  arguments.reserve(given.size());
  for (const std::string& argument : given) arguments.push_back(argument.c_str());
  Invocation invocation;
  try {
    invocation = parse_arguments(static_cast<int>(arguments.size()), arguments.data());
    if (!invocation.command) {
      Terminal(false, false).print(invocation.text);
      return exit_ok;
    }
    for (const std::string& argument : given)
      invocation.global.command += (invocation.global.command.empty() ? "" : " ") + argument;
    return run(invocation);
  } catch (const Failure& failure) {
    const bool json = asks_for_json(given);
    Terminal terminal(false, json);
    return report(failure, terminal, json, Json::object());
  }
}
