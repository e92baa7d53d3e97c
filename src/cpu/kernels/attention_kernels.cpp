// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/attention_kernels.hpp"

#include "cpu/kernels/attention_tiles.hpp"
#include "cpu/kernels/attention_vectors.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

// Calls `body` with the loops of the call's dtypes. Everything of one call has to come here: they sum in different
// orders.
template <class Key, class Body>
BIFOLIO_INLINE void with_loops(const attention_args& args, const attention_item& item, const attention_scratch& scratch,
                               const Body& body) noexcept {
  constexpr dtype kv_type = dtype_of<Key>;
  const bool one_type = args.q_type == kv_type && args.out_type == kv_type;
  if constexpr (has_tiles<Key>) {
    if (one_type && args.bias == nullptr) {
      tile_item<Key> loops(args, item, scratch);
      return body(loops);
    }
  } else if constexpr (has_pair_dot && __is_same(Key, bfloat16)) {
    if (one_type) {
      vector_item<Key, vector_sums::dots> loops(args, item, scratch);
      return body(loops);
    }
  }
  vector_item<Key, vector_sums::widened> loops(args, item, scratch);
  body(loops);
}

template <class Key>
void run_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_loops<Key>(args, item, scratch, [](auto& loops) { loops.run(); });
}

template <class Key>
void finish_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_loops<Key>(args, item, scratch, [](auto& loops) { loops.finish(); });
}

}  // namespace

extern const attention_kernels attention_table;
const attention_kernels attention_table{
    {&run_item<float>, &run_item<float16>, &run_item<bfloat16>},
    {&finish_item<float>, &finish_item<float16>, &finish_item<bfloat16>},
    &merge_rows,
};

}  // namespace bifolio::cpu::BIFOLIO_ISA
