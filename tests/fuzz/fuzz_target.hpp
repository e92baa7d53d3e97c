// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One fuzz target per file:
///
///   BIFOLIO_FUZZ_TARGET(safetensors) { … `input` holds the bytes … }
///
/// In a fuzz build (-DBIFOLIO_FUZZ=ON, Clang) each file becomes a libFuzzer program. In every other build all of them
/// are linked into one program that replays the committed corpus, which is a test of the ordinary suite. A target
/// returns for input that is refused as documented; it ends the process (`flaw`, a sanitizer, an exception of another
/// type) for a defect.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace bifolio::fuzz {

using target_function = void (*)(std::span<const std::uint8_t> input);

/// Says what is wrong and aborts.
[[noreturn]] void flaw(std::string_view what);

#ifndef BIFOLIO_FUZZ
struct registered_target {
  registered_target(std::string_view name, target_function run);
};
#endif

}  // namespace bifolio::fuzz

#ifdef BIFOLIO_FUZZ
#define BIFOLIO_FUZZ_TARGET(name)                                                     \
  static void fuzz_##name(std::span<const std::uint8_t> input);                       \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    fuzz_##name({data, size});                                                        \
    return 0;                                                                         \
  }                                                                                   \
  static void fuzz_##name([[maybe_unused]] std::span<const std::uint8_t> input)
#else
#define BIFOLIO_FUZZ_TARGET(name)                                                       \
  static void fuzz_##name(std::span<const std::uint8_t> input);                         \
  static const bifolio::fuzz::registered_target registered_##name(#name, &fuzz_##name); \
  static void fuzz_##name([[maybe_unused]] std::span<const std::uint8_t> input)
#endif
