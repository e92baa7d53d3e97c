// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bifolio/error.hpp>
#include <bifolio/prefix_cache.hpp>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "common/base/hash.hpp"
#include "common/base/make_room.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/prefix_state.hpp"
#include "common/cache/require_limits.hpp"

namespace bifolio::inline v0_2 {
namespace {

// Serials of scopes have the top bit, the scope's index in the low 24 bits and the interner's count between.
constexpr std::uint64_t scope_serial_bit = std::uint64_t{1} << 63;
constexpr std::uint32_t scope_index_bits = 24;

constexpr bool is_scope(std::uint64_t serial) noexcept { return (serial & scope_serial_bit) != 0; }
constexpr std::uint32_t scope_index(std::uint64_t serial) noexcept {
  return static_cast<std::uint32_t>(serial & ((std::uint64_t{1} << scope_index_bits) - 1));
}

// Blocks whose cache lines are prefetched together: what a core's miss buffers hold.
constexpr std::size_t group_size = 32;

void append_word(std::string& to, std::uint64_t word) { to.append(reinterpret_cast<const char*>(&word), sizeof word); }

// Empty for the scope that has neither salt nor adapter.
std::string bytes_of(const prefix_scope& scope) {
  std::string bytes;
  if (scope.salt.empty() && scope.adapter_id == 0) return bytes;
  bytes.reserve(8 + scope.salt.size());
  append_word(bytes, scope.adapter_id);
  bytes.append(scope.salt);
  return bytes;
}

// Those of a prompt's extra keys that are in [begin, end).
std::span<const extra_key> extras_within(std::span<const extra_key> extras, std::int64_t begin, std::int64_t end) {
  const auto by_position = [](const extra_key& extra, std::int64_t position) { return extra.position < position; };
  const auto first = std::lower_bound(extras.begin(), extras.end(), begin, by_position);
  return {first, std::lower_bound(first, extras.end(), end, by_position)};
}

// For a heap whose front expires first, and of those that expire together the last published.
constexpr auto later_expiry = [](const auto& a, const auto& b) {
  return a.at != b.at ? a.at > b.at : a.serial < b.serial;
};

prefix_cache_config validated(prefix_cache_config config) {
  detail::require_between("block_size", config.block_size, 1, std::int64_t{1} << 30);
  if (config.memory == nullptr) config.memory = &default_host_memory();
  if (config.policy == nullptr) config.policy = &priority_policy();
  return config;
}

}  // namespace

prefix_cache::prefix_cache(block_pool& pool, const prefix_cache_config& config)
    : pool_(&pool),
      config_(validated(config)),
      hasher_(config.seed.has_value() ? *config.seed : random_hash_seed(), config.key_bits),
      index_(pool.num_blocks(), config.block_size, *config_.memory),
      tells_events_(config_.record_events || config_.hook.function != nullptr),
      next_serial_(config.first_serial) {
  detail::translate_bad_alloc("prefix_cache", [&] {
    interned_ = std::make_unique<interned>();
    interned_->roots.push_back(hasher_.root({}));
    tracker_ = config_.policy->make_tracker(idle_queues(pool));
  });
}

prefix_cache::~prefix_cache() = default;

// --- scopes and extra keys

std::optional<prefix_chain> prefix_cache::find_root(const prefix_scope& scope) const {
  const std::int64_t index = interned_->scopes.find(bytes_of(scope));
  if (index < 0) return std::nullopt;
  return root(scope_id{static_cast<std::uint32_t>(index)});
}

scope_id prefix_cache::acquire_scope(const prefix_scope& scope) {
  detail::require_salt(scope.salt);
  const std::string bytes = bytes_of(scope);
  detail::make_room(interned_->roots, 1);
  const std::uint32_t index = interned_->scopes.acquire(bytes);
  if (index >> scope_index_bits != 0) {
    interned_->scopes.release(index);
    detail::refuse(errc::failed_precondition, index, " scopes are in use, the most there can be");
  }
  if (index >= interned_->roots.size()) interned_->roots.emplace_back();
  interned_->roots[index] = hasher_.root(scope);
  return scope_id{index};
}

void prefix_cache::retain_scope(scope_id scope) noexcept {
  interned_->scopes.retain(static_cast<std::uint32_t>(scope));
}
void prefix_cache::release_scope(scope_id scope) noexcept {
  interned_->scopes.release(static_cast<std::uint32_t>(scope));
}

prefix_chain prefix_cache::root(scope_id scope) const noexcept {
  const auto index = static_cast<std::uint32_t>(scope);
  return {interned_->roots[index], scope_serial_bit | interned_->scopes.serial(index) << scope_index_bits | index};
}

std::optional<extras_id> prefix_cache::find_extras(std::span<const extra_key> extras,
                                                   std::int64_t first_position) const {
  if (extras.empty()) return no_extras;
  const std::int64_t index = interned_->extras.find(pack_extras(extras, first_position));
  if (index < 0) return std::nullopt;
  return extras_id{static_cast<std::uint32_t>(index)};
}

extras_id prefix_cache::acquire_extras(std::span<const extra_key> extras, std::int64_t first_position) {
  if (extras.empty()) return no_extras;
  detail::require_extras(extras);
  if (extras_of_.empty()) extras_of_.resize(static_cast<std::size_t>(pool_->num_blocks()), no_extras);
  return extras_id{interned_->extras.acquire(pack_extras(extras, first_position))};
}

void prefix_cache::retain_extras(extras_id extras) noexcept {
  interned_->extras.retain(static_cast<std::uint32_t>(extras));
}

void prefix_cache::release_extras(extras_id extras) noexcept {
  interned_->extras.release(static_cast<std::uint32_t>(extras));
}

std::size_t prefix_cache::num_interned() const noexcept {
  return interned_->scopes.num_in_use() - 1 + interned_->extras.num_in_use() - 1;
}

// --- looking up

bool prefix_cache::matches(block_id block, const content_key& key, std::uint64_t parent, const token_id* tokens,
                           extras_id extras) const noexcept {
  const detail::prefix_index::contents& contents = index_.of(block);
  if (contents.key != key || contents.parent != parent) return false;
  if (!extras_of_.empty() && extras_of_[static_cast<std::uint32_t>(block)] != extras) return false;
  if (config_.block_size == 16) return std::memcmp(index_.tokens(block), tokens, 64) == 0;  // inline, without a call
  return std::memcmp(index_.tokens(block), tokens, static_cast<std::size_t>(config_.block_size) * sizeof(token_id)) ==
         0;
}

block_id prefix_cache::find(const content_key& key, std::uint64_t parent, const token_id* tokens,
                            extras_id extras) const noexcept {
  return index_.find_if(key, [&](block_id block) { return matches(block, key, parent, tokens, extras); });
}

// The key of logical block `index`, given the key of the block before it.
content_key prefix_cache::key_of_block(const prompt_view& prompt, std::size_t index, const content_key& before) const {
  const auto block_size = static_cast<std::size_t>(config_.block_size);
  const std::span<const token_id> tokens = prompt.tokens.subspan(index * block_size, block_size);
  if (prompt.extras.empty()) [[likely]]
    return hasher_.next(before, tokens);
  const auto first = static_cast<std::int64_t>(index * block_size);
  return hasher_.next(before, tokens,
                      pack_extras(extras_within(prompt.extras, first, first + config_.block_size), first));
}

void prefix_cache::append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const {
  detail::require_salt(prompt.scope.salt);
  detail::require_extras(prompt.extras);
  const std::size_t num_blocks = prompt.tokens.size() / static_cast<std::size_t>(config_.block_size);
  keys.reserve(num_blocks);
  content_key last = keys.empty() ? hasher_.root(prompt.scope) : keys.back();
  for (std::size_t i = keys.size(); i < num_blocks; ++i) {
    last = key_of_block(prompt, i, last);
    keys.push_back(last);
  }
}

prefix_match prefix_cache::match(const prompt_view& prompt, std::span<block_id> out) const {
  detail::require_salt(prompt.scope.salt);
  detail::require_extras(prompt.extras);
  prefix_match result;
  const std::optional<prefix_chain> begin = find_root(prompt.scope);
  if (!begin.has_value()) return result;
  result.end = *begin;
  const auto block_size = static_cast<std::size_t>(config_.block_size);
  const std::size_t most = std::min(prompt.tokens.size() / block_size, out.size());
  content_key last = begin->key;
  std::array<std::array<content_key, group_size>, 2> both_keys;  // of this group and the next
  std::array<block_id, group_size> blocks;
  const auto prepare = [&](std::size_t from) {
    std::array<content_key, group_size>& keys = both_keys[from / group_size % 2];
    for (std::size_t i = from; i < std::min(from + group_size, most); ++i) {
      last = i < prompt.keys.size() ? prompt.keys[i] : key_of_block(prompt, i, last);
      keys[i - from] = last;
      index_.prefetch_bucket(last);
    }
  };
  prepare(0);
  for (std::size_t i = 0; i < most;) {
    const std::size_t count = std::min(group_size, most - i);
    const std::array<content_key, group_size>& keys = both_keys[i / group_size % 2];
    const std::size_t next = i + group_size;
    // Going ahead is worth it only when the keys are there already; else a miss would have cost a group of them.
    const bool has_keys = next < prompt.keys.size();
    if (has_keys) prepare(next);
    for (std::size_t k = 0; k < count; ++k) {
      blocks[k] = index_.candidate(keys[k]);
      if (blocks[k] == invalid_block) break;
      __builtin_prefetch(&index_.of(blocks[k]));
      for (std::size_t byte = 0; byte < block_size * sizeof(token_id) && byte < 256; byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(index_.tokens(blocks[k])) + byte);
      }
      pool_->prefetch({&blocks[k], 1});
    }
    for (std::size_t k = 0; k < count; ++k, ++i) {
      if (blocks[k] == invalid_block) return result;
      const auto first = static_cast<std::int64_t>(i * block_size);
      const std::optional<extras_id> extras =
          find_extras(extras_within(prompt.extras, first, first + config_.block_size), first);
      if (!extras.has_value()) return result;
      const token_id* tokens = prompt.tokens.data() + i * block_size;
      block_id hit = blocks[k];
      if (!matches(hit, keys[k], result.end.serial, tokens, *extras)) {
        hit = find(keys[k], result.end.serial, tokens, *extras);
        if (hit == invalid_block) return result;
      }
      out[i] = hit;
      result.end = {keys[k], index_.of(hit).serial};
      ++result.num_blocks;
    }
    if (!has_keys) prepare(next);
  }
  return result;
}

