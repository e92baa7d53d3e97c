// SPDX-License-Identifier: Apache-2.0
// CPU and CUDA side by side: bits of the cache calls on aligned caches (the conformance suite's are misaligned on
// purpose), swaps through pinned and ordinary memory, whole steps on both, and pools past 2^32 elements.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cuda.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "conformance/whole_steps.hpp"
#include "support/cache_pair.hpp"
#include "support/elements.hpp"
#include "support/reach.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

// Says so when there is none; a case then returns.
bool no_device() {
  if (cuda::num_devices() > 0) return false;
  skip("no CUDA device");
  return true;
}
backend& cuda_device() {
  static const std::unique_ptr<backend> opened = open_backend({device_type::cuda, 0});
  return *opened;
}
backend& cpu_device() {
  static const std::unique_ptr<backend> opened = open_backend();
  return *opened;
}

std::vector<std::byte> read(backend& where, const void* data, std::size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  require_ok(where.download(bytes.data(), data, num_bytes, {}), "download");
  require_ok(where.synchronize({}), "synchronize");
  return bytes;
}
void write(backend& where, void* data, const std::vector<std::byte>& bytes) {
  require_ok(where.upload(data, bytes.data(), bytes.size(), {}), "upload");
  require_ok(where.synchronize({}), "synchronize");
}

/// The same bytes on both devices, aligned as each allocates.
struct twin {
  buffer on_cpu, on_cuda;
  twin(random_source& random, dtype type, std::int64_t elements)
      : on_cpu(cpu_device().memory(), static_cast<std::size_t>(elements) * size_of(type)),
        on_cuda(cuda_device().memory(), static_cast<std::size_t>(elements) * size_of(type)) {
    const std::vector<std::byte> bytes = hard_elements(random, type, elements);
    write(cpu_device(), on_cpu.data(), bytes);
    write(cuda_device(), on_cuda.data(), bytes);
  }
  [[nodiscard]] bool equal() const {
    return read(cpu_device(), on_cpu.data(), on_cpu.num_bytes()) ==
           read(cuda_device(), on_cuda.data(), on_cuda.num_bytes());
  }
};

kv_cache_view view_of(buffer& memory, const kv_layout& layout, std::int64_t num_blocks) {
  auto* const k = memory.as<std::byte>();
  return {k, k + num_blocks * layout.block_bytes() / 2, num_blocks, layout};
}

struct shape {
  std::int32_t heads, dims, block_size;
};
constexpr shape shapes[] = {{8, 128, 16}, {2, 64, 32}, {3, 80, 16}, {1, 256, 8}, {2, 20, 5}, {4, 8, 1}, {1, 1, 3}};
constexpr layout_kind kinds[] = {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split};
constexpr std::int64_t num_blocks = 9;

/// The first backend under test of this kind; null when there is none.
const tested_backend* tested_on(device_type type) {
  for (const tested_backend& tested : all_backends()) {
    if (tested.get().where().type == type) return &tested;
  }
  return nullptr;
}

/// How many random steps a case takes: BIFOLIO_CUDA_STEPS when set.
int num_random_steps() {
  const char* text = std::getenv("BIFOLIO_CUDA_STEPS");
  return text == nullptr ? 400 : std::atoi(text);
}

/// "cuda decode" of "cuda decode bf16 d128 plain".
std::string family_of(const std::string& kernel) { return kernel.substr(0, kernel.find(' ', kernel.find(' ') + 1)); }

}  // namespace

