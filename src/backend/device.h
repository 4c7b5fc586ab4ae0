// The contract of a GPU: its memory, its streams of work and the dense operations of the forward
// pass, as a table of plain functions that kernels/cuda fills; and what owns the memory. The table
// of the CPU is backend/kernels.h: operations of one name do the same.
//
// Pointers called device are addresses that only the device follows. Work that is given to a stream
// is done in order, later: a function returns when it is under way, unless it says otherwise. All
// return 0 or an error, which may be that of work given before; a device that has failed fails from
// then on. Streams are used by one thread at a time.
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

#include "backend/device_attention.h"
#include "backend/device_inputs.h"
#include "backend/device_nearest.h"
#include "backend/free_space.h"
#include "backend/page_rates.h"
#include "base/cancel.h"
#include "base/status.h"
#include "gguf/tensor_type.h"

namespace kvasir {

struct DeviceContext;  // the device's own
struct DeviceStream;
struct DeviceGraph;

struct DeviceInfo {
  char name[64];
  uint64_t bytes, free_bytes;  // of memory, and what nobody had taken when it was asked
  uint32_t multiprocessors;
  // bytes of host memory that register_host() takes a hundredth of a second for, or little more
  uint64_t shared_at_once;
  // of an array that grows by blocks, at most: large ones are few, small ones are had for nothing
  uint64_t block_bytes;
};

// Weights in the device's memory, as kernels/cuda/layout.h has them; rows and cols as WeightView
// has them.
struct DeviceMatrix {
  TensorType type = TensorType::f32;
  uint32_t rows = 0, cols = 0;
  const std::byte* data = nullptr;  // device; matrix_bytes()
};

// y[i * w.rows + r] = sum_c w[r][c] * x[i][c] + bias[r]; bias null: none.
struct DeviceProduct {
  DeviceMatrix w;
  const float* bias;  // device, as y
  float* y;
};

struct DeviceKernels {
  // ---- devices and memory
  // -----------------------------------------------------------------------------------------------
  int (*count)(int* devices);  // comes first; an error where there is no driver
  const char* (*error_text)(int error);
  bool (*is_out_of_memory)(int error);
  int (*capability)(int index, int* major, int* minor);
  int (*open)(int index, DeviceContext** out);  // loads the kernels
  int (*close)(DeviceContext* device);          // after all that was taken of it
  int (*describe)(DeviceContext* device, DeviceInfo* out);
  int (*allocate)(DeviceContext* device, std::size_t size, void** out);
  // work that was given before may still use it
  int (*release)(DeviceContext* device, void* memory);
  // of the CPU's, which the device reads and writes at its full rate
  int (*allocate_host)(DeviceContext* device, std::size_t size, void** out);
  int (*release_host)(DeviceContext* device, void* memory);
  // Lets the device read memory that the CPU has, from whole pages of it, at *out. It must stay
  // until unshare_host().
  int (*register_host)(DeviceContext* device, const void* memory, std::size_t size, uint64_t* out);
  int (*unshare_host)(DeviceContext* device, const void* memory);
  // where this device reads what register_host() was called for by another one
  int (*map_host)(DeviceContext* device, const void* memory, uint64_t* out);
  int (*open_stream)(DeviceContext* device, DeviceStream** out);
  int (*close_stream)(DeviceStream* stream);  // waits for its work
  int (*wait)(DeviceStream* stream);          // until all of it is done
  // what is given to the stream from now on comes after what has been given to the other
  int (*after)(DeviceStream* stream, DeviceStream* other);
  // Memory from allocate_host() must stay as it is until wait(); of other memory what is uploaded
  // has been read when this returns.
  int (*upload)(DeviceStream* stream, void* to, const void* from, std::size_t size);
  int (*download)(DeviceStream* stream, void* to, const void* from, std::size_t size);

  // Work that is given to a stream between the first two is not done but kept, to be done by one
  // call as often as is wanted: with the same memory, also the CPU's. Where there is no memory to
  // keep it, *out is null.
  int (*begin_graph)(DeviceStream* stream);
  int (*end_graph)(DeviceStream* stream, DeviceGraph** out);
  int (*run_graph)(DeviceStream* stream, const DeviceGraph* graph);
  int (*release_graph)(DeviceStream* stream, DeviceGraph* graph);

