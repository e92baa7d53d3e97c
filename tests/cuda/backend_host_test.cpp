// SPDX-License-Identifier: Apache-2.0
// The backend over a pretended CUDA runtime: what it calls, what it never calls, and how it takes each failure.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/buffer.hpp>
#include <bifolio/cuda.hpp>
#include <bifolio/trace.hpp>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/fake_runtime.hpp"
#include "cuda/host/backend.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t heads = 2;
constexpr std::int32_t dims = 64;
constexpr std::int32_t block_size = 16;
constexpr std::int64_t num_blocks = 8;

/// A cache of two layers, rows and a step on the pretended device 0, while device 1 is current.
struct world {
  fake_runtime runtime;
  cuda::cuda_backend opened{runtime.api(), 0};
  backend& where = opened;
  kv_layout layout;
  std::vector<buffer> storage;
  std::vector<kv_cache_view> layers;
  buffer rows, out, slots;
  std::vector<std::int32_t> starts{0, 1, 3};
  std::vector<std::int32_t> lens{20, 40};
  std::vector<std::int32_t> tables{0, 1, 0, 2, 3, 4};
  buffer batch_memory;
  event mark;
  attention_plan plan;

  explicit world(layout_kind kind = layout_kind::hnd) {
    layout = make_layout(kind, dtype::bf16, heads, dims, block_size);
    for (int i = 0; i < 2; ++i) {
      storage.emplace_back(where.memory(), static_cast<std::size_t>(num_blocks * layout.block_bytes()));
      auto* const k = storage.back().as<std::byte>();
      layers.push_back({k, k + num_blocks * layout.block_bytes() / 2, num_blocks, layout});
    }
    rows = buffer(where.memory(), 3 * 4 * dims * 4);
    out = buffer(where.memory(), 3 * 4 * dims * 4);
    slots = buffer(where.memory(), 3 * sizeof(std::int64_t));
    batch_memory = buffer(where.memory(), 1024);
    mark = where.make_event();
    runtime.current_device = 1;
    runtime.forget_counts();
  }

  [[nodiscard]] host_step_view host_batch() const {
    return {
        static_cast<std::int32_t>(lens.size()), starts.back(), starts.data(), lens.data(), tables.data(), 3, nullptr};
  }
  [[nodiscard]] static attention_spec spec() {
    attention_spec s;
    s.num_q_heads = 4;
    s.num_kv_heads = heads;
    s.qk_head_dim = s.v_head_dim = dims;
    s.block_size = block_size;
    s.k_code.type = s.v_code.type = dtype::bf16;
    return s;
  }
  void make_plan() { where.plan_attention(plan, spec(), host_batch(), num_blocks); }
  [[nodiscard]] append_params append() {
    const auto view = as_const(dense_view(rows.data(), dtype::f32, 3, heads, dims));
    return {layers[0], view, view, slots.as<std::int64_t>()};
  }
  [[nodiscard]] attention_params attention() {
    attention_params p;
    p.q = as_const(dense_view(rows.data(), dtype::f32, 3, 4, dims));
    p.out = dense_view(out.data(), dtype::f32, 3, 4, dims);
    p.kv = layers[0];
    p.batch = as_device_view(host_batch());
    const auto* const on_device = batch_memory.as<std::int32_t>();
    p.batch.query_start_loc = on_device;
    p.batch.seq_lens = on_device + 8;
    p.batch.block_tables = on_device + 16;
    p.scale = 0.125f;
    return p;
  }
  [[nodiscard]] merge_params merge() {
    merge_params p;
    p.a = {as_const(dense_view(rows.data(), dtype::f32, 3, 2, dims)), out.as<float>()};
    p.b = p.a;
    p.out = dense_view(out.data(), dtype::f32, 3, 2, dims);
    return p;
  }
};

constexpr std::array<block_copy, 2> two_pairs{block_copy{block_id{0}, block_id{4}},
                                              block_copy{block_id{1}, block_id{6}}};

