// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.hpp"

#include <array>
#include <bifolio/error.hpp>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

#include "common/base/refuse.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace bifolio::inline v0_2::cpu {
namespace {

struct cpuid_registers {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
};

// Zeros for a leaf that this processor does not have, or that no processor but x86 has.
cpuid_registers cpuid([[maybe_unused]] unsigned leaf, [[maybe_unused]] unsigned subleaf) noexcept {
  cpuid_registers found;
#if defined(__x86_64__)
  if (__get_cpuid_count(leaf, subleaf, &found.a, &found.b, &found.c, &found.d) == 0) return {};
#endif
  return found;
}

bool has_bits(unsigned value, unsigned bits) noexcept { return (value & bits) == bits; }

// Whether the operating system saves these registers (XCR0). A feature counts only then (Intel SDM volume 1, 14.3).
bool saves_registers([[maybe_unused]] std::uint64_t state) noexcept {
#if defined(__x86_64__)
  constexpr unsigned osxsave = 1u << 27;
  if (!has_bits(cpuid(1, 0).c, osxsave)) return false;
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (((static_cast<std::uint64_t>(high) << 32) | low) & state) == state;
#else
  return false;
#endif
}

// Linux hands out the 8 KiB of tile registers only to processes that request them (since 5.16, "Using XSTATE features
// in user space applications"); threads inherit the permission. Refused where an alternate signal stack has no room for
// them.
bool may_use_tiles() noexcept {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// The tests that rows of cpu_isas.hpp name: what their ISA needs in addition to the one that it extends (Intel SDM
// volume 2, CPUID).

bool always() noexcept { return true; }

bool has_avx2() noexcept {
  constexpr unsigned fma_avx_f16c = (1u << 12) | (1u << 28) | (1u << 29);
  constexpr unsigned bmi1_avx2_bmi2 = (1u << 3) | (1u << 5) | (1u << 8);
  constexpr std::uint64_t ymm = 0x6;
  return has_bits(cpuid(1, 0).c, fma_avx_f16c) && has_bits(cpuid(7, 0).b, bmi1_avx2_bmi2) && saves_registers(ymm);
}

bool has_avx_vnni() noexcept {
  constexpr unsigned avx_vnni = 1u << 4;
  return has_bits(cpuid(7, 1).a, avx_vnni);
}

bool has_avx512() noexcept {
  constexpr unsigned f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
  constexpr std::uint64_t zmm_and_masks = 0xe6;
  return has_bits(cpuid(7, 0).b, f_dq_bw_vl) && saves_registers(zmm_and_masks);
}

bool has_avx512_bf16() noexcept {
  constexpr unsigned bf16 = 1u << 5;
  constexpr unsigned vbmi_vnni = (1u << 1) | (1u << 11);  // all but Cooper Lake have all three
  return has_bits(cpuid(7, 1).a, bf16) && has_bits(cpuid(7, 0).c, vbmi_vnni);
}

// A Xeon of 2023 (family 6, model 207) takes 2.14 cycles for a dot product of 16 bf16 pairs and half a cycle for 16
// float32 multiply-adds: `avx512`, which widens bf16, is the faster there, in prefill 1.7 times. No other one of
// Intel's has been measured.
bool has_slow_pair_dot() noexcept {
  const cpuid_registers vendor = cpuid(0, 0);
  return vendor.b == 0x756e6547 && vendor.d == 0x49656e69 && vendor.c == 0x6c65746e;  // GenuineIntel
}

bool has_amx() noexcept {
  constexpr unsigned bf16_tile = (1u << 22) | (1u << 24);
  constexpr std::uint64_t tiles = 0x60000;
  return has_bits(cpuid(7, 0).d, bf16_tile) && saves_registers(tiles) && may_use_tiles();
}

bool has_amx_fp16() noexcept {
  constexpr unsigned fp16 = 1u << 21;
  return has_bits(cpuid(7, 1).a, fp16);
}

bool has_asimd() noexcept {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long asimd = 1ul << 1;
  return (getauxval(AT_HWCAP) & asimd) != 0;
#elif defined(__aarch64__)
  return true;  // part of every 64-bit Arm system that has no HWCAP
#else
  return false;
#endif
}

bool has_bf16() noexcept {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long i8mm_bf16 = (1ul << 13) | (1ul << 14);  // Armv8.6 has both
  return (getauxval(AT_HWCAP2) & i8mm_bf16) == i8mm_bf16;
#else
  return false;
#endif
}

// SVE with its BF16 and I8MM instructions, and vectors of 256 bits: those of the calling thread, which the threads that
// it starts inherit.
bool has_sve256() noexcept {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long sve = 1ul << 22;
  constexpr unsigned long sve_i8mm_bf16 = (1ul << 9) | (1ul << 12);
  if ((getauxval(AT_HWCAP) & sve) == 0 || (getauxval(AT_HWCAP2) & sve_i8mm_bf16) != sve_i8mm_bf16) return false;
  constexpr int get_vector_length = 51;  // PR_SVE_GET_VL: bytes in the lower 16 bits
  const int found = prctl(get_vector_length);
  return found >= 0 && (found & 0xffff) == 32;
#else
  return false;
#endif
}

// runs_<isa>(): whether this machine runs it.
constexpr bool runs_none() noexcept { return true; }
#define BIFOLIO_RUNS(name, processor, extended, test) \
  bool runs_##name() noexcept { return runs_##extended() && test(); }
BIFOLIO_CPU_ISAS(BIFOLIO_RUNS)
#undef BIFOLIO_RUNS

struct isa_row {
  cpu_isa isa;
  std::string_view name;
  bool (*runs)() noexcept;
  const kernel_table& (*kernels)() noexcept;  // null: left out of this build
};

// BIFOLIO_HAS_ISA_<isa> is 1 or 0, from CMake.
#define BIFOLIO_KERNELS_IF_1(name) &name::kernels
#define BIFOLIO_KERNELS_IF_0(name) nullptr
#define BIFOLIO_KERNELS_IF_(built, name) BIFOLIO_KERNELS_IF_##built(name)
#define BIFOLIO_KERNELS_IF(built, name) BIFOLIO_KERNELS_IF_(built, name)
#define BIFOLIO_ROW(name, ...) \
  isa_row{cpu_isa::name, #name, &runs_##name, BIFOLIO_KERNELS_IF(BIFOLIO_HAS_ISA_##name, name)},
constexpr isa_row isa_rows[] = {BIFOLIO_CPU_ISAS(BIFOLIO_ROW)};
#undef BIFOLIO_ROW
#undef BIFOLIO_KERNELS_IF
#undef BIFOLIO_KERNELS_IF_
#undef BIFOLIO_KERNELS_IF_0
#undef BIFOLIO_KERNELS_IF_1

// In rising order of preference on this machine.
struct isa_list {
  std::array<cpu_isa, std::size(isa_rows)> items{};
  std::size_t count = 0;
  void add(cpu_isa isa) noexcept { items[count++] = isa; }
  [[nodiscard]] std::span<const cpu_isa> all() const noexcept { return {items.data(), count}; }
};

// Compiled in and usable here. Found once; thread-safe.
std::span<const cpu_isa> usable_isas() noexcept {
  static const isa_list list = [] {
    isa_list usable;
    for (const isa_row& row : isa_rows) {
      if (row.kernels != nullptr && row.runs()) usable.add(row.isa);
    }
    const auto begin = usable.items.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(usable.count);
    if (end - begin > 1 && end[-1] == cpu_isa::avx512_bf16 && end[-2] == cpu_isa::avx512 && has_slow_pair_dot()) {
      std::swap(end[-1], end[-2]);
    }
    return usable;
  }();
  return list.all();
}

// A part of a sentence: "baseline, avx2".
auto list_of(std::span<const cpu_isa> isas) {
  return [isas](std::string& sentence) {
    for (std::size_t i = 0; i < isas.size(); ++i) sentence.append(i == 0 ? "" : ", ").append(to_string(isas[i]));
  };
}

}  // namespace

const kernel_table& kernels_for(cpu_isa isa) {
  for (const cpu_isa usable : usable_isas()) {
    if (usable == isa) return isa_rows[static_cast<std::size_t>(isa)].kernels();
  }
  detail::refuse(errc::unsupported, "the instruction set '", to_string(isa),
                 "' is not compiled in or cannot run here; usable: ", list_of(usable_isas()));
}

}  // namespace bifolio::inline v0_2::cpu

namespace bifolio::inline v0_2 {

std::string_view to_string(cpu_isa isa) noexcept {
  const auto index = static_cast<std::size_t>(isa);
  return index < std::size(cpu::isa_rows) ? cpu::isa_rows[index].name : "unknown";
}

cpu_isa parse_isa(std::string_view text) {
  for (const cpu::isa_row& row : cpu::isa_rows) {
    if (row.name == text) return row.isa;
  }
  detail::refuse(errc::invalid_argument, "instruction set '", text, "' is not one of ", cpu::list_of(known_isas()));
}

std::span<const cpu_isa> known_isas() noexcept {
#define BIFOLIO_NAME(name, ...) cpu_isa::name,
  static constexpr cpu_isa all[] = {BIFOLIO_CPU_ISAS(BIFOLIO_NAME)};
#undef BIFOLIO_NAME
  return all;
}

std::vector<cpu_isa> supported_isas() {
  const std::span<const cpu_isa> usable = cpu::usable_isas();
  return {usable.begin(), usable.end()};
}

cpu_isa default_isa() {
  const std::span<const cpu_isa> usable = cpu::usable_isas();
  const char* wanted = std::getenv("BIFOLIO_CPU_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    for (const cpu_isa isa : usable) {
      if (to_string(isa) == wanted) return isa;
    }
    detail::refuse(errc::unsupported, "BIFOLIO_CPU_ISA is '", wanted,
                   "', which cannot run here; usable: ", cpu::list_of(usable));
  }
  if (usable.empty()) {
    detail::refuse(errc::unsupported, "this machine can run none of the instruction sets that were compiled in");
  }
  return usable.back();
}

}  // namespace bifolio::inline v0_2
