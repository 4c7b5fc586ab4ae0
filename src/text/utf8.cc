#include "text/utf8.h"

namespace kvasir {

static constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

void Utf8Stream::push(std::string_view bytes, std::string* out) {
  pending_.append(bytes);
  std::string_view rest = pending_;
  while (!rest.empty()) {
    std::size_t length;
    const Utf8 step = utf8_step(rest, &length);
    if (step == Utf8::incomplete) break;
    out->append(step == Utf8::valid ? rest.substr(0, length) : kReplacement);
    rest.remove_prefix(length);
  }
  pending_.erase(0, pending_.size() - rest.size());
}

void Utf8Stream::finish(std::string* out) {
  if (!pending_.empty()) out->append(kReplacement);
  pending_.clear();
}

}  // namespace kvasir
