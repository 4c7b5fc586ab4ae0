// The contract of a GPU: its memory, its streams and the operations of the forward pass, as a table
// of plain functions that kernels/cuda fills; and the class that owns the memory. The table of the
// CPU is backend/kernels.h; operations of the same name compute the same.
//
// "Device" pointers are addresses that only the device follows. A function that takes a stream
// enqueues its work and returns; the stream does its work in order. Every function returns 0 or an
// error, possibly of work enqueued before. A device that failed keeps failing. A stream is used by
// one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/activation.h"
#include "backend/device_attention.h"
#include "backend/device_experts.h"
#include "backend/device_inputs.h"
#include "backend/device_nearest.h"
#include "backend/device_recurrent.h"
#include "backend/device_window.h"
#include "backend/free_space.h"
#include "backend/page_rates.h"
#include "base/cancel.h"
#include "base/status.h"
#include "gguf/tensor_type.h"

namespace kvasir {

class ThreadPool;

struct DeviceContext;  // of the backend
struct DeviceStream;
struct DeviceGraph;

struct DeviceInfo {
  char name[64];
  uint64_t bytes, free_bytes;  // memory, and what was free when describe() was called
  uint32_t multiprocessors;
  uint64_t registration_bytes;  // host memory that register_host() takes about 10 ms for
  // The largest block of an array that grows by blocks: few large blocks, no small ones that waste.
  uint64_t block_bytes;
};

// Weights in device memory, in the layout of kernels/cuda/layout.h; rows and cols as in WeightView.
struct DeviceMatrix {
  TensorType type = TensorType::f32;
  uint32_t rows = 0, cols = 0;
  const std::byte* data = nullptr;  // device; matrix_bytes()
  float scale = 1;
};

// A matrix in half precision, as products with many inputs read it.
struct DeviceHalves {
  std::byte* memory;  // device; DeviceKernels::kept_bytes()
  std::size_t bytes;
  bool is_made = false;   // what is enqueued writes it
  bool in_pairs = false;  // with the next matrix, as multiply_gated() reads both
};

// y[i * w.rows + r] = w.scale * sum_c w[r][c] * x[i][c] + bias[r]; bias null: none.
struct DeviceProduct {
  DeviceMatrix w;
  const float* bias;  // device
  float* y;           // device
  // Halves that stay, one behind the other for products of one type, which the first product that
  // reads them makes; null: DeviceActivations::halves has them in each product.
  DeviceHalves* halves = nullptr;
};

// The same of row i of expert e, whose matrix is rows [e * rows, (e + 1) * rows) of w:
// y[i * rows + r] = scales[e] * w.scale * sum_c w[e * rows + r][c] * x[i][c] + biases[e][r].
struct DeviceExpertProduct {
  DeviceMatrix w;
  const float *biases, *scales;  // [experts][rows], [experts]; device; null: none
  float* y;                      // [n * used][rows]; device
  // Of choices in order: an expert that every token has besides, of the type and shape of one, or
  // no data. Its rows follow: y [n * used + n][rows].
  DeviceMatrix shared{};
};

struct DeviceKernels {
  // ---- devices and memory
  int (*count)(int* devices);  // called first; an error without a driver
  const char* (*error_text)(int error);
  bool (*is_out_of_memory)(int error);
  int (*capability)(int index, int* major, int* minor);
  int (*open)(int index, DeviceContext** out);  // loads the kernels
  int (*close)(DeviceContext* device);          // after everything allocated from it is released
  int (*describe)(DeviceContext* device, DeviceInfo* out);
  int (*allocate)(DeviceContext* device, std::size_t size, void** out);
  // Enqueued work may still use the memory.
  int (*release)(DeviceContext* device, void* memory);
  // Pinned host memory, which the device reads and writes at its full rate.
  int (*allocate_host)(DeviceContext* device, std::size_t size, void** out);
  int (*release_host)(DeviceContext* device, void* memory);
  // Pins host memory, whole system pages, so that the device reads it at *out. The memory must stay
  // until unregister_host(). written: the device writes it too.
  int (*register_host)(DeviceContext* device, const void* memory, std::size_t size, bool written,
                       uint64_t* out);
  int (*unregister_host)(DeviceContext* device, const void* memory);
  // The address at which this device reads memory that another one registered.
  int (*map_host)(DeviceContext* device, const void* memory, uint64_t* out);
  int (*open_stream)(DeviceContext* device, DeviceStream** out);
  int (*close_stream)(DeviceStream* stream);  // waits for its work
  int (*wait)(DeviceStream* stream);          // until all its work is done
  // Orders later work of `stream` after the work that `other` has now.
  int (*after)(DeviceStream* stream, DeviceStream* other);
  // Memory of allocate_host() must not change until wait(); other memory may change when upload()
  // returns.
  int (*upload)(DeviceStream* stream, void* to, const void* from, std::size_t size);
  int (*download)(DeviceStream* stream, void* to, const void* from, std::size_t size);