TEST_CASE("append and gather leave the same bits on the CPU and on CUDA, aligned and in every layout and dtype") {
  if (no_device()) return;
  random_source random(hash_of(test_seed(), 1));
  CAPTURE(seed_note());
  for (const shape& s : shapes) {
    for (const layout_kind kind : kinds) {
      for (const dtype cache_type : dtypes) {
        for (const dtype row_type : dtypes) {
          const kv_layout layout = make_layout(kind, cache_type, s.heads, s.dims, s.block_size);
          const std::int64_t num_slots = num_blocks * s.block_size;
          const std::int64_t num_tokens = random.between(1, num_slots);
          twin cache(random, cache_type, 2 * num_blocks * layout.block_elements(layout.k));
          const std::int64_t row_elements = num_tokens * s.heads * s.dims;
          twin k(random, row_type, row_elements);
          twin v(random, row_type, row_elements);
          std::vector<std::int64_t> slots(static_cast<std::size_t>(num_slots));
          for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
          for (std::size_t i = slots.size(); i > 1; --i) {
            std::swap(slots[i - 1], slots[static_cast<std::size_t>(random.between(0, static_cast<int>(i) - 1))]);
          }
          slots.resize(static_cast<std::size_t>(num_tokens));
          slots[0] = -5;
          buffer device_slots(cuda_device().memory(), slots.size() * sizeof(std::int64_t));
          write(cuda_device(), device_slots.data(), bytes_of(slots));
          const auto rows = [&](buffer& memory) {
            return dense_view(memory.data(), row_type, num_tokens, s.heads, s.dims);
          };
          CAPTURE(s.dims);
          CAPTURE(to_string(kind));
          CAPTURE(to_string(cache_type));
          CAPTURE(to_string(row_type));
          REQUIRE(cpu_device().append({view_of(cache.on_cpu, layout, num_blocks), as_const(rows(k.on_cpu)),
                                       as_const(rows(v.on_cpu)), slots.data()}) == errc::ok);
          REQUIRE(cuda_device().append({view_of(cache.on_cuda, layout, num_blocks), as_const(rows(k.on_cuda)),
                                        as_const(rows(v.on_cuda)), device_slots.as<std::int64_t>()}) == errc::ok);
          CHECK(cache.equal());
          REQUIRE(cpu_device().gather({view_of(cache.on_cpu, layout, num_blocks), rows(k.on_cpu), rows(v.on_cpu),
                                       slots.data()}) == errc::ok);
          REQUIRE(cuda_device().gather({view_of(cache.on_cuda, layout, num_blocks), rows(k.on_cuda), rows(v.on_cuda),
                                        device_slots.as<std::int64_t>()}) == errc::ok);
          CHECK(k.equal());
          CHECK(v.equal());
        }
      }
    }
  }
}

TEST_CASE("slots past the end of the cache are never written on CUDA") {
  if (no_device()) return;
  backend& where = cuda_device();
  random_source random(hash_of(test_seed(), 2));
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 2, 64, 16);
  twin cache(random, dtype::bf16, 2 * num_blocks * layout.block_elements(layout.k));
  twin rows(random, dtype::f32, 4 * 2 * 64);
  const std::vector<std::int64_t> slots{num_blocks * 16, std::int64_t{1} << 40, -1, -(std::int64_t{1} << 62)};
  buffer device_slots(where.memory(), slots.size() * sizeof(std::int64_t));
  write(where, device_slots.data(), bytes_of(slots));
  const auto view = dense_view(rows.on_cuda.data(), dtype::f32, 4, 2, 64);
  CHECK(where.append({view_of(cache.on_cuda, layout, num_blocks), as_const(view), as_const(view),
                      device_slots.as<std::int64_t>()}) == errc::ok);
  CHECK(cache.equal());
}

TEST_CASE("long lists of copies leave the same bits on the CPU and on CUDA, in units of 16, 4, 2 and 1 bytes") {
  if (no_device()) return;
  random_source random(hash_of(test_seed(), 7));
  CAPTURE(seed_note());
  constexpr std::int64_t many_blocks = 3000;
  struct row {
    dtype type;
    std::int32_t dims;
  };
  for (const auto& [type, dims] :
       {row{dtype::bf16, 8}, row{dtype::bf16, 2}, row{dtype::bf16, 3}, row{dtype::e4m3, 3}}) {
    const kv_layout layout = make_layout(layout_kind::hnd, type, 1, dims, 1);
    twin cache(random, type, 2 * many_blocks * layout.block_elements(layout.k));
    std::vector<block_copy> copies;
    for (std::int32_t i = 0; i < 1400; ++i) {
      copies.push_back({block_id{static_cast<std::int32_t>(random.between(0, 1400))}, block_id{1500 + i}});
    }
    const kv_cache_view on_cpu = view_of(cache.on_cpu, layout, many_blocks);
    const kv_cache_view on_cuda = view_of(cache.on_cuda, layout, many_blocks);
    REQUIRE(cpu_device().copy_blocks({&on_cpu, 1}, copies) == errc::ok);
    REQUIRE(cuda_device().copy_blocks({&on_cuda, 1}, copies) == errc::ok);
    CAPTURE(to_string(type));
    CAPTURE(dims);
    CHECK(cache.equal());
  }
}

