// The expressions of the models' published tokenizers, with common parts written once.
//
// \s and \S mean the Unicode property White_Space (pretokenizer.cc). No expression matches the
// empty string, and none makes the matcher look at more than a constant number of runs per match,
// which keeps splitting linear.
#include "text/pretokenizer_families.h"

namespace kvasir {
namespace {

// Contractions, words with one space before, numbers, other marks, blanks except the last one
// before a word.
constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr const char* kGpt2List[] = {kGpt2, nullptr};
constexpr const char* kGpt2Digits[] = {R"(\p{N})", kGpt2, nullptr};
constexpr const char* kFalcon[] = {R"([\p{P}$+<=>^~|`]+)", kGpt2, "[0-9][0-9][0-9]", nullptr};
constexpr const char* kDefault[] = {R"([\p{P}$+<=>^~|]+)", kGpt2, R"(\p{N}+)", "[0-9][0-9][0-9]",
                                    nullptr};

constexpr const char* kLlama3[] = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};
constexpr const char* kQwen2[] = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};
constexpr const char* kQwen35[] = {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?)"
                                   R"([\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*)"
                                   R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
                                   nullptr};
constexpr const char* kSeedCoder[] = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};
constexpr const char* kBailing[] = {
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*)"
    R"(|\s*[\r\n]|\s+(?!\S)|\s+)",
    nullptr};
constexpr const char* kMinicpm5[] = {
    R"(\p{N}{1,3})",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};

// Words of two cases: capitals then small letters; letters without case and marks count as both.
#define CASED_WORDS(ending)                                                                \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)" ending \
  R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)" ending
#define CONTRACTION R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"

constexpr const char* kTekken[] = {
    CASED_WORDS("") R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)", nullptr};
constexpr const char* kGpt4o[] = {
    CASED_WORDS(CONTRACTION) R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};
constexpr const char* kYoutu[] = {
    R"([\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+)"
    R"(|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C})"
    R"(\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+)"
    R"(|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+)",
    CASED_WORDS(CONTRACTION) R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};

// Divides a piece of digits into threes from its right.
#define THREES(digit)                                                                         \
  "^(?=" digit "++$)" digit "{1,2}(?=(?:" digit "{3})*+$)|(?:^(?=" digit "++$)|\\G(?<=" digit \
  "))" digit "{3}"

// The published expression for digits is \d{1,3}(?=(?:\d{3})*\b), which is quadratic. The class is
// that of \b.
constexpr const char* kTinyAya[] = {R"((?<!\d)\d++(?![\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}]))",
                                    THREES("\\d"), kGpt4o[0], nullptr};

// Kimi's words of two cases have no Han. Their classes name the other categories: a class can
// exclude, but not intersect. Han is the script's own characters: \p{Han} has also those that it
// shares with others, by PCRE2 10.40 and later.
#define HAN                                                                                  \
  R"(\x{2E80}-\x{2E99}\x{2E9B}-\x{2EF3}\x{2F00}-\x{2FD5}\x{3005}\x{3007}\x{3021}-\x{3029})"  \
  R"(\x{3038}-\x{303B}\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FA6D}\x{FA70}-\x{FAD9})" \
  R"(\x{16FE2}\x{16FE3}\x{16FF0}\x{16FF1}\x{20000}-\x{323AF})"
#define NO_SMALL_NO_HAN R"([^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C})" HAN "]"
#define NO_CAPITAL_NO_HAN R"([^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C})" HAN "]"
constexpr const char* kKimi[] = {
    "[" HAN R"(]+|[^\r\n\p{L}\p{N}]?)" NO_SMALL_NO_HAN "*" NO_CAPITAL_NO_HAN "+" CONTRACTION
    R"(|[^\r\n\p{L}\p{N}]?)" NO_SMALL_NO_HAN "+" NO_CAPITAL_NO_HAN "*" CONTRACTION
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};

// Letters run across single spaces. The published (?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+ matches the
// same and keeps every letter on the matcher's stack.
constexpr const char* kExaoneMoe[] = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}(?:\p{M}| ?\p{L})*+|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)",
    nullptr};

// Llama 3's words; runs of blanks are divided again, where the published expression tries each size
// at every blank.
constexpr const char* kJais2[] = {
    kLlama3[0],
    R"((?:^(?=\s++$(?<![\r\n]))|\G(?<=\s)))"
    R"((?:\s{512}|\s{256}|\s{128}|\s{64}|\s{32}|\s{16}|\s{8}|\s{4}|\s{2}|\s))",
    nullptr};

// Numbers are divided; everything else is one word. The published expression for the divisions,
// (?=(\d{3})+(?!\d)), is quadratic.
constexpr const char* kSuperbpe[] = {
    R"(\p{N}+)",
    R"((?:(?<!\d)(?=(?:\d{3})++(?!\d))|(?<!\d)\d{1,2}(?=(?:\d{3})++(?!\d))\K|\G(?<=\d))\d{3})",
    nullptr};

constexpr const char* kLaguna[] = {R"(\n+)", kQwen2[0], nullptr};

constexpr const char* kBloom[] = {
    R"( ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+)", nullptr};
constexpr const char* kViking[] = {kBloom[0], R"(\p{N})", nullptr};

