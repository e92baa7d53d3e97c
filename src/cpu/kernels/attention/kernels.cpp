// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/attention/kernels.hpp"

#include "cpu/kernels/attention/tiles.hpp"
#include "cpu/kernels/attention/vectors.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

// The loops that compute a call; `one_type`: queries, KV cache and output have the same dtype.
template <class Key>
constexpr attention_loops loops_of(bool one_type) noexcept {
  if (one_type && has_tiles<Key>) return attention_loops::tiles;
  if (one_type && has_pair_dot && __is_same(Key, bfloat16)) return attention_loops::dots;
  return attention_loops::vectors;
}

// Calls `body` with the loops of the call's dtypes. All work of a call must go through here, because the loops sum in
// different orders.
template <class Key, class Body>
BIFOLIO_INLINE void with_loops(const attention_args& args, const attention_item& item, const attention_scratch& scratch,
                               const Body& body) noexcept {
  constexpr dtype kv_type = dtype_of<Key>;
  constexpr attention_loops one_type_loops = loops_of<Key>(true);
  const bool one_type = args.q_type == kv_type && args.out_type == kv_type;
  if constexpr (one_type_loops == attention_loops::tiles) {
    if (one_type && args.bias == nullptr) {
      tile_mainloop<Key> loops(args, item, scratch);
      return body(loops);
    }
  } else if constexpr (one_type_loops == attention_loops::dots) {
    if (one_type) {
      vector_mainloop<Key, vector_sums::dots> loops(args, item, scratch);
      return body(loops);
    }
  }
  vector_mainloop<Key, vector_sums::widened> loops(args, item, scratch);
  body(loops);
}

template <class Key>
void run_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_loops<Key>(args, item, scratch, [](auto& loops) { loops.run(); });
}

template <class Key>
void combine_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_loops<Key>(args, item, scratch, [](auto& loops) { loops.combine_items(); });
}

constexpr attention_kernels make_table() noexcept {
  attention_kernels table = {};
  table.merge = &merge_rows;
  for (const dtype type : all_dtypes) {
    const auto at = static_cast<std::size_t>(type);
    visit_dtype(type, [&](auto traits) {
      using key = typename decltype(traits)::storage;
      table.run[at] = &run_item<key>;
      table.combine[at] = &combine_item<key>;
      table.loops[at][0] = loops_of<key>(false);
      table.loops[at][1] = loops_of<key>(true);
    });
  }
  return table;
}

}  // namespace

extern const attention_kernels attention_table;
constexpr attention_kernels attention_table = make_table();

}  // namespace bifolio::cpu::BIFOLIO_ISA
