// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU in orders of workers and work items that no ordinary executor takes: each item, and each
// combining of partial results, may wait for others or come first. No bit of a result may depend on it, and
// ThreadSanitizer sees every access.
#include <doctest/doctest.h>

#include <atomic>
#include <bifolio/cpu.hpp>
#include <memory>
#include <utility>

#include "conformance/attention_tables.hpp"
#include "cpu/backend.hpp"
#include "cpu/isa.hpp"
#include "support/adversarial_executor.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

/// The kernels of an ISA with a stop before and after each.
class stopping_kernels {
 public:
  explicit stopping_kernels(cpu_isa isa)
      : original_(cpu::kernels_for(isa)),
        attention_(original_.attention),
        table_(with_attention(original_, attention_)) {
    wrap(std::make_index_sequence<cpu::num_attention_loops * num_dtypes>());
  }
  stopping_kernels(const stopping_kernels&) = delete;
  stopping_kernels& operator=(const stopping_kernels&) = delete;
  [[nodiscard]] const cpu::kernel_table& table() const noexcept { return table_; }
  /// How often partial results were combined since the last call.
  [[nodiscard]] static std::int32_t num_combined() noexcept { return combined.exchange(0, std::memory_order_relaxed); }

 private:
  static cpu::kernel_table with_attention(const cpu::kernel_table& original, const cpu::attention_kernels& attention) {
    return {.isa = original.isa, .cache = original.cache, .rotate = original.rotate, .attention = attention};
  }

  // A kernel is a function without data: one set of kernels is wrapped at a time.
  static inline const cpu::attention_kernels* wrapped = nullptr;
  static inline std::atomic<std::int32_t> combined{0};

  template <std::size_t Index, cpu::item_kernels::kernel cpu::item_kernels::*Which>
  static void stopping(const cpu::attention_args& args, const cpu::attention_item& item,
                       const cpu::attention_scratch& scratch) noexcept {
    adversarial_executor::stop();
    if constexpr (Which == &cpu::item_kernels::combine) combined.fetch_add(1, std::memory_order_relaxed);
    (wrapped->items[Index / num_dtypes][Index % num_dtypes].*Which)(args, item, scratch);
    adversarial_executor::stop();
  }
  template <std::size_t... Index>
  void wrap(std::index_sequence<Index...>) {
    wrapped = &original_.attention;
    const auto replace = [](cpu::item_kernels::kernel& kernel, cpu::item_kernels::kernel by) {
      if (kernel != nullptr) kernel = by;
    };
    (replace(attention_.items[Index / num_dtypes][Index % num_dtypes].run, &stopping<Index, &cpu::item_kernels::run>),
     ...);
    (replace(attention_.items[Index / num_dtypes][Index % num_dtypes].combine,
             &stopping<Index, &cpu::item_kernels::combine>),
     ...);
  }

  const cpu::kernel_table& original_;
  cpu::attention_kernels attention_;
  cpu::kernel_table table_;
};

/// A backend over them whose workers the executor's schedules order.
tested_backend stopping_backend(const stopping_kernels& kernels, executor& workers) {
  tested_backend tested;
  tested.name = std::string(to_string(kernels.table().isa)) + " with stops";
  tested.family = tested.name;
  backend_options options;
  options.own_executor = &workers;
  tested.owned = std::make_unique<cpu::cpu_backend>(kernels.table(), options);
  return tested;
}

std::vector<attention_case> conformance_cases() {
  std::vector<attention_case> cases;
  for (const std::vector<attention_case>& table :
       {decode_cases(), prefill_cases(), empty_cases(), head_dim_cases(), plane_cases(), block_size_cases(),
        group_cases(), length_cases(), dtype_cases(), layout_cases(), option_cases(), value_cases()}) {
    cases.insert(cases.end(), table.begin(), table.end());
  }
  return cases;
}

TEST_CASE("no order of workers and items changes a bit of a conformance case") {
  MESSAGE(seed_note());
  const auto num_schedules = static_cast<std::uint64_t>(4 * num_test_runs());  // each kind as often
  adversarial_executor workers(4);
  std::int64_t num_calls = 0;
  const std::vector<attention_case> cases = conformance_cases();
  for (const cpu_isa isa : supported_isas()) {
    const stopping_kernels kernels(isa);
    const tested_backend tested = stopping_backend(kernels, workers);
    for (std::size_t n = 0; n < cases.size(); n += BIFOLIO_CASE_STEP) {
      const attention_case& c = cases[n];
      const attention_contents contents(c);
      attention_call call(tested, c, contents, placement_in_turn(c, n));
      call.plan();
      workers.set_choices({});  // one worker does everything that it may
      const attention_output expected = run_planned(tested, call);
      if (workers.alternatives().size() < 2) continue;  // too little work for a second worker
      for (std::uint64_t schedule = 0; schedule < num_schedules; ++schedule) {
        workers.set_seed(hash_of(test_seed(), n, schedule / 4) / 4 * 4 + schedule % 4);
        call.reset_outputs();
        const std::string difference = bit_difference(expected, run_planned(tested, call));
        REQUIRE_MESSAGE(difference.empty(), tested.name, ", schedule ", schedule, ": ", difference, " [", describe(c),
                        "]");
        ++num_calls;
      }
    }
  }
  MESSAGE(num_calls, " calls");
  CHECK(num_calls > 0);
}

// The work counter and the completion counters in every order of their changes: two layers on one plan, so that each
// counter is used again.
TEST_CASE("every interleaving of two workers over split work gives the same bits, layer after layer") {
  const stopping_kernels kernels(supported_isas().front());
  const attention_case c{.what = "three splits",
                         .num_kv_heads = 1,
                         .group_size = 4,
                         .head_dim = 128,
                         .block_size = 64,
                         .seqs = {{1, 1300}}};
  const attention_contents contents(c);
  attention_output expected;
  std::int64_t num_splits = 0;
  const std::int64_t count = for_each_interleaving(2, 100000, [&](adversarial_executor& workers) {
    const tested_backend tested = stopping_backend(kernels, workers);
    attention_call call(tested, c, contents);
    call.plan();
    for (int layer = 0; layer < 2; ++layer) {
      call.reset_outputs();
      (void)stopping_kernels::num_combined();
      const attention_output got = run_planned(tested, call);
      REQUIRE(stopping_kernels::num_combined() == 1);  // by the last item, and not before
      if (expected.out.empty()) expected = got;
      REQUIRE(bit_difference(expected, got) == "");
    }
    num_splits = std::ssize(workers.alternatives());
  });
  MESSAGE(count, " interleavings of about ", num_splits, " stops");
  CHECK(count > 50);
  CHECK(count < 100000);
}

}  // namespace
}  // namespace bifolio::test
