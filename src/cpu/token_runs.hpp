// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the cache calls of the CPU are made of: workers and who owns a block, runs of tokens in a list of slots, and
/// the mover of such runs between rows and one plane.

#include <bifolio/dtype.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstddef>
#include <cstdint>

#include "common/base/kv_code.hpp"
#include "cpu/code_moves.hpp"
#include "cpu/kernels/kernel_table.hpp"
#include "cpu/move_plan.hpp"

namespace bifolio::inline v0_2::cpu {

/// Bytes moved that are worth one more worker: about 20 µs of copying, which is where a second worker begins
/// to pay (docs/kernels/cache_ops_cpu.md).
inline constexpr std::int64_t bytes_per_worker = std::int64_t{384} << 10;

inline std::int32_t workers_for(const executor& workers, std::int64_t num_bytes) noexcept {
  const std::int64_t worth = num_bytes / bytes_per_worker + 1;
  const std::int32_t concurrency = workers.concurrency();
  return worth < concurrency ? static_cast<std::int32_t>(worth) : concurrency;
}

/// Runs `body(worker, num_workers)`, which must be noexcept.
template <class Body>
void run_workers(executor& workers, std::int32_t num_workers, const Body& body) noexcept {
  struct context {
    const Body* body;
    std::int32_t num_workers;
  } shared{&body, num_workers};
  if (num_workers <= 1) {
    body(0, 1);
    return;
  }
  workers.run(
      num_workers,
      [](void* opaque, std::int32_t worker) noexcept {
        const auto& mine = *static_cast<const context*>(opaque);
        (*mine.body)(worker, mine.num_workers);
      },
      &shared);
}

/// The worker that owns a block: Fibonacci hashing, so that every pattern of ids spreads.
inline std::int32_t owner_of(std::int64_t key, std::int32_t num_workers) noexcept {
  if (num_workers == 1) return 0;
  const std::uint64_t hash = (static_cast<std::uint64_t>(key) * 0x9e3779b97f4a7c15u) >> 32;
  return static_cast<std::int32_t>((hash * static_cast<std::uint64_t>(num_workers)) >> 32);
}

inline std::byte* at(void* base, std::int64_t elements, dtype type) noexcept {
  return static_cast<std::byte*>(base) + elements * static_cast<std::int64_t>(size_of(type));
}
inline const std::byte* at(const void* base, std::int64_t elements, dtype type) noexcept {
  return static_cast<const std::byte*>(base) + elements * static_cast<std::int64_t>(size_of(type));
}

/// Slots to blocks and offsets without a division where block_size is a power of two.
class slot_splitter {
 public:
  explicit slot_splitter(std::int32_t block_size) noexcept : block_size_(block_size) {
    if ((block_size & (block_size - 1)) == 0) {
      while ((1 << shift_) < block_size) ++shift_;
    } else {
      shift_ = -1;
    }
  }
  [[nodiscard]] std::int64_t block_of(std::int64_t slot) const noexcept {
    return shift_ >= 0 ? slot >> shift_ : slot / block_size_;
  }
  [[nodiscard]] std::int64_t block_size() const noexcept { return block_size_; }

 private:
  std::int64_t block_size_;
  std::int32_t shift_ = 0;
};

/// Tokens that follow one another in the rows and in one block.
struct token_run {
  std::int64_t row = 0;
  std::int64_t count = 0;
  std::int64_t block = 0;
  std::int64_t offset = 0;
};

/// Calls `body(run)` for the runs of rows [begin, end), in order; skipped rows belong to none.
template <class Body>
void for_each_run(const std::int64_t* slots, std::int64_t begin, std::int64_t end, const slot_splitter& split,
                  const Body& body) noexcept {
  for (std::int64_t row = begin; row < end;) {
    const std::int64_t slot = slots[row];
    if (slot < 0) {
      ++row;
      continue;
    }
    token_run run{row, 1, split.block_of(slot), 0};
    run.offset = slot - run.block * split.block_size();
    const std::int64_t room = split.block_size() - run.offset;
    while (run.count < room && row + run.count < end && slots[row + run.count] == slot + run.count) ++run.count;
    body(run);
    row += run.count;
  }
}

/// Moves runs of one plane between rows and blocks; the plan of the last length is kept, as most runs are alike. Rows
/// of codes go token by token.
class plane_mover {
 public:
  /// `is_k`: which plane of `kv` the rows belong to.
  template <class Rows>
  plane_mover(const kernel_table& table, const kv_cache_view& kv, bool is_k, const Rows& rows, bool to_cache) noexcept
      : kernels_(&table.cache),
        cache_{static_cast<std::byte*>(is_k ? kv.k : kv.v), is_k ? kv.layout.k : kv.layout.v,
               is_k ? kv.k_scales : kv.v_scales},
        rows_(code_side::of_rows(rows, strides_of(rows))),
        heads_(kv.layout.num_kv_heads),
        to_cache_(to_cache) {
    const dtype stored = cache_.plane.code.type;
    const dtype given = rows_.plane.code.type;
    if (is_plain()) move_ = to_cache ? kernels_->mover(stored, given) : kernels_->mover(given, stored);
  }

  void operator()(const token_run& run) noexcept {
    if (!is_plain()) return move_tokens(run);
    plan_for(run.count);
    const kv_strides& cache = cache_.plane.strides;
    std::byte* const stored =
        at(cache_.base, run.block * cache.block + run.offset * cache.token, cache_.plane.code.type);
    std::byte* const given = at(rows_.base, run.row * rows_.plane.strides.token, rows_.plane.code.type);
    if (to_cache_) {
      move_(stored, given, plan_);
    } else {
      move_(given, stored, plan_);
    }
  }

 private:
  [[nodiscard]] bool is_plain() const noexcept { return detail::is_plain(cache_.plane.code); }
  void move_tokens(const token_run& run) const noexcept {
    for (std::int64_t i = 0; i < run.count; ++i) {
      const code_place stored{run.block, run.offset + i};
      const code_place given{0, run.row + i};
      if (to_cache_) {
        move_token(kernels_->codes, cache_, stored, rows_, given, heads_);
      } else {
        move_token(kernels_->codes, rows_, given, cache_, stored, heads_);
      }
    }
  }
  void plan_for(std::int64_t num_tokens) noexcept {
    if (num_tokens == planned_) return;
    planned_ = num_tokens;
    const tile_shape tile{heads_, num_tokens, cache_.plane.head_dim};
    const kv_strides& cache = cache_.plane.strides;
    const kv_strides& rows = rows_.plane.strides;
    plan_ = make_plan(to_cache_ ? make_nest(tile, rows, cache) : make_nest(tile, cache, rows));
  }

  const cache_kernels* kernels_;
  code_side cache_;
  code_side rows_;
  std::int32_t heads_;
  bool to_cache_;
  move_kernel move_ = nullptr;
  std::int64_t planned_ = 0;
  move_plan plan_;
};

/// Elements of a token in all stored planes.
inline std::int64_t token_elements(const kv_layout& layout) noexcept {
  const std::int64_t dims = std::int64_t{layout.k.head_dim} + (layout.v_in_k ? 0 : layout.v.head_dim);
  return layout.num_kv_heads * dims;
}

/// Bytes of K and V of `num_tokens` tokens, read and written.
inline std::int64_t traffic(const kv_layout& layout, std::int64_t num_tokens, dtype other) noexcept {
  return num_tokens * token_elements(layout) * static_cast<std::int64_t>(size_of(layout.k.code.type) + size_of(other));
}

}  // namespace bifolio::inline v0_2::cpu
