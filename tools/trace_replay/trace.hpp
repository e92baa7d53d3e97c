// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A serving trace in memory: when requests arrived, how long they were, and the ids of the blocks of their prompts.
///
/// Two formats are read. Mooncake's JSON lines: `timestamp` in ms, `input_length` and `output_length` in tokens, and
/// `hash_ids`, one integer for each block of the prompt (512 tokens in the published traces), a partly filled last one
/// included; an id names a block together with everything before it. Azure's CSV: TIMESTAMP, ContextTokens and
/// GeneratedTokens, without ids. Fields and columns besides these are ignored.

#include <bifolio/types.hpp>
#include <cstdint>
#include <istream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace trace_replay {

enum class trace_format : std::uint8_t { automatic, mooncake, azure };

struct trace_request {
  double arrival_us = 0;  ///< since the trace's first moment
  std::int32_t num_input_tokens = 0;
  std::int32_t num_output_tokens = 0;
  std::int64_t first_id = 0;  ///< into trace::ids
  std::int32_t num_ids = 0;
};

struct trace {
  trace_format format = trace_format::automatic;
  std::vector<trace_request> requests;  ///< in the order of the file
  /// Of all requests one after another, numbered by first appearance from 0. As token ids, which is what they are to
  /// the prefix cache when it is replayed alone.
  std::vector<bifolio::token_id> ids;
  std::int32_t num_distinct_ids = 0;
  /// Whether each id always follows the same id, and none occurs twice in a request: what makes an id a prefix.
  bool ids_name_prefixes = true;

  [[nodiscard]] std::span<const bifolio::token_id> ids_of(const trace_request& one) const noexcept {
    return {ids.data() + one.first_id, static_cast<std::size_t>(one.num_ids)};
  }
};

/// Reads at most `max_requests` of them (0: all). `name` appears in the sentences of errors, with the line number.
/// Throws `input_error` for a line that is not as above, a number that is negative or too large, or no request at all.
[[nodiscard]] trace read_trace(std::istream& in, std::string_view name, trace_format format, std::int64_t max_requests);
[[nodiscard]] trace read_trace_file(const std::string& path, trace_format format, std::int64_t max_requests);

}  // namespace trace_replay
