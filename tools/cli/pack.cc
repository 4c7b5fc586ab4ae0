// kvasir pack and kvasir unpack.
#include <filesystem>

#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"
#include "prefill.h"
#include "system.h"

namespace tool {
namespace {

namespace fs = std::filesystem;

template <typename Call>
void run(Console& console, const PackArguments& arguments, const char* action, Call call) {
  expect_unused(arguments.output, arguments.force);
  Progress progress(console.terminal, action + (" " + document_name(arguments.path)), Unit::bytes);
  const kv_control control = control_of(console, &progress);
  kv_error error{};
  const kv_status status = call(arguments.path.c_str(), arguments.output.c_str(), &control, &error);
  if (status == KV_CANCELLED)
    throw Failure(exit_cancelled, "stopped; " + arguments.output + " was not written");
  check(status, error);
  const double seconds = progress.seconds();
  const uint64_t from = fs::file_size(system::path(arguments.path)),
                 to = fs::file_size(system::path(arguments.output));
  console.result = {{"path", arguments.path},
                    {"output", arguments.output},
                    {"bytes", from},
                    {"output_bytes", to},
                    {"seconds", seconds}};
  const double larger = static_cast<double>(std::max(from, to));
  if (!console.json)
    console.terminal.print(arguments.output + ": " + byte_count(to) + " from " + byte_count(from) +
                           ", in " + duration(seconds) + ", " +
                           byte_count(static_cast<uint64_t>(larger / std::max(seconds, 1e-9))) +
                           "/s\n");
}

}  // namespace

void run_pack(Console& console, const PackArguments& arguments) {
  run(console, arguments, "Packing",
      [&](const char* path, const char* packed, const kv_control* control, kv_error* error) {
        return kv_pack(path, packed, arguments.level, control, error);
      });
}

void run_unpack(Console& console, const PackArguments& arguments) {
  run(console, arguments, "Unpacking", kv_unpack);
}

}  // namespace tool
