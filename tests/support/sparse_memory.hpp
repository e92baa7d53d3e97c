// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Address space that gets memory only where it is touched: pools far past 2^32 elements on a small machine. And the
/// floating-point mode that flushes subnormals, which a program around the library may have set.

#include <sys/mman.h>

#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bifolio::test {

class sparse_memory {
 public:
  explicit sparse_memory(std::size_t num_bytes) noexcept : num_bytes_(num_bytes) {
    void* pointer =
        ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pointer == MAP_FAILED) return;
    data_ = static_cast<std::byte*>(pointer);
    (void)::madvise(pointer, num_bytes, MADV_NOHUGEPAGE);  // a touched byte costs 4 KiB, not 2 MiB
    (void)::madvise(pointer, num_bytes, MADV_DONTDUMP);
  }
  ~sparse_memory() {
    if (data_ != nullptr) ::munmap(data_, num_bytes_);
  }
  sparse_memory(const sparse_memory&) = delete;
  sparse_memory& operator=(const sparse_memory&) = delete;

  /// Zeros; null when the system refuses.
  [[nodiscard]] std::byte* data() noexcept { return data_; }
  [[nodiscard]] std::size_t num_bytes() const noexcept { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t num_bytes_;
};

/// While it lives, this thread's arithmetic takes subnormals for zero and makes none (x86; elsewhere nothing changes).
class flush_subnormals {
 public:
#if defined(__x86_64__)
  flush_subnormals() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~flush_subnormals() { _mm_setcsr(saved_); }
#else
  flush_subnormals() noexcept = default;
#endif
  flush_subnormals(const flush_subnormals&) = delete;
  flush_subnormals& operator=(const flush_subnormals&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace bifolio::test
