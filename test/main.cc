// The main() of every test program. It is in the locale that the environment names, as a host may
// be in any.
#include <clocale>
#include <cstdio>
#include <cstdlib>

#ifdef _WIN32  // where GCC frees what is thread_local before it runs the destructors
#define DOCTEST_THREAD_LOCAL
#endif
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  const char* const locale = std::getenv("KVASIR_TEST_LOCALE");
  if (locale && !std::setlocale(LC_ALL, locale)) {
    std::fprintf(stderr, "there is no locale %s\n", locale);
    return 1;
  }
  return doctest::Context(argc, argv).run();
}