TEST_CASE("copies, chains of copies and conversions leave the same bits on the CPU and on CUDA") {
  if (no_device()) return;
  random_source random(hash_of(test_seed(), 3));
  CAPTURE(seed_note());
  for (const shape& s : shapes) {
    for (const layout_kind src_kind : kinds) {
      for (const layout_kind dst_kind : kinds) {
        for (const dtype src_type : dtypes) {
          for (const dtype dst_type : dtypes) {
            const kv_layout from = make_layout(src_kind, src_type, s.heads, s.dims, s.block_size);
            const kv_layout to = make_layout(dst_kind, dst_type, s.heads, s.dims, s.block_size);
            twin src(random, src_type, 2 * num_blocks * from.block_elements(from.k));
            twin dst(random, dst_type, 2 * num_blocks * to.block_elements(to.k));
            std::vector<block_copy> pairs(static_cast<std::size_t>(random.between(1, 12)));
            for (block_copy& pair : pairs) {
              pair = {block_id{static_cast<std::int32_t>(random.between(0, num_blocks - 1))},
                      block_id{static_cast<std::int32_t>(random.between(0, num_blocks - 1))}};
            }
            CAPTURE(s.dims);
            CAPTURE(to_string(src_kind));
            CAPTURE(to_string(dst_kind));
            CAPTURE(to_string(src_type));
            CAPTURE(to_string(dst_type));
            const auto run = [&](backend& where, buffer& a, buffer& b) {
              const kv_cache_view source = view_of(a, from, num_blocks);
              REQUIRE(where.copy_blocks({&source, 1}, pairs) == errc::ok);
              REQUIRE(where.convert_blocks(source, view_of(b, to, num_blocks), pairs) == errc::ok);
            };
            run(cpu_device(), src.on_cpu, dst.on_cpu);
            run(cuda_device(), src.on_cuda, dst.on_cuda);
            CHECK(src.equal());
            CHECK(dst.equal());
          }
        }
      }
    }
  }
}

TEST_CASE("blocks swapped to host memory and back are the same, pinned or not, in short and long runs") {
  if (no_device()) return;
  backend& where = cuda_device();
  random_source random(hash_of(test_seed(), 4));
  CAPTURE(seed_note());
  for (const std::int32_t block_size : {1, 16, 256}) {
    for (const bool pinned : {true, false}) {
      const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 8, 128, block_size);
      const std::int64_t elements = 2 * num_blocks * layout.block_elements(layout.k);
      twin cache(random, dtype::bf16, elements);
      memory_resource& host = pinned ? where.staging_memory() : default_host_memory();
      buffer away(host, cache.on_cpu.num_bytes());
      std::memset(away.data(), 0x77, away.num_bytes());
      const kv_cache_view on_device = view_of(cache.on_cuda, layout, num_blocks);
      const kv_cache_view on_host = view_of(away, layout, num_blocks);
      std::vector<block_copy> out;
      std::vector<block_copy> back;
      for (std::int32_t i = 0; i < num_blocks; ++i) {
        out.push_back({block_id{i}, block_id{static_cast<std::int32_t>(num_blocks) - 1 - i}});
        back.push_back({out.back().dst, out.back().src});
      }
      REQUIRE(where.swap_blocks({&on_device, 1}, {&on_host, 1}, out) == errc::ok);
      REQUIRE(where.synchronize({}) == errc::ok);
      const auto block = static_cast<std::size_t>(layout.block_bytes() / 2);
      CHECK(std::memcmp(away.data(), cache.on_cpu.as<std::byte>() + 8 * block, block) == 0);
      write(where, cache.on_cuda.data(), std::vector<std::byte>(cache.on_cuda.num_bytes(), std::byte{0x11}));
      REQUIRE(where.swap_blocks({&on_host, 1}, {&on_device, 1}, back) == errc::ok);
      CHECK(cache.equal());
    }
  }
}

