// Calls of the C API whose allocations fail.
#pragma once

#include <functional>

#include "failing_allocations.h"
#include "helpers.h"

namespace api_test {

struct Outcome {
  bool reached;  // there was an Nth allocation
  bool failed;   // and the call failed for it
};

// Calls attempt(n, once) with the Nth allocation failing, for every n until there are no more;
// larger steps further on. attempt makes its FailingAllocations around the tested call alone. A
// call may still succeed if the failure lost only the words of a message that no caller uses.
inline void sweep(const std::function<Outcome(long first, bool once)>& attempt) {
  for (bool once : {true, false}) {
    int attempts = 0, failures = 0;
    for (long n = 0; n < 100'000; n += 1 + n / 16, ++attempts) {
      CAPTURE(n);
      CAPTURE(once);
      const Outcome outcome = attempt(n, once);
      failures += outcome.failed;
      if (!outcome.reached) break;
    }
    CHECK(attempts > 2);
    CHECK(failures * 10 > attempts * 8);
  }
}

// One call with failing memory.
template <class Call>
Outcome run(long first, bool once, Call call) {
  kv_error error{};
  kv_status status;
  bool reached;
  {
    FailingAllocations failing(first, once);
    status = call(&error);
    reached = failing.reached();
  }
  if (status != KV_OK) {
    CHECK(reached);
    CHECK_MESSAGE(status == KV_NO_MEMORY, error.message);
    CHECK(error.status == status);
  }
  return {reached, status != KV_OK};
}

}  // namespace api_test