  // ---- weights
  // -----------------------------------------------------------------------------------------------
  std::size_t (*matrix_bytes)(TensorType type, uint32_t rows, uint32_t cols);
  // Lays out rows [row, row + n) of a matrix, whose data is at `to`, from blocks as they are in the
  // file; `from` is device too.
  int (*lay_out)(DeviceStream* stream, const DeviceMatrix& to, const std::byte* from, uint32_t row,
                 uint32_t n);

  // ---- what is between two attentions: products, and what makes inputs of them; all pointers
  // device -------------------------------- Products as Kernels::matmul has them, of matrices that
  // have one input; add: they are added to what y has.
  int (*matmul)(DeviceStream* stream, std::span<const DeviceProduct> products,
                const DeviceActivations& x, bool add);
  // from f32, which is checked; without q that is all
  int (*quantize)(DeviceStream* stream, const DeviceActivations& x, const DeviceCheck& check);
  // x is checked; out.f32 may be x.
  int (*rms_norm)(DeviceStream* stream, const float* x, const float* weight, float epsilon,
                  const DeviceCheck& check, const DeviceActivations& out);
  // out.f32 += rms_norm(x). x is checked; out has f32 alone.
  int (*add_rms_norm)(DeviceStream* stream, const float* x, const float* weight, float epsilon,
                      const DeviceCheck& check, const DeviceActivations& out);
  // What it makes is checked; out.f32 may be gate.
  int (*swiglu)(DeviceStream* stream, const float* gate, const float* up, const DeviceCheck& check,
                const DeviceActivations& out);
  // q, k and v are checked afterwards
  int (*rotate)(DeviceStream* stream, const DeviceHeads& heads, const DeviceCheck& check);

  // ---- attention of a layer's new tokens, in this order; see backend/device_attention.h; all
  // pointers device -------------------- q: [n][kv_heads * group * head_dim], k and v: [n][kv_heads
  // * head_dim], after RoPE. Keys and values go to the window.
  int (*begin_attention)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a,
                         const float* q, const float* k, const float* v);
  // where no sketch is scored
  int (*attend_sinks_and_window)(DeviceStream* stream, const DeviceKv& kv,
                                 const DeviceAttention& a);
  // as Kernels::score_sketch; and attend_sinks_and_window() beside it
  int (*score_sketch)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // as `bounded` does with shared heads; after score_sketch(), which clears
  int (*choose)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // where there is room for it: before several tokens read it
  int (*gather_chosen)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // kv: of the first layer; between any of these
  int (*gather_group)(DeviceStream* stream, const DeviceKv& kv, const DeviceGroup& g);
  int (*attend_chosen)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a);
  // out: as q, f32 in any case, and checked; totals: [n][heads] ln of the sum of e^score; mass:
  // [n][heads] the share of it that was read and stands for itself.
  int (*finish_attention)(DeviceStream* stream, const DeviceKv& kv, const DeviceAttention& a,
                          const DeviceActivations& out, const DeviceCheck& check, float* totals,
                          float* mass);

  // ---- attention of a text that is read, in this order; arguments and out as above
  // -----------------------------------------------
  int (*prepare_reading)(DeviceStream* stream, const DeviceReading& r, const float* q,
                         const float* k, const float* v);
  int (*attend_reading)(DeviceStream* stream, const DeviceReading& r, float* out, float* totals);

  // ---- making an index of keys
  // -----------------------------------------------------------------------------------------------
  // The k items with the largest scores of each query, best first, ties to the lowest item; scores
  // bit for bit as Kernels::score_tokens has them, of which none may be NaN. See
  // backend/device_nearest.h.
  int (*find_nearest)(DeviceStream* stream, const DeviceNearest& n);
};

// Null when this build has none.
const DeviceKernels* cuda_kernels();

// Waits for a stream when it ends.
struct StreamWait {
  const DeviceKernels& ops;
  DeviceStream* const stream;
  ~StreamWait() { (void)ops.wait(stream); }
};

