// SPDX-License-Identifier: Apache-2.0
// One small attention call against the float64 oracle, within the published bounds of each element, on every
// instruction set of this machine; those of one family give the same bits in any placement.
#include <string>

#include "choices.hpp"
#include "conformance/attention_case.hpp"
#include "fuzz_target.hpp"

BIFOLIO_FUZZ_TARGET(attention) {
  using namespace bifolio;
  fuzz::choices from(input);
  test::attention_case c{};
  c.what = "fuzz";
  c.statistical = false;  // a case may be one row, and a search finds the unlucky ones
  c.num_kv_heads = 1 + from.below(2);
  c.group_size = 1 + from.below(5);
  c.head_dim = 1 + from.below(160);
  const std::uint8_t planes = from.byte();
  if ((planes & 1) != 0) {
    c.v_in_k = (planes & 2) != 0;
    c.v_head_dim = c.v_in_k ? 1 + from.byte() % c.head_dim : 1 + from.below(160);
  }
  c.block_size = 1 + from.below(40);
  c.q_type = tensor_dtypes[from.byte() % std::size(tensor_dtypes)];
  c.kv_type = tensor_dtypes[from.byte() % std::size(tensor_dtypes)];
  c.out_type = tensor_dtypes[from.byte() % std::size(tensor_dtypes)];
  constexpr test::arrangement layouts[] = {test::arrangement::hnd, test::arrangement::nhd, test::arrangement::x_split};
  c.layout = layouts[from.below(3)];
  const std::uint8_t options = from.byte();
  c.causal = (options & 1) == 0;
  if ((options & 2) != 0) c.window_left = from.below(100);
  if ((options & 4) != 0) c.window_right = from.below(50);
  if ((options & 8) != 0) c.soft_cap = 0.25f * static_cast<float>(1 + from.below(200));
  c.alibi = (options & 16) != 0;
  c.sinks = (options & 32) != 0;
  c.lse = (options & 64) == 0;
  constexpr test::bias_kind biases[] = {test::bias_kind::none,     test::bias_kind::none,    test::bias_kind::full,
                                        test::bias_kind::one_head, test::bias_kind::one_row, test::bias_kind::masked};
  c.bias = biases[from.below(6)];
  constexpr test::value_kind values[] = {test::value_kind::normal,       test::value_kind::normal,
                                         test::value_kind::equal_logits, test::value_kind::dominant_key,
                                         test::value_kind::huge_logits,  test::value_kind::denormal};
  c.values = values[from.below(6)];
  c.seed = from.byte();
  const int num_seqs = 1 + from.below(4);
  for (int i = 0; i < num_seqs; ++i) {
    // Mostly short, since the oracle takes most of the time; some are longer than a split of 512 keys.
    const std::int32_t seq_len = from.byte() % 64 * (from.below(16) == 0 ? 16 : 1);
    c.seqs.push_back({.query_len = std::min(seq_len, static_cast<std::int32_t>(from.below(7))), .seq_len = seq_len});
  }
  const std::string problem = test::check_attention(c, from.byte());
  if (!problem.empty()) fuzz::flaw(problem);
}
