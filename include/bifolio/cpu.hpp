// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is specific to the CPU backend: the instruction sets of its kernels. Which threads compute is the executor's
/// matter (bifolio/executor.hpp).

#include <bifolio/detail/cpu_isas.hpp>
#include <bifolio/export.hpp>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace bifolio::inline v0_2 {

/// CPU instruction sets with kernels of their own, in rising order of preference: `baseline`, `avx2`, `avx512`, …, one
/// enumerator per row of bifolio/detail/cpu_isas.hpp.
enum class cpu_isa : std::uint8_t {
#define BIFOLIO_CPU_ISA_ENUMERATOR(name, ...) name,
  BIFOLIO_CPU_ISAS(BIFOLIO_CPU_ISA_ENUMERATOR)
#undef BIFOLIO_CPU_ISA_ENUMERATOR
};

/// The enumerator's name: "baseline", "avx2", …
[[nodiscard]] BIFOLIO_API std::string_view to_string(cpu_isa isa) noexcept;
/// Throws `error` (invalid_argument, with all names).
[[nodiscard]] BIFOLIO_API cpu_isa parse_isa(std::string_view text);
/// All of them, whether or not this build has them and this machine runs them.
[[nodiscard]] BIFOLIO_API std::span<const cpu_isa> known_isas() noexcept;
/// Those compiled in and supported by this machine; the last is the best.
[[nodiscard]] BIFOLIO_API std::vector<cpu_isa> supported_isas();
/// The best supported one, or the one that the environment variable BIFOLIO_CPU_ISA names. Throws `error` (unsupported,
/// with the list of supported ones) when that cannot run here.
[[nodiscard]] BIFOLIO_API cpu_isa default_isa();

}  // namespace bifolio::inline v0_2
