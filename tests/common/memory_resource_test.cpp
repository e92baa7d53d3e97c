// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <bifolio/buffer.hpp>
#include <bifolio/error.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace bifolio;

template <class Call>
std::optional<errc> refused(const Call& call) {
  try {
    call();
  } catch (const error& problem) {
    return problem.code();
  }
  return std::nullopt;
}

bool is_aligned(const void* pointer, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

/// Upstream that has no memory at all above a size, without troubling the system.
class small_memory final : public memory_resource {
 public:
  void* allocate(std::size_t num_bytes, std::size_t alignment) override {
    if (num_bytes > (std::size_t{1} << 20)) throw error(errc::out_of_memory, "too much for this test");
    return default_host_memory().allocate(num_bytes, alignment);
  }
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override {
    default_host_memory().deallocate(pointer, num_bytes, alignment);
  }
  device where() const noexcept override { return {device_type::cuda, 3}; }
};

TEST_CASE("host memory is aligned as asked, from one byte to two megabytes") {
  memory_resource& host = default_host_memory();
  for (std::size_t alignment = 1; alignment <= (std::size_t{2} << 20); alignment *= 2) {
    for (const std::size_t num_bytes : {std::size_t{1}, std::size_t{100}, std::size_t{5000}}) {
      void* pointer = host.allocate(num_bytes, alignment);
      CAPTURE(alignment);
      REQUIRE(pointer != nullptr);
      CHECK(is_aligned(pointer, alignment));
      std::memset(pointer, 0x5a, num_bytes);
      host.deallocate(pointer, num_bytes, alignment);
    }
  }
  CHECK(host.where() == device{});
}

TEST_CASE("blocks of two megabytes and more are aligned to two megabytes") {
  memory_resource& host = default_host_memory();
  for (const std::size_t num_bytes : {std::size_t{2} << 20, (std::size_t{2} << 20) + 1, std::size_t{7} << 20}) {
    void* pointer = host.allocate(num_bytes, 64);
    CHECK(is_aligned(pointer, std::size_t{2} << 20));
    static_cast<char*>(pointer)[num_bytes - 1] = 1;
    host.deallocate(pointer, num_bytes, 64);
  }
}

TEST_CASE("zero bytes give a null pointer, which may be given back") {
  counting_memory_resource counting(default_host_memory());
  limiting_memory_resource limiting(counting, 0);
  failing_memory_resource failing(limiting);
  for (memory_resource* resource :
       {&default_host_memory(), static_cast<memory_resource*>(&counting), static_cast<memory_resource*>(&limiting),
        static_cast<memory_resource*>(&failing)}) {
    void* pointer = resource->allocate(0, 64);
    CHECK(pointer == nullptr);
    resource->deallocate(pointer, 0, 64);
  }
  CHECK(counting.num_live() == 0);
  CHECK(limiting.used_bytes() == 0);
}

TEST_CASE("an alignment that is not a power of two is refused by name, through every adaptor, and counted nowhere") {
  counting_memory_resource counting(default_host_memory());
  limiting_memory_resource limiting(counting, 1000);
  failing_memory_resource failing(limiting);
  for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{48}, SIZE_MAX}) {
    CHECK(refused([&] { (void)failing.allocate(8, alignment); }) == errc::invalid_argument);
    CHECK(refused([&] { (void)default_host_memory().allocate(0, alignment); }) == errc::invalid_argument);
  }
  try {
    (void)default_host_memory().allocate(8, 48);
  } catch (const error& problem) {
    CHECK(std::string(problem.what()) == "alignment 48 is not a power of two");
  }
  CHECK(counting.num_live() == 0);
  CHECK(limiting.used_bytes() == 0);
}

TEST_CASE("sizes that no machine has are out_of_memory") {
  memory_resource& host = default_host_memory();
  CHECK(refused([&] { (void)host.allocate(SIZE_MAX, 64); }) == errc::out_of_memory);
  CHECK(refused([&] { (void)host.allocate(SIZE_MAX - 10, std::size_t{1} << 21); }) == errc::out_of_memory);
}

TEST_CASE("a limit refuses what would pass it and takes memory back") {
  limiting_memory_resource limited(default_host_memory(), 1000);
  void* a = limited.allocate(600, 8);
  CHECK(limited.used_bytes() == 600);
  CHECK(refused([&] { (void)limited.allocate(401, 8); }) == errc::out_of_memory);
  CHECK(refused([&] { (void)limited.allocate(SIZE_MAX, 8); }) == errc::out_of_memory);
  CHECK(limited.used_bytes() == 600);
  void* b = limited.allocate(400, 8);
  CHECK(limited.used_bytes() == 1000);
  try {
    (void)limited.allocate(1, 8);
    FAIL("went past the limit");
  } catch (const error& problem) {
    CHECK(std::string(problem.what()) == "cannot allocate 1 bytes: the limit is 1000 bytes, 1000 in use");
  }
  limited.deallocate(a, 600, 8);
  CHECK(limited.used_bytes() == 400);
  void* c = limited.allocate(600, 8);
  limited.deallocate(c, 600, 8);
  limited.deallocate(b, 400, 8);
  limited.deallocate(nullptr, 400, 8);
  CHECK(limited.used_bytes() == 0);
}