  // Work enqueued between begin_graph() and end_graph() is recorded and not done. run_graph() does
  // it, any number of times, with the same memory, host memory included. *out is null where memory
  // for the graph is missing.
  int (*begin_graph)(DeviceStream* stream);
  int (*end_graph)(DeviceStream* stream, DeviceGraph** out);
  int (*run_graph)(DeviceStream* stream, const DeviceGraph* graph);
  int (*release_graph)(DeviceStream* stream, DeviceGraph* graph);

  // ---- weights
  std::size_t (*matrix_bytes)(TensorType type, uint32_t rows, uint32_t cols);
  // Lays out rows [row, row + n) of a matrix, whose data is at `to`, from the blocks of the file;
  // `from` is device too.
  int (*lay_out)(DeviceStream* stream, const DeviceMatrix& to, const std::byte* from, uint32_t row,
                 uint32_t n);

  // ---- products and their inputs; all pointers device
  // Kernels::matmul for matrices with one input. add: adds to y. With x.halves, weights and inputs
  // may be rounded to half precision.
  int (*matmul)(DeviceStream* stream, std::span<const DeviceProduct> products,
                const DeviceActivations& x, bool add);
  // Bytes of DeviceActivations::halves for n inputs of at most `cols` columns; 0: the device's
  // products have no use for it.
  std::size_t (*halves_bytes)(DeviceContext* context, uint32_t n, uint32_t cols);
  // Bytes of DeviceHalves of a matrix; 0: products do not read them.
  std::size_t (*kept_bytes)(DeviceContext* context, const DeviceMatrix& w);
  // From f32, which it checks; without q it only checks.
  int (*quantize)(DeviceStream* stream, const DeviceActivations& x, const DeviceCheck& check);
  // Checks x; out.f32 may be x.
  int (*rms_norm)(DeviceStream* stream, const float* x, const float* weight, float epsilon,
                  const DeviceCheck& check, const DeviceActivations& out);
  // out.f32 += rms_norm(x). Checks x; out has f32 alone.
  int (*add_rms_norm)(DeviceStream* stream, const float* x, const float* weight, float epsilon,
                      const DeviceCheck& check, const DeviceActivations& out);
  // Kernels::layer_norm; bias null: zeros. Checks x; out.f32 may be x.
  int (*layer_norm)(DeviceStream* stream, const float* x, const float* weight, const float* bias,
                    float epsilon, const DeviceCheck& check, const DeviceActivations& out);
  // Kernels::activate; up null: f(gate). Checks its output; out.f32 may be gate.
  int (*activate)(DeviceStream* stream, Activation f, const float* gate, const float* up,
                  const DeviceCheck& check, const DeviceActivations& out);
  // f(products[0]) * products[1], or f(products[0]) alone, as matmul() and activate() compute it.
  // Checks its output; out.q may be x.q. y of a product has room for `room` inputs: where it is
  // used, no more are multiplied at a time. Or it is out.f32, with room for all.
  int (*multiply_gated)(DeviceStream* stream, std::span<const DeviceProduct> products,
                        uint32_t room, const DeviceActivations& x, Activation f,
                        const DeviceCheck& check, const DeviceActivations& out);
  // x[i] *= factor
  int (*scale)(DeviceStream* stream, float* x, std::size_t n, float factor);
  // Of each row of x: [rows][n]; n < 2^31. out: [rows][largest_parts]; a part without numbers has
  // -infinity.
  int (*find_largest)(DeviceStream* stream, const float* x, uint32_t rows, std::size_t n,
                      DeviceLargest* out);
  // Checks q, k and v afterwards.
  int (*rotate)(DeviceStream* stream, const DeviceHeads& heads, const DeviceCheck& check);