// A device and how much of its memory may be taken. Threads: all functions may run together.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // The numbers of those that a name means: "cuda" (the first), "cuda:N", several such with commas
  // between them, "cuda:all" or "auto" (all that are new enough). Code::unsupported (this build has
  // no such backend), Code::not_found (no driver, no such device or one that is too old),
  // Code::bad_argument (the name), Code::device.
  static Status find(const std::string& name, std::vector<int>* out);
  // One of those. budget: bytes, 0: what is free, but for a reserve; of that only the part of one
  // of `users` that open the same one. Code::device, Code::no_memory.
  static Status open(int index, uint64_t budget, uint32_t users, std::shared_ptr<Device>* out);

  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }  // "cuda:0"
  const DeviceInfo& info() const { return info_; }
  const DeviceKernels& kernels() const { return kernels_; }
  DeviceContext* context() const { return context_; }
  uint64_t budget() const { return budget_; }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t left() const { return budget_ - used(); }

  // The Status of an error of the table. `what` it was for: "weights".
  Status status(int error, const char* what) const;

  // Within the budget. Code::no_memory where there is none left, or where the device has no more;
  // Code::device. `what` it is for: "weights".
  Status allocate(std::size_t size, const char* what, void** out);
  void release(void* memory, std::size_t size);

  // Memory of the CPU's, which the device reads and writes at its full rate. The system takes a
  // third of a millisecond for each MiB of it, so some is kept from keep_host() on: `staged` bytes
  // for what sessions bring to the device, one at a time, and as many as half of them for what they
  // have longer. Without it, and where that is not enough, they take what they need from the
  // system. release_host(): what allocate_host() has given, and its size.
  void keep_host(std::size_t staged);
  Status allocate_host(std::size_t size, void** out);
  void release_host(void* memory, std::size_t size);
  // The caller's alone as long as the lock is held.
  struct Staging {
    std::unique_lock<std::timed_mutex> lock;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  // At least so many bytes. Code::no_memory, Code::device, Code::cancelled.
  Status stage(std::size_t least, const CancelLatch& cancel, Staging* out);

  // Lets the device read [begin, end) of host memory, in whole pages of the system, until unshare()
  // of what *begin was made: what others, also other devices, have shared that holds all of it is
  // shared once. *begin, *end: of what is shared; *seen: where the device has it. The memory must
  // stay. *allowance: bytes that may be shared anew, less what was; at 0 only what others have
  // shared is, and of other memory *seen becomes 0. Code::unsupported.
  Status share(uint64_t* begin, uint64_t* end, uint64_t* allowance, uint64_t* seen);
  void unshare(uint64_t begin);
  // As they were measured, once for all sessions of so many threads.
  PageRates page_rates(uint32_t threads) const;
  void set_page_rates(uint32_t threads, const PageRates& rates);

  // What an allocation takes: a device hands out large ones in whole blocks.
  static uint64_t taken_by(std::size_t size) {
    constexpr uint64_t large = uint64_t{1} << 20, block = 2 * large;
    return size < large ? size : (size + block - 1) / block * block;
  }

 private:
  Device(const DeviceKernels& kernels, uint64_t budget) : kernels_(kernels), budget_(budget) {}
  const DeviceKernels& kernels_;
  DeviceContext* context_ = nullptr;
  DeviceInfo info_{};
  std::string name_;
  uint64_t budget_;
  std::atomic<uint64_t> used_{0};
  std::timed_mutex staging_mutex_;  // of the next two
  std::mutex host_mutex_;           // and of the two after them
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
  std::byte* host_ = nullptr;
  std::size_t host_bytes_ = 0;
  FreeSpace host_free_;
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
  [[gnu::noinline]] ~DeviceBuffer() {  // there are many of them together
    if (data_) device_->release(data_, bytes_);
  }
  // As Device::allocate(); it is empty where that fails.
  Status allocate(const std::shared_ptr<Device>& device, std::size_t n, const char* what) {
    *this = DeviceBuffer();
    void* memory = nullptr;
    if (Status s = device->allocate(n * sizeof(T), what, &memory); !s.ok()) return s;
    data_ = static_cast<T*>(memory);
    device_ = device;
    bytes_ = n * sizeof(T);
    return {};
  }
  T* get() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  uint64_t taken() const { return Device::taken_by(bytes_); }  // of the device's budget

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

// n elements of T in host memory, which the device reads and writes at its full rate.
template <class T>
class PinnedBuffer {
 public:
  // Code::no_memory, Code::device; it is empty then.
  Status allocate(const std::shared_ptr<Device>& device, std::size_t n) {
    data_.reset();
    void* memory = nullptr;
    if (Status s = device->allocate_host(n * sizeof(T), &memory); !s.ok()) return s;
    data_ = std::unique_ptr<T[], Release>(static_cast<T*>(memory), Release{device, n * sizeof(T)});
    return {};
  }
  T* get() const { return data_.get(); }

 private:
  struct Release {
    std::shared_ptr<Device> device;
    std::size_t bytes = 0;
    void operator()(T* p) const { device->release_host(p, bytes); }
  };
  std::unique_ptr<T[], Release> data_;
};

}  // namespace kvasir
