// SPDX-License-Identifier: Apache-2.0
#include "support/backends.hpp"

#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <cstdlib>
#include <optional>
#include <stdexcept>

#include "support/adversarial_executor.hpp"
#include "support/fenced_memory.hpp"
#include "support/reach.hpp"

namespace bifolio::test {
namespace {

class reversed_executor final : public executor {
 public:
  explicit reversed_executor(std::int32_t concurrency) : concurrency_(concurrency) {}
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    for (std::int32_t worker = num_workers - 1; worker >= 0; --worker) function(context, worker);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "reversed"; }

 private:
  std::int32_t concurrency_;
};

// Null when this build or machine does not have it; any other failure is a failure of the test run.
std::unique_ptr<backend> open(device where, const backend_options& options) {
  try {
    return open_backend(where, options);
  } catch (const error& problem) {
    if (problem.code() == errc::unsupported) return nullptr;
    throw;
  }
}

// Whether a GPU multiplies this type on tensor cores.
bool has_tensor_cores(dtype type) {
  switch (type) {
    case dtype::f32:
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return false;
    case dtype::f16:
    case dtype::bf16:
      return true;
  }
  return false;
}

// From the names of its kernels, "cpu amx bf16 tiles".
arithmetic loosest_numbers_of(const backend& where) {
  constexpr auto f16 = static_cast<std::size_t>(dtype::f16);
  constexpr auto bf16 = static_cast<std::size_t>(dtype::bf16);
  arithmetic numbers;
  for (const std::string& kernel : where.attention_kernels()) {
    const auto is = [&](const char* type_and_loops) { return kernel.find(type_and_loops) != std::string::npos; };
    // Hardware products of 16-bit numbers: probabilities are rounded to their type, subnormal bfloat16 numbers count as
    // 0. Tiles multiply pairs of dims of V.
    if (is(" bf16 dots") || is(" bf16 tiles")) {
      numbers.unit_probability[bf16] = 0x1p-8;
      numbers.flushed[bf16] = 0x1p-126;
    }
    if (is(" bf16 tiles")) numbers.dims_together[bf16] = 2;
    if (is(" f16 tiles")) {
      numbers.unit_probability[f16] = 0x1p-11;
      numbers.tiny_probability[f16] = 0x1p-29;  // 16 times the probability is rounded to f16
      numbers.dims_together[f16] = 2;
    }
  }
  return numbers;
}

std::vector<tested_backend> open_all() {
  static adversarial_executor adversarial(3);
  const char* wanted = std::getenv("BIFOLIO_TEST_BACKENDS");
  std::vector<tested_backend> list;
  const auto add = [&](std::string name, std::string family, device where, const backend_options& options) {
    if (wanted != nullptr && name.find(wanted) == std::string::npos) return;
    std::optional<tested_backend> entry = open_tested(std::move(name), std::move(family), where, options);
    if (entry) list.push_back(std::move(*entry));
  };

  for (const cpu_isa isa : supported_isas()) {
    const std::string family = "cpu-" + std::string(to_string(isa));
    backend_options options;
    options.isa = isa;
    options.host_memory = &fenced_host_memory();
    for (const executor_kind kind :
         {executor_kind::threads, executor_kind::openmp, executor_kind::tbb, executor_kind::serial}) {
      options.executor_choice = kind;
      options.num_threads = kind == executor_kind::serial ? 0 : 2;
      add(family + "-" + std::string(to_string(kind)), family, device{}, options);
    }
    options.own_executor = &adversarial;
    add(family + "-adversarial", family, device{}, options);
  }
  add("cuda", "cuda", device{device_type::cuda, 0}, {});
  if (list.empty()) {
    std::string families;
    for (const cpu_isa isa : supported_isas()) families += " cpu-" + std::string(to_string(isa)) + ",";
    throw std::runtime_error("BIFOLIO_TEST_BACKENDS is '" + std::string(wanted == nullptr ? "" : wanted) +
                             "', part of no name of this machine's backends; they begin with" + families +
                             " or are cuda, where there is a GPU");
  }
  return list;
}

}  // namespace

std::optional<tested_backend> open_tested(std::string name, std::string family, device where,
                                          const backend_options& options) {
  tested_backend entry;
  entry.owned = open(where, options);
  if (entry.owned == nullptr) return std::nullopt;
  entry.name = std::move(name);
  entry.family = std::move(family);
  entry.is_host = where.type == device_type::cpu;
  if (entry.is_host) {
    entry.numbers = loosest_numbers_of(*entry.owned);
  } else {
    // Tensor cores: their sums are looser than float32's, and probabilities are rounded to the type of V.
    entry.numbers.unit_accumulate = {0x1p-24, 0x1p-22, 0x1p-22};
    entry.numbers.unit_probability = {0, 0x1p-11, 0x1p-8};
    entry.numbers.tiny_probability = {0, 0x1p-25, 0};
    entry.numbers.split_size = 2048;
  }
  return entry;
}

arithmetic tested_backend::numbers_for(dtype q_type, dtype kv_type, dtype out_type, std::int32_t head_dim) const {
  const bool one_type = q_type == kv_type && out_type == kv_type;
  if (is_host) return one_type ? numbers : arithmetic{};
  if (one_type && has_tensor_cores(kv_type) && head_dim % 8 == 0 && head_dim <= 512) return numbers;
  arithmetic f32;
  // Products of TensorFloat-32 take subnormal numbers for 0.
  if (one_type && kv_type == dtype::f32) f32.flushed[static_cast<std::size_t>(dtype::f32)] = 0x1p-126;
  return f32;
}

arithmetic tested_backend::numbers_for_codes(dtype q_type, dtype out_type) const {
  arithmetic f32;
  if (!is_host || q_type != dtype::bf16 || out_type != dtype::bf16) return f32;
  constexpr auto to = static_cast<std::size_t>(dtype::f32);
  constexpr auto from = static_cast<std::size_t>(dtype::bf16);
  f32.unit_probability[to] = numbers.unit_probability[from];
  f32.dims_together[to] = numbers.dims_together[from];
  f32.flushed[to] = numbers.flushed[from];
  return f32;
}

arithmetic numbers_of(cpu_isa isa, dtype q_type, dtype kv_type, dtype out_type) {
  if (q_type != kv_type || out_type != kv_type) return {};
  backend_options options;
  options.isa = isa;
  options.executor_choice = executor_kind::serial;
  return loosest_numbers_of(*make_backend({}, options));
}

std::span<const tested_backend> all_backends() {
  static const std::vector<tested_backend> list = open_all();
  return list;
}

std::vector<const tested_backend*> one_per_family(std::size_t turn) {
  const std::span<const tested_backend> all = all_backends();
  std::vector<const tested_backend*> chosen;
  for (std::size_t first = 0; first < all.size();) {
    std::size_t last = first;
    while (last < all.size() && all[last].family == all[first].family) ++last;
    chosen.push_back(&all[first + turn % (last - first)]);
    first = last;
  }
  return chosen;
}

std::unique_ptr<executor> make_reversed_executor(std::int32_t concurrency) {
  return std::make_unique<reversed_executor>(concurrency);
}

std::vector<executor_kind> threaded_executors() {
  std::vector<executor_kind> kinds;
  for (const executor_kind kind : {executor_kind::threads, executor_kind::openmp, executor_kind::tbb}) {
    backend_options options;
    options.executor_choice = kind;
    if (open({}, options) != nullptr) kinds.push_back(kind);
  }
  return kinds;
}

memory_resource& fenced_host_memory() {
  static fenced_memory_resource resource;
  return resource;
}

}  // namespace bifolio::test