TEST_CASE("a sequence prefilled on one device decodes on the other after its blocks were moved") {
  if (no_device()) return;
  backend& gpu = cuda_device();
  backend& cpu = cpu_device();
  random_source random(hash_of(test_seed(), 5));
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 2, 128, 16);
  cache_engine on_gpu(gpu, {2, 40, layout});
  cache_engine on_cpu(cpu, {2, 40, layout}, &gpu.staging_memory());
  constexpr std::int64_t tokens = 600;
  std::vector<float> keys(static_cast<std::size_t>(tokens) * 2 * 128);
  for (float& value : keys) value = normal_from(random.next());
  std::vector<std::int64_t> slots(tokens);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  const auto cpu_rows = as_const(dense_view<void>(keys.data(), dtype::f32, tokens, 2, 128));
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    REQUIRE(on_cpu.append(layer, cpu_rows, cpu_rows, slots.data()) == errc::ok);
  }
  std::vector<block_copy> moves;
  for (std::int32_t i = 0; i < 38; ++i) moves.push_back({block_id{i}, block_id{39 - i}});
  REQUIRE(on_cpu.swap_blocks_to(on_gpu, moves) == errc::ok);
  REQUIRE(gpu.synchronize({}) == errc::ok);

  std::vector<std::int32_t> starts{0, 1};
  std::vector<std::int32_t> lens{static_cast<std::int32_t>(tokens)};
  std::vector<std::int32_t> cpu_table(40);
  std::vector<std::int32_t> gpu_table(40);
  for (std::int32_t i = 0; i < 40; ++i) {
    cpu_table[static_cast<std::size_t>(i)] = i;
    gpu_table[static_cast<std::size_t>(i)] = 39 - i;
  }
  attention_spec spec;
  spec.num_q_heads = 8;
  spec.num_kv_heads = 2;
  spec.qk_head_dim = spec.v_head_dim = 128;
  spec.block_size = 16;
  spec.k_code.type = spec.v_code.type = dtype::bf16;
  std::vector<float> query(8 * 128);
  for (float& value : query) value = normal_from(random.next());
  const auto decode = [&](backend& where, cache_engine& engine, const std::vector<std::int32_t>& table) {
    const host_step_view host{1, 1, starts.data(), lens.data(), table.data(), 40, nullptr};
    device_bytes d_q(where, bytes_of(query), 4);
    device_bytes d_starts(where, bytes_of(starts), 4);
    device_bytes d_lens(where, bytes_of(lens), 4);
    device_bytes d_table(where, bytes_of(table), 4);
    device_bytes d_out(where, bytes_of(std::vector<float>(8 * 128, NAN)), 4);
    attention_plan plan;
    where.plan_attention(plan, spec, host, 40);
    attention_params p;
    p.q = as_const(dense_view<void>(d_q.data(), dtype::f32, 1, 8, 128));
    p.out = dense_view<void>(d_out.data(), dtype::f32, 1, 8, 128);
    p.kv = engine.layers()[1];
    p.batch = as_device_view(host);
    p.batch.query_start_loc = reinterpret_cast<const std::int32_t*>(d_starts.data());
    p.batch.seq_lens = reinterpret_cast<const std::int32_t*>(d_lens.data());
    p.batch.block_tables = reinterpret_cast<const std::int32_t*>(d_table.data());
    p.scale = 0.01f;
    REQUIRE(where.attention(plan, p) == errc::ok);
    const std::vector<std::byte> bytes = d_out.read();
    std::vector<float> out(8 * 128);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  };
  const std::vector<float> a = decode(cpu, on_cpu, cpu_table);
  const std::vector<float> b = decode(gpu, on_gpu, gpu_table);
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= 1e-5f);
}