/// Every call that may be made once per layer or step, by name.
struct named_call {
  const char* name;
  std::function<errc(world&)> call;
};
const std::vector<named_call>& calls() {
  static const std::vector<named_call> list{
      {"append", [](world& w) { return w.where.append(w.append()); }},
      {"gather",
       [](world& w) {
         gather_params p{w.layers[0], dense_view(w.rows.data(), dtype::f32, 3, heads, dims),
                         dense_view(w.out.data(), dtype::f32, 3, heads, dims), w.slots.as<std::int64_t>()};
         return w.where.gather(p);
       }},
      {"copy_blocks", [](world& w) { return w.where.copy_blocks(w.layers, two_pairs); }},
      {"convert_blocks", [](world& w) { return w.where.convert_blocks(w.layers[0], w.layers[1], two_pairs); }},
      {"swap_blocks",
       [](world& w) {
         const std::span<const kv_cache_view> all(w.layers);
         return w.where.swap_blocks(all.first(1), all.last(1), two_pairs);
       }},
      {"attention", [](world& w) { return w.where.attention(w.plan, w.attention()); }},
      {"merge_states", [](world& w) { return w.where.merge_states(w.merge()); }},
      {"upload", [](world& w) { return w.where.upload(w.out.data(), w.rows.data(), 64, {}); }},
      {"download", [](world& w) { return w.where.download(w.out.data(), w.rows.data(), 64, {}); }},
      {"synchronize", [](world& w) { return w.where.synchronize({}); }},
      {"record", [](world& w) { return w.where.record(w.mark); }},
      {"wait", [](world& w) { return w.where.wait(w.mark); }},
      {"query",
       [](world& w) {
         bool done = false;
         return w.mark.query(done);
       }},
      {"synchronize an event", [](world& w) { return w.mark.synchronize(); }},
  };
  return list;
}

}  // namespace

TEST_CASE("CUDA errors become the documented codes") {
  CHECK(cuda::to_errc(cudaSuccess) == errc::ok);
  CHECK(cuda::to_errc(cudaErrorMemoryAllocation) == errc::out_of_memory);
  CHECK(cuda::to_errc(cudaErrorInvalidValue) == errc::invalid_argument);
  CHECK(cuda::to_errc(cudaErrorNoDevice) == errc::unsupported);
  CHECK(cuda::to_errc(cudaErrorInsufficientDriver) == errc::unsupported);
  CHECK(cuda::to_errc(cudaErrorNoKernelImageForDevice) == errc::unsupported);
  CHECK(cuda::to_errc(cudaErrorStreamCaptureUnsupported) == errc::failed_precondition);
  CHECK(cuda::to_errc(cudaErrorLaunchOutOfResources) == errc::internal);
  for (const cudaError_t sticky :
       {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorAssert, cudaErrorHardwareStackError,
        cudaErrorECCUncorrectable, cudaErrorLaunchTimeout, cudaErrorMisalignedAddress, cudaErrorIllegalInstruction}) {
    CHECK(cuda::is_sticky(sticky));
    CHECK(cuda::to_errc(sticky) == errc::device_lost);
  }
}

TEST_CASE("opening a device that is not there says so and which there are") {
  fake_runtime runtime;
  const auto problem = [&](std::int32_t index) -> std::pair<errc, std::string> {
    try {
      cuda::cuda_backend backend(runtime.api(), index);
      return {errc::ok, ""};
    } catch (const error& e) {
      return {e.code(), e.what()};
    }
  };
  CHECK(problem(1).first == errc::ok);
  for (const std::int32_t index : {2, 7, -1}) {
    const auto [code, text] = problem(index);
    CHECK(code == errc::unsupported);
    CHECK(text.find("cuda:" + std::to_string(index)) != std::string::npos);
    CHECK(text.find("2 devices") != std::string::npos);
  }
  runtime.major = 7;
  runtime.minor = 5;
  CHECK(problem(0).first == errc::unsupported);
  CHECK(problem(0).second.find("7.5") != std::string::npos);
  runtime.fail_always("get_device_count", cudaErrorInsufficientDriver);
  CHECK(problem(0).first == errc::unsupported);
  CHECK(problem(0).second.find("cudaErrorInsufficientDriver") != std::string::npos);
  CHECK(runtime.last_error == cudaSuccess);
}

TEST_CASE("every call runs on its own device and restores the caller's") {
  world w;
  w.make_plan();
  CHECK(w.runtime.current_device == 1);
  for (const named_call& one : calls()) {
    CAPTURE(std::string(one.name));
    w.runtime.forget_counts();
    CHECK(one.call(w) == errc::ok);
    CHECK(w.runtime.current_device == 1);
    CHECK(w.runtime.count("set_device") == 2);
  }
  w.runtime.current_device = 0;
  for (const named_call& one : calls()) {
    w.runtime.forget_counts();
    CHECK(one.call(w) == errc::ok);
    CHECK(w.runtime.count("set_device") == 0);
  }
}

