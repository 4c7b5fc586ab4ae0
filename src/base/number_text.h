// Fractions as text. printf and streams follow the host's locale, possibly with a comma, which JSON
// forbids.
#pragma once

namespace kvasir {

struct NumberText {
  char text[32];
  const char* c_str() const { return text; }
};

// printf's %.*g in the "C" locale, for any locale of the host. digits: 1 to 9.
NumberText number_text(double value, int digits = 6) noexcept;

// printf's %.*f, for magnitudes below 1e15; larger ones as number_text(). decimals: 0 to 9.
NumberText fixed_text(double value, int decimals) noexcept;

}  // namespace kvasir
