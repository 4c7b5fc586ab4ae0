// Line editing with libedit: line_editor_libedit.cc, or line_editor_none.cc in a build without it.
#pragma once

#include <memory>

#include "line_input.h"

namespace tool {

// Null where the build has no line editor or the terminal cannot be edited on.
std::unique_ptr<LineInput> open_line_editor(Interrupt* interrupt);

}  // namespace tool
