// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Host memory in which every allocation ends at a page that cannot be touched: reading or writing one byte past the
/// end is a fault at once, in any build. Slow (a mapping per allocation); the data in front of an allocation is not
/// fenced.

#include <bifolio/memory_resource.hpp>

namespace bifolio::test {

class fenced_memory_resource final : public memory_resource {
 public:
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return {}; }
};

}  // namespace bifolio::test
