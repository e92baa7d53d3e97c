// SPDX-License-Identifier: Apache-2.0
#include "common/scheduler/request_intake.hpp"

#if defined(BIFOLIO_HAS_TBB)
#include <oneapi/tbb/concurrent_queue.h>

#include <cstddef>
#include <new>
#include <utility>
#else
#include <deque>
#include <mutex>
#endif

namespace bifolio::inline v0_2::detail {

#if defined(BIFOLIO_HAS_TBB)

namespace {

// A tbb::concurrent_queue (2021.8) whose page allocation fails inside `push` refuses every later push of that lane. So
// the page that a push may need is allocated before the push begins, and the queue's allocator takes it from here.
constexpr std::size_t page_bytes = 1024;
thread_local void* spare_page = nullptr;

template <class T>
struct page_allocator {
  using value_type = T;
  page_allocator() = default;
  template <class U>
  page_allocator(const page_allocator<U>&) noexcept {}

  T* allocate(std::size_t count) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    if (count * sizeof(T) <= page_bytes && spare_page != nullptr) {
      return static_cast<T*>(std::exchange(spare_page, nullptr));
    }
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* pointer, std::size_t) noexcept { ::operator delete(pointer); }
  friend bool operator==(const page_allocator&, const page_allocator&) { return true; }
};

}  // namespace

struct request_intake::queue {
  tbb::concurrent_queue<intake_message, page_allocator<intake_message>> messages;
};

void request_intake::push(const intake_message& message) {
  spare_page = ::operator new(page_bytes);
  queue_->messages.push(message);
  ::operator delete(std::exchange(spare_page, nullptr));
}

bool request_intake::try_pop(intake_message& message) noexcept { return queue_->messages.try_pop(message); }

#else

struct request_intake::queue {
  std::mutex mutex;
  std::deque<intake_message> messages;
};

void request_intake::push(const intake_message& message) {
  const std::lock_guard lock(queue_->mutex);
  queue_->messages.push_back(message);
}

bool request_intake::try_pop(intake_message& message) noexcept {
  const std::lock_guard lock(queue_->mutex);
  if (queue_->messages.empty()) return false;
  message = queue_->messages.front();
  queue_->messages.pop_front();
  return true;
}

#endif

request_intake::request_intake() : queue_(std::make_unique<queue>()) {}
request_intake::~request_intake() = default;

}  // namespace bifolio::inline v0_2::detail
