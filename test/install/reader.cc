// The same as reader.c, from C++.
#include <kvasir.h>

#include <iostream>
#include <memory>
#include <string>

int main(int count, char** values) {
  const std::string text = "It is a capital mistake to theorise before one has data.";
  kv_model* opened = nullptr;
  kv_error error{};
  if (kv_open(count == 2 ? values[1] : "", nullptr, nullptr, &opened, &error) != KV_OK) {
    std::cerr << error.message << "\n";
    return 1;
  }
  const std::unique_ptr<kv_model, decltype(&kv_close)> model(opened, kv_close);
  size_t tokens = 0;
  // KV_LIMIT: the capacity is 0
  kv_tokenize(model.get(), text.data(), text.size(), 0, nullptr, nullptr, 0, &tokens, nullptr);
  std::cout << kv_version() << ": " << tokens << " tokens\n";
  return tokens > 5 && tokens < text.size() && kv_version() == KV_VERSION_NUMBER ? 0 : 1;
}
