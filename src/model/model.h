// A model: the mapped GGUF file, its configuration, views of its weights, tokenizer and chat
// format. Immutable; shared by threads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/kernels.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "cachefile/format.h"
#include "gguf/gguf.h"
#include "model/config.h"
#include "model/device_weights.h"
#include "model/full_hash.h"
#include "model/rope.h"
#include "os/os.h"
#include "store/page_store.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace kvasir {

// y = W x + b. The matrix lies in the mapped file; the bias is a copy, empty when there is none.
struct Linear {
  WeightView w;
  Array<float> bias;  // [rows]
};

// Weights of a norm; empty where a layer has no such norm, or a norm has no weights.
struct Norm {
  Array<float> weight, bias;

  bool empty() const { return weight.empty(); }
};

// The matrices of all experts, one after another in the mapped file.
struct ExpertMatrices {
  WeightView first;        // of expert 0
  std::size_t stride = 0;  // bytes from an expert's matrix to the next one's
  Array<float> biases;     // [experts][rows], or empty
  Array<float> scales;     // [experts] factors of the products, or empty

  WeightView of(uint32_t expert) const {
    WeightView w = first;
    w.data += expert * stride;
    return w;
  }
};

struct ExpertWeights {
  Linear router;  // [experts][width]
  // Where a layer has a dense network besides experts: the router's norm of x, that of the
  // experts' input and output, and that of the dense network's output.
  Norm router_norm, input_norm, output_norm, dense_norm;
  Array<float> selection_bias;  // [experts], or empty
  ExpertMatrices gate, up, down;
  Linear shared_gate, shared_up, shared_down;  // of the shared expert, where there is one
  Array<float> shared_router;                  // [width]: its gate, or empty
};

// Of a layer of latent attention: LatentConfig.
struct LatentWeights {
  Linear query_a;           // [query_rank][width], or empty
  Array<float> query_norm;  // [query_rank], or empty
  Linear query;             // [heads * (plain + rotated)][query_rank, or width]
  Linear kv;                // [rank + rotated][width]
  Array<float> norm;        // [rank]
  // Of each head: [rank][plain], or [plain][rank] where LatentConfig::joint; [values][rank]
  ExpertMatrices keys, values;
};

// Of a layer with AltUp (engine/altup.h).
struct AltUpWeights {
  Linear router;  // [streams][width]
  Norm router_norm;
  Array<float> predict, correct;  // [streams * streams][streams], [streams][streams]
  Array<float> scale;             // [width]
  Linear laurel_down, laurel_up;  // [rank][width], [width][rank]
  Norm laurel_norm;
};

// Of a recurrent mixer. `in` makes the convolution's inputs, `gate` multiplies the output.
struct RecurrentWeights {
  // [channels][width], [inner][width]. Old files of Qwen3-Next have both in `in`: of each key head
  // the query, the key, the values of its heads and their gates.
  Linear in, gate;
  // [heads][width]: how fast a state decays, and how much of a token it takes. Of a short
  // convolution, beta gates its inputs: [channels][width]. Qwen3-Next has both in beta:
  // [2 * heads][width], those of a key head together.
  Linear alpha, beta;
  Linear out;                            // [width][inner]
  Array<float> convolution, bias;        // [taps][channels], [channels] or empty
  Array<float> decay, decay_bias, skip;  // [heads] each; skip: or empty
  Array<float> norm;                     // [value_dim], Mamba: [inner], or empty
};

// A LayerConfig says which of these exist; others are empty.
struct LayerWeights {
  Norm mixer_norm, mixer_post_norm;  // [width]
  // [heads * head_dim][width], [kv_heads * head_dim][width] twice, [width][heads * head_dim]
  Linear q, k, v, o;     // q with an output gate: each head's q, then its gate
  LatentWeights latent;  // in place of q, k and v
  RecurrentWeights recurrent;
  Array<float> q_norm, k_norm;  // as QkNorm has them
  Array<float> sinks;           // [heads]
  Norm ffn_norm, ffn_post_norm;
  Linear gate, up, down;  // [feed_forward][width] twice, [width][feed_forward]
  ExpertWeights experts;
  // x += norm(W_out (f(W_gate x) * the layer's input)), where the model has layer inputs
  Linear input_gate, input_out;  // [layer_input][width], [width][layer_input]
  Norm input_norm;
  AltUpWeights altup;
  Array<float> output_scale;  // [1]: a factor of x behind the layer, or empty
};

