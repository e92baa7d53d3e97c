// SPDX-License-Identifier: Apache-2.0
// The checks of planning: a spec by itself, and a step's host arrays.
#include <algorithm>
#include <limits>

#include "common/attention/visibility.hpp"
#include "common/base/kv_code.hpp"
#include "common/engine/refusal.hpp"
#include "common/engine/validate_attention.hpp"

namespace bifolio::inline v0_2::validate {
namespace {

errc expect_positive(const char* name, std::int32_t value, const refusal& refuse) {
  if (value >= 1) return errc::ok;
  return refuse(errc::invalid_argument, name, " is ", value, "; it must be at least 1");
}

/// Whether all of [first, last) are in [0, num_blocks). Without a branch per id, so that it is vectorised everywhere: a
/// step of 256 sequences has ten thousands.
bool are_block_ids(const std::int32_t* first, const std::int32_t* last, std::int64_t num_blocks) noexcept {
  constexpr std::int64_t largest = std::numeric_limits<std::int32_t>::max();
  const auto limit = static_cast<std::uint32_t>(std::min(num_blocks - 1, largest));
  std::uint32_t signs = 0;
  for (; first != last; ++first) {
    const auto id = static_cast<std::uint32_t>(*first);
    signs |= id | (limit - id);
  }
  return (signs >> 31) == 0;
}

/// blocks_for in 32 bits, whose division takes half as long; a step asks some hundred times.
std::int64_t blocks_of(std::int64_t num_tokens, std::int32_t block_size) noexcept {
  const auto size = static_cast<std::uint32_t>(block_size);
  return (static_cast<std::uint32_t>(num_tokens) + size - 1) / size;
}

// The dtypes and codes of a spec, and what v_in_k asks of them.
errc check_codes(const attention_spec& spec, const refusal& refuse) {
  const struct {
    const char* name;
    dtype type;
    bool is_tensor;
  } all[] = {{"q", spec.q_type, true},
             {"k", spec.k_code.type, false},
             {"v", spec.v_code.type, false},
             {"out", spec.out_type, true}};
  for (const auto& each : all) {
    if (each.is_tensor ? is_tensor_dtype(each.type) : is_dtype(each.type)) continue;
    return refuse_dtype(each.name, each.type, each.is_tensor ? tensor_dtype_names : dtype_names, refuse);
  }
  if (!detail::is_supported(spec.k_code)) {
    return refuse(errc::unsupported, detail::unsupported_code("K", spec.k_code));
  }
  if (!detail::is_supported(spec.v_code)) {
    return refuse(errc::unsupported, detail::unsupported_code("V", spec.v_code));
  }
  if (spec.v_in_k && spec.k_code != spec.v_code) {
    return refuse(
        errc::invalid_argument, "the code of V is ", [&](std::string& text) { text += to_string(spec.v_code); },
        "; where V is part of K it must be that of K, ", [&](std::string& text) { text += to_string(spec.k_code); });
  }
  if (!detail::suits_records(spec.k_code, spec.v_code, spec.qk_head_dim, spec.v_head_dim, spec.v_in_k)) {
    return refuse(errc::invalid_argument, detail::unsuitable_records(spec.qk_head_dim, spec.v_head_dim, spec.v_in_k));
  }
  if (spec.v_in_k && spec.v_head_dim > spec.qk_head_dim) {
    return refuse(errc::invalid_argument, "v_head_dim is ", spec.v_head_dim,
                  "; where V is part of K it must be at most qk_head_dim, ", spec.qk_head_dim);
  }
  return errc::ok;
}

}  // namespace

errc attention_spec_alone(const attention_spec& spec, std::string* sentence) {
  const refusal refuse(sentence);
  if (const errc code = expect_positive("num_q_heads", spec.num_q_heads, refuse); code != errc::ok) return code;
  if (const errc code = expect_positive("num_kv_heads", spec.num_kv_heads, refuse); code != errc::ok) return code;
  if (const errc code = expect_positive("qk_head_dim", spec.qk_head_dim, refuse); code != errc::ok) return code;
  if (const errc code = expect_positive("v_head_dim", spec.v_head_dim, refuse); code != errc::ok) return code;
  if (const errc code = expect_positive("block_size", spec.block_size, refuse); code != errc::ok) return code;
  if (spec.num_q_heads % spec.num_kv_heads != 0) {
    return refuse(errc::invalid_argument, "num_q_heads is ", spec.num_q_heads,
                  "; it must be a multiple of num_kv_heads, ", spec.num_kv_heads);
  }
  constexpr std::int64_t max_row = std::int64_t{1} << 31;
  for (const bool is_qk : {true, false}) {
    const std::int64_t row = std::int64_t{spec.num_q_heads} * (is_qk ? spec.qk_head_dim : spec.v_head_dim);
    if (row <= max_row) continue;
    return refuse(errc::invalid_argument, "num_q_heads times ", is_qk ? "qk_head_dim" : "v_head_dim", " is ", row,
                  "; the largest allowed value is ", max_row);
  }
  return check_codes(spec, refuse);
}

errc attention_batch(const attention_spec& spec, const host_step_view& batch, std::int64_t num_blocks,
                     std::string* sentence) {
  const refusal refuse(sentence);
  if (num_blocks < 0) {
    return refuse(errc::invalid_argument, "num_blocks is ", num_blocks, "; it must not be negative");
  }
  if (batch.num_seqs < 0) {
    return refuse(errc::invalid_argument, "num_seqs is ", batch.num_seqs, "; it must not be negative");
  }
  if (batch.num_tokens < 0) {
    return refuse(errc::invalid_argument, "num_tokens is ", batch.num_tokens, "; it must not be negative");
  }
  if (batch.num_seqs == 0) {
    if (batch.num_tokens == 0) return errc::ok;
    return refuse(errc::invalid_argument, "num_tokens is ", batch.num_tokens,
                  " in a batch of no sequences; it must be 0");
  }
  if (batch.query_start_loc == nullptr || batch.seq_lens == nullptr) {
    return refuse(errc::invalid_argument, batch.seq_lens == nullptr ? "seq_lens" : "query_start_loc",
                  " is null in a batch of ", batch.num_seqs, " sequences");
  }
  if (batch.block_table_stride < 0) {
    return refuse(errc::invalid_argument, "block_table_stride is ", batch.block_table_stride,
                  "; it must not be negative");
  }
  if (batch.query_start_loc[0] != 0) {
    return refuse(errc::invalid_argument, "query_start_loc starts at ", batch.query_start_loc[0],
                  "; it must start at 0");
  }
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (batch.query_start_loc[seq + 1] < batch.query_start_loc[seq]) {
      return refuse(errc::invalid_argument, "query_start_loc decreases from ", batch.query_start_loc[seq], " to ",
                    batch.query_start_loc[seq + 1], " at sequence ", seq);
    }
  }
  if (batch.query_start_loc[batch.num_seqs] != batch.num_tokens) {
    return refuse(errc::invalid_argument, "query_start_loc ends at ", batch.query_start_loc[batch.num_seqs],
                  "; num_tokens is ", batch.num_tokens);
  }
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    const std::int64_t seq_len = batch.seq_lens[seq];
    if (seq_len < 0) {
      return refuse(errc::invalid_argument, "seq_lens[", seq, "] is ", seq_len, "; it must not be negative");
    }
    const std::int64_t needed = blocks_of(seq_len, spec.block_size);
    if (needed > batch.block_table_stride) {
      return refuse(errc::out_of_range, "seq_lens[", seq, "] is ", seq_len, " and needs ", needed,
                    " table entries; a row has ", batch.block_table_stride);
    }
    if (needed > 0 && batch.block_tables == nullptr) {
      return refuse(errc::invalid_argument, "block_tables is null and sequence ", seq, " holds ", seq_len, " tokens");
    }
    const std::int64_t query_len = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    if (query_len == 0) continue;
    const std::int64_t first = attn::first_query_position(batch.query_positions, seq, query_len, seq_len);
    constexpr std::int64_t end_of_positions = std::int64_t{1} << 31;
    if (first + query_len > end_of_positions) {
      return refuse(errc::invalid_argument, "query_positions[", seq, "] is ", first, " and the sequence has ",
                    query_len, " new tokens; their positions must be below ", end_of_positions);
    }
    const attn::visible_range visible = attn::window_of(spec).of_run(first, first + query_len - 1, seq_len);
    if (visible.begin >= visible.end) continue;
    const std::int32_t* row = batch.block_tables + seq * batch.block_table_stride;
    const std::int64_t end = blocks_of(visible.end, spec.block_size);
    if (are_block_ids(row + visible.begin / spec.block_size, row + end, num_blocks)) continue;
    for (std::int64_t entry = visible.begin / spec.block_size; entry < end; ++entry) {
      if (row[entry] < 0 || row[entry] >= num_blocks) {
        return refuse(errc::out_of_range, "entry ", entry, " of the block table of sequence ", seq, " is ", row[entry],
                      "; block ids must be in [0, ", num_blocks, ")");
      }
    }
  }
  return errc::ok;
}

}  // namespace bifolio::inline v0_2::validate