  // Kernels::sigmoid_gate: out = x / (1 + e^-gate). Checks its output; out.f32 may be x.
  int (*sigmoid_gate)(DeviceStream* stream, const float* x, const float* gate,
                      const DeviceCheck& check, const DeviceActivations& out);

  // ---- recurrent layers, called in this order; backend/device_recurrent.h
  // Kernels::convolve, with its factors; writes the next state's inputs.
  int (*convolve)(DeviceStream* stream, const DeviceConvolution& c);
  // Fills decay and rate and, of the delta rule, normalises q and k in x.
  int (*prepare_heads)(DeviceStream* stream, const DeviceHeadStates& h);
  // Kernels::advance_state of all heads. Steps of n and m tokens give the bits of one of n + m.
  int (*advance_heads)(DeviceStream* stream, const DeviceHeadStates& h);
  int (*gate_heads)(DeviceStream* stream, const DeviceGatedNorm& g, const DeviceCheck& check);

  // ---- experts, called in this order; backend/device_experts.h; all pointers device
  // logits: [n][experts], which it checks. Writes rows.chosen as choose_experts() does. The choices
  // of a token are different experts, whatever the logits are.
  int (*route)(DeviceStream* stream, const DeviceRouting& routing, const float* logits,
               const DeviceCheck& check, const DeviceExpertRows& rows);
  // Fills the other arrays of rows.
  int (*group_choices)(DeviceStream* stream, const DeviceExpertRows& rows);
  // Copies the inputs of the choices to their rows; weighs: multiplied by the weights.
  int (*gather_inputs)(DeviceStream* stream, const DeviceExpertRows& rows,
                       const DeviceActivations& x, bool weighs, const DeviceActivations& out);
  // Products of one type and shape, at most three. x.n: the rows; or of rows in order the tokens,
  // where a token's choices have the same input, its shared expert too. With several tokens a row's
  // result depends on nothing but its input.
  int (*multiply_experts)(DeviceStream* stream, std::span<const DeviceExpertProduct> products,
                          const DeviceExpertRows& rows, const DeviceActivations& x);
  // out has f32 alone.
  int (*sum_experts)(DeviceStream* stream, const DeviceExpertRows& rows, const DeviceExpertSum& sum,
                     const DeviceActivations& out);

