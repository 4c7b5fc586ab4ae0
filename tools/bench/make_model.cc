// kvasir-make-model: writes a GGUF file of a given shape with random weights, for benchmarks and
// tests of speed and memory.
//
// The file is complete: metadata, a byte-level BPE vocabulary with a chat format, and every weight.
// Its answers have no meaning. The same options and seed give the same file, with the same C++
// library.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/memory.h"
#include "encode_weights.h"
#include "gguf/gguf.h"
#include "model_shapes.h"
#include "os/os.h"

namespace kvasir {
namespace {

constexpr uint64_t kAlignment = 32;   // of tensors, bytes: GGUF's default
constexpr uint32_t kPoolGroup = 256;  // elements: a multiple of every block
// Groups in the pool. A prime, so that rows of any width begin at different places in it: 65521
// different rows.
constexpr uint64_t kPoolGroups = 65521;
// activations of a few dozen layers then stay in range, as in trained models
constexpr float kSigma = 0.02f;
constexpr uint32_t kSpecials = 3;
constexpr uint32_t kMinVocab = kSpecials + 256;

struct Options {
  Shape shape;
  TensorTypes types;
  bool untied;
  uint64_t seed;
  std::string path;
};

// ---- metadata
// -------------------------------------------------------------------------------------------------

class Header {
 public:
  void key(const std::string& name, uint32_t value) {
    begin(name, GgufType::u32), put(&keys_, value);
  }
  void key(const std::string& name, float value) { begin(name, GgufType::f32), put(&keys_, value); }
  void key(const std::string& name, bool value) {
    begin(name, GgufType::boolean), put(&keys_, value);
  }
  void key(const std::string& name, const char* value) {
    begin(name, GgufType::string), put_text(&keys_, value);
  }
  void key(const std::string& name, const std::vector<std::string>& values) {
    begin_array(name, GgufType::string, values.size());
    for (const std::string& value : values) put_text(&keys_, value);
  }
  void key(const std::string& name, const std::vector<int32_t>& values) {
    begin_array(name, GgufType::i32, values.size());
    for (int32_t value : values) put(&keys_, value);
  }
  void tensor(const Tensor& tensor) {
    put_text(&tensors_, tensor.name);
    put(&tensors_, static_cast<uint32_t>(tensor.dims.size()));
    for (uint64_t dim : tensor.dims) put(&tensors_, dim);
    put(&tensors_, tensor.type);
    put(&tensors_, data_bytes_);
    data_bytes_ += round_up(tensor.bytes(), kAlignment);
    ++n_tensors_;
  }
  // The bytes before the data, padded to the alignment.
  std::string build() const {
    std::string out = "GGUF";
    put(&out, uint32_t{3});
    put(&out, n_tensors_);
    put(&out, n_keys_);
    out += keys_;
    out += tensors_;
    out.resize(round_up(out.size(), kAlignment));
    return out;
  }

 private:
  template <class T>
  static void put(std::string* out, T value) {
    out->append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void put_text(std::string* out, const std::string& text) {
    put(out, uint64_t{text.size()});
    *out += text;
  }
  void begin(const std::string& name, GgufType type) {
    put_text(&keys_, name);
    put(&keys_, type);
    ++n_keys_;
  }
  void begin_array(const std::string& name, GgufType element, uint64_t count) {
    begin(name, GgufType::array);
    put(&keys_, element);
    put(&keys_, count);
  }

  uint64_t n_keys_ = 0, n_tensors_ = 0, data_bytes_ = 0;
  std::string keys_, tensors_;
};

// The character of a byte in byte-level BPE: itself if it is printable Latin-1, else the next of
// U+0100, U+0101, ...
std::vector<std::string> byte_spellings() {
  std::vector<std::string> spellings;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    const uint32_t c = printable ? byte : next++;
    if (c < 0x80) spellings.emplace_back(1, static_cast<char>(c));
    else
      spellings.push_back({static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 0x3f))});
  }
  return spellings;
}

