// SPDX-License-Identifier: Apache-2.0
#include <bifolio/c/bifolio.h>

#include <bifolio/kv_cache_manager.hpp>
#include <vector>

#include "model_rows.hpp"
#include "row_timer.hpp"

namespace bifolio::bench {
namespace {

constexpr std::int32_t num_calls = 4096;

class c_bench : row_timer {
 public:
  using row_timer::row_timer;

  /// The same call of a manager of the C++ interface and of one of the C interface, in turns.
  void run(std::int32_t rounds) {
    kv_cache_manager manager({.block_size = num_calls, .num_blocks = 4});
    const seq_id seq = manager.allocate(1).seq;
    bifolio_manager_config config;
    bifolio_manager handle = nullptr;
    bifolio_seq c_seq = 0;
    bifolio_block_copy copy{};
    std::int64_t num_tokens = 0;
    if (bifolio_manager_config_init(&config, sizeof config) != BIFOLIO_OK)
      throw error(errc::internal, bifolio_last_error());
    config.block_size = num_calls;
    config.num_blocks = 4;
    if (bifolio_manager_create(&config, &handle) != BIFOLIO_OK ||
        bifolio_manager_allocate(handle, 1, &c_seq) != BIFOLIO_OK) {
      throw error(errc::internal, bifolio_last_error());
    }
    std::vector<double> append, c_append, asking, c_asking;
    bool good = true;
    for (std::int32_t round = 0; round < rounds; ++round) {
      time(append, num_calls - 1, [&] {
        for (int i = 1; i < num_calls; ++i) good &= manager.append(seq, 1).status == alloc_status::ok;
      });
      time(c_append, num_calls - 1, [&] {
        for (int i = 1; i < num_calls; ++i) good &= bifolio_manager_append(handle, c_seq, 1, 0, &copy) == BIFOLIO_OK;
      });
      time(asking, num_calls, [&] {
        for (int i = 0; i < num_calls; ++i) good &= manager.num_tokens(seq) == num_calls;
      });
      time(c_asking, num_calls, [&] {
        for (int i = 0; i < num_calls; ++i) {
          good &=
              bifolio_manager_num_tokens(handle, c_seq, &num_tokens, nullptr) == BIFOLIO_OK && num_tokens == num_calls;
        }
      });
      manager.truncate(seq, 1);
      good &= bifolio_manager_truncate(handle, c_seq, 1) == BIFOLIO_OK;
    }
    (void)bifolio_manager_destroy(handle);
    if (!good) throw error(errc::internal, "a call was refused");
    add("append in place, C++", "in order", "call", append);
    add("append in place, C", "in order", "call", c_append);
    add("number of tokens, C++", "in order", "call", asking);
    add("number of tokens, C", "in order", "call", c_asking);
  }
};

}  // namespace

void add_c_rows(std::int32_t rounds, report& out) { c_bench(out).run(rounds); }

}  // namespace bifolio::bench
