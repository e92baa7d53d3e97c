// SPDX-License-Identifier: Apache-2.0
#include "cpu/spare_threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>

namespace bifolio::inline v0_2::cpu {
namespace {

struct visitor {
  pthread_t handle{};
  long number = 0;  // the kernel's; written by the thread, read once it was joined
  const std::atomic<bool>* may_leave = nullptr;
};

void* visit(void* opaque) {
  auto& self = *static_cast<visitor*>(opaque);
  self.number = ::syscall(SYS_gettid);
  self.may_leave->wait(false);
  return nullptr;
}

}  // namespace

std::int32_t num_spare_threads(std::int32_t wanted) noexcept {
  const std::unique_ptr<visitor[]> visitors(new (std::nothrow) visitor[static_cast<std::size_t>(wanted)]);
  if (visitors == nullptr) return 0;
  std::atomic<bool> may_leave{false};
  std::int32_t made = 0;
  for (; made < wanted; ++made) {
    visitor& next = visitors[static_cast<std::size_t>(made)];
    next.may_leave = &may_leave;
    if (::pthread_create(&next.handle, nullptr, &visit, &next) != 0) break;
  }
  may_leave.store(true);
  may_leave.notify_all();
  for (std::int32_t i = 0; i < made; ++i) ::pthread_join(visitors[static_cast<std::size_t>(i)].handle, nullptr);
  // A thread that was joined counts against the system's limits for an instant longer, until its number is unknown. A
  // number that is in use again ends the wait by the number of tries.
  for (std::int32_t i = 0; i < made; ++i) {
    const long number = visitors[static_cast<std::size_t>(i)].number;
    for (int tries = 0; tries < 1000 && ::syscall(SYS_tgkill, ::getpid(), number, 0) == 0; ++tries) ::sched_yield();
  }
  return made;
}

}  // namespace bifolio::inline v0_2::cpu
