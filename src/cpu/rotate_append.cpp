// SPDX-License-Identifier: Apache-2.0
// The heads of k that a worker rotates are those whose blocks it owns, so that of two tokens with one slot the later
// one wins, as in append; the heads of q are shared out by tokens.
#include <algorithm>

#include "common/base/kv_code.hpp"
#include "common/engine/validate_rotate.hpp"
#include "cpu/cache_ops.hpp"
#include "cpu/code_moves.hpp"
#include "cpu/token_runs.hpp"

namespace bifolio::inline v0_2::cpu {
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

/// Rotates the heads of one token from rows of a tensor to where they are stored: some at once, as far as they lie next
/// to one another and their values fit.
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
    const std::int32_t dims = rows.head_dim;
    if (rows.head_stride == dims) heads_at_once_ = std::min(rows.num_heads, largest_rotated_head_dim / dims);
    const kv_strides& strides = to.plane.strides;
    stores_runs_ = detail::is_plain(to.plane.code) && strides.head == dims && strides.dim == 1 && strides.chunk == dims;
  }

  void operator()(std::int64_t token, const code_place& place) noexcept {
    angles_.of_token(token, how_);
    const auto widen = table_->cache.codes.widen[static_cast<std::size_t>(rows_->type)];
    const std::int32_t dims = rows_->head_dim;
    for (std::int32_t first = 0; first < rows_->num_heads; first += heads_at_once_) {
      const std::int32_t count = std::min(heads_at_once_, rows_->num_heads - first);
      widen(values_, at(rows_->data, token * rows_->token_stride + first * rows_->head_stride, rows_->type),
            std::int64_t{count} * dims);
      for (std::int32_t i = 0; i < count; ++i) table_->rotate.head(values_ + i * dims, how_);
      store(place, first, count);
    }
  }

 private:
  void store(const code_place& place, std::int32_t first, std::int32_t count) noexcept {
    const std::int32_t dims = rows_->head_dim;
    if (!stores_runs_) {
      for (std::int32_t i = 0; i < count; ++i) {
        store_values(table_->cache.codes, to_, place, first + i, values_ + i * dims);
      }
      return;
    }
    const kv_strides& strides = to_.plane.strides;
    const dtype type = to_.plane.code.type;
    table_->cache.codes.narrow[static_cast<std::size_t>(type)](
        at(to_.base, place.block * strides.block + place.token * strides.token + first * strides.head, type), values_,
        std::int64_t{count} * dims);
  }

  const kernel_table* table_;
  const const_tensor_view* rows_;
  code_side to_;
  head_rotation how_;
  token_angles angles_;
  std::int32_t heads_at_once_ = 1;  // as their values fit
  bool stores_runs_ = false;        // heads next to one another are stored next to one another
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

}  // namespace bifolio::inline v0_2::cpu