TEST_CASE("calls of a step neither allocate nor wait") {
  world w;
  w.make_plan();
  w.make_plan();  // the second plan has its buffers
  w.runtime.forget_counts();
  for (const named_call& one : calls()) {
    if (std::string(one.name).starts_with("synchronize")) continue;
    CHECK(one.call(w) == errc::ok);
  }
  w.make_plan();
  for (const char* name : {"malloc_device", "malloc_host", "malloc_async", "free_device", "free_host", "free_async",
                           "stream_synchronize", "event_synchronize", "event_create"}) {
    CAPTURE(name);
    CHECK(w.runtime.count(name) == 0);
  }
}

TEST_CASE("an error that passes is returned by the call that met it, and the last-error slot is clean") {
  for (const named_call& one : calls()) {
    CAPTURE(std::string(one.name));
    world w;
    w.make_plan();
    for (std::int64_t nth = 1;; ++nth) {
      w.runtime.fail_at(nth, cudaErrorInvalidValue);
      const errc code = one.call(w);
      CHECK(w.runtime.last_error == cudaSuccess);
      CHECK(w.runtime.current_device == 1);
      CHECK(w.where.health() == errc::ok);
      if (code == errc::ok) {
        w.runtime.fail_at(0, cudaSuccess);
        // A swap that cannot ask where pointers point goes by the copy engine instead.
        CHECK((nth > 1 || std::string(one.name) == "swap_blocks"));
        break;
      }
      CHECK(code == errc::invalid_argument);
      REQUIRE(nth < 100);
    }
    CHECK(one.call(w) == errc::ok);
  }
}

TEST_CASE("a sticky error loses the device: every later call fails at once, with the first cause") {
  for (const named_call& one : calls()) {
    CAPTURE(std::string(one.name));
    world w;
    w.make_plan();
    w.runtime.fail_at(1, cudaErrorIllegalAddress);
    CHECK(one.call(w) == errc::device_lost);
    CHECK(w.where.health() == errc::device_lost);
    w.runtime.fail_at(1, cudaErrorLaunchFailure);
    for (const named_call& other : calls()) {
      w.runtime.forget_counts();
      CHECK(other.call(w) == errc::device_lost);
      CHECK(w.runtime.launches.empty());
      CHECK(w.runtime.count("memcpy_async") == 0);
    }
    CHECK(w.where.description().find("cudaErrorIllegalAddress") != std::string::npos);
    CHECK_THROWS_WITH_AS(w.make_plan(), doctest::Contains("cudaErrorIllegalAddress"), error);
    CHECK_THROWS_AS((void)w.where.memory().allocate(16, 16), error);
    w.runtime.fail_at(0, cudaSuccess);
  }
}

TEST_CASE("memory is aligned, counted back, and refused by code and sentence") {
  world w;
  const std::int64_t live = w.runtime.live_device_blocks;
  for (memory_resource* resource : {&w.where.memory(), &w.where.staging_memory()}) {
    CHECK(resource->allocate(0, 64) == nullptr);
    void* const pointer = resource->allocate(1000, 256);
    CHECK(reinterpret_cast<std::uintptr_t>(pointer) % 256 == 0);
    resource->deallocate(pointer, 1000, 256);
    resource->deallocate(nullptr, 0, 64);
    CHECK_THROWS_WITH_AS((void)resource->allocate(16, 48), doctest::Contains("48"), error);
    CHECK_THROWS_WITH_AS((void)resource->allocate(16, 512), doctest::Contains("256"), error);
    w.runtime.fail_at(1, cudaErrorMemoryAllocation);
    try {
      (void)resource->allocate(4096, 64);
      FAIL("an allocation that failed was answered");
    } catch (const error& e) {
      CHECK(e.code() == errc::out_of_memory);
      CHECK(std::string(e.what()).find("4096") != std::string::npos);
    }
  }
  CHECK(w.where.staging_memory().where() == device{});
  CHECK(w.where.memory().where() == device{device_type::cuda, 0});
  {
    const auto pool = cuda::make_stream_memory(w.where, {});
    buffer block(*pool, 128);
    CHECK(w.runtime.live_device_blocks == live + 1);
  }
  CHECK(w.runtime.live_device_blocks == live);
  CHECK(w.runtime.live_host_blocks == 0);
  CHECK(w.runtime.current_device == 1);
  CHECK(w.where.health() == errc::ok);
}

TEST_CASE("what only CUDA has is there on a CUDA backend that is traced") {
  world w;
  trace_log log;
  const auto traced = trace_backend(w.where, log);
  const auto twice = trace_backend(*traced, log);
  {
    const auto pool = cuda::make_stream_memory(*twice, {});
    buffer block(*pool, 128);
  }
  attention_plan plan;
  cuda::reserve_plan(*twice, plan, world::spec(), 1, 1, 1);
  CHECK(&twice->unwrapped() == &w.where);
}

