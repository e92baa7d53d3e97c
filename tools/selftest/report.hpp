// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What was checked and what came of it, as data; and the same as text for a terminal, Markdown or JSON.

#include <array>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace selftest {

enum class output_format : std::uint8_t { text, md, json };

/// Calls that move stored numbers: every byte must be that of the naive model.
enum class operation : std::uint8_t { append, gather, copy, convert, swap };
inline constexpr operation all_operations[] = {operation::append, operation::gather, operation::copy,
                                               operation::convert, operation::swap};
[[nodiscard]] std::string_view to_string(operation value) noexcept;

/// What must hold of an attention call. All but `bounds` compare bits.
enum class promise : std::uint8_t {
  bounds,      ///< error against the float64 oracle within the published bound; nothing written outside the outputs
  repeats,     ///< the same call again, planned again or not
  threads,     ///< other numbers of threads, other executors
  blocks,      ///< other physical blocks and other strides of the block table
  neighbours,  ///< other sequences in the batch, in another order
  chunks,      ///< the prompt cut into other chunks
};
inline constexpr promise all_promises[] = {promise::bounds, promise::repeats,    promise::threads,
                                           promise::blocks, promise::neighbours, promise::chunks};
inline constexpr std::size_t num_promises = std::size(all_promises);
[[nodiscard]] std::string_view to_string(promise value) noexcept;

inline constexpr std::string_view no_isa = "-";  ///< where the ISA of a CPU would stand, for a GPU

struct tally {
  std::int64_t num_compared = 0;
  std::int64_t num_failed = 0;
};

struct cache_row {
  std::string device, isa;
  operation what = operation::append;
  tally cases;
};

/// Largest error as a share of its bound, and the case that has it; empty when nothing was judged.
struct worst_error {
  std::optional<double> share;
  std::string case_name;
};

struct attention_row {
  std::string device, isa, kernel;
  std::array<tally, num_promises> promises{};
  worst_error of_f32;     ///< of outputs in float32
  worst_error of_narrow;  ///< of 16-bit outputs: their one rounding is most of the bound, so a share near 1 is usual

  [[nodiscard]] tally& of(promise value) noexcept { return promises[static_cast<std::size_t>(value)]; }
  [[nodiscard]] const tally& of(promise value) const noexcept { return promises[static_cast<std::size_t>(value)]; }
};

struct failure {
  std::string device, isa;
  std::string what;       ///< the operation, or the kernels
  std::string broken;     ///< "bytes", or the promise
  std::string case_name;  ///< for --case
  std::string text;
};

struct report {
  std::vector<std::pair<std::string, std::string>> machine;
  std::uint64_t seed = 0;
  double seconds = 0;  ///< that the checks took
  std::vector<cache_row> cache;
  std::vector<attention_row> attention;
  std::vector<failure> failures;  ///< the first `max_failures`
  std::int64_t num_failures = 0;
  std::vector<std::string> not_reached;  ///< "device: kernel", known to the backend and met by no case
  std::vector<std::string> left_out;     ///< sentences
  bool strict = false;                   ///< kernels that no case reached are a failure

  static constexpr std::size_t max_failures = 50;

  /// The row of this name, made when it is not there.
  [[nodiscard]] cache_row& row(const std::string& device, const std::string& isa, operation what);
  [[nodiscard]] attention_row& row(const std::string& device, const std::string& isa, const std::string& kernel);
  void add(failure what);
  [[nodiscard]] std::int64_t num_checks() const noexcept;
  [[nodiscard]] bool passed() const noexcept { return num_failures == 0 && (!strict || not_reached.empty()); }
};

/// The command that runs one case again.
[[nodiscard]] std::string command_of(const report& said, const std::string& device, const std::string& isa,
                                     const std::string& case_name);

void print(std::ostream& out, const report& said, output_format format);

}  // namespace selftest
