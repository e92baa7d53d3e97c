// SPDX-License-Identifier: Apache-2.0
// The heads of k that a worker rotates are those whose blocks it owns, so that of two tokens with one slot the later
// one wins, as in append; the heads of q are shared out by tokens.
#include "common/engine/validate_rotate.hpp"
#include "cpu/cache_ops.hpp"
#include "cpu/code_moves.hpp"
#include "cpu/token_runs.hpp"

namespace bifolio::cpu {
namespace {

/// The cosines and sines of one token.
class token_angles {
 public:
  explicit token_angles(const rotate_append_params& params, const rotate_kernels& kernels) noexcept
      : rotary_(params.rotary), num_tokens_(params.append.k.num_tokens), kernels_(&kernels) {}

  /// Sets the table's part of `how`.
  void of_token(std::int64_t token, head_rotation& how) noexcept {
    const std::int32_t pairs = rotary_.rotary_dim / 2;
    if (pairs == 0) return;
    if (rotary_.axis_of_pair == nullptr) {
      how.cosines = rotary_.cos_sin + row_of(0, token);
      how.sines = how.cosines + pairs;
      return;
    }
    std::int64_t rows[256];
    for (std::int32_t axis = 0; axis < rotary_.num_axes; ++axis) rows[axis] = row_of(axis, token);
    kernels_->gather_pairs(gathered_, rotary_.cos_sin, rows, rotary_.axis_of_pair, pairs);
    kernels_->gather_pairs(gathered_ + pairs, rotary_.cos_sin + pairs, rows, rotary_.axis_of_pair, pairs);
    how.cosines = gathered_;
    how.sines = gathered_ + pairs;
  }

 private:
  [[nodiscard]] std::int64_t row_of(std::int32_t axis, std::int64_t token) const noexcept {
    return std::int64_t{rotary_.positions[axis * num_tokens_ + token]} * rotary_.rotary_dim;
  }

  const rotary_params& rotary_;
  std::int64_t num_tokens_;
  const rotate_kernels* kernels_;
  alignas(64) float gathered_[largest_rotated_head_dim];
};

/// Rotates the heads of one token from rows of a tensor to where they are stored.
class head_rotator {
 public:
  head_rotator(const kernel_table& table, const rotate_append_params& params, const const_tensor_view& rows,
               const code_side& to, const float* weights) noexcept
      : table_(&table), rows_(&rows), to_(to), angles_(params, table.rotate) {
    how_.head_dim = rows.head_dim;
    how_.rotary_dim = params.rotary.rotary_dim;
    how_.rotary_offset = params.rotary.rotary_dim == 0 ? 0 : params.rotary.rotary_offset;
    how_.neighbours = params.rotary.pairing == rope_pairing::gptj;
    how_.weights = weights;
    how_.epsilon = params.norm.epsilon;
  }

  void operator()(std::int64_t token, const code_place& place) noexcept {
    angles_.of_token(token, how_);
    const auto widen = table_->cache.codes.widen[static_cast<std::size_t>(rows_->type)];
    for (std::int32_t head = 0; head < rows_->num_heads; ++head) {
      widen(values_, at(rows_->data, token * rows_->token_stride + head * rows_->head_stride, rows_->type),
            rows_->head_dim);
      table_->rotate.head(values_, how_);
      store_values(table_->cache.codes, to_, place, head, values_);
    }
  }

 private:
  const kernel_table* table_;
  const const_tensor_view* rows_;
  code_side to_;
  head_rotation how_;
  token_angles angles_;
  alignas(64) float values_[largest_rotated_head_dim];
};

void rotate_queries(const kernel_table& table, const rotate_append_params& params, std::int64_t begin,
                    std::int64_t end) noexcept {
  if (params.q.num_heads == 0 || begin == end) return;
  head_rotator rotate(table, params, params.q, code_side::of_rows(params.q_out, strides_of(params.q_out)),
                      params.norm.q_weight);
  for (std::int64_t token = begin; token < end; ++token) rotate(token, {0, token});
}

}  // namespace

errc rotate_append(const kernel_table& table, executor& workers, const rotate_append_params& params) noexcept {
  if (const errc code = validate::rotate_append(params); code != errc::ok) return code;
  if (const errc code = validate::rotate_append_arrays(params); code != errc::ok) return code;
  const append_params& stored = params.append;
  const std::int64_t num_tokens = stored.k.num_tokens;
  if (num_tokens == 0) return errc::ok;
  const kv_layout& layout = stored.kv.layout;
  const bool has_v = !layout.v_in_k;
  const code_side k_plane{static_cast<std::byte*>(stored.kv.k), layout.k, stored.kv.k_scales};
  const std::int64_t q_bytes = num_tokens * params.q.num_heads * params.q.head_dim *
                               static_cast<std::int64_t>(size_of(stored.k.type) + size_of(params.q_out.type));
  run_workers(workers, workers_for(workers, traffic(layout, num_tokens, stored.k.type) + q_bytes),
              [&](std::int32_t worker, std::int32_t num_workers) noexcept {
                head_rotator k(table, params, stored.k, k_plane, params.norm.k_weight);
                plane_mover v(table, stored.kv, !has_v, has_v ? stored.v : stored.k, true);
                for_each_run(stored.slot_mapping, 0, num_tokens, slot_splitter(layout.block_size),
                             [&](const token_run& run) noexcept {
                               if (owner_of(run.block, num_workers) != worker) return;
                               for (std::int64_t i = 0; i < run.count; ++i) k(run.row + i, {run.block, run.offset + i});
                               if (has_v) v(run);
                             });
                rotate_queries(table, params, num_tokens * worker / num_workers,
                               num_tokens * (worker + 1) / num_workers);
              });
  return errc::ok;
}

}  // namespace bifolio::cpu
