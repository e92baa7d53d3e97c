// SPDX-License-Identifier: Apache-2.0
#include "common/base/fork_generation.hpp"

#include <pthread.h>

namespace bifolio::inline v0_2::detail {
namespace {

// Counts forks on the child's side.
std::atomic<unsigned> generation{0};

}  // namespace

unsigned fork_generation() noexcept {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace bifolio::inline v0_2::detail
