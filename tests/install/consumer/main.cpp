// SPDX-License-Identifier: Apache-2.0
// A user's program: everything through the umbrella header and the installed library.
#include <bifolio/bifolio.hpp>
#include <cstdio>

int main() {
  const bifolio::kv_layout layout = bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::bf16, 2, 64, 16);
  const auto executor = bifolio::make_executor(bifolio::executor_kind::serial);
  if (layout.block_bytes() != 2 * 2 * 64 * 16 * 2 || executor->concurrency() != 1) return 1;
  const auto cpu = bifolio::make_backend();
  bifolio::cache_engine cache(*cpu, {.num_layers = 2, .num_blocks = 8, .layout = layout});
  bifolio::kv_cache_manager manager({.block_size = 16, .num_blocks = 8});
  bifolio::scheduler scheduler(manager, {});
  if (scheduler.submit({.prompt = {bifolio::token_id{1}}}).status != bifolio::alloc_status::ok) return 1;
  if (scheduler.schedule().num_tokens != 1 || cache.layers().size() != 2) return 1;
  try {
    (void)bifolio::parse_dtype("f64");
  } catch (const bifolio::error& problem) {  // thrown in the library, caught here: its type is exported
    std::printf("bifolio %s: %s\n", BIFOLIO_VERSION, problem.what());
    return 0;
  }
  return 1;
}
