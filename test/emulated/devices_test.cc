// Faults of GPUs that no real machine makes on demand: calls that fail, full memory, old devices,
// no devices. The emulated GPUs of emulated.h make them.
#include <thread>

#include "../session/device_helpers.h"
#include "../session/wide_model.h"
#include "emulated.h"
#include "model/device_sizes.h"
#include "model/gpu_expert_workspace.h"
#include "offload/kv_mirror.h"

using namespace kvasir;
using namespace kvasir::test;
using emulated::Changed;

TEST_CASE(
    "three devices have layers in proportion to their memory, and answer as one device does") {
  emulated::Changed more(emulated::machine().free_bytes[1], uint64_t{2} << 30);
  std::shared_ptr<const Model> model;
  const Status s = open_on("cuda:all", 0, &model);
  REQUIRE_MESSAGE(s.ok(), s.message());
  const auto& devices = model->device_weights();
  REQUIRE(devices.size() == 3);
  CHECK(model->device_names() == "cuda:0,cuda:1,cuda:2");
  CHECK(devices[1].layers().size() >= 2 * devices[0].layers().size());
  CHECK(devices[2].has_output());
  auto one = load(device_model(), read_file(), bounded_options(200)),
       all = load(model, read_file(), bounded_options(200));
  CHECK(continue_with(all.get(), 12) == continue_with(one.get(), 12));
  CHECK(attends(*all));
  const auto tokens = book_tokens(200);
  read(all.get(), tokens);
  read(one.get(), tokens);
  CHECK(attends(*all));
  CHECK(continue_with(all.get(), 4) == continue_with(one.get(), 4));
  // In another order too.
  REQUIRE(open_on("cuda:2,cuda:0", 0, &model).ok());
  CHECK(model->device_names() == "cuda:2,cuda:0");
}

TEST_CASE(
    "old or missing devices: an error if named, left out of `all`, never chosen automatically") {
  std::shared_ptr<const Model> model;
  {
    emulated::Changed old(emulated::machine().capability[0], 7);
    CHECK(open_on("cuda", 0, &model).code() == Code::not_found);
    CHECK(open_on("cuda:1,cuda:0", 0, &model).code() == Code::not_found);
    REQUIRE(open_on("cuda:all", 0, &model).ok());
    CHECK(model->device_names() == "cuda:1,cuda:2");
    emulated::Changed more(emulated::machine().free_bytes[1], uint64_t{2} << 30);
    REQUIRE(open_on("auto", 0, &model).ok());
    CHECK(model->device_names() == "cuda:1");
    emulated::Changed second(emulated::machine().capability[1], 7),
        third(emulated::machine().capability[2], 7);
    CHECK(open_on("cuda:all", 0, &model).code() == Code::not_found);
    REQUIRE(open_on("auto", 0, &model).ok());
    CHECK(says(*open_session(model), "compute capability 7.0"));
  }
  emulated::Changed none(emulated::machine().count, 0);
  for (const char* name : {"cuda", "cuda:all", "cuda:0,cuda:1"})
    CHECK(open_on(name, 0, &model).code() == Code::not_found);
  REQUIRE(open_on("auto", 0, &model).ok());
  CHECK(model->device_names() == "cpu");
  CHECK(model->why_no_device() == "device 'auto': no driver");
}

TEST_CASE("heads of more than 256 dimensions are attended by the CPU, and the plan says so") {
  const TempFolder folder;
  std::shared_ptr<const Model> model;
  REQUIRE(Model::open(save_wide_model(folder), "", &model, {.name = "cuda"}).ok());
  const auto session = open_session(model, bounded_options(128));
  read(session.get(), std::vector<Token>(100, 1));
  CHECK(says(*session, "the GPU has no kernels for this head size"));
}

TEST_CASE("a device with room for the whole model is chosen, and without one all devices") {
  std::shared_ptr<const Model> model;
  REQUIRE(device_model());
  uint64_t opened[emulated::Machine::most];
  for (int i = 0; i < emulated::Machine::most; ++i) opened[i] = emulated::machine().opened[i];
  emulated::Changed full(emulated::machine().free_bytes[0], uint64_t{8} << 20),
      more(emulated::machine().free_bytes[1], uint64_t{2} << 30);
  REQUIRE(open_on("auto", 0, &model).ok());
  CHECK(model->device_names() == "cuda:1");
  model.reset();
  for (int i = 0; i < emulated::Machine::most; ++i)
    CHECK(emulated::machine().opened[i] == opened[i]);
  uint64_t budget = uint64_t{1} << 20;
  while (!open_on("cuda:1", budget, &model).ok() || !model->device_weights().back().has_output())
    budget += uint64_t{1} << 20;
  REQUIRE(open_on("auto", budget, &model).ok());
  CHECK(model->device_names() == "cuda:0");
  REQUIRE(open_on("auto", budget - (uint64_t{1} << 20), &model).ok());
  CHECK(model->device_names() == "cuda:0,cuda:1,cuda:2");
  REQUIRE(!model->device_weights().empty());
  CHECK(model->device_weights().back().has_output());
}