// Three special tokens, the 256 bytes, then every string of lower-case letters, with or without a
// space before, shortest first, until the vocabulary is full. Each is made by one merge: the string
// without its last letter, and that letter.
void add_vocabulary(uint32_t size, Header* header) {
  std::vector<std::string> tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  const std::vector<std::string> bytes = byte_spellings();
  tokens.insert(tokens.end(), bytes.begin(), bytes.end());
  std::vector<std::string> words = {bytes[' ']};
  for (char c = 'a'; c <= 'z'; ++c) words.emplace_back(1, c);
  std::vector<std::string> merges;
  for (std::size_t i = 0; tokens.size() < size; ++i) {
    for (char c = 'a'; c <= 'z' && tokens.size() < size; ++c) {
      words.push_back(words[i] + c);
      tokens.push_back(words.back());
      merges.push_back(words[i] + ' ' + c);
    }
  }
  std::vector<int32_t> kinds(tokens.size(), 1);  // normal
  std::fill_n(kinds.begin(), kSpecials, 3);      // control
  header->key("tokenizer.ggml.model", "gpt2");
  header->key("tokenizer.ggml.pre", "qwen2");
  header->key("tokenizer.ggml.tokens", tokens);
  header->key("tokenizer.ggml.token_type", kinds);
  header->key("tokenizer.ggml.merges", merges);
  header->key("tokenizer.ggml.bos_token_id", uint32_t{0});
  header->key("tokenizer.ggml.eos_token_id", uint32_t{2});
  header->key("tokenizer.ggml.padding_token_id", uint32_t{0});
  header->key("tokenizer.ggml.add_bos_token", false);
  header->key("tokenizer.chat_template",
              "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
              "message['content'] + "
              "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt "
              "%}{{'<|im_start|>assistant\n'}}{% endif %}");
}

// general.file_type: the type of most weights.
const std::map<TensorType, uint32_t> kFileTypes = {
    {TensorType::f32, 0},      {TensorType::f16, 1},     {TensorType::q4_0, 2},
    {TensorType::q8_0, 7},     {TensorType::q4_k, 14},   {TensorType::q6_k, 18},
    {TensorType::iq2_xxs, 19}, {TensorType::iq2_xs, 20}, {TensorType::iq3_xxs, 23},
    {TensorType::iq1_s, 24},   {TensorType::iq3_s, 26},  {TensorType::iq2_s, 28},
    {TensorType::iq4_xs, 30},  {TensorType::iq1_m, 31},  {TensorType::bf16, 32},
    {TensorType::tq1_0, 36},   {TensorType::tq2_0, 37},  {TensorType::mxfp4, 38},
    {TensorType::nvfp4, 39}};

void add_shape(const Shape& s, Header* header) {
  const std::string prefix = std::string(s.family->architecture) + ".";
  const auto add = [&](const char* name, const auto& value) { header->key(prefix + name, value); };
  list_keys(s, {add, add, add, add});
}

std::string build_header(const Options& o, const std::vector<Tensor>& tensors) {
  Header header;
  header.key("general.architecture", o.shape.family->architecture);
  header.key("general.name", "random weights");
  header.key("general.file_type",
             kFileTypes.at(o.shape.experts > 0 ? o.types.experts : o.types.matrices));
  add_shape(o.shape, &header);
  add_vocabulary(o.shape.vocab, &header);
  for (const Tensor& tensor : tensors) header.tensor(tensor);
  return header.build();
}

// ---- weights
// -------------------------------------------------------------------------------------------------

// Encoded random weights of one type. All tensors of the type read them in turn, in a circle.
class Pool {
 public:
  Pool(TensorType type, uint64_t groups, uint64_t seed)
      : group_bytes_(bytes_of(type)), data_(groups * group_bytes_) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, kSigma);
    float x[kPoolGroup];
    for (uint64_t g = 0; g < groups; ++g) {
      for (float& value : x) value = normal(random);
      encode_weights(type, x, kPoolGroup, data_.data() + g * group_bytes_);
    }
  }

  Status write(uint64_t offset, uint64_t bytes, os::File* file) {
    while (bytes > 0) {
      const uint64_t n = std::min(bytes, data_.size() - at_);
      Status status = file->write(offset, data_.data() + at_, n);
      if (!status.ok()) return status;
      offset += n;
      bytes -= n;
      at_ = (at_ + n) % data_.size();
    }
    return {};
  }

 private:
  static uint64_t bytes_of(TensorType type) {
    const TensorTypeInfo* info = tensor_type_info(type);
    return uint64_t{kPoolGroup} / info->block_elements * info->block_bytes;
  }
  uint64_t group_bytes_;
  Array<std::byte> data_;
  uint64_t at_ = 0;  // bytes; beginning of the next tensor
};

