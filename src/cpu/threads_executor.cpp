// SPDX-License-Identifier: Apache-2.0
// The default executor: a thread pool of the library's own.
#include <atomic>
#include <new>

#include "common/base/fork_generation.hpp"
#include "cpu/executors.hpp"
#include "cpu/thread_pool.hpp"
#include "cpu/usable_cpus.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

class threads_executor final : public executor {
 public:
  explicit threads_executor(std::int32_t concurrency) : concurrency_(concurrency), pool_(new local_pool(concurrency)) {}
  ~threads_executor() override {
    local_pool* const pool = pool_.load();
    if (pool->generation == detail::fork_generation()) delete pool;
  }
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    local_pool* const pool = num_workers > 1 ? pool_of_process() : nullptr;
    if (pool != nullptr) return pool->threads.run(num_workers, function, context);
    for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "threads"; }
  [[nodiscard]] errc health() const noexcept override { return errc::ok; }

 private:
  struct local_pool {
    explicit local_pool(std::int32_t concurrency) : threads(concurrency - 1), generation(detail::fork_generation()) {}
    thread_pool threads;
    unsigned generation;
  };

  // In a child made by fork() the parent's pool has no threads and may be in the midst of a call: it is left alone, and
  // the child has a pool of its own. Null where there is no memory for one.
  [[nodiscard]] local_pool* pool_of_process() noexcept {
    local_pool* pool = pool_.load(std::memory_order_acquire);
    if (pool->generation == detail::fork_generation()) return pool;
    local_pool* fresh = nullptr;
    try {
      fresh = new local_pool(concurrency_);
    } catch (...) {
      return nullptr;
    }
    if (pool_.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;  // another thread was first
    return pool;
  }

  std::int32_t concurrency_;
  std::atomic<local_pool*> pool_;
};

}  // namespace

std::unique_ptr<executor> make_threads_executor(std::int32_t num_threads) {
  return std::make_unique<threads_executor>(num_threads > 0 ? num_threads : num_usable_cpus());
}

}  // namespace bifolio::inline v0_2::cpu