TEST_CASE("what the upstream refuses does not count against a limit or as live") {
  small_memory small;
  counting_memory_resource counting(small);
  limiting_memory_resource limited(counting, SIZE_MAX);
  CHECK(refused([&] { (void)limited.allocate(std::size_t{2} << 20, 8); }) == errc::out_of_memory);
  CHECK(limited.used_bytes() == 0);
  CHECK(counting.num_live() == 0);
  CHECK(counting.num_allocations() == 0);
  CHECK(limited.where() == device{device_type::cuda, 3});
}

TEST_CASE("the limit holds when many threads press on it") {
  limiting_memory_resource limited(default_host_memory(), 64 * 100);
  std::atomic<int> granted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        try {
          void* pointer = limited.allocate(64 * 40, 8);
          granted.fetch_add(1);
          if (limited.used_bytes() > 64 * 100) granted.store(-1000000);
          limited.deallocate(pointer, 64 * 40, 8);
        } catch (const error&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(granted.load() > 0);
  CHECK(limited.used_bytes() == 0);
}

TEST_CASE("counting knows calls, live blocks, live bytes and the peak") {
  counting_memory_resource counting(default_host_memory());
  void* a = counting.allocate(100, 8);
  void* b = counting.allocate(50, 8);
  CHECK(counting.num_allocations() == 2);
  CHECK(counting.num_live() == 2);
  CHECK(counting.live_bytes() == 150);
  counting.deallocate(a, 100, 8);
  void* c = counting.allocate(20, 8);
  CHECK(counting.num_live() == 2);
  CHECK(counting.live_bytes() == 70);
  CHECK(counting.peak_bytes() == 150);
  counting.deallocate(b, 50, 8);
  counting.deallocate(c, 20, 8);
  CHECK(counting.num_live() == 0);
  CHECK(counting.live_bytes() == 0);
  CHECK(counting.num_allocations() == 3);
}

TEST_CASE("the N-th allocation fails, once, and all others pass") {
  counting_memory_resource counting(default_host_memory());
  failing_memory_resource failing(counting);
  for (std::int64_t nth = 1; nth <= 4; ++nth) {
    failing.fail_at(nth);
    for (std::int64_t i = 1; i <= 6; ++i) {
      std::optional<errc> code;
      void* pointer = nullptr;
      code = refused([&] { pointer = failing.allocate(16, 16); });
      CHECK(code.has_value() == (i == nth));
      if (code.has_value()) CHECK(*code == errc::out_of_memory);
      failing.deallocate(pointer, 16, 16);
    }
  }
  failing.fail_at(0);
  void* pointer = failing.allocate(16, 16);
  CHECK(pointer != nullptr);
  failing.deallocate(pointer, 16, 16);
  CHECK(counting.num_live() == 0);
}

TEST_CASE("a buffer gives back what it took, once, however it is moved") {
  counting_memory_resource counting(default_host_memory());
  {
    buffer a(counting, 1000);
    CHECK(is_aligned(a.data(), 64));
    CHECK(a.num_bytes() == 1000);
    void* const first = a.data();
    buffer b(std::move(a));
    CHECK(b.data() == first);
    CHECK(a.data() == nullptr);
    CHECK(a.num_bytes() == 0);
    buffer c(counting, 10, 256);
    CHECK(is_aligned(c.data(), 256));
    c = std::move(b);
    CHECK(c.data() == first);
    CHECK(counting.num_live() == 1);
    buffer& alias = c;
    c = std::move(alias);
    CHECK(c.data() == first);
    CHECK(c.num_bytes() == 1000);
    c = buffer();
    CHECK(counting.num_live() == 0);
    buffer d(counting, 64);
    buffer e;
    e.swap(d);
    CHECK(d.data() == nullptr);
    CHECK(e.as<const char>() != nullptr);
    const buffer& seen = e;
    CHECK(seen.as<int>() == seen.data());
  }
  CHECK(counting.num_live() == 0);
  CHECK(counting.num_allocations() == 3);
}

TEST_CASE("a buffer of zero bytes holds nothing and gives nothing back") {
  counting_memory_resource counting(default_host_memory());
  {
    const buffer empty(counting, 0);
    CHECK(empty.data() == nullptr);
    CHECK(empty.num_bytes() == 0);
  }
  CHECK(counting.num_live() == 0);
}

TEST_CASE("a buffer that cannot be made throws what the resource throws and leaves nothing") {
  counting_memory_resource counting(default_host_memory());
  failing_memory_resource failing(counting);
  failing.fail_at(1);
  CHECK(refused([&] { const buffer none(failing, 100); }) == errc::out_of_memory);
  CHECK(refused([&] { const buffer none(failing, 100, 12); }) == errc::invalid_argument);
  CHECK(counting.num_live() == 0);
}

}  // namespace
