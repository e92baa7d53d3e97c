// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Where memory comes from. One small interface, a host implementation, and adaptors that wrap another resource to
/// limit it, to count it, or to make it fail on request. Resources are borrowed by whoever uses them and must outlive
/// every allocation made from them.

#include <atomic>
#include <bifolio/device.hpp>
#include <bifolio/export.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::inline v0_2 {

/// Thread-safe unless a class says otherwise.
class BIFOLIO_API memory_resource {
 public:
  virtual ~memory_resource();

  /// At least `num_bytes` bytes aligned to `alignment` (a power of two), contents undefined. 0 bytes give a null
  /// pointer. Throws `error`: out_of_memory when there is none, invalid_argument on a bad alignment.
  [[nodiscard]] virtual void* allocate(std::size_t num_bytes, std::size_t alignment) = 0;

  /// Gives back what `allocate` returned, with the same two numbers. Null is a no-op.
  virtual void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept = 0;

  /// The device whose code may dereference the pointers.
  [[nodiscard]] virtual device where() const noexcept = 0;

 protected:
  memory_resource() = default;
  memory_resource(const memory_resource&) = default;
  memory_resource& operator=(const memory_resource&) = default;
};

/// Ordinary host memory. Blocks of 2 MiB and more are aligned to 2 MiB and huge pages are advised (Linux), because
/// random blocks of a KV cache miss the TLB otherwise.
class BIFOLIO_API host_memory_resource final : public memory_resource {
 public:
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return {}; }
};

/// Bytes of a memory: all, and those that can be had now.
struct memory_amount {
  std::int64_t total_bytes = 0;
  std::int64_t free_bytes = 0;
  friend constexpr bool operator==(memory_amount, memory_amount) = default;
};

/// What this process can have of the host's memory: the least of what the machine has available without swapping, and
/// what the limits of its control groups and its address space (RLIMIT_AS) leave. Both numbers are 0 where the system
/// does not say.
[[nodiscard]] BIFOLIO_API memory_amount host_memory_amount();

/// The process-wide host resource.
[[nodiscard]] BIFOLIO_API memory_resource& default_host_memory() noexcept;

/// Refuses (out_of_memory) what would bring the total above `limit_bytes`.
class BIFOLIO_API limiting_memory_resource final : public memory_resource {
 public:
  limiting_memory_resource(memory_resource& upstream, std::size_t limit_bytes) noexcept;
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return upstream_->where(); }
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_.load(std::memory_order_relaxed); }

 private:
  memory_resource* upstream_;
  std::size_t limit_bytes_;
  std::atomic<std::size_t> used_{0};
};

/// Counts calls and bytes.
class BIFOLIO_API counting_memory_resource final : public memory_resource {
 public:
  explicit counting_memory_resource(memory_resource& upstream) noexcept;
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return upstream_->where(); }
  [[nodiscard]] std::int64_t num_allocations() const noexcept { return num_allocations_.load(); }
  [[nodiscard]] std::int64_t num_live() const noexcept { return num_live_.load(); }
  [[nodiscard]] std::int64_t live_bytes() const noexcept { return live_bytes_.load(); }
  [[nodiscard]] std::int64_t peak_bytes() const noexcept { return peak_bytes_.load(); }

 private:
  memory_resource* upstream_;
  std::atomic<std::int64_t> num_allocations_{0}, num_live_{0}, live_bytes_{0}, peak_bytes_{0};
};

/// Fails the N-th allocation counted from the last `fail_at` (1 = the next one), once; passes the others on.
class BIFOLIO_API failing_memory_resource final : public memory_resource {
 public:
  explicit failing_memory_resource(memory_resource& upstream) noexcept;
  void fail_at(std::int64_t nth) noexcept { countdown_.store(nth); }  ///< 0 = never
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return upstream_->where(); }

 private:
  memory_resource* upstream_;
  std::atomic<std::int64_t> countdown_{0};
};

}  // namespace bifolio::inline v0_2