TEST_CASE("small batches through every tensor-core kernel are within the bound on CUDA") {
  if (no_device()) return;
  const tested_backend* gpu = tested_on(device_type::cuda);
  REQUIRE(gpu != nullptr);
  for (const dtype type : {dtype::f16, dtype::bf16}) {
    for (const std::int32_t head_dim : {64, 96, 128, 192, 256}) {
      for (const bool options : {false, true}) {
        for (const bool deterministic : {false, true}) {
          attention_case c{.what = "small batch",
                           .num_kv_heads = 1,
                           .group_size = 4,
                           .head_dim = head_dim,
                           .block_size = 16,
                           .q_type = type,
                           .kv_type = type,
                           .out_type = type,
                           .seqs = {{1, 70}, {40, 200}, {1, 1100}, {3, 5}, {0, 9}, {1, 0}},
                           .deterministic = deterministic};
          if (options) {
            c.window_left = 600;
            c.soft_cap = 5;
            c.alibi = c.sinks = true;
          }
          if (!deterministic && head_dim < 256) c.seqs[1] = {600, 610};  // enough for the prefill kernel
          CHECK(check_attention(c, {gpu}, 0) == "");  // turn 0: rows without gaps, as these kernels need them
          if (!deterministic || options) continue;
          // More units than CTAs: a deterministic plan then combines chunks inside a CTA.
          c.num_kv_heads = 4;
          c.seqs.assign(70, {1, 250});
          for (std::size_t i = 0; i < c.seqs.size(); ++i) c.seqs[i].seq_len += static_cast<std::int32_t>(i);
          CHECK(check_attention(c, {gpu}, 0) == "");
        }
      }
    }
  }
}

TEST_CASE("random calls of all shapes agree between the CPU and CUDA") {
  if (no_device()) return;
  const tested_backend* gpu = tested_on(device_type::cuda);
  const tested_backend* cpu = tested_on(device_type::cpu);
  REQUIRE(gpu != nullptr);
  if (cpu == nullptr) return skip("BIFOLIO_TEST_BACKENDS leaves the CPU out");
  CAPTURE(seed_note());
  for (const attention_case& c : random_cases(hash_of(test_seed(), 6), num_random_steps())) {
    const attention_contents contents(c);
    const attention_output a = run_attention(*cpu, c, contents);
    const attention_output b = run_attention(*gpu, c, contents);
    // Both are held to the oracle elsewhere; here a coarse bound finds what is plainly different.
    const float unit = std::max(2e-4f, 4.1f * facts_of(c.out_type).unit_roundoff);
    float largest = 0;
    for (const float value : a.out) {
      if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
    }
    bool agree = true;
    for (std::size_t i = 0; i < a.out.size(); ++i) {
      agree = agree && std::abs(a.out[i] - b.out[i]) <= unit * std::max(largest, 1e-30f);
    }
    for (std::size_t i = 0; i < a.lse.size(); ++i) {
      agree = agree && (a.lse[i] == b.lse[i] || std::abs(a.lse[i] - b.lse[i]) <= 1e-3f * (1 + std::abs(a.lse[i])));
    }
    CHECK_MESSAGE(agree, describe(c));
  }
}

TEST_CASE("random whole steps leave equal caches and results within the bound on the CPU and CUDA") {
  if (no_device()) return;
  const tested_backend* gpu = tested_on(device_type::cuda);
  const tested_backend* cpu = tested_on(device_type::cpu);
  REQUIRE(gpu != nullptr);
  if (cpu == nullptr) return skip("BIFOLIO_TEST_BACKENDS leaves the CPU out");
  steps_tally tally;
  const std::string problems = run_whole_steps(*cpu, *gpu, hash_of(test_seed(), 16), num_random_steps(), tally);
  CHECK_MESSAGE(problems.empty(), problems, seed_note());
  MESSAGE(cpu->name, " and ", gpu->name, ", ", seed_note(), ", ", tally.text());
  // The run met every family of kernels that this device has: decode, x_split, the general one, and prefill on Hopper.
  std::set<std::string> expected;
  std::set<std::string> met;
  for (const std::string& kernel : gpu->get().attention_kernels()) expected.insert(family_of(kernel));
  for (const auto& [kernel, count] : tally.kernels) met.insert(family_of(kernel));
  expected.erase("cuda latent");                                 // its one shape is not among these steps
  if (num_random_steps() < 400) expected.erase("cuda prefill");  // few of the prompts are long enough for it
  CHECK(expected.size() >= 3);
  for (const std::string& family : expected) CHECK_MESSAGE(met.count(family) == 1, family, " was not met");
}