void prefix_cache::pin(std::span<const block_id> hits) noexcept {
  constexpr std::size_t ahead = 16;
  for (std::size_t i = 0; i < std::min(ahead, hits.size()); ++i) pool_->prefetch_node(hits[i]);
  for (std::size_t i = 0; i < hits.size(); ++i) {
    if (i + ahead < hits.size()) pool_->prefetch_node(hits[i + ahead]);
    if (i + ahead / 2 < hits.size()) pool_->prefetch_neighbours(hits[i + ahead / 2]);
    pool_->touch(hits[i]);
  }
  if (tracker_) {
    for (const block_id block : hits) tracker_->hit(block);
  }
}

prefix_match prefix_cache::match_and_pin(const prompt_view& prompt, std::span<block_id> out) {
  const prefix_match found = match(prompt, out);
  const auto num_hits = static_cast<std::size_t>(found.num_blocks);
  pin(out.first(num_hits));
  count_lookup(static_cast<std::int64_t>(prompt.tokens.size()) / config_.block_size, found.num_blocks);
  return found;
}

void prefix_cache::count_lookup(std::int64_t num_blocks, std::int64_t num_hits) noexcept {
  ++stats_.num_lookups;
  stats_.num_looked_up_blocks += num_blocks;
  stats_.num_hit_blocks += num_hits;
}

