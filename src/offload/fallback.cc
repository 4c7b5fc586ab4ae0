#include "offload/fallback.h"

namespace kvasir {

const char* text_of(Fallback reason) {
  switch (reason) {
    case Fallback::none:
      return "";
    case Fallback::not_planned:
      return "no step was planned yet";
    case Fallback::traced:
      return "passages are traced";
    case Fallback::documents:
      return "several documents are attended";
    case Fallback::attends_everything:
      return "every token is attended";
    case Fallback::other_strategy:
      return "the GPU does not choose by this strategy";
    case Fallback::is_prefill:
      return "a document is prefilled";
    case Fallback::separate_heads:
      return "each query head chooses for itself";
    case Fallback::dense_layers:
      return "some layers attend every token";
    case Fallback::compared:
      return "the choice is compared with exact attention";
    case Fallback::memory_limit:
      return "memory_limit is set";
    case Fallback::full_precision:
      return "keys and values are kept in full precision";
    case Fallback::head_size:
      return "the GPU has no kernels for this head size";
    case Fallback::capped_scores:
      return "the GPU does not cap scores of layers that attend every token";
    case Fallback::shared_keys:
      return "layers attend the keys and values of earlier ones";
    case Fallback::group_size:
      return "too many query heads share a KV head";
    case Fallback::no_sketch:
      return "the keys have no sketch yet";
    case Fallback::query_batch:
      return "the tokens of a question choose together on the CPU";
    case Fallback::few_tokens:
      return "few tokens are prefilled";
    case Fallback::no_room:
      return "the GPU has no room for what its attention needs";
    case Fallback::pinning:
      return "pages are being pinned, some with each step; until then the CPU stages or attends "
             "them";
    case Fallback::cannot_pin:
      return "the GPU cannot read host memory; the CPU stages the chosen pages";
    case Fallback::too_many_pages:
      return "the pages are more than three quarters of the memory; the CPU stages the chosen ones";
    case Fallback::spilled:
      return "some pages are in a spill file; the CPU stages the chosen ones";
    case Fallback::no_memory_to_pin:
      return "no memory was left to pin pages in; the CPU stages the chosen ones";
    case Fallback::unknown_rate:
      return "the rates of the CPU and the GPU are not measured yet";
    case Fallback::cpu_is_faster:
      return "the CPU attends pages much faster than the GPU reads them; the CPU attends all";
    case Fallback::several_tokens:
      return "the CPU attends what each token of a question chose";
    case Fallback::no_room_for_group:
      return "the GPU has no room for what the filter layers choose";
    case Fallback::no_layers_in_group:
      return "no filter layer has layers of the GPU to choose for";
    case Fallback::no_room_for_weights:
      return "the GPU has no room for streamed weights";
    case Fallback::more_streams:
      return "layers pass on more than a residual stream";
  }
  return "";
}

}  // namespace kvasir
