// The metadata of a model under its architecture's name, with the first thing that is wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/number_text.h"
#include "base/plausible.h"
#include "base/status.h"
#include "gguf/gguf.h"

namespace kvasir {

// Reads "<architecture>.<key>" values and remembers the first thing that is wrong.
class Schema {
 public:
  Schema(const Gguf& gguf, const std::string& architecture)
      : gguf_(gguf), prefix_(architecture + ".") {}

  uint64_t required(const char* key, uint64_t low, uint64_t high) {
    const auto value = gguf_.get_uint(prefix_ + key);
    if (!value)
      return fail(Status::error(Code::corrupt, "the model has no whole number '%s%s'",
                                prefix_.c_str(), key)),
             low;
    return checked(key, *value, low, high);
  }

  // At least 1, and no more than any model has.
  uint32_t size(const char* key, uint64_t max) {
    return claim(key, required(key, 1, UINT64_MAX), max);
  }

  // One for each layer, from a number or from an array. 0 in an array is kept.
  std::vector<uint32_t> sizes(const char* key, uint32_t layers, uint64_t max) {
    const auto array = gguf_.get_ints(prefix_ + key);
    if (!array) return std::vector<uint32_t>(layers, size(key, max));
    std::vector<uint32_t> sizes(layers, 1);
    if (array->size() < layers) {
      fail(Status::error(Code::corrupt, "the model's '%s%s' has %zu numbers for %u layers",
                         prefix_.c_str(), key, array->size(), layers));
      return sizes;
    }
    for (uint32_t l = 0; l < layers; ++l) {
      const int32_t value = (*array)[l];
      sizes[l] = value == 0 ? 0 : claim(key, static_cast<uint64_t>(std::max(value, 0)), max);
      if (value < 0)
        fail(Status::error(Code::corrupt, "the model's '%s%s' has a negative number",
                           prefix_.c_str(), key));
    }
    return sizes;
  }

  uint64_t optional(const char* key, uint64_t otherwise, uint64_t low, uint64_t high) {
    if (!gguf_.find(prefix_ + key)) return otherwise;
    return required(key, low, high);
  }

  double optional_float(const char* key, double otherwise, double low, double high) {
    if (!gguf_.find(prefix_ + key)) return otherwise;
    const auto value = gguf_.get_float(prefix_ + key);
    if (!value || !(*value >= low && *value <= high)) {
      fail(Status::error(Code::corrupt, "the model's '%s%s' is not a number from %s to %s",
                         prefix_.c_str(), key, number_text(low).c_str(),
                         number_text(high).c_str()));
      return otherwise;
    }
    return *value;
  }

  bool optional_bool(const char* key, bool otherwise) {
    if (!gguf_.find(prefix_ + key)) return otherwise;
    const auto value = gguf_.get_bool(prefix_ + key);
    if (!value)
      fail(Status::error(Code::corrupt, "the model's '%s%s' is neither true nor false",
                         prefix_.c_str(), key));
    return value.value_or(otherwise);
  }

  // A feature that changes the result and that the forward pass lacks.
  void refuse_nonzero(const char* key, const char* feature) {
    const auto value = gguf_.get_float(prefix_ + key);
    const auto whole = gguf_.get_uint(prefix_ + key);
    if ((value && *value != 0) || (whole && *whole != 0) ||
        (gguf_.find(prefix_ + key) && !value && !whole))
      refuse((std::string("uses ") + feature).c_str(), key);
  }

  // feature: "uses ALiBi".
  void refuse(const char* feature, const char* key) {
    fail(Status::error(Code::unsupported, "the model %s ('%s%s'), which Kvasir does not support",
                       feature, prefix_.c_str(), key));
  }
  bool has(const char* key) const { return gguf_.find(prefix_ + key) != nullptr; }

  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  Status take() { return std::move(status_); }
  const std::string& prefix() const { return prefix_; }

 private:
  uint32_t claim(const char* key, uint64_t value, uint64_t max) {
    uint32_t size = 1;
    if (!take_claim(value, max, &size))
      fail(Status::error(Code::limit, "the model's '%s%s' is %llu: at most %llu can be read",
                         prefix_.c_str(), key, static_cast<unsigned long long>(value),
                         static_cast<unsigned long long>(max)));
    return size;
  }

  uint64_t checked(const char* key, uint64_t value, uint64_t low, uint64_t high) {
    if (value >= low && value <= high) return value;
    fail(Status::error(Code::corrupt, "the model's '%s%s' is %llu: it must be %llu to %llu",
                       prefix_.c_str(), key, static_cast<unsigned long long>(value),
                       static_cast<unsigned long long>(low),
                       static_cast<unsigned long long>(high)));
    return low;
  }

  const Gguf& gguf_;
  std::string prefix_;
  Status status_;
};

}  // namespace kvasir