TEST_CASE("blocks past 2^32 elements are stored, copied, converted and attended to") {
  if (no_device()) return;
  backend& where = cuda_device();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  REQUIRE(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 8, 128, 16);
  const std::int64_t blocks = (std::int64_t{1} << 32) / layout.block_elements(layout.k) + 8;
  const auto bytes = static_cast<std::size_t>(blocks * layout.block_bytes());
  if (free_bytes < bytes + (std::size_t{1} << 30))
    return skip("not enough device memory for a pool past 2^32 elements");
  buffer pool(where.memory(), bytes);
  const kv_cache_view kv = view_of(pool, layout, blocks);
  const auto last = static_cast<std::int32_t>(blocks - 1);

  // Two tokens into the last block, read back, and copied to the one before it.
  std::vector<float> values(2 * 8 * 128);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
  device_bytes rows(where, bytes_of(values), 16);
  const std::vector<std::int64_t> slot_list{std::int64_t{last} * 16, std::int64_t{last} * 16 + 1};
  device_bytes slots(where, bytes_of(slot_list), 8);
  const auto view = as_const(dense_view<void>(rows.data(), dtype::f32, 2, 8, 128));
  REQUIRE(where.append({kv, view, view, reinterpret_cast<const std::int64_t*>(slots.data())}) == errc::ok);
  const block_copy pair{block_id{last}, block_id{last - 1}};
  REQUIRE(where.copy_blocks({&kv, 1}, {&pair, 1}) == errc::ok);
  const std::vector<std::int64_t> copied{std::int64_t{last - 1} * 16, std::int64_t{last - 1} * 16 + 1};
  device_bytes copied_slots(where, bytes_of(copied), 8);
  device_bytes back(where, bytes_of(std::vector<float>(2 * values.size(), NAN)), 16);
  REQUIRE(where.gather({kv, dense_view<void>(back.data(), dtype::f32, 2, 8, 128),
                        dense_view<void>(back.data() + values.size() * 4, dtype::f32, 2, 8, 128),
                        reinterpret_cast<const std::int64_t*>(copied_slots.data())}) == errc::ok);
  std::vector<float> both(values);
  both.insert(both.end(), values.begin(), values.end());
  CHECK(back.read() == bytes_of(both));

  // One visible token in that block: attention gives its V back.
  attention_spec spec;
  spec.num_q_heads = 8;
  spec.num_kv_heads = 8;
  spec.qk_head_dim = spec.v_head_dim = 128;
  spec.block_size = 16;
  spec.k_code.type = spec.v_code.type = dtype::bf16;
  const std::vector<std::int32_t> starts{0, 1};
  const std::vector<std::int32_t> lens{1};
  const std::vector<std::int32_t> table{last};
  device_bytes d_starts(where, bytes_of(starts), 4);
  device_bytes d_lens(where, bytes_of(lens), 4);
  device_bytes d_table(where, bytes_of(table), 4);
  const host_step_view host{1, 1, starts.data(), lens.data(), table.data(), 1, nullptr};
  attention_plan plan;
  where.plan_attention(plan, spec, host, blocks);
  attention_params p;
  p.q = as_const(dense_view<void>(rows.data(), dtype::f32, 1, 8, 128));
  p.out = dense_view<void>(back.data(), dtype::f32, 1, 8, 128);
  p.kv = kv;
  p.batch = as_device_view(host);
  p.batch.query_start_loc = reinterpret_cast<const std::int32_t*>(d_starts.data());
  p.batch.seq_lens = reinterpret_cast<const std::int32_t*>(d_lens.data());
  p.batch.block_tables = reinterpret_cast<const std::int32_t*>(d_table.data());
  p.scale = 1e-6f;
  REQUIRE(where.attention(plan, p) == errc::ok);
  std::vector<std::byte> got = back.read();
  got.resize(8 * 128 * 4);
  CHECK(got == bytes_of(std::vector<float>(values.begin(), values.begin() + 8 * 128)));
}

TEST_CASE("the current device and the last error are the caller's own") {
  if (no_device()) return;
  backend& where = cuda_device();
  int before = -1;
  REQUIRE(cudaGetDevice(&before) == cudaSuccess);
  CHECK(where.upload(reinterpret_cast<void*>(std::uintptr_t{16}), &before, 4, {}) != errc::ok);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(where.health() == errc::ok);
  int after = -1;
  REQUIRE(cudaGetDevice(&after) == cudaSuccess);
  CHECK(after == before);
  CHECK_THROWS_AS((void)where.memory().allocate(std::size_t{1} << 50, 64), error);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  const auto pool = cuda::make_stream_memory(where, {});
  { buffer some(*pool, 1 << 20); }
  CHECK(where.synchronize({}) == errc::ok);
}