struct Weights {
  WeightView embedding;  // [vocabulary][width]
  // Of layer inputs: [vocabulary][depth * layer_input], [depth * layer_input][width]
  WeightView input_embedding;
  Linear input_projection;
  Norm input_norm;  // [layer_input]
  std::vector<LayerWeights> layers;
  ExpertMatrices stream_in, stream_out;  // [streams - 1][width][width] of AltUp
  Norm output_norm;                      // [width]
  Linear output;                         // [vocabulary][width]; the embedding when tied
  uint64_t parameters = 0;
  uint64_t bytes = 0;   // in the file
  std::string formats;  // "Q4_K Q6_K F32", most bytes first
};

// What makes the input of an MTP layer (model/mtp.h).
struct MtpInputs {
  Norm token_norm, hidden_norm;  // [width]
  Linear projection;             // [width][2 * width]: of the token's embedding, then of h
};

// Divisors of RoPE's frequencies: [dim / 2] each, or empty.
struct RopeDivisors {
  Array<float> freqs;          // of sets without longrope
  Array<float> longs, shorts;  // of longrope: for contexts above the original one, and up to it
};

struct MtpLayer;

using Fingerprint = std::array<uint8_t, 32>;

// Whether a model is opened to run, or to say what it is: then none of its weights is copied, nor a
// device opened. For its vocabulary alone, neither hyper-parameters nor tensors are read.
enum class ModelUse { run, inspect, vocabulary };

class Model {
 public:
  // chat_format: as Chat::parse has it; "" to recognise it. On failure *out is unchanged; the
  // message names the file. hash_folder: where the hash of the whole file is kept; when it is not
  // "", a thread computes it.
  static Status open(const std::string& path, const std::string& chat_format,
                     std::shared_ptr<const Model>* out, const DeviceOptions& device = {},
                     const std::string& hash_folder = "", const Cancel* cancel = nullptr);
  // To say what it is: reads the metadata and the fingerprint's samples. Opens a file without
  // tensors for its vocabulary.
  static Status inspect(const std::string& path, std::shared_ptr<const Model>* out);
  // For tokenizer and chat format; the architecture need not be known. Of config(), only name and
  // vocabulary are set.
  static Status open_vocabulary(const std::string& path, const std::string& chat_format,
                                std::shared_ptr<const Model>* out);

