// The main() of every test program.
#ifdef _WIN32  // where GCC frees what is thread_local before it runs the destructors
#define DOCTEST_THREAD_LOCAL
#endif
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
