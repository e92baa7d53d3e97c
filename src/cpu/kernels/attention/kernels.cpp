// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/attention/kernels.hpp"

#include "cpu/kernels/attention/tiles.hpp"
#include "cpu/kernels/attention/vectors.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

template <class Mainloop>
void run_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  Mainloop(args, item, scratch).run();
}

template <class Mainloop>
void combine_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  Mainloop(args, item, scratch).combine_items();
}

template <class Mainloop>
constexpr item_kernels kernels_of() noexcept {
  return {&run_item<Mainloop>, &combine_item<Mainloop>};
}

constexpr attention_kernels make_table() noexcept {
  attention_kernels table = {};
  table.merge = &merge_rows;
  for (const dtype type : tensor_dtypes) {
    visit_tensor_dtype(type, [&](auto traits) {
      using key = typename decltype(traits)::storage;
      const auto set = [&](attention_loops loops, const item_kernels& kernels) {
        table.items[static_cast<std::size_t>(loops)][static_cast<std::size_t>(type)] = kernels;
      };
      set(attention_loops::vectors, kernels_of<vector_mainloop<key, vector_sums::widened>>());
      if constexpr (has_tiles<key>) set(attention_loops::tiles, kernels_of<tile_mainloop<key>>());
      if constexpr (has_pair_dot && __is_same(key, bfloat16)) {
        set(attention_loops::dots, kernels_of<vector_mainloop<key, vector_sums::dots>>());
      }
      if constexpr (has_quad_dot && __is_same(key, bfloat16)) {
        set(attention_loops::integers, kernels_of<vector_mainloop<key, vector_sums::integers>>());
      }
    });
  }
  return table;
}

}  // namespace

extern const attention_kernels attention_table;
constexpr attention_kernels attention_table = make_table();

}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