  const std::string& path() const { return path_; }
  ModelUse use() const { return use_; }
  std::string_view architecture() const;  // as the file names it; "" if it does not
  const ModelConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  // By LayerConfig::rope, for a sequence of at most `context` tokens.
  const std::vector<Rope>& ropes(uint64_t context) const {
    return has_long_ropes(context) ? long_ropes_ : ropes_;
  }
  // Whether the context decides them, and is a long one (longrope).
  bool has_long_ropes(uint64_t context) const {
    return !long_ropes_.empty() && context > long_context_;
  }
  uint64_t long_context() const { return long_context_; }  // tokens up to which it is a short one
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const Chat& chat() const { return chat_; }
  // How it thinks in a format. Valid as long as `chat`.
  ThinkingMarks thinking(const Chat& chat) const { return recognise_thinking(gguf_, chat); }
  bool chat_is_chosen() const { return chat_is_chosen_; }  // by the caller, not recognised
  // Of all metadata, the tensor table, the file's size and blocks of every tensor.
  const Fingerprint& fingerprint() const { return fingerprint_; }
  FullHash* full_hash() const { return full_hash_.get(); }  // null of an inspected model
  // Bytes of a layer's weights where the file has them together; 0: it does not.
  uint64_t layer_bytes(uint32_t layer) const {
    return layer < layer_places_.size() ? layer_places_[layer].bytes : 0;
  }
  // Lets the system read part `part` of `parts` of such a layer ahead; advice.
  void read_ahead(uint32_t layer, uint32_t part, uint32_t parts) const;
  // Code::corrupt where the file was cut since it was mapped. Costs a system call.
  Status check_file() const { return full_hash_ ? full_hash_->check_size() : Status(); }
  void identify(format::Identity* out) const;  // fills in what says which weights these are
  // Whether a cache is of these weights: by the hash of the whole file where both have one, and by
  // the fingerprint.
  bool is_of(const format::Identity& identity) const;
  // Makes this the model of the whole model's MTP layer alone.
  Status read_mtp(const Model& whole, ModelConfig config, MtpInputs* inputs);
  // Uploads it to the whole model's last GPU. Errors as DeviceWeights::upload_part().
  Status upload_mtp(const Model& whole, const Linear& inputs, const Cancel* cancel) {
    return DeviceWeights::upload_part(whole, *this, inputs, cancel, &device_weights_);
  }
  // Of the MTP layer that sessions share (MtpLayer::open).
  struct SharedMtp {
    std::mutex mutex;
    std::weak_ptr<const MtpLayer> layer;
  };
  SharedMtp& shared_mtp() const { return shared_mtp_; }
  StoreShape store_shape() const;    // of the layers that keep every token
  StoreShape windows_shape() const;  // of those that see a window; no layers: none
  // Closes files that sessions of this model drop.
  const std::shared_ptr<os::FileReaper>& reaper() const { return reaper_; }
  // of each device; empty: the CPU computes everything
  const std::vector<DeviceWeights>& device_weights() const { return device_weights_; }
  std::string device_names() const;  // theirs, with commas between them, or "cpu"
  // where DeviceOptions left it open and there is none
  const std::string& why_no_device() const { return why_no_device_; }

 private:
  Status map(const std::string& path, const std::string& chat_format,
             const std::string& hash_folder, const Cancel* cancel);
  Status refuse_holes() const;
  void make_ropes(const RopeDivisors& divisors);
  void place_layers();
  Status read(const std::string& chat_format, const Cancel* cancel);
  Status read_vocabulary();
  Status read_weights();

  std::string path_;
  ModelUse use_ = ModelUse::run;
  os::Mapping mapping_;
  Gguf gguf_;
  ModelConfig config_;
  Weights weights_;
  struct Place {
    uint64_t begin = 0, bytes = 0;
  };
  std::vector<Place> layer_places_;  // [depth] in the file
  std::vector<Rope> ropes_;
  std::vector<Rope> long_ropes_;  // longrope: of contexts above long_context_; otherwise empty
  uint64_t long_context_ = 0;
  std::unique_ptr<const Tokenizer> tokenizer_;
  Chat chat_;
  bool chat_is_chosen_ = false;
  Fingerprint fingerprint_{};
  std::shared_ptr<os::FileReaper> reaper_ = std::make_shared<os::FileReaper>();
  std::unique_ptr<FullHash> full_hash_;
  std::vector<DeviceWeights> device_weights_;
  std::string why_no_device_;
  mutable SharedMtp shared_mtp_;
};

// Binds every tensor of the file to its place; a missing, misshapen or unused tensor is an error
// that names it. Nothing is copied before all of them fit. ModelUse::inspect leaves the copied
// vectors empty.
Status bind_weights(const Gguf& gguf, const std::byte* file, const ModelConfig& config,
                    ModelUse use, Weights* out, RopeDivisors* divisors);
// Likewise of the MTP layer, block `block` of the file. config: of that layer alone. *out begins
// with the whole model's embedding and output, which the layer shares unless it has its own.
Status bind_mtp(const Gguf& gguf, const std::byte* file, const ModelConfig& config, uint32_t block,
                Weights* out, MtpInputs* inputs);

}  // namespace kvasir