TEST_CASE("a lost device, any of several, is an error of the step, and the sequence is as before") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());
  const auto tokens = book_tokens(300);
  TempFolder folder;
  for (const int lost : {0, 1}) {
    auto session = load(model, read_file(), bounded_options(200));
    const Token first = continue_with(session.get(), 1)[0];
    {
      emulated::Changed now(emulated::machine().lost, lost);
      Token token = -1;
      bool end = false;
      uint64_t done = 0;
      const Status s = session->next({}, nullptr, &token, &end);
      CHECK_MESSAGE(s.code() == Code::device, s.message());
      CHECK(std::string(s.message()).find("cuda:" + std::to_string(lost)) != std::string::npos);
      CHECK(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done).code() == Code::device);
      CHECK(session->tokens().size() == 3001);
      REQUIRE(session->save(folder.file("kept.kv"), nullptr, {}).ok());
    }
    auto kept = load(mini_model(), folder.file("kept.kv"), bounded_options(200));
    CHECK(kept->tokens().size() == 3001);
    CHECK(kept->tokens().back() == first);
    REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());  // a lost one stays lost
  }
}

TEST_CASE(
    "a device that has no room for attention leaves its layers to the CPU, and the session says "
    "which one") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());
  const auto tokens = book_tokens(40);
  auto first = load(model, read_file(), bounded_options(200));
  const std::vector<float> expected = score(first.get(), tokens);
  CHECK(attends(*first));
  const uint64_t workspace = device_workspace_bytes(
      workspace_widths_of(model->config(), model->weights()), {}, KvMirror::max_tokens);
  // a step's arrays fit, attention's do not
  emulated::Changed full(emulated::machine().max_bytes[1],
                         emulated::machine().bytes[1] + workspace + (1 << 16));
  auto second = load(model, read_file(), bounded_options(200));
  CHECK(mean_difference(score(second.get(), tokens), expected) < 0.2);
  CHECK_FALSE(attends(*second));
  CHECK(
      says(*second,
           "\"gpu_attends_because\":\"cuda:1: the GPU has no room for what its attention needs\""));
  CHECK(says(*second, "\"attends\":true"));
  CHECK(says(*second, "\"attends\":false"));
  CHECK(score(first.get(), tokens) == expected);
  CHECK(attends(*first));
}

TEST_CASE(
    "memory that other programs take during the transfer of weights moves layers to the next "
    "device") {
  std::shared_ptr<const Model> model, alone;
  {
    emulated::Changed full(emulated::machine().max_bytes[0],
                           emulated::machine().bytes[0] + (uint64_t{32 + 6} << 20));
    const Status s = open_on("cuda:0,cuda:1", 0, &model);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    emulated::Changed none(emulated::machine().max_bytes[0],
                           emulated::machine().bytes[0] + (uint64_t{32} << 20));
    REQUIRE(open_on("cuda:0,cuda:1", 0, &alone).ok());
    CHECK(alone->device_names() == "cuda:1");
    CHECK(alone->device_weights().front().has_output());
    CHECK(open_on("cuda:0", 0, &alone).code() == Code::no_memory);
  }
  const auto& devices = model->device_weights();
  REQUIRE(devices.size() == 2);
  CHECK(devices[0].layers().size() < 4);
  CHECK(devices[1].first_layer() == devices[0].end_layer());
  CHECK(devices[1].end_layer() == model->config().layers);
  CHECK(devices[1].has_output());
  auto one = load(device_model(), read_file(), bounded_options(200)),
       two = load(model, read_file(), bounded_options(200));
  CHECK(continue_with(two.get(), 6) == continue_with(one.get(), 6));
}

TEST_CASE(
    "forks of a document answer on two devices at once, from threads of their own, as one after "
    "the other") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());
  auto first = load(model, read_file(), bounded_options(100));
  std::unique_ptr<Session> forks[3];
  std::vector<Token> answers[3];
  for (auto& fork : forks) REQUIRE(first->fork(&fork).ok());
  const std::vector<Token> expected = continue_with(first.get(), 5);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      answers[i] = continue_with(forks[i].get(), 5);
      forks[i].reset();
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<Token>& answer : answers) CHECK(answer == expected);
}

