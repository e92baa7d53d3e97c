// SPDX-License-Identifier: Apache-2.0
// A user's program: everything through the umbrella header and the installed library.
#include <bifolio/bifolio.hpp>
#include <cstdio>

int main() {
  const bifolio::kv_layout layout = bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::bf16, 2, 64, 16);
  const auto executor = bifolio::make_executor(bifolio::executor_kind::serial);
  if (layout.block_bytes() != 2 * 2 * 64 * 16 * 2 || executor->width() != 1) return 1;
  try {
    (void)bifolio::parse_dtype("f64");
  } catch (const bifolio::error& problem) {  // thrown in the library, caught here: its type is exported
    std::printf("bifolio %s: %s\n", BIFOLIO_VERSION, problem.what());
    return 0;
  }
  return 1;
}
