#include "line_editor.h"

namespace tool {

std::unique_ptr<LineInput> open_line_editor(Interrupt*) { return nullptr; }

}  // namespace tool