// --- publishing and forgetting

void prefix_cache::record(const cache_event& event, std::span<const token_id> tokens, bool is_first) noexcept {
  if (!tells_events_) return;
  if (config_.record_events) {
    events_.push_back(event);
    if (config_.record_tokens && event.what == cache_event::kind::stored) {
      stored_.tokens.insert(stored_.tokens.end(), tokens.begin(), tokens.end());
      stored_.is_first.push_back(is_first ? 1 : 0);
    }
  }
  if (config_.hook.function != nullptr) config_.hook.function(config_.hook.user, event, tokens, is_first);
}

content_key prefix_cache::next_key(const prefix_chain& after, std::span<const token_id> tokens,
                                   extras_id extras) const noexcept {
  return hasher_.next(after.key, tokens, interned_->extras.bytes(static_cast<std::uint32_t>(extras)));
}

publish_result prefix_cache::publish(block_id block, const content_key& key, const prefix_chain& after,
                                     std::span<const token_id> tokens, std::int64_t index, const retention_hint& hint,
                                     extras_id extras) noexcept {
  // In nearly all cases one look at one cache line says that there is no such entry.
  const block_id found = index_.may_hold(key) ? find(key, after.serial, tokens.data(), extras) : invalid_block;
  // Sequences that share a block which was not yet full for good publish it one after another.
  if (found == block) return {{key, index_.of(block).serial}, invalid_block};
  if (holds(block)) [[unlikely]]
    unregister(block);
  if (tokens.size() == 16) {
    std::memcpy(index_.tokens(block), tokens.data(), 64);  // inline, without a call
  } else {
    std::memcpy(index_.tokens(block), tokens.data(), tokens.size_bytes());
  }
  detail::prefix_index::contents& contents = index_.of(block);
  if (found != invalid_block) {
    contents = index_.of(found);
    ++stats_.num_duplicate_blocks;
    return {{key, contents.serial}, found};
  }
  contents = {key, next_serial_++, after.serial};
  if (is_scope(after.serial)) interned_->scopes.retain(scope_index(after.serial));
  if (extras != no_extras) interned_->extras.retain(static_cast<std::uint32_t>(extras));
  if (!extras_of_.empty()) extras_of_[static_cast<std::uint32_t>(block)] = extras;
  index_.insert(block, key);
  if (tracker_) [[unlikely]] {
    pool_->set_level(block, tracker_->inserted(block, key, block_at(after), hint, index));
  } else {
    set_level(block, hint, index);
  }
  ++stats_.num_published_blocks;
  ++stats_.num_cached_blocks;
  record({cache_event::kind::stored, block, key, after.key}, tokens, is_scope(after.serial));
  return {{key, contents.serial}, invalid_block};
}

