// SPDX-License-Identifier: Apache-2.0
#include "eviction.hpp"

namespace trace_replay {
namespace {

using bifolio::block_level;
using bifolio::retention_hint;

class lru final : public bifolio::eviction_policy {
 public:
  [[nodiscard]] block_level level(const retention_hint& hint, std::int64_t index) const noexcept override {
    return bifolio::lru_policy().level(hint, index);
  }
};

class keeping_beginnings final : public bifolio::eviction_policy {
 public:
  explicit keeping_beginnings(std::int64_t num_kept) : num_kept_(num_kept) {}
  [[nodiscard]] block_level level(const retention_hint& hint, std::int64_t index) const noexcept override {
    retention_hint kept = hint;
    if (index < num_kept_) kept.priority = retention_hint::highest;
    return bifolio::priority_policy().level(kept, index);
  }

 private:
  std::int64_t num_kept_;
};

}  // namespace

std::unique_ptr<bifolio::eviction_policy> make_policy(policy_kind kind, std::int64_t num_kept) {
  switch (kind) {
    case policy_kind::lru:
      return std::make_unique<lru>();
    case policy_kind::priority:
      return std::make_unique<keeping_beginnings>(num_kept);
    case policy_kind::s3_fifo:
      return bifolio::make_s3_fifo_policy();
  }
  return nullptr;
}

}  // namespace trace_replay
