#include "console.h"

#include "terminal_text.h"

namespace tool {

std::string json_text(const Json& value) {
  return with_escapes(value.dump(2, ' ', false, Json::error_handler_t::replace)) + "\n";
}

}  // namespace tool
