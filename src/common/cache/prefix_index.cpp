// SPDX-License-Identifier: Apache-2.0
#include <bifolio/detail/prefix_index.hpp>

namespace bifolio::inline v0_2::detail {
namespace {

constexpr std::size_t whole_lines(std::size_t num_bytes) noexcept { return (num_bytes + 63) / 64 * 64; }

}  // namespace

prefix_index::prefix_index(std::int64_t num_blocks, std::int32_t block_size, memory_resource& memory)
    : block_size_(static_cast<std::size_t>(block_size)), num_buckets_(static_cast<std::uint64_t>(num_blocks) / 5 + 1) {
  const auto count = static_cast<std::size_t>(num_blocks);
  const std::size_t num_words = count / 64 + 1;
  const std::size_t token_bytes = whole_lines(count * block_size_ * sizeof(token_id));
  storage_ = buffer(memory, num_buckets_ * sizeof(bucket) + token_bytes + count * sizeof(contents) +
                                num_words * sizeof(std::uint64_t));
  std::memset(storage_.data(), 0, storage_.num_bytes());
  buckets_ = storage_.as<bucket>();
  tokens_ = reinterpret_cast<token_id*>(buckets_ + num_buckets_);
  contents_ = reinterpret_cast<contents*>(storage_.as<std::byte>() + num_buckets_ * sizeof(bucket) + token_bytes);
  held_ = reinterpret_cast<std::uint64_t*>(contents_ + count);
  for (std::uint64_t i = 0; i < num_buckets_; ++i) buckets_[i].blocks.fill(to_index(invalid_block));
}

void prefix_index::erase(block_id block) noexcept {
  std::uint64_t at = home_of(tag_of(of(block).key));
  std::uint32_t found = buckets_[at].with_block(block);
  while (found == 0) {
    --buckets_[at].num_passed();
    at = next_bucket(at);
    found = buckets_[at].with_block(block);
  }
  const auto slot = static_cast<std::uint32_t>(std::countr_zero(found));
  buckets_[at].tags[slot] = 0;
  buckets_[at].blocks[slot] = to_index(invalid_block);
  held_[static_cast<std::uint32_t>(block) / 64] &= ~(std::uint64_t{1} << (static_cast<std::uint32_t>(block) % 64));
}

std::string prefix_index::check(std::int64_t num_held) const {
  std::int64_t num_filled = 0;
  std::uint64_t num_passed = 0;
  for (std::uint64_t at = 0; at < num_buckets_; ++at) {
    const bucket& slots = buckets_[at];
    num_passed += slots.num_passed();
    for (std::uint32_t i = 0; i < bucket::num_slots; ++i) {
      if (slots.tags[i] == 0) continue;
      ++num_filled;
      const std::uint64_t home = home_of(slots.tags[i]);
      num_passed -= at >= home ? at - home : at + num_buckets_ - home;
    }
  }
  if (num_passed != 0) return "the buckets' counts of entries that went on are off";
  if (num_filled != num_held) {
    return "the index has " + std::to_string(num_filled) + " entries for " + std::to_string(num_held) + " blocks";
  }
  return {};
}

}  // namespace bifolio::inline v0_2::detail
