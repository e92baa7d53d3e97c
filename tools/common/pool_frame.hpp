// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What one picture of the pool shows, without saying how it is drawn.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tools {

enum class cell_state : std::uint8_t {
  free,    ///< without contents that anyone could use
  cached,  ///< found by the prefix cache, used by nobody
  used,    ///< by one sequence
  shared,  ///< by several
  fenced,  ///< given back, but a step in flight may still touch it
};
inline constexpr int num_cell_states = 5;

struct cell {
  cell_state state = cell_state::free;
  /// free '.', cached ':', fenced '~', used the letter of the sequence, shared the number of sequences ('+' above 9). A
  /// letter of '#': one of more sequences than there are letters.
  char mark = '.';
  friend bool operator==(const cell&, const cell&) = default;
};

/// The inverse of `cell::mark`; nothing for a character that is none.
[[nodiscard]] std::optional<cell> cell_of(char mark) noexcept;

/// The pool of a layer group other than the first.
struct group_frame {
  std::string kind;             ///< "window", "state", …
  std::int64_t block_size = 0;  ///< tokens; of states 1
  std::vector<cell> device{};
  std::vector<cell> host{};
  std::int64_t hits = 0;  ///< blocks, or snapshots, since the start
  std::int64_t evictions = 0;
};

struct pool_frame {
  std::int64_t step = 0;
  std::int64_t block_size = 0;
  std::vector<cell> device;
  std::vector<cell> host;  ///< empty without a host pool; used and shared by swapped sequences, free
  std::string running;     ///< letters
  std::string swapped;     ///< letters
  std::int64_t num_waiting = 0;
  std::int64_t num_tokens = 0;  ///< computed in this step
  std::int64_t lookups = 0;     ///< full blocks of prompts, since the start
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
  std::int64_t preemptions = 0;
  std::int64_t swapped_out_blocks = 0;
  std::int64_t swapped_in_blocks = 0;
  std::int64_t copies = 0;          ///< on write
  std::vector<std::string> news;    ///< of the last steps, the newest last
  std::vector<group_frame> others;  ///< layer groups 1, 2, …; what is above is the first one's

  [[nodiscard]] std::int64_t count(cell_state state) const noexcept;
};

/// For a legend: "free", "cached, idle", ...
[[nodiscard]] const char* name_of(cell_state state) noexcept;

}  // namespace tools
