// SPDX-License-Identifier: Apache-2.0
#include <bifolio/eviction_policy.hpp>

namespace bifolio::inline v0_2 {
namespace {

class lru final : public eviction_policy {
 public:
  [[nodiscard]] block_level level(const retention_hint&, std::int64_t) const noexcept override {
    return retention_hint::normal;
  }
};

class by_priority final : public eviction_policy {
 public:
  [[nodiscard]] block_level level(const retention_hint& hint, std::int64_t) const noexcept override {
    return hint.priority;
  }
};

}  // namespace

eviction_tracker::~eviction_tracker() = default;
eviction_policy::~eviction_policy() = default;

std::unique_ptr<eviction_tracker> eviction_policy::make_tracker(idle_queues) const { return nullptr; }

const eviction_policy& lru_policy() noexcept {
  static const lru policy;
  return policy;
}

const eviction_policy& priority_policy() noexcept {
  static const by_priority policy;
  return policy;
}

}  // namespace bifolio::inline v0_2
