// kvasir pack and kvasir unpack: a smaller copy of a cache, and the cache again.
#include <filesystem>

#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"
#include "system.h"

namespace tool {
namespace {

namespace fs = std::filesystem;

std::string file_name(const std::string& path) {
  return system::text(system::path(path).filename());
}

void run(Console& console, const PackArguments& arguments, const char* doing,
         decltype(kv_pack)* call) {
  expect_unused(arguments.output, arguments.force);
  Progress progress(console.terminal, doing + (" " + file_name(arguments.path)), Unit::bytes);
  kv_pack_options options;
  kv_pack_options_init(&options, sizeof options);
  options.level = arguments.level;
  options.cancel = console.interrupt.token();
  options.progress = Progress::callback;
  options.progress_user = &progress;
  kv_error error{};
  const kv_status status = call(arguments.path.c_str(), arguments.output.c_str(), &options, &error);
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
  run(console, arguments, "Packing", kv_pack);
}

void run_unpack(Console& console, const PackArguments& arguments) {
  run(console, arguments, "Unpacking", kv_unpack);
}

}  // namespace tool
