// The only file that includes PCRE2. Compiled expressions are immutable and shared by threads; each
// call makes its own match data.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pretokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/quoted.h"
#include "text/pretokenizer_families.h"
#include "text/utf8.h"

namespace kvasir {

struct FreePcre {
  void operator()(pcre2_general_context* p) const { pcre2_general_context_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
template <class T>
using Pcre = std::unique_ptr<T, FreePcre>;

namespace {

// The characters with the Unicode property White_Space. PCRE2's own \s adds U+180E, which lost the
// property in Unicode 6.3.
constexpr std::string_view kWhiteSpace =
    R"(\t-\r\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// Matcher steps per byte of a fragment: generous for the expressions in use, which need a few, and
// far from quadratic.
constexpr uint64_t kMatchEffort = 64;
// Bytes of stack for an expression's machine code, which would otherwise use the caller's stack.
constexpr std::size_t kMachineStack = 32 << 10;
// KiB of heap for the interpreter that runs where machine code is not available.
constexpr uint32_t kHeapLimit = 20 * 1024;

// Replaces a byte that is not UTF-8 while the text is split. One byte, so that offsets stay.
constexpr char kStandIn = '\x01';

template <class T>
Pcre<T> owned(T* p) {
  if (!p) throw std::bad_alloc();
  return Pcre<T>(p);
}

Pcre<pcre2_general_context> make_context() {
  return owned(pcre2_general_context_create([](PCRE2_SIZE size, void*) { return allocate(size); },
                                            [](void* p, void*) { deallocate(p); }, nullptr));
}

// Null where PCRE2 was built without machine code.
Pcre<pcre2_jit_stack> make_stack(pcre2_general_context* context) {
  uint32_t has_machine_code = 0;
  pcre2_config(PCRE2_CONFIG_JIT, &has_machine_code);
  if (!has_machine_code) return nullptr;
  return owned(pcre2_jit_stack_create(kMachineStack, kMachineStack, context));
}

// Replaces \s and \S by the characters that they mean.
std::string expand(std::string_view expression) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\') {
      const char escaped = expression[++i];
      if (escaped == 's')
        out.append(in_class ? "" : "[").append(kWhiteSpace).append(in_class ? "" : "]");
      else if (escaped == 'S') out.append("[^").append(kWhiteSpace).append("]");
      else out.append({c, escaped});
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

// A copy with every byte that is not UTF-8 replaced; empty when there is none.
Array<char> replace_invalid(std::string_view text, CancelPoll* cancel) {
  Array<char> copy;
  std::size_t length;
  for (std::size_t i = 0; i < text.size() && !cancel->stop(); i += length) {
    const Utf8 step = utf8_step(text.substr(i), &length);
    if (step == Utf8::valid) continue;
    if (copy.empty()) copy.assign(text.begin(), text.end());
    std::fill_n(copy.begin() + static_cast<std::ptrdiff_t>(i), length, kStandIn);
  }
  return copy;
}

}  // namespace

struct Pretokenizer::Steps {
  const PretokenizerFamily* family;
  Pcre<pcre2_general_context> context;
  std::vector<Pcre<pcre2_code>> codes;
  // The stack of the last call that ended, for reuse.
  mutable std::atomic<pcre2_jit_stack*> spare{nullptr};

  ~Steps() { Pcre<pcre2_jit_stack> freed(spare.load(std::memory_order_acquire)); }
};

namespace {

// One call of split(): walks the expressions depth first, so no list of pieces is kept.
class Cutter {
 public:
  Cutter(pcre2_general_context* context, const std::vector<Pcre<pcre2_code>>& codes,
         std::string_view text, std::string_view subject, const Pretokenizer::Word& word,
         pcre2_jit_stack* stack)
      : codes_(codes), text_(text), subject_(subject), word_(word),
        limits_(owned(pcre2_match_context_create(context))),
        match_(owned(pcre2_match_data_create(1, context))) {
    const uint64_t effort = std::min<uint64_t>(UINT32_MAX, kMatchEffort * (text.size() + 1024));
    pcre2_set_match_limit(limits_.get(), static_cast<uint32_t>(effort));
    pcre2_set_heap_limit(limits_.get(), kHeapLimit);
    pcre2_jit_stack_assign(limits_.get(), nullptr, stack);
  }

  // Recursion is as deep as there are expressions.
  Status cut(std::size_t step, std::size_t begin, std::size_t end) {
    if (begin == end) return {};
    if (step == codes_.size()) return word_(text_.substr(begin, end - begin));
    std::size_t rest = begin, match_begin, match_end;
    while (rest < end) {
      bool found;
      if (Status status = find(step, begin, end, rest, &found, &match_begin, &match_end);
          !status.ok())
        return status;
      if (!found) break;
      if (Status status = cut(step + 1, rest, match_begin); !status.ok()) return status;
      if (Status status = cut(step + 1, match_begin, match_end); !status.ok()) return status;
      rest = match_end;
    }
    return cut(step + 1, rest, end);
  }

 private:
  // Offsets are those of the text; the matcher sees [begin, end) only.
  Status find(std::size_t step, std::size_t begin, std::size_t end, std::size_t from, bool* found,
              std::size_t* match_begin, std::size_t* match_end) {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(subject_.data() + begin);
    constexpr uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int rc = pcre2_match(codes_[step].get(), subject, end - begin, from - begin, options,
                         match_.get(), limits_.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
      rc = pcre2_match(codes_[step].get(), subject, end - begin, from - begin,
                       options | PCRE2_NO_JIT, match_.get(), limits_.get());
    *found = rc >= 0;
    if (rc >= 0) {
      const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match_.get());
      *match_begin = begin + range[0];
      *match_end = begin + range[1];
      return {};
    }
    if (rc == PCRE2_ERROR_NOMATCH) return {};
    if (rc == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
    if (rc == PCRE2_ERROR_MATCHLIMIT || rc == PCRE2_ERROR_HEAPLIMIT || rc == PCRE2_ERROR_DEPTHLIMIT)
      return Status::error(Code::limit,
                           "splitting text into words at byte %zu took too much effort", from);
    return Status::error(Code::internal,
                         "splitting text into words failed at byte %zu (PCRE2 error %d)", from, rc);
  }

  const std::vector<Pcre<pcre2_code>>& codes_;
  std::string_view text_, subject_;
  const Pretokenizer::Word& word_;
  Pcre<pcre2_match_context> limits_;
  Pcre<pcre2_match_data> match_;
};

}  // namespace

Pretokenizer::Pretokenizer(std::unique_ptr<const Steps> steps) : steps_(std::move(steps)) {}
Pretokenizer::~Pretokenizer() = default;

bool Pretokenizer::adds_bos() const { return steps_->family->adds_bos; }
bool Pretokenizer::takes_whole_words() const { return steps_->family->takes_whole_words; }

Status Pretokenizer::create(std::string_view name, std::unique_ptr<const Pretokenizer>* out) {
  auto steps = std::make_unique<Steps>();
  steps->family = find_pretokenizer_family(name);
  if (!steps->family)
    return Status::error(Code::unsupported,
                         "the pre-tokenizer \"%s\" (tokenizer.ggml.pre) is not known",
                         Quoted(name).text());
  steps->context = make_context();
  const auto options = owned(pcre2_compile_context_create(steps->context.get()));
  for (const char* const* expression = steps->family->expressions; *expression; ++expression) {
    const std::string expanded = expand(*expression);
    int error = 0;
    PCRE2_SIZE at = 0;
    Pcre<pcre2_code> code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expanded.data()),
                                        expanded.size(),
                                        PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C |
                                            PCRE2_DOLLAR_ENDONLY | PCRE2_NO_AUTO_CAPTURE,
                                        &error, &at, options.get()));
    if (!code && error == PCRE2_ERROR_HEAP_FAILED) throw std::bad_alloc();
    if (!code)
      return Status::error(Code::internal,
                           "the expression of \"%s\" does not compile (PCRE2 error %d at %zu)",
                           Quoted(name).text(), error, at);
    // Where the system forbids machine code, PCRE2 interprets the expression: slower, with the same
    // result.
    // result.
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
    steps->codes.push_back(std::move(code));
  }
  out->reset(new Pretokenizer(std::move(steps)));
  return {};
}

Status Pretokenizer::split(std::string_view text, CancelPoll* cancel, const Word& word) const {
  const Array<char> replaced = replace_invalid(text, cancel);
  if (cancel->stopped()) return Status::error(Code::cancelled, "cancelled");
  const std::string_view subject =
      replaced.empty() ? text : std::string_view(replaced.data(), replaced.size());
  Pcre<pcre2_jit_stack> stack(steps_->spare.exchange(nullptr, std::memory_order_acq_rel));
  if (!stack) stack = make_stack(steps_->context.get());
  Status status = Cutter(steps_->context.get(), steps_->codes, text, subject, word, stack.get())
                      .cut(0, 0, text.size());
  pcre2_jit_stack* none = nullptr;
  if (steps_->spare.compare_exchange_strong(none, stack.get(), std::memory_order_acq_rel))
    (void)stack.release();
  return status;
}

}  // namespace kvasir
