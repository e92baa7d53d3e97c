// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A debugging aid for engines that put a manager and a cache engine together by hand. A manager announces copies (copy
/// on write, swaps), and somebody else carries them out; a copy that is forgotten shows as wrong text, much later. Give
/// one audit to both:
///
///   copy_audit audit;
///   kv_cache_manager manager({…, .audit = &audit});
///   cache_engine engine(*where, {…, .audit = &audit});
///
/// Tokens that were computed after a copy was announced are committed, but nobody has carried that copy out: then it
/// was forgotten, and is reported when the sequence is built again, forked, swapped or freed, to the log
/// (bifolio/log.hpp) and by `missed`. Answers and plans are the same with an audit and without.

#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

enum class copy_kind : std::uint8_t { on_write, swap_out, swap_in };

struct announced_copy {
  copy_kind kind = copy_kind::on_write;
  std::int32_t group = 0;  ///< layer group
  block_copy copy{};
  seq_id seq = invalid_seq;     ///< whose tokens are in the block
  std::int64_t num_tokens = 0;  ///< that the sequence had then
};

/// "copy on write of block 3 to block 8, announced when sequence 5 had 17 tokens, was never carried out".
[[nodiscard]] BIFOLIO_API std::string to_string(const announced_copy& what);

/// Thread-safety: all functions from any thread.
class BIFOLIO_API copy_audit {
 public:
  /// Copies that were never carried out, in the order in which that was found; the first `max_kept` of them.
  [[nodiscard]] std::vector<announced_copy> missed() const;
  [[nodiscard]] std::int64_t num_missed() const noexcept;
  /// Copies that are still to be carried out.
  [[nodiscard]] std::int64_t num_outstanding() const noexcept;
  /// failed_precondition with the first copy that was missed, and how many there are; empty when there is none.
  [[nodiscard]] std::optional<error> find_problem() const;

  static constexpr std::size_t max_kept = 1000;

  /// Copies of this layer group are not watched from now on: it stores nothing. For groups without layers, which are
  /// indices of texts; a `model_cache` calls it for its own. Of numbers that are no group's nothing changes.
  void ignore_group(std::int32_t group) noexcept;

  /// Called by `cache_engine`, and by those who move blocks without one.
  void carried_out(copy_kind kind, std::int32_t group, std::span<const block_copy> copies) noexcept;

  // Called by `kv_cache_manager`. Where memory for an entry is lacking, that copy is not watched.
  void announce(copy_kind kind, std::int32_t group, std::span<const block_copy> copies, seq_id seq,
                std::int64_t num_tokens) noexcept;
  void forget(copy_kind kind, std::int32_t group, std::span<const block_copy> copies) noexcept;
  void fork(seq_id parent, seq_id child) noexcept;
  void free(seq_id seq) noexcept;
  /// Takes out the copies of a sequence that were announced before it had more than `num_committed` tokens.
  [[nodiscard]] std::vector<announced_copy> take_due(seq_id seq, std::int64_t num_committed) noexcept;
  void report(const announced_copy& what) noexcept;

 private:
  mutable std::mutex mutex_;
  std::vector<announced_copy> outstanding_;
  std::vector<announced_copy> missed_;
  std::int64_t num_missed_ = 0;
  std::uint32_t ignored_groups_ = 0;  // a bit each
};

}  // namespace bifolio::inline v0_2