  // ---- attention of a layer's new tokens, called in this order; backend/device_attention.h; all
  // pointers device
  // q: [n][kv_heads * group * head_dim], k and v: [n][kv_heads * head_dim], after RoPE. Writes keys
  // and values to the window.
  int (*begin_attention)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a,
                         const float* q, const float* k, const float* v);
  // For steps without score_sketch().
  int (*attend_sinks_and_window)(DeviceStream* stream, const DeviceKv& kv,
                                 const DeviceAttention& a);
  // Kernels::score_sketch; includes attend_sinks_and_window().
  int (*score_sketch)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // Selects as `bounded` does with shared heads; after score_sketch(), which clears the counts.
  int (*choose)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // Where `gathered` is not null: copies the quads before several tokens read them.
  int (*gather_chosen)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // kv: of the first layer; allowed between any of these.
  int (*gather_group)(DeviceStream* stream, const DeviceKv& kv, const DeviceGroup& g);
  int (*attend_chosen)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // In place of the calls after begin_attention(), for one token: attends every quad. Quad i has
  // place i of `hot`; quads behind its room are read where their pages are. Includes
  // attend_sinks_and_window().
  int (*attend_all)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // Writes out (like q; always f32), which it checks; lse: [n][heads] ln of the sum of e^score;
  // mass: [n][heads] the part of that sum that was attended and stands for itself.
  int (*finish_attention)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a,
                          const DeviceActivations& out, const DeviceCheck& check, float* lse,
                          float* mass);

  // ---- attention of prefill, called in this order; arguments and out as above
  int (*prepare_prefill)(DeviceStream* stream, const DevicePrefill& r, const float* q,
                         const float* k, const float* v);
  // Only where r.tiles.room > 0: chooses the tiles.
  int (*choose_prefill)(DeviceStream* stream, const DevicePrefill& r);
  int (*attend_prefill)(DeviceStream* stream, const DevicePrefill& r, float* out, float* lse);

  // ---- attention of a layer whose queries see a window; all pointers device, arguments as above
  // Reads tokens before the step from the ring. out: like q; not checked.
  int (*attend_window)(DeviceStream* stream, const DeviceWindow& w, const float* q, const float* k,
                       const float* v, float* out);
  // After attend_window(): writes the step's newest keys and values to the ring.
  int (*keep_window)(DeviceStream* stream, const DeviceWindow& w, const float* k, const float* v);

  // ---- building an index of keys; backend/device_nearest.h
  // The k items with the largest scores of each query, best first, ties to the lowest item. Scores
  // equal those of Kernels::score_tokens bit for bit; none may be NaN.
  int (*find_nearest)(DeviceStream* stream, const DeviceNearest& n);
};

// Null when this build has no GPU backend.
const DeviceKernels* cuda_kernels();

// Waits for a stream when it ends.
struct StreamWait {
  const DeviceKernels& ops;
  DeviceStream* const stream;
  ~StreamWait() { (void)ops.wait(stream); }
};

// A device and its memory budget. Threads: all functions may be called at once.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Numbers of the devices that a name selects: "cuda" (the first), "cuda:N", several of these
  // separated by commas, "cuda:all" or "auto" (all that are new enough). Code::unsupported (this
  // build has no such backend), Code::not_found (no driver, no such device, or one that is too
  // old), Code::bad_argument (the name), Code::device.
  static Status find(const std::string& name, std::vector<int>* out);
  // Opens one of those. budget: bytes; 0: the free memory less a reserve, divided by the `users`
  // that open the same device. Code::device, Code::no_memory.
  static Status open(int index, uint64_t budget, uint32_t users, std::shared_ptr<Device>* out);

  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }  // "cuda:0"
  const DeviceInfo& info() const { return info_; }
  const DeviceKernels& kernels() const { return kernels_; }
  DeviceContext* context() const { return context_; }
  uint64_t budget() const { return budget_; }  // bytes
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t left() const { return budget_ - used(); }

  // Converts an error of the table. subject: a noun for the message, "weights".
  Status status(int error, const char* subject) const;

  // Allocates within the budget. Code::no_memory where the budget or the device is exhausted;
  // Code::device. subject: a noun for the message, "weights".
  Status allocate(std::size_t size, const char* subject, void** out);
  void release(void* memory, std::size_t size);

  // Pinned host memory. The driver pins a MiB in half a millisecond, so reserve_host() pins some in
  // advance: `staging_bytes` for uploads of one session at a time, and `bytes` for longer uses.
  // Beyond it allocate_host() takes much memory in huge pages, which the pool's threads clear
  // before they are pinned (H200, 554 MB: 31 ms in place of 310); null: the caller clears them.
  // release_host(): no work uses the memory any more.
  void reserve_host(std::size_t staging_bytes, std::size_t bytes);
  struct HostMemory {
    void* data = nullptr;
    std::size_t bytes = 0;
    bool is_registered = false;  // pages of allocate_pages(), otherwise the driver's
  };
  Status allocate_host(std::size_t size, ThreadPool* pool, HostMemory* out);
  void release_host(const HostMemory& memory);
  // Exclusive to the caller while the lock is held.
  struct Staging {
    std::unique_lock<std::timed_mutex> lock;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  // Locks the staging buffer and grows it to min_bytes. Code::no_memory, Code::device,
  // Code::cancelled.
  Status stage(std::size_t min_bytes, const CancelLatch& cancel, Staging* out);

  // Registers [begin, end) of host memory, in whole system pages, until unregister_host(*begin).
  // Memory inside a region that any device registered is reused. *begin, *end become the region's;
  // *mapped: the address at which this device reads it. The memory must stay. *allowance: bytes
  // that may still be registered, which new regions reduce; at 0 only existing regions are used,
  // and for other memory *mapped becomes 0. Code::unsupported.
  Status register_host(uint64_t* begin, uint64_t* end, uint64_t* allowance, uint64_t* mapped);
  void unregister_host(uint64_t begin);
  // Measured once for all sessions with as many threads.
  PageRates page_rates(uint32_t threads) const;
  void set_page_rates(uint32_t threads, const PageRates& rates);

  static constexpr uint64_t rounded_bytes = uint64_t{2} << 20;
  // Bytes that an allocation takes from the budget: the driver rounds large ones up to blocks.
  static uint64_t allocated_size(std::size_t size) {
    constexpr uint64_t large = rounded_bytes / 2;
    return size < large ? size : (size + rounded_bytes - 1) / rounded_bytes * rounded_bytes;
  }

 private:
  Device(const DeviceKernels& kernels, uint64_t budget) : kernels_(kernels), budget_(budget) {}
  bool allocate_huge(std::size_t size, ThreadPool* pool, HostMemory* out);
  const DeviceKernels& kernels_;
  DeviceContext* context_ = nullptr;
  DeviceInfo info_{};
  std::string name_;
  uint64_t budget_;
  std::atomic<uint64_t> used_{0};
  std::timed_mutex staging_mutex_;  // guards staging_ and staging_bytes_
  std::mutex host_mutex_;           // guards host_, host_bytes_ and host_free_
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
  std::byte* host_ = nullptr;
  std::size_t host_bytes_ = 0;
  FreeSpace host_free_;
  std::atomic<bool> registers_{true};  // false once allocate_huge() was refused
  mutable std::mutex rates_mutex_;
  std::vector<std::pair<uint32_t, PageRates>> rates_;  // by threads
};