TEST_CASE("a cuda option is refused on another backend") {
  const auto cpu = make_backend();
  CHECK_THROWS_AS((void)cuda::make_stream_memory(*cpu, {}), error);
  attention_plan plan;
  CHECK(cuda::graph_epoch(plan) == 0);
  CHECK_THROWS_AS(cuda::reserve_plan(*cpu, plan, world::spec(), 1, 1, 1), error);
}

TEST_CASE("copies of all layers are one launch, and chained pairs are as many as must follow each other") {
  world w;
  CHECK(w.where.copy_blocks(w.layers, two_pairs) == errc::ok);
  REQUIRE(w.runtime.launches.size() == 1);
  CHECK(w.runtime.launches[0].grid.y == 2);
  CHECK(w.runtime.launches[0].grid.z == 2);

  w.runtime.forget_counts();
  constexpr std::array<block_copy, 3> chain{block_copy{block_id{0}, block_id{1}}, block_copy{block_id{1}, block_id{2}},
                                            block_copy{block_id{2}, block_id{3}}};
  CHECK(w.where.copy_blocks(w.layers, chain) == errc::ok);
  CHECK(w.runtime.launches.size() == 3);

  w.runtime.forget_counts();
  CHECK(w.where.copy_blocks(w.layers, {}) == errc::ok);
  CHECK(w.where.copy_blocks({}, two_pairs) == errc::ok);
  CHECK(w.runtime.launches.empty());
}

TEST_CASE("planes of different head_dim take a launch each in cache calls, and V as part of K takes none") {
  world w;
  for (const bool v_in_k : {false, true}) {
    for (kv_cache_view& layer : w.layers) {
      layer.layout =
          make_layout(layout_kind::hnd, {dtype::bf16}, {dtype::bf16}, heads, dims, dims / 2, block_size, v_in_k);
      if (v_in_k) layer.v = nullptr;
    }
    const std::size_t num_planes = v_in_k ? 1 : 2;
    append_params append = w.append();
    append.kv = w.layers[0];
    append.v = v_in_k ? const_tensor_view{}
                      : dense_view<const void>(append.v.data, append.v.type, append.v.num_tokens, heads, dims / 2);
    w.runtime.forget_counts();
    CHECK(w.where.append(append) == errc::ok);
    CHECK(w.runtime.launches.size() == num_planes);

    w.runtime.forget_counts();
    CHECK(w.where.copy_blocks(w.layers, two_pairs) == errc::ok);
    REQUIRE(w.runtime.launches.size() == num_planes);
    for (const auto& launch : w.runtime.launches) {
      CHECK(launch.grid.y == 2);
      CHECK(launch.grid.z == 1);
    }
  }
}

TEST_CASE("long runs of blocks are swapped by the copy engine, one transfer per plane, short ones by one kernel") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  const auto swap = [&](std::int32_t block_tokens, std::span<const block_copy> pairs) {
    const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, 8, 128, block_tokens);
    const auto bytes = static_cast<std::size_t>(4 * layout.block_bytes());
    buffer a(where.memory(), bytes);
    buffer b(where.memory(), bytes);
    const auto view = [&](buffer& memory) {
      return kv_cache_view{memory.data(), memory.as<std::byte>() + bytes / 2, 4, layout};
    };
    const std::array<kv_cache_view, 1> src{view(a)};
    const std::array<kv_cache_view, 1> dst{view(b)};
    auto* const values = a.as<std::int32_t>();
    std::iota(values, values + bytes / 4, 0);
    runtime.forget_counts();
    REQUIRE(where.swap_blocks(src, dst, pairs) == errc::ok);
    const auto half = static_cast<std::size_t>(layout.block_elements(layout.k));
    return b.as<std::int32_t>()[static_cast<std::size_t>(to_index(pairs[0].dst)) * half] ==
           values[static_cast<std::size_t>(to_index(pairs[0].src)) * half];
  };
  constexpr std::array<block_copy, 2> run{block_copy{block_id{1}, block_id{0}}, block_copy{block_id{2}, block_id{1}}};
  CHECK(swap(64, run));
  CHECK(runtime.count("memcpy_batch_async") == 1);
  CHECK(runtime.launches.empty());
  (void)swap(4, run);
  CHECK(runtime.count("memcpy_async") == 0);
  CHECK(runtime.launches.size() == 1);
}

TEST_CASE(
    "attention on x_split takes the kernels of that layout, and the general kernel for the rest of a mixed batch") {
  for (const layout_kind kind : {layout_kind::x_split, layout_kind::hnd}) {
    world w(kind);
    w.make_plan();  // one decode, one sequence of two new tokens
    CHECK(w.where.attention(w.plan, w.attention()) == errc::ok);
    CHECK(w.runtime.launches.size() == (kind == layout_kind::x_split ? 2u : 1u));
  }
}

