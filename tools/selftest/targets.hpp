// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is checked: every device that this machine has, and on the CPU every instruction set.

#include <memory>
#include <string>
#include <vector>

#include "support/backends.hpp"

namespace selftest {

/// One device with one instruction set.
struct target {
  std::string device;  ///< "cpu", "cuda:0"
  std::string isa;     ///< "avx2"; "-" on a GPU
  std::unique_ptr<bifolio::executor> reversed;
  bifolio::test::tested_backend main;
  /// The same device and instruction set with other threads and executors, which must not change a bit.
  std::vector<bifolio::test::tested_backend> others;
};

struct target_choice {
  std::string device = "all";     ///< "all", "cpu", "cuda" (every GPU) or "cuda:N"
  std::vector<std::string> isas;  ///< of the CPU; empty: all that this machine supports
};

/// Opens them. Throws `bifolio::error` (invalid_argument) with what there is when the choice names something else.
[[nodiscard]] std::vector<target> open_targets(const target_choice& choice);

/// The instruction sets of this machine, as one line: "baseline, avx2".
[[nodiscard]] std::string supported_isa_names();

}  // namespace selftest
