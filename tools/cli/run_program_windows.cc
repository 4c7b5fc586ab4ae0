#include <cerrno>

#include "run_program.h"

namespace tool {

bool run_program(const std::vector<std::string>&, const std::function<bool()>&, ProgramResult*) {
  errno = ENOTSUP;
  return false;
}

}  // namespace tool