void prefix_cache::set_level(block_id block, const retention_hint& hint, std::int64_t index) noexcept {
  block_level level = std::clamp(config_.policy->level(hint, index), retention_hint::lowest, retention_hint::highest);
  if (hint.expires_at != 0 && hint.expires_at <= now_) level = retention_hint::normal;
  pool_->set_level(block, level);
  if (hint.expires_at != 0 && level != retention_hint::normal) {
    expiries_.push_back({hint.expires_at, index_.of(block).serial, block});
    std::push_heap(expiries_.begin(), expiries_.end(), later_expiry);
  }
}

block_id prefix_cache::block_at(const prefix_chain& after) const noexcept {
  if (is_scope(after.serial)) return invalid_block;
  return index_.find_if(after.key, [&](block_id block) { return index_.of(block).serial == after.serial; });
}

prefix_chain prefix_cache::chain_at(block_id block) const noexcept {
  return {index_.of(block).key, index_.of(block).serial};
}

std::span<const token_id> prefix_cache::tokens_of(block_id block) const noexcept {
  return {index_.tokens(block), static_cast<std::size_t>(config_.block_size)};
}

void prefix_cache::unregister(block_id block) noexcept {
  if (holds(block)) remove(block, removal_reason::unregistered);
}

// Requires a registered block.
void prefix_cache::remove(block_id block, removal_reason reason) noexcept {
  index_.erase(block);
  detail::prefix_index::contents& contents = index_.of(block);
  if (is_scope(contents.parent)) interned_->scopes.release(scope_index(contents.parent));
  if (!extras_of_.empty()) release_extras(std::exchange(extras_of_[static_cast<std::uint32_t>(block)], no_extras));
  record({cache_event::kind::removed, block, contents.key, {}});
  if (observer_ != nullptr) [[unlikely]]
    observer_->removed({contents.key, contents.serial});
  contents.serial = 0;
  if (tracker_) [[unlikely]]
    tracker_->removed(block, contents.key, reason);
  pool_->set_level(block, 0);
  --stats_.num_cached_blocks;
}

// The entry of a block that is about to be handed out, and once that is near, its slot.
void prefix_cache::prefetch_evictions() const noexcept {
  const block_id far = pool_->upcoming(12);
  if (far != invalid_block) detail::prefetch_to_write(&index_.of(far));
  const block_id near = pool_->upcoming(6);
  if (near != invalid_block && holds(near)) {
    index_.prefetch_bucket_to_write(index_.of(near).key);
  }
}

