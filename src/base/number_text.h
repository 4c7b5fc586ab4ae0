// Fractions as text. printf and streams write them as the host's locale wants, perhaps with a
// comma, which JSON does not take.
#pragma once

namespace kvasir {

struct NumberText {
  char text[32];
  const char* c_str() const { return text; }
};

// As printf's %.*g writes it in the "C" locale, whatever the host's. digits: 1 to 9.
NumberText number_text(double value, int digits = 6) noexcept;

// As %.*f does, of a magnitude below 1e15; a larger one as number_text(). decimals: 0 to 9.
NumberText fixed_text(double value, int decimals) noexcept;

}  // namespace kvasir