TEST_CASE("a call with a bias is one launch of the general kernel, whatever layout and dtypes it has") {
  const void* general = nullptr;  // f32 queries on hnd have no other kernel
  for (const bool one_type : {false, true}) {
    for (const layout_kind kind : {layout_kind::hnd, layout_kind::x_split}) {
      world w(kind);
      attention_spec spec = world::spec();
      attention_params params = w.attention();
      if (one_type) spec.q_type = spec.out_type = params.q.type = params.out.type = dtype::bf16;
      w.where.plan_attention(w.plan, spec, w.host_batch(), num_blocks);
      w.runtime.forget_counts();
      REQUIRE(w.where.attention(w.plan, params) == errc::ok);
      if (general == nullptr) general = w.runtime.launches.at(0).function;
      const bool has_own = one_type || kind == layout_kind::x_split;
      CHECK((w.runtime.launches.at(0).function != general) == has_own);

      const buffer bias(w.where.memory(), 40 * sizeof(std::uint16_t));
      params.bias = {bias.data(), dtype::f16, 1, 1, 40};
      w.runtime.forget_counts();
      REQUIRE(w.where.attention(w.plan, params) == errc::ok);
      REQUIRE(w.runtime.launches.size() == 1);
      CHECK(w.runtime.launches[0].function == general);
    }
  }
}

TEST_CASE("a call with query positions is one launch of the general kernel, whatever layout and dtypes it has") {
  const void* general = nullptr;  // f32 queries on hnd have no other kernel
  for (const bool one_type : {false, true}) {
    for (const layout_kind kind : {layout_kind::hnd, layout_kind::x_split}) {
      world w(kind);
      attention_spec spec = world::spec();
      attention_params params = w.attention();
      if (one_type) spec.q_type = spec.out_type = params.q.type = params.out.type = dtype::bf16;
      const std::vector<std::int32_t> positions{-3, 70};
      host_step_view batch = w.host_batch();
      batch.query_positions = positions.data();
      params.batch.query_positions = w.batch_memory.as<std::int32_t>() + 32;
      w.where.plan_attention(w.plan, spec, batch, num_blocks);
      w.runtime.forget_counts();
      REQUIRE(w.where.attention(w.plan, params) == errc::ok);
      REQUIRE(w.runtime.launches.size() == 1);
      if (general == nullptr) general = w.runtime.launches[0].function;
      CHECK(w.runtime.launches[0].function == general);
      params.batch.query_positions = nullptr;
      CHECK(w.where.attention(w.plan, params) == errc::invalid_argument);
    }
  }
}

TEST_CASE("a plan of another backend, and a plan never made, are refused") {
  world w;
  CHECK(w.where.attention(w.plan, w.attention()) == errc::failed_precondition);
  w.make_plan();
  cuda::cuda_backend second(w.runtime.api(), 1);
  backend& other = second;
  CHECK(other.attention(w.plan, w.attention()) == errc::failed_precondition);
  const auto cpu = make_backend();
  attention_plan foreign;
  cpu->plan_attention(foreign, world::spec(), w.host_batch(), num_blocks);
  CHECK(w.where.attention(foreign, w.attention()) == errc::failed_precondition);
  // Planning takes such a plan over.
  w.where.plan_attention(foreign, world::spec(), w.host_batch(), num_blocks);
  CHECK(w.where.attention(foreign, w.attention()) == errc::ok);
}

TEST_CASE("the budget of a device is what the runtime says less the reserve") {
  world w;
  CHECK(w.where.amount_of_memory() == memory_amount{std::int64_t{80} << 30, std::int64_t{60} << 30});
  CHECK(w.runtime.current_device == 1);
  CHECK(memory_budget(w.where) == (std::int64_t{52} << 30));  // a tenth of all is left
  CHECK(memory_budget(w.where, {.fraction = 0, .bytes = std::int64_t{5} << 30}) == (std::int64_t{55} << 30));
  CHECK(memory_budget(w.where, {.fraction = 0.5, .bytes = std::int64_t{5} << 30}) == (std::int64_t{20} << 30));
  w.runtime.free_bytes = std::size_t{1} << 30;
  CHECK(memory_budget(w.where) == 0);
  w.runtime.fail_always("get_driver_entry_point", cudaErrorIllegalAddress);
  try {
    (void)memory_budget(w.where);
    FAIL("a lost device has no memory");
  } catch (const error& problem) {
    CHECK(problem.code() == errc::device_lost);
  }
}
