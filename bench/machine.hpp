// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a reader must know of the machine to judge a number.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bifolio::bench {

/// Names and values: cpu, logical cpus, load at the start, best ISA, compiler, library version, date.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> machine_facts();

/// "avx2, amx (default: the best)": the instruction sets that an option takes.
[[nodiscard]] std::string isa_choice();

/// Bytes that do not fit the last-level cache: a quarter more than what the system says of it, `least` at the least.
[[nodiscard]] std::int64_t bytes_beyond_cache(std::int64_t least) noexcept;

}  // namespace bifolio::bench