// The published expression for trailing blanks is \s+$; the look-behind makes it try each run of
// blanks once.
constexpr const char* kDeepseekLlm[] = {
    R"([\r\n])",
    R"(\s?[)"
    R"(A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293})"
    R"(\x{295}-\x{2AF})"
    R"(\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C})"
    R"(\x{38E}-\x{3A1})"
    R"(\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-)"
    R"(\x{13F5})"
    R"(\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77})"
    R"(\x{1D79}-\x{1D9A})"
    R"(\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57})"
    R"(\x{1F59}\x{1F5B})"
    R"(\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4})"
    R"(\x{1FC6}-\x{1FCC})"
    R"(\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC})"
    R"(\x{2102}\x{2107})"
    R"(\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D})"
    R"(\x{212F}-\x{2134})"
    R"(\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B})"
    R"(\x{2C7E}-\x{2CE4})"
    R"(\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F})"
    R"(\x{A771}-\x{A787})"
    R"(\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A})"
    R"(\x{FF41}-\x{FF5A})"
    R"(\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-)"
    R"(\x{10CF2})"
    R"(\x{118A0}-\x{118DF}\x{1E900}-\x{1E943})"
    R"(]+)",
    R"(\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+)",
    R"((?<!\s)\s+$)",
    R"([\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+)",
    R"(\p{N}+)",
    nullptr};
constexpr const char* kDeepseekCoder[] = {
    R"([\r\n])",    R"(\s?\p{L}+)",
    R"(\s?\p{P}+)", R"([\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+)",
    R"(\p{N})",     nullptr};
constexpr const char* kDeepseek3[] = {
    R"(\p{N}{1,3})", R"([\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+)",
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?)"
    R"([\p{P}\p{S}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    nullptr};

constexpr const char* kAfmoe[] = {
    R"(\p{N}+)", THREES("\\p{N}"),
    R"([\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF})"
    R"(\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF})"
    R"(\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+)",
    kDeepseek3[2], nullptr};

#undef CASED_WORDS
#undef CONTRACTION
#undef THREES
#undef HAN
#undef NO_SMALL_NO_HAN
#undef NO_CAPITAL_NO_HAN

struct Named {
  std::string_view name;
  PretokenizerFamily family;
};

constexpr PretokenizerFamily kLlama3Family = {kLlama3, true, true};

constexpr Named kFamilies[] = {
    {"default", {kDefault}},
    {"gpt-2", {kGpt2List}},
    {"phi-2", {kGpt2List}},
    {"mpt", {kGpt2List}},
    {"olmo", {kGpt2List}},
    {"jais", {kGpt2List}},
    {"trillion", {kGpt2List}},
    {"granite-docling", {kGpt2List}},
    {"gigachat", {kGpt2List}},
    {"a.x-4.0", {kGpt2List}},
    {"mellum", {kGpt2List}},
    {"exaone4", {kGpt2List}},
    {"starcoder", {kGpt2Digits}},
    {"refact", {kGpt2Digits}},
    {"command-r", {kGpt2Digits}},
    {"smollm", {kGpt2Digits}},
    {"codeshell", {kGpt2Digits}},
    {"exaone", {kGpt2Digits}},
    {"minerva-7b", {kGpt2Digits}},
    {"mellum2", {kGpt2Digits}},
    {"falcon", {kFalcon}},
    {"llama-bpe", kLlama3Family},
    {"llama3", kLlama3Family},
    {"llama-v3", kLlama3Family},
    {"falcon3", kLlama3Family},
    {"falcon-h1", kLlama3Family},
    {"pixtral", kLlama3Family},
    {"midm-2.0", kLlama3Family},
    {"lfm2", kLlama3Family},
    {"dbrx", {kLlama3}},
    {"smaug-bpe", {kLlama3}},
    {"chatglm-bpe", {kLlama3}},
    {"glm4", {kLlama3}},
    {"qwen2", {kQwen2}},
    {"deepseek-r1-qwen", {kQwen2}},
    {"stablelm2", {kQwen2}},
    {"megrez", {kQwen2}},
    {"f2llmv2", {kQwen2}},
    {"kormo", {kQwen2}},
    {"hunyuan", {kQwen2}},
    {"solar-open", {kQwen2}},
    {"grok-2", {kQwen2}},
    {"qwen35", {kQwen35}},
    {"seed-coder", {kSeedCoder}},
    {"bailingmoe", {kBailing}},
    {"bailingmoe2", {kBailing}},
    {"llada-moe", {kBailing}},
    {"minicpm5", {kMinicpm5, false, true}},
    {"tekken", {kTekken, true, true}},
    {"gpt-4o", {kGpt4o}},
    {"llama4", {kGpt4o}},
    {"kanana2", {kGpt4o}},
    {"talkie", {kGpt4o}},
    {"minimax-m2", {kGpt4o}},
    {"bloom", {kBloom}},
    {"poro-chat", {kBloom}},
    {"gpt3-finnish", {kBloom}},
    {"viking", {kViking}},
    {"deepseek-llm", {kDeepseekLlm}},
    {"deepseek-coder", {kDeepseekCoder}},
    {"deepseek-v3", {kDeepseek3}},
    {"hunyuan-dense", {kDeepseek3}},
    {"joyai-llm", {kDeepseek3}},
    {"afmoe", {kAfmoe}},
    {"tiny_aya", {kTinyAya}},
    {"cohere2moe", {kTinyAya}},
    {"kimi-k2", {kKimi}},
    {"exaone-moe", {kExaoneMoe}},
    {"youtu", {kYoutu, false, true}},
    {"superbpe", {kSuperbpe}},
    {"jais-2", {kJais2}},
    {"laguna", {kLaguna}},
};

}  // namespace

const PretokenizerFamily* find_pretokenizer_family(std::string_view name) {
  for (const Named& named : kFamilies) {
    if (named.name == name) return &named.family;
  }
  return nullptr;
}

}  // namespace kvasir
