// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.hpp"

#include <array>
#include <bifolio/error.hpp>
#include <cstddef>
#include <cstdlib>
#include <string>

#include "common/base/refuse.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace bifolio::cpu {
namespace {

struct isa_list {
  std::array<cpu_isa, 7> items{};
  std::size_t count = 0;
  void add(cpu_isa isa) noexcept { items[count++] = isa; }
};

#if defined(__x86_64__)

struct x86_features {
  bool avx2 = false;         // AVX2, FMA, F16C, BMI, BMI2, and the system saves the ymm registers
  bool avx512 = false;       // the above, AVX-512 F, BW, DQ, VL, and the system saves zmm and the masks
  bool avx512_bf16 = false;  // the above, and AVX512-BF16
  bool amx = false;          // the above, AMX-TILE and AMX-BF16, and the system lets this process use tiles
  bool amx_fp16 = false;     // the above, and AMX-FP16
};

std::uint64_t read_xcr0() noexcept {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KiB of tile registers only to processes that ask (since 5.16, "Using XSTATE features in user
// space applications"); threads inherit the permission. Refused where an alternate signal stack has no room for them.
bool may_use_tiles() noexcept {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// Intel SDM volume 2, CPUID, and volume 1, section 14.3: a feature counts only when XCR0 says that the operating system
// saves its registers.
x86_features detect_x86() noexcept {
  x86_features found;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned fma = 1u << 12;
  constexpr unsigned osxsave = 1u << 27;
  constexpr unsigned avx = 1u << 28;
  constexpr unsigned f16c = 1u << 29;
  constexpr unsigned wanted = fma | osxsave | avx | f16c;
  if ((c & wanted) != wanted) return found;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  const std::uint64_t xcr0 = read_xcr0();

  constexpr unsigned bmi1 = 1u << 3;
  constexpr unsigned avx2 = 1u << 5;
  constexpr unsigned bmi2 = 1u << 8;
  constexpr unsigned avx2_all = bmi1 | avx2 | bmi2;
  constexpr std::uint64_t ymm_state = 0x6;
  found.avx2 = (b & avx2_all) == avx2_all && (xcr0 & ymm_state) == ymm_state;

  constexpr unsigned avx512_all = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  constexpr std::uint64_t zmm_state = 0xe6;
  found.avx512 = found.avx2 && (b & avx512_all) == avx512_all && (xcr0 & zmm_state) == zmm_state;

  constexpr unsigned bf16 = 1u << 5;
  constexpr unsigned amx_all = (1u << 22) | (1u << 24);  // BF16, TILE
  constexpr std::uint64_t tile_state = 0x60000;
  const bool has_tiles = (d & amx_all) == amx_all && (xcr0 & tile_state) == tile_state;
  constexpr unsigned fp16_tiles = 1u << 21;
  found.avx512_bf16 = found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & bf16) != 0;
  found.amx = found.avx512_bf16 && has_tiles && may_use_tiles();
  found.amx_fp16 = found.amx && (a & fp16_tiles) != 0;
  return found;
}

#endif

isa_list detect() noexcept {
  isa_list list;
#if BIFOLIO_HAS_ISA_BASELINE
  list.add(cpu_isa::baseline);
#endif
#if defined(__x86_64__)
  [[maybe_unused]] const x86_features features = detect_x86();
#if BIFOLIO_HAS_ISA_AVX2
  if (features.avx2) list.add(cpu_isa::avx2);
#endif
#if BIFOLIO_HAS_ISA_AVX512
  if (features.avx512) list.add(cpu_isa::avx512);
#endif
#if BIFOLIO_HAS_ISA_AVX512_BF16
  if (features.avx512_bf16) list.add(cpu_isa::avx512_bf16);
#endif
#if BIFOLIO_HAS_ISA_AMX
  if (features.amx) list.add(cpu_isa::amx);
#endif
#if BIFOLIO_HAS_ISA_AMX_FP16
  if (features.amx_fp16) list.add(cpu_isa::amx_fp16);
#endif
#endif
#if BIFOLIO_HAS_ISA_NEON
#if defined(__linux__)
  constexpr unsigned long hwcap_asimd = 1ul << 1;
  if ((getauxval(AT_HWCAP) & hwcap_asimd) != 0) list.add(cpu_isa::neon);
#else
  list.add(cpu_isa::neon);  // Advanced SIMD is part of every 64-bit Arm system outside Linux's HWCAP reporting.
#endif
#endif
  return list;
}

std::string names_of(std::span<const cpu_isa> isas) {
  std::string text;
  for (const cpu_isa isa : isas) {
    if (!text.empty()) text += ", ";
    text += to_string(isa);
  }
  return text;
}

bool can_run(cpu_isa isa) noexcept {
  for (const cpu_isa usable : usable_isas()) {
    if (usable == isa) return true;
  }
  return false;
}

}  // namespace

std::span<const cpu_isa> usable_isas() noexcept {
  static const isa_list list = detect();
  return {list.items.data(), list.count};
}

const kernel_table& kernels_for(cpu_isa isa) {
  if (can_run(isa)) {
    switch (isa) {
      case cpu_isa::baseline:
#if BIFOLIO_HAS_ISA_BASELINE
        return baseline::kernels();
#else
        break;
#endif
      case cpu_isa::avx2:
#if BIFOLIO_HAS_ISA_AVX2
        return avx2::kernels();
#else
        break;
#endif
      case cpu_isa::avx512:
#if BIFOLIO_HAS_ISA_AVX512
        return avx512::kernels();
#else
        break;
#endif
      case cpu_isa::avx512_bf16:
#if BIFOLIO_HAS_ISA_AVX512_BF16
        return avx512_bf16::kernels();
#else
        break;
#endif
      case cpu_isa::amx:
#if BIFOLIO_HAS_ISA_AMX
        return amx::kernels();
#else
        break;
#endif
      case cpu_isa::amx_fp16:
#if BIFOLIO_HAS_ISA_AMX_FP16
        return amx_fp16::kernels();
#else
        break;
#endif
      case cpu_isa::neon:
#if BIFOLIO_HAS_ISA_NEON
        return neon::kernels();
#else
        break;
#endif
    }
  }
  detail::refuse(errc::unsupported, "the instruction set '", to_string(isa),
                 "' is not compiled in or cannot run here; usable: ", [](std::string& sentence) {
                   sentence += names_of(usable_isas());
                 });
}

}  // namespace bifolio::cpu

namespace bifolio {

std::string_view to_string(cpu_isa isa) noexcept {
  switch (isa) {
    case cpu_isa::baseline:
      return "baseline";
    case cpu_isa::avx2:
      return "avx2";
    case cpu_isa::avx512:
      return "avx512";
    case cpu_isa::avx512_bf16:
      return "avx512_bf16";
    case cpu_isa::amx:
      return "amx";
    case cpu_isa::amx_fp16:
      return "amx_fp16";
    case cpu_isa::neon:
      return "neon";
  }
  return "unknown";
}

cpu_isa parse_isa(std::string_view text) {
  for (const cpu_isa isa : {cpu_isa::baseline, cpu_isa::avx2, cpu_isa::avx512, cpu_isa::avx512_bf16, cpu_isa::amx,
                            cpu_isa::amx_fp16, cpu_isa::neon}) {
    if (text == to_string(isa)) return isa;
  }
  detail::refuse(errc::invalid_argument, "instruction set '", text,
                 "' is not one of baseline, avx2, avx512, avx512_bf16, amx, amx_fp16, neon");
}

std::vector<cpu_isa> supported_isas() {
  const std::span<const cpu_isa> usable = cpu::usable_isas();
  return {usable.begin(), usable.end()};
}

cpu_isa default_isa() {
  const std::span<const cpu_isa> usable = cpu::usable_isas();
  const char* wish = std::getenv("BIFOLIO_CPU_ISA");
  if (wish != nullptr && *wish != '\0') {
    for (const cpu_isa isa : usable) {
      if (to_string(isa) == wish) return isa;
    }
    detail::refuse(errc::unsupported, "BIFOLIO_CPU_ISA asks for '", wish, "', which cannot run here; usable: ",
                   [&](std::string& sentence) { sentence += cpu::names_of(usable); });
  }
  if (usable.empty()) {
    detail::refuse(errc::unsupported, "this machine can run none of the instruction sets that were compiled in");
  }
  return usable.back();
}

}  // namespace bifolio
