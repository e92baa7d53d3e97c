// SPDX-License-Identifier: Apache-2.0
// A serving trace, in the format that the first byte says.
#include "trace.hpp"

#include <sstream>
#include <string>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"

BIFOLIO_FUZZ_TARGET(trace) {
  using namespace bifolio::fuzz;
  choices from(input);
  constexpr trace_replay::trace_format formats[] = {
      trace_replay::trace_format::automatic, trace_replay::trace_format::mooncake, trace_replay::trace_format::azure};
  const std::uint8_t form = from.byte();
  const trace_replay::trace_format format = formats[form % 3];
  const std::int64_t max_requests = from.below(4);
  const auto read = [&] {
    if (form >= 128) {
      return trace_replay::read_trace_file(write_scratch("trace", from.rest()).string(), format, max_requests);
    }
    std::istringstream text{std::string(text_of(from.rest()))};
    return trace_replay::read_trace(text, "input", format, max_requests);
  };
  try {
    const trace_replay::trace all = read();
    if (all.requests.empty()) flaw("a trace without requests was accepted");
    for (const trace_replay::trace_request& one : all.requests) {
      if (one.num_input_tokens < 0 || one.num_output_tokens < 0) flaw("a negative length was accepted");
      for (const bifolio::token_id id : all.ids_of(one)) {
        if (static_cast<std::int32_t>(id) >= all.num_distinct_ids) flaw("an id that does not exist");
      }
    }
  } catch (const tools::input_error&) {
  }
}
