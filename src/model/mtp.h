// The MTP layer: behind the last layer of some models (GGUF: nextn_predict_layers), it predicts one
// token more. With h, what the output matrix multiplies for a token, and the token after it:
//
//   x = W [norm(E[next token]); norm(h)];  x += mixer(norm(x));  x += ffn(norm(x))
//   logits of the token after next = W_out norm(x)
//
// What its own output matrix multiplies stands for h where it goes on from its own prediction.
// It is bound only where a session asks for it; sessions of a model share it. It is on the GPU that
// has the model's output, if that has room for it, and otherwise on the CPU.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "model/model.h"

namespace kvasir {

struct MtpLayer {
  std::shared_ptr<const Model> whole;
  Model layer;  // of this layer alone; its tensors lie in the file of `whole`
  MtpInputs inputs;
  std::string why_cpu;  // why a model on GPUs has it on the CPU; empty otherwise

  std::string device_names() const { return layer.device_names(); }

  // Code::unsupported (the file has none, or one of a kind that is not supported), Code::corrupt
  // names a tensor, Code::device, Code::cancelled.
  static Status open(std::shared_ptr<const Model> whole, const Cancel* cancel,
                     std::shared_ptr<const MtpLayer>* out);
  // Its layer and inputs alone. Code::unsupported, Code::corrupt.
  static Status bind(const Model& whole, MtpLayer* out);
};

}  // namespace kvasir
