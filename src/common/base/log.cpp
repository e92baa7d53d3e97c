// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.hpp"

#include <atomic>
#include <mutex>

namespace bifolio::inline v0_2 {
namespace {

struct listener {
  std::mutex calling;
  std::atomic<log_function> function{nullptr};  // written and called under the mutex, asked for without
  void* user = nullptr;
};

// Never destroyed: static objects of the program may log while it ends.
listener& the_listener() noexcept {
  static listener* const only = new listener;
  return *only;
}

}  // namespace

void set_log(log_function function, void* user) noexcept {
  listener& to = the_listener();
  const std::lock_guard lock(to.calling);
  to.function.store(function, std::memory_order_relaxed);
  to.user = user;
}

bool detail::is_logging() noexcept { return the_listener().function.load(std::memory_order_relaxed) != nullptr; }

void detail::log(log_level level, const std::string& message) noexcept {
  listener& to = the_listener();
  const std::lock_guard lock(to.calling);
  if (const log_function function = to.function.load(std::memory_order_relaxed))
    function(to.user, level, message.c_str());
}

}  // namespace bifolio::inline v0_2
