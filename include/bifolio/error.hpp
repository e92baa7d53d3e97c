// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How bifolio says no. Wrong use and a broken environment throw `error` at construction, configuration and planning;
/// scarcity is a value (`alloc_status`); calls made once per layer return an `errc` and never throw. The library never
/// prints, exits or aborts.

#include <bifolio/export.hpp>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

/// What went wrong, for programs. The sentence for people is in `error::what()`.
enum class errc : std::int32_t {
  ok = 0,
  invalid_argument,     ///< a value outside what the call documents
  out_of_range,         ///< an index or length past the end of what it points into
  not_found,            ///< unknown, stale or foreign id
  already_exists,       ///< the thing to be created is there
  failed_precondition,  ///< right call, wrong state
  out_of_memory,        ///< host or device memory
  unsupported,          ///< impossible here, with the reason
  device_lost,          ///< a sticky device error; every later call fails with the first cause
  internal,             ///< an invariant of bifolio is broken: please report
};

/// Name of a code, e.g. "invalid_argument". Never null.
[[nodiscard]] BIFOLIO_API std::string_view to_string(errc code) noexcept;

/// The one exception type: a code and a sentence with the value received and the values allowed. A refusal for whose
/// sentence the host has no memory keeps its code; what() then says the code's name, and that the sentence is missing.
class BIFOLIO_API error : public std::runtime_error {
 public:
  error(errc code, const std::string& message);
  /// Without a sentence. Allocates nothing with libstdc++, whose empty std::runtime_error needs no memory.
  explicit error(errc code);
  ~error() override;
  [[nodiscard]] errc code() const noexcept { return code_; }
  [[nodiscard]] const char* what() const noexcept override;

 private:
  errc code_;
};

/// Answer of everything that takes blocks. Scarcity is not an error.
enum class alloc_status : std::uint8_t {
  ok,     ///< done (or: would succeed now)
  later,  ///< not now; freeing or preempting others can make it succeed
  never,  ///< larger than the whole pool can ever give
};

[[nodiscard]] BIFOLIO_API std::string_view to_string(alloc_status status) noexcept;

}  // namespace bifolio::inline v0_2