TEST_CASE("host memory is registered once for all devices, and released with the sequence") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1,cuda:2", 0, &model).ok());
  const int before = emulated::machine().shared;
  {
    auto session = open_session(model, bounded_options(200));
    const auto tokens = book_tokens(1100);
    read(session.get(), tokens);
    CHECK(emulated::machine().shared == before);  // prefill copies
    continue_with(session.get(), 2);
    CHECK(attends(*session));
    const int shared = emulated::machine().shared - before;
    // the full extents, each once
    CHECK(shared == static_cast<int>(1100 / PageShape::of(64).extent_tokens()));
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    continue_with(fork.get(), 2);
    CHECK(emulated::machine().shared == before + shared);
    REQUIRE(session->rewind(0).ok());
    read(session.get(), {tokens.data(), 100});
    continue_with(fork.get(), 1);
    CHECK(emulated::machine().shared == before + shared);  // the fork has them
    REQUIRE(fork->rewind(0).ok());
    read(fork.get(), {tokens.data(), 100});
    read(session.get(), {tokens.data(), 100});
    CHECK(emulated::machine().shared == before);
    auto mapped = load(model, read_file(), bounded_options(200));
    continue_with(mapped.get(), 2);
    CHECK(attends(*mapped));
    CHECK(emulated::machine().shared == before + 2);  // a file's pages and its scales
  }
  CHECK(emulated::machine().shared == before);
}

TEST_CASE(
    "a misaligned array is an error that names it, and arrays without vector loads need no "
    "alignment") {
  const DeviceKernels& k = *cuda_kernels();
  DeviceContext* context = nullptr;
  DeviceStream* stream = nullptr;
  void* memory = nullptr;
  REQUIRE(k.open(0, &context) == 0);
  REQUIRE(k.open_stream(context, &stream) == 0);
  REQUIRE(k.allocate(context, 4096, &memory) == 0);
  auto* floats = static_cast<float*>(memory);
  const auto multiply = [&](TensorType type, uint32_t cols, uint32_t n, std::size_t weights_at,
                            std::size_t inputs_at) {
    const DeviceProduct product{
        {type, 2, cols, static_cast<const std::byte*>(memory) + weights_at}, nullptr, floats + 501};
    DeviceActivations x{n, cols, floats + 256 + inputs_at};
    if (type == TensorType::q8_0)
      x = {n,      cols, nullptr, reinterpret_cast<int8_t*>(floats + 256) + inputs_at, floats + 400,
           nullptr};
    return k.matmul(stream, {&product, 1}, x, false);
  };
  CHECK(multiply(TensorType::f16, 16, 1, 0, 0) == 0);
  CHECK(multiply(TensorType::f16, 16, 1, 0, 2) == emulated::misaligned);
  CHECK(std::string(k.error_text(emulated::misaligned)) == "matmul: one input, of floats");
  CHECK(multiply(TensorType::f16, 16, 1, 8, 0) == emulated::misaligned);
  CHECK(std::string(k.error_text(emulated::misaligned)) ==
        "matmul: weights of floats, of one input");
  CHECK(multiply(TensorType::f16, 12, 1, 8, 1) == 0);
  CHECK(multiply(TensorType::f32, 12, 1, 16, 1) == emulated::misaligned);
  CHECK(multiply(TensorType::f16, 16, 3, 2, 1) == 0);
  CHECK(multiply(TensorType::q8_0, 32, 3, 0, 4) == emulated::misaligned);
  CHECK(std::string(k.error_text(emulated::misaligned)) == "matmul: quants of inputs");
  CHECK(k.close_stream(stream) == 0);
  CHECK(k.release(context, memory) == 0);
  CHECK(k.close(context) == 0);
}

TEST_CASE("a device of much memory has larger steps, for which it keeps room") {
  const auto opened = [] {
    std::shared_ptr<const Model> model;
    REQUIRE(open_on("cuda:0", 0, &model).ok());
    return model;
  };
  const auto sizes_of = [](const Model& model) {
    return DeviceSizes(model.weights(), model.config(),
                       model.device_weights()[0].device()->kernels());
  };
  const auto small = opened();
  const Device& device = *small->device_weights()[0].device();
  CHECK(open_session(small)->stats().prefill_chunk == 1024);
  CHECK(sizes_of(*small).room(device) + sizes_of(*small).margin == device.left());
  Changed more(emulated::machine().free_bytes[0], uint64_t{64} << 30);
  const auto large = opened();
  const Device& larger = *large->device_weights()[0].device();
  CHECK(open_session(large)->stats().prefill_chunk == 2048);
  const DeviceSizes sizes = sizes_of(*large);
  CHECK(sizes.large_margin > 0);
  CHECK(sizes.room(larger) + sizes.margin + sizes.large_margin == larger.left());
}