// The numbers of a small tensor, which is F32.
std::vector<float> filled(const Tensor& tensor, uint64_t seed) {
  std::vector<float> values(tensor.elements(), tensor.fill == Fill::step ? -4.0f : 1.0f);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 1.0f / kDeltaTaps);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (tensor.fill == Fill::taps) values[i] = normal(random);
    if (tensor.fill == Fill::decay) values[i] = -1.0f - static_cast<float>(i % 16);
  }
  return values;
}

Status write_contents(const Options& o, const std::vector<Tensor>& tensors, os::File* file,
                      uint64_t* size) {
  const std::string header = build_header(o, tensors);
  Status status = file->write(0, header.data(), header.size());
  uint64_t groups = 0;
  for (const Tensor& tensor : tensors) groups += ceil_div(tensor.elements(), kPoolGroup);
  std::map<TensorType, Pool> pools;
  uint64_t offset = header.size();
  for (const Tensor& tensor : tensors) {
    if (!status.ok()) return status;
    if (tensor.fill != Fill::weights) {
      const std::vector<float> values = filled(tensor, o.seed);
      status = file->write(offset, values.data(), tensor.bytes());
    } else {
      const auto pool =
          pools.try_emplace(tensor.type, tensor.type, std::min(groups, kPoolGroups), o.seed).first;
      status = pool->second.write(offset, tensor.bytes(), file);
    }
    const uint64_t end = offset + tensor.bytes();
    offset = round_up(end, kAlignment);
    const char zeros[kAlignment] = {};
    if (status.ok()) status = file->write(end, zeros, offset - end);
  }
  *size = offset;
  return status;
}

// Writes a temporary file and renames it, so that the path never holds half a model.
Status write_model(const Options& o, const std::vector<Tensor>& tensors, uint64_t* size) {
  os::File file;
  Status status = os::File::create_temporary(o.path, &file);
  if (!status.ok()) return status;
  const std::string temporary = file.path();
  status = write_contents(o, tensors, &file, size);
  if (status.ok()) status = file.close();
  if (status.ok()) status = os::rename_replace(temporary, o.path);
  if (!status.ok()) (void)os::remove_file(temporary).ok();
  return status;
}

// ---- command line
// -------------------------------------------------------------------------------------------------

// Type names of --type.
std::map<std::string, TensorType> type_names() {
  std::map<std::string, TensorType> names;
  for (uint32_t id = 0; tensor_type_name(id); ++id) {
    if (can_encode(static_cast<TensorType>(id)))
      names[tensor_type_name(id)] = static_cast<TensorType>(id);
  }
  return names;
}

// The reason why the shape is not possible, or "".
std::string complaint(const Options& o) {
  const Shape& s = o.shape;
  if (s.heads % s.kv_heads != 0) return "--heads must be a multiple of --kv-heads";
  if (s.head_dim % 2 != 0) return "--head-dim must be even";
  if (s.vocab < kMinVocab) return "--vocab must be at least " + std::to_string(kMinVocab);
  if (s.used > s.experts || (s.used == 0 && s.experts > 0)) return "--used must be 1 to --experts";
  uint32_t block = 1;
  for (const TensorType type : {o.types.matrices, o.types.embedding, o.types.experts})
    block = std::max(block, tensor_type_info(type)->block_elements);
  for (const auto& [name, cols] :
       {std::pair{"--width", uint64_t{s.width}}, std::pair{"--ffn", uint64_t{s.ffn}},
        std::pair{"--heads times --head-dim", uint64_t{s.heads} * s.head_dim}}) {
    if (cols % block != 0)
      return std::string(name) + " must be a multiple of the type's block, " +
             std::to_string(block);
  }
  return "";
}