// n elements of T in a device's memory, uninitialised.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& o) noexcept { swap(o); }
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept { return swap(o), *this; }
  [[gnu::noinline]] ~DeviceBuffer() {  // many members of one class: inlined, they are large
    if (data_) device_->release(data_, bytes_);
  }
  // Device::allocate(); on failure the buffer is empty.
  Status allocate(const std::shared_ptr<Device>& device, std::size_t n, const char* subject) {
    *this = DeviceBuffer();
    void* memory = nullptr;
    RETURN_IF_ERROR(device->allocate(n * sizeof(T), subject, &memory));
    data_ = static_cast<T*>(memory);
    device_ = device;
    bytes_ = n * sizeof(T);
    return {};
  }
  T* get() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  uint64_t taken() const { return Device::allocated_size(bytes_); }  // from the budget

 private:
  void swap(DeviceBuffer& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(device_, o.device_);
  }
  T* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::shared_ptr<Device> device_;
};

// n elements of T in pinned host memory.
template <class T>
class PinnedBuffer {
 public:
  // Code::no_memory, Code::device; then the buffer is empty. pool: as in Device::allocate_host().
  Status allocate(const std::shared_ptr<Device>& device, std::size_t n,
                  ThreadPool* pool = nullptr) {
    data_.reset();
    Device::HostMemory memory;
    RETURN_IF_ERROR(device->allocate_host(n * sizeof(T), pool, &memory));
    data_ = std::unique_ptr<T[], Release>(static_cast<T*>(memory.data), Release{device, memory});
    return {};
  }
  T* get() const { return data_.get(); }

 private:
  struct Release {
    std::shared_ptr<Device> device;
    Device::HostMemory memory;
    void operator()(T*) const { device->release_host(memory); }
  };
  std::unique_ptr<T[], Release> data_;
};

}  // namespace kvasir