TEST_CASE("weights that come in prefill have larger steps on a large device, and room for them") {
  for (const bool large : {false, true}) {
    const Changed more(emulated::machine().multiprocessors, large ? 132u : 2u);
    const auto whole = model_on("cuda:0");
    const DeviceWeights& all = whole->device_weights()[0];
    CHECK(open_session(whole)->stats().prefill_chunk == 1024);
    DeviceSizes sizes(whole->weights(), whole->config(), all.device()->kernels());
    const uint64_t before = sizes.stream_margin;
    sizes.add_stream_steps({&all.device(), 1});
    CHECK(sizes.large_margin > 0);
    CHECK(sizes.stream_margin == before + (large ? sizes.large_margin : 0));
    // layers as large as those of other models
    for (LayerSizes& layer : sizes.layers) layer.base = sizes.stream_margin;
    const uint64_t few[] = {2 * sizes.stream_margin - 1}, some[] = {4 * sizes.stream_margin};
    CHECK(!sizes.plan(0, few).streams);
    CHECK(sizes.plan(0, some).streams);
    CHECK(sizes.plan(0, some).parts[0].layers == 3);
    // No weights come to a device without that room, and steps stay small.
    std::shared_ptr<const Model> model;
    for (uint64_t budget = all.bytes() / 4; !model; budget += all.bytes() / 32)
      (void)open_on("cuda:0", budget, &model);
    REQUIRE(model->device_weights()[0].end_layer() < model->config().depth());
    CHECK(open_session(model)->stats().prefill_chunk == 1024);
  }
}

TEST_CASE("devices that multiply in half precision keep room for it besides streamed weights") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0,cuda:1", 0, &model).ok());
  std::vector<std::shared_ptr<Device>> devices;
  for (const DeviceWeights& d : model->device_weights()) devices.push_back(d.device());
  REQUIRE(devices.size() == 2);
  DeviceKernels kernels = devices[0]->kernels();
  static const DeviceContext* wide;  // of the device that has such products
  wide = devices[1]->context();
  kernels.halves_bytes = [](DeviceContext* c, uint32_t n, uint32_t cols) {
    return c == wide ? std::size_t{n} * cols : 0;
  };
  DeviceSizes sizes(model->weights(), model->config(), kernels);
  const uint64_t before = sizes.stream_margin;
  sizes.add_stream_steps({devices.data(), 1});
  CHECK(sizes.stream_margin == before);
  sizes.add_stream_steps(devices);
  CHECK(sizes.stream_margin >= before + uint64_t{1024} * model->config().width);
}

TEST_CASE("much pinned memory is cleared memory that is registered, where a device takes that") {
  const auto model = model_on("cuda:0");
  const std::shared_ptr<Device>& device = model->device_weights()[0].device();
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  constexpr std::size_t many = (std::size_t{5} << 20) + 3;
  const uint64_t held = emulated::machine().held;
  for (const bool refuses : {false, true}) {
    CAPTURE(refuses);
    const emulated::Changed sharing(emulated::machine().refuses_sharing, int{refuses});
    const uint64_t allocations = emulated::machine().allocations;
    PinnedBuffer<std::byte> buffer;
    REQUIRE(buffer.allocate(device, many, pool.get()).ok());
    CHECK(emulated::machine().allocations - allocations == refuses);
    CHECK(emulated::machine().held == held + 1);
    if (!refuses)
      CHECK(std::count(buffer.get(), buffer.get() + many, std::byte()) == std::ptrdiff_t{many});
    // a device writes it: other memory would be an error
    DeviceBuffer<std::byte> from;
    REQUIRE(from.allocate(device, many, "a test").ok());
    DeviceStream* stream = nullptr;
    const DeviceKernels& k = device->kernels();
    REQUIRE(k.open_stream(device->context(), &stream) == 0);
    CHECK(k.upload(stream, from.get(), buffer.get(), many) == 0);
    CHECK(k.download(stream, buffer.get(), from.get(), many) == 0);
    CHECK(k.wait(stream) == 0);
    CHECK(k.close_stream(stream) == 0);
    CHECK(emulated::machine().shared == 0);
  }
  CHECK(emulated::machine().held == held);
}
