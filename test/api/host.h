// Helpers of test programs that act as a host's process: they do not count failures, they end with
// the first.
#pragma once

#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kvasir.h"

namespace host {

constexpr int skipped = 77;  // as Meson has it

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::_Exit(1);
}

inline void require_status(kv_status status, kv_status expected, const kv_error& error,
                           const char* what) {
  if (status == expected) return;
  std::fprintf(stderr, "broken: %s: %s, not %s: %s\n", what, kv_status_text(status),
               kv_status_text(expected), error.message);
  std::_Exit(1);
}

// Of the tiny model's vocabulary.
inline std::vector<int32_t> some_tokens(std::size_t count) {
  std::vector<int32_t> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(3 + i * i % 250));
  return tokens;
}

// From now on this process is the user `nobody`, who is in no group.
inline void become_nobody() {
  const passwd* nobody = getpwnam("nobody");
  require(nobody && setgroups(0, nullptr) == 0 && setgid(nobody->pw_gid) == 0 &&
              setuid(nobody->pw_uid) == 0,
          "becoming nobody");
}

}  // namespace host