int run(int argc, char** argv) {
  CLI::App app(
      "Writes a GGUF file of a model with random weights, for benchmarks.\n"
      "All weights are drawn from one pool of normal numbers, which large models read round and "
      "round: no row of a tensor\n"
      "repeats below 65521 rows, but statistics over the whole model are those of the pool.");
  std::string shape_name = "1b", type = "Q4_0", embedding_type, expert_type;
  Options o{};
  const std::map<std::string, TensorType> types = type_names();
  app.add_option("--shape", shape_name, "a known shape, which the options below change")
      ->check(CLI::IsMember(known_shapes()))
      ->capture_default_str();
  const struct {
    const char* name;
    uint32_t Shape::*field;
    const char* text;
    uint32_t max;
  } fields[] = {
      {"--layers", &Shape::layers, "transformer layers", 1024},
      {"--width", &Shape::width, "embedding length", 65536},
      {"--heads", &Shape::heads, "query heads", 1024},
      {"--kv-heads", &Shape::kv_heads, "key and value heads", 1024},
      {"--head-dim", &Shape::head_dim, "dimensions of a head", 1024},
      {"--ffn", &Shape::ffn, "feed-forward length, or an expert's", 262144},
      {"--experts", &Shape::experts, "experts; without them, one network", 4096},
      {"--used", &Shape::used, "experts that a token uses", 4096},
      {"--vocab", &Shape::vocab, "tokens in the vocabulary", 1048576},
      {"--context", &Shape::context, "tokens of context that the metadata promises", 1u << 30},
  };
  for (const auto& field : fields) {
    app.add_option(field.name, o.shape.*field.field, field.text)->check(CLI::Range(1u, field.max));
  }
  app.add_option("--type", type, "of the weights")
      ->transform(CLI::IsMember(types, CLI::ignore_case))
      ->capture_default_str();
  app.add_option("--embedding-type", embedding_type,
                 "of the embedding and the output; as --type when not given")
      ->transform(CLI::IsMember(types, CLI::ignore_case));
  app.add_option("--expert-type", expert_type, "of the experts; as --type when not given")
      ->transform(CLI::IsMember(types, CLI::ignore_case));
  app.add_flag("--mtp", o.shape.mtp, "an MTP layer behind the last one");
  app.add_flag("--untied", o.untied, "an output matrix of its own, not the embedding");
  app.add_option("--seed", o.seed, "of the random numbers")->capture_default_str();
  app.add_option("-o,--output", o.path, "the file to write; an existing one is replaced")
      ->required();
  CLI11_PARSE(app, argc, argv);

  const Shape& known = known_shapes().at(shape_name);
  o.shape.family = known.family;
  for (const auto& field : fields) {
    if (o.shape.*field.field == 0) o.shape.*field.field = known.*field.field;
  }
  o.types.matrices = types.at(type);
  o.types.embedding = embedding_type.empty() ? o.types.matrices : types.at(embedding_type);
  o.types.experts = expert_type.empty() ? o.types.matrices : types.at(expert_type);
  if (const std::string wrong = complaint(o); !wrong.empty()) {
    std::fprintf(stderr, "kvasir-make-model: %s\n", wrong.c_str());
    return 2;
  }
  const std::vector<Tensor> tensors = list_tensors(o.shape, o.types, o.untied);
  uint64_t parameters = 0, size = 0;
  for (const Tensor& tensor : tensors) parameters += tensor.elements();
  const Status status = write_model(o, tensors, &size);
  if (!status.ok()) {
    std::fprintf(stderr, "kvasir-make-model: %s\n", status.message());
    return 1;
  }
  std::printf("%s: %.3f billion parameters, %.1f MiB\n", o.path.c_str(),
              static_cast<double>(parameters) * 1e-9, static_cast<double>(size) / (1 << 20));
  return 0;
}

}  // namespace
}  // namespace kvasir

int main(int argc, char** argv) { return kvasir::run(argc, argv); }