block_id prefix_cache::allocate_one() noexcept {
  if (pool_->num_free() == 0) return invalid_block;
  // Without a tracker the order of the pool's levels is the order of eviction. A tracker's victim goes to level 0.
  if (tracker_ && pool_->front(0) == invalid_block) [[unlikely]] {
    ++stats_.num_evicted_blocks;
    remove(tracker_->victim(), removal_reason::evicted);
  }
  const block_id block = pool_->allocate_one();
  if (holds(block)) {
    ++stats_.num_evicted_blocks;
    remove(block, removal_reason::evicted);
  }
  prefetch_evictions();
  return block;
}

alloc_status prefix_cache::allocate(std::span<block_id> out) noexcept {
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (wanted > pool_->num_free()) return wanted > pool_->num_blocks() ? alloc_status::never : alloc_status::later;
  for (block_id& block : out) block = allocate_one();
  return alloc_status::ok;
}

bool prefix_cache::is_idle() const noexcept {
  for (std::int64_t b = 0; b < pool_->num_blocks(); ++b) {
    const block_id block{static_cast<std::int32_t>(b)};
    if (holds(block) && pool_->num_refs(block) != 0) return false;
  }
  return true;
}

bool prefix_cache::reset() {
  if (!is_idle()) return false;
  const std::int64_t num_blocks = pool_->num_blocks();
  if (config_.record_events) detail::translate_bad_alloc("reset", [&] { events_.reserve(events_.size() + 1); });
  const bool tells = std::exchange(tells_events_, false);  // one event stands for all
  for (std::int64_t b = 0; b < num_blocks; ++b) unregister(block_id{static_cast<std::int32_t>(b)});
  tells_events_ = tells;
  record({cache_event::kind::cleared, invalid_block, {}, {}});
  expiries_.clear();
  return true;
}

// --- time, events

void prefix_cache::advance_clock(std::int64_t now) noexcept {
  now_ = std::max(now_, now);
  while (!expiries_.empty() && expiries_.front().at <= now_) {
    const expiry due = expiries_.front();
    std::pop_heap(expiries_.begin(), expiries_.end(), later_expiry);
    expiries_.pop_back();
    // The block may hold other contents by now.
    if (is_live(due)) pool_->set_level(due.block, retention_hint::normal);
  }
}

void prefix_cache::reserve_events(std::int64_t num_events) {
  const auto more = static_cast<std::size_t>(num_events);
  if (expiries_.capacity() - expiries_.size() < more) {
    // Those of contents that are gone make room; at most one per block is left.
    std::erase_if(expiries_, [this](const expiry& timer) { return !is_live(timer); });
    std::make_heap(expiries_.begin(), expiries_.end(), later_expiry);
    detail::make_room(expiries_, std::max(more, expiries_.size()));  // as many again, so that this is rare
  }
  if (!config_.record_events) return;
  detail::make_room(events_, more);
  if (!config_.record_tokens) return;
  detail::make_room(stored_.tokens, more * static_cast<std::size_t>(config_.block_size));
  detail::make_room(stored_.is_first, more);
}

void prefix_cache::drain_events(std::vector<cache_event>& events) {
  events.clear();
  events.swap(events_);
  stored_.clear();
}

void prefix_cache::drain_events(std::vector<cache_event>& events, stored_contents& stored) {
  stored.clear();
  std::swap(stored, stored_);
  events.clear();
  events.swap(events_);
}

void prefix_cache::list_contents(std::vector<cache_event>& events, stored_contents& stored) const {
  events.clear();
  stored.clear();
  std::vector<block_id> blocks;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(pool_->num_blocks()); ++i) {
    if (holds(block_id{i})) blocks.push_back(block_id{i});
  }
  std::ranges::sort(blocks, {}, [this](block_id block) { return index_.of(block).serial; });
  std::unordered_map<std::uint64_t, content_key> listed;  // by serial
  for (const block_id block : blocks) {
    const detail::prefix_index::contents& contents = index_.of(block);
    const bool is_first = is_scope(contents.parent);
    const auto parent = listed.find(contents.parent);
    if (!is_first && parent == listed.end()) continue;
    const content_key before = is_first ? content_key{} : parent->second;
    events.push_back({cache_event::kind::stored, block, contents.key, before});
    const std::span<const token_id> tokens = tokens_of(block);
    stored.tokens.insert(stored.tokens.end(), tokens.begin(), tokens.end());
    stored.is_first.push_back(is_first ? 1 : 0);
    listed.emplace(contents.serial, contents.key);
  }
}

}  // namespace bifolio::inline v0_2
