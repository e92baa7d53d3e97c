// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager's side of prefix caching: what a new sequence shares, and how full blocks are published.

#include <algorithm>
#include <array>
#include <bifolio/detail/group_manager.hpp>
#include <bifolio/detail/manager_core.hpp>
#include <utility>

#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/manager_steps.hpp"
#include "common/cache/require_limits.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

// Serial numbers of different groups are different, because a follower's contents name those of the first group.
constexpr std::uint64_t first_serial_of(std::uint32_t group) noexcept { return std::uint64_t{group} << 56 | 1; }

}  // namespace

void manager_core::make_prefix_cache() {
  static_assert(sizeof(publication) == 56, "kv_cache_config says so");
  const bool follows = role_ == core_role::follower;
  prefix_ = std::make_unique<prefix_cache>(
      pool_, prefix_cache_config{.block_size = follows ? 1 : config_.block_size,
                                 .seed = config_.prefix.seed,
                                 .key_bits = config_.prefix.key_bits,
                                 .record_events = config_.prefix.record_events,
                                 .record_tokens = config_.prefix.record_tokens && !follows,
                                 .hook = follows ? cache_event_hook{} : config_.prefix.hook,
                                 .policy = config_.prefix.policy,
                                 .memory = config_.memory,
                                 .first_serial = first_serial_of(group_)});
  if (follows) return;
  const std::size_t num_tail_tokens = std::size_t{num_records_} * static_cast<std::size_t>(config_.block_size);
  publication_storage_ =
      buffer(*config_.memory, std::size_t{num_records_} * sizeof(publication) + num_tail_tokens * sizeof(token_id));
  publications_ = publication_storage_.as<publication>();
  tail_tokens_ = reinterpret_cast<token_id*>(publications_ + num_records_);
  for (std::uint32_t i = 0; i < num_records_; ++i) std::construct_at(&publications_[i]);
}

void manager_core::reserve_events(std::int64_t num_events) {
  if (prefix_) prefix_->reserve_events(num_events);
}

// --- opening

manager_core::prefix_hits manager_core::look_up(const prompt_view& prompt) const {
  const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
  require_between("prompt tokens", num_tokens, 1, config_.max_seq_len);
  std::int64_t lowest = 0;
  for (const extra_key& extra : prompt.extras) {
    require_between("position of an extra key", extra.position, lowest, config_.max_seq_len - 1);
    lowest = extra.position;
  }
  require_salt(prompt.scope.salt);
  require_extras(prompt.extras);
  prefix_hits hits;
  if (!prefix_) return hits;
  translate_bad_alloc("open", [&] {
    hits_.resize(static_cast<std::size_t>(whole_blocks(num_tokens)));
    const prefix_match found = prefix_->match(prompt, hits_);
    hits.num_blocks = found.num_blocks;
    hits.end = found.end;
  });
  hits.num_tokens = hits.num_blocks * config_.block_size;
  const auto num_idle = [&] {
    std::int64_t count = 0;
    for (std::int64_t i = first_visible_block(hits.num_tokens); i < hits.num_blocks; ++i) {
      count += pool_.is_free(hits_[static_cast<std::size_t>(i)]) ? 1 : 0;
    }
    return count;
  };
  if (hits.num_tokens < num_tokens) {
    hits.num_idle_blocks = num_idle();
    return hits;
  }
  // The last token is computed even when its K and V are there: its logits are what the caller wants. That takes a copy
  // of the last block, or, where no block can be had for it as long as the prompt's own are kept, the block anew.
  --hits.num_tokens;
  hits.num_idle_blocks = num_idle();
  hits.copies_last = config_.block_size > 1 && !(hits.num_idle_blocks == pool_.num_free() &&
                                                 pool_.is_free(hits_[static_cast<std::size_t>(hits.num_blocks) - 1]));
  if (!hits.copies_last) {
    --hits.num_blocks;
    hits.num_tokens = hits.num_blocks * config_.block_size;
    hits.num_idle_blocks = num_idle();
  }
  const std::int64_t num_whole = whole_blocks(hits.num_tokens);
  if (num_whole > 0) hits.end = prefix_->chain_at(hits_[static_cast<std::size_t>(num_whole) - 1]);
  return hits;
}

admission manager_core::can_open(const prompt_view& prompt, std::int64_t step_tokens, std::int64_t num_promised) const {
  const prefix_hits hits = look_up(prompt);
  require_between("step_tokens", step_tokens, 0, INT64_MAX);
  require_between("num_promised", num_promised, 0, max_num_blocks);
  admission answer{alloc_status::later, hits.num_tokens};
  const std::int64_t peak = blocks_at_peak(static_cast<std::int64_t>(prompt.tokens.size()), step_tokens);
  if (peak + watermark_blocks_ > config_.num_blocks) {
    answer.status = alloc_status::never;
    return answer;
  }
  // Hits in use cost nothing, except one that is copied. While it is copied an idle hit takes a block, too; look_up has
  // counted that.
  std::int64_t num_used_hits = hits.num_blocks - first_visible_block(hits.num_tokens) - hits.num_idle_blocks;
  if (hits.copies_last && !pool_.is_free(hits_[static_cast<std::size_t>(hits.num_blocks) - 1])) --num_used_hits;
  const std::int64_t needed = std::max<std::int64_t>(0, peak - num_used_hits);
  if (num_sequences_ < config_.max_sequences && needed + watermark_blocks_ + num_promised <= pool_.num_free()) {
    answer.status = alloc_status::ok;
  }
  return answer;
}

open_result manager_core::open(const prompt_view& prompt, std::int64_t num_new_tokens) {
  require_between("num_new_tokens", num_new_tokens, 1, INT64_MAX);
  const prefix_hits hits = look_up(prompt);
  const auto prompt_len = static_cast<std::int64_t>(prompt.tokens.size());
  const std::int64_t num_tokens = hits.num_tokens + std::min(num_new_tokens, prompt_len - hits.num_tokens);
  const std::int32_t size = blocks_of(num_tokens);
  const std::int32_t first = std::min(first_visible_block(hits.num_tokens), size);
  const std::int64_t num_fresh = size - hits.num_blocks + (hits.copies_last ? 1 : 0);
  if (size - first > config_.num_blocks) return {.status = alloc_status::never};
  if (num_fresh + hits.num_idle_blocks > pool_.num_free() || free_record_ < 0) return {.status = alloc_status::later};
  const scope_id scope = reserve_open(prompt, size, num_fresh);
  open_result result{.status = alloc_status::ok, .num_cached_tokens = hits.num_tokens};
  const std::span<const block_id> taken =
      std::span(hits_)
          .first(static_cast<std::size_t>(hits.num_blocks))
          .subspan(static_cast<std::size_t>(std::min<std::int64_t>(first, hits.num_blocks)));
  result.seq = open_sharing({num_tokens, hits.num_tokens, first, taken, hits.copies_last}, result.copy);
  if (prefix_) start_publication(*find(result.seq), prompt, hits, scope);
  return result;
}

scope_id manager_core::reserve_open(const prompt_view& prompt, std::int32_t size, std::int64_t num_fresh) {
  return translate_bad_alloc("open", [&] {
    scope_id scope = default_scope;
    tables_[free_record_].reserve(size);
    slab_.reserve(block_table::chunks_to_grow(0, size));
    if (!prefix_) return scope;
    prefix_->reserve_events(num_fresh);
    std::vector<block_extras> extras = acquire_block_extras(prompt);
    try {
      if (!extras.empty()) extras_[static_cast<std::uint32_t>(free_record_)];
      scope = prefix_->acquire_scope(prompt.scope);
    } catch (...) {
      release_block_extras(extras);
      extras_.erase(static_cast<std::uint32_t>(free_record_));
      throw;
    }
    if (!extras.empty()) extras_[static_cast<std::uint32_t>(free_record_)] = std::move(extras);
    return scope;
  });
}

seq_id manager_core::open_sharing(const shared_opening& what, block_copy& copy) noexcept {
  const auto& [num_tokens, num_cached_tokens, first, taken, copies_last] = what;
  const std::int32_t size = blocks_of(num_tokens);
  sequence& record = open_record();
  block_table& table = table_of(record);
  if (prefix_) prefix_->pin(taken);
  for (std::int32_t i = 0; i < first; ++i) table.push_null();
  for (const block_id block : copies_last ? taken.first(taken.size() - 1) : taken) table.push_back(block, slab_);
  if (copies_last) {
    copy = {taken.back(), take_block()};
    table.push_back(copy.dst, slab_);
    pool_.release(taken.back());  // only now: it must not be handed out as its own copy
    ++num_copied_;
  }
  while (table.size() < size) table.push_back(take_block(), slab_);
  record.num_tokens = static_cast<std::int32_t>(num_tokens);
  record.num_committed = static_cast<std::int32_t>(num_cached_tokens);
  record.writable_end = end_of(table);  // the tail is a fresh block: at least one token is not cached
  num_tokens_ += num_tokens;
  num_entries_ += size - first;
  peak_used_ = std::max(peak_used_, pool_.num_used());
  return id_of(record);
}

std::vector<manager_core::block_extras> manager_core::acquire_block_extras(const prompt_view& prompt) {
  std::vector<block_extras> acquired;
  acquired.reserve(prompt.extras.size());
  try {
    for (std::size_t i = 0; i < prompt.extras.size();) {
      const std::int64_t index = prompt.extras[i].position / config_.block_size;
      std::size_t end = i;
      while (end < prompt.extras.size() && prompt.extras[end].position / config_.block_size == index) ++end;
      acquired.push_back({static_cast<std::int32_t>(index),
                          prefix_->acquire_extras(prompt.extras.subspan(i, end - i), index * config_.block_size)});
      i = end;
    }
  } catch (...) {
    release_block_extras(acquired);
    throw;
  }
  return acquired;
}

void manager_core::release_block_extras(std::span<const block_extras> extras) noexcept {
  for (const block_extras& extra : extras) prefix_->release_extras(extra.extras);
}

std::span<const manager_core::block_extras> manager_core::extras_of(const sequence& record) const noexcept {
  if (extras_.empty()) return {};
  const auto found = extras_.find(static_cast<std::uint32_t>(&record - records_));
  if (found == extras_.end()) return {};
  return found->second;
}

extras_id manager_core::extras_at(const sequence& record, std::int32_t index) const noexcept {
  const std::span<const block_extras> extras = extras_of(record);
  const auto at = std::lower_bound(extras.begin(), extras.end(), index,
                                   [](const block_extras& some, std::int32_t wanted) { return some.index < wanted; });
  return at != extras.end() && at->index == index ? at->extras : no_extras;
}

// --- publishing

void manager_core::start_publication(const sequence& record, const prompt_view& prompt, const prefix_hits& hits,
                                     scope_id scope) noexcept {
  const std::int32_t num_published = whole_blocks(hits.num_tokens);
  publication_of(record) = {.end = num_published > 0 ? hits.end : prefix_->root(scope),
                            .num_published = num_published,
                            .num_evicted_prefix_blocks = 0,
                            .scope = scope,
                            .retention = prompt.retention};
  const auto begin = static_cast<std::size_t>(num_published) * static_cast<std::size_t>(config_.block_size);
  std::copy_n(prompt.tokens.begin() + static_cast<std::ptrdiff_t>(begin),
              static_cast<std::size_t>(hits.num_tokens) - begin, tail_tokens_of(record));
  prefix_->count_lookup(whole_blocks(static_cast<std::int64_t>(prompt.tokens.size())), hits.num_blocks);
}

void manager_core::publish_tokens(sequence& record, std::span<const token_id> tokens) noexcept {
  publication& state = publication_of(record);
  if (state.num_published < 0) return;
  const auto block_size = static_cast<std::size_t>(config_.block_size);
  token_id* tail = tail_tokens_of(record);
  const auto offset = static_cast<std::size_t>(record.num_committed - state.num_published * config_.block_size);
  if (offset > 0) {
    const std::size_t count = std::min(block_size - offset, tokens.size());
    std::copy_n(tokens.begin(), count, tail + offset);
    if (offset + count < block_size) return;
    publish_blocks(record, {tail, block_size});
    tokens = tokens.subspan(count);
  }
  const std::size_t num_whole = tokens.size() / block_size * block_size;
  publish_blocks(record, tokens.first(num_whole));
  std::copy(tokens.begin() + static_cast<std::ptrdiff_t>(num_whole), tokens.end(), tail);
}

// `tokens` fill whole blocks. Keys are made a few blocks ahead, so that what publishing will write is near by then.
void manager_core::publish_blocks(sequence& record, std::span<const token_id> tokens) noexcept {
  constexpr std::size_t group_size = 32;
  publication& state = publication_of(record);
  block_table& table = table_of(record);
  const auto block_size = static_cast<std::size_t>(config_.block_size);
  std::array<content_key, group_size> keys;
  while (!tokens.empty()) {
    const std::size_t count = std::min(group_size, tokens.size() / block_size);
    prefix_chain ahead = state.end;
    for (std::size_t k = 0; k < count; ++k) {
      const std::int32_t index = state.num_published + static_cast<std::int32_t>(k);
      ahead.key = keys[k] =
          prefix_->next_key(ahead, tokens.subspan(k * block_size, block_size), extras_at(record, index));
      if (count > 1) prefix_->prefetch(table[index], keys[k]);
    }
    for (std::size_t k = 0; k < count; ++k) {
      const std::int32_t index = state.num_published++;
      const publish_result published =
          prefix_->publish(table[index], keys[k], state.end, tokens.subspan(k * block_size, block_size), index,
                           state.retention, extras_at(record, index));
      state.end = published.end;
      if (groups_ != nullptr) [[unlikely]]
        groups_->first_published(record, index, published.end);
      if (config_.prefix.deduplicate && published.duplicate_of != invalid_block && !table.is_shared(index, pool_)) {
        prefix_->pin({&published.duplicate_of, 1});
        table.replace(index, published.duplicate_of, pool_, slab_);
        note_table_change(record);
        peak_used_ = std::max(peak_used_, pool_.num_used());  // a fence may hold the one that was replaced
      }
    }
    tokens = tokens.subspan(count * block_size);
  }
}

// After a rollback: back to the end of the last block that is still full. Its key and the tokens after it are in the
// prefix cache, unless the sequence was swapped in or slid past it since; then the sequence publishes no more blocks.
void manager_core::rewind_publication(sequence& record) noexcept {
  publication& state = publication_of(record);
  if (state.num_published < 0 || record.num_committed >= state.num_published * config_.block_size) return;
  const block_table& table = table_of(record);
  const std::int32_t keep = whole_blocks(record.num_committed);
  const std::int32_t oldest_named = std::max(state.num_evicted_prefix_blocks, table.first());
  const bool has_tail = ends_in_block(record.num_committed);
  if ((keep > 0 && keep - 1 < oldest_named) || (has_tail && keep < oldest_named)) {
    state.num_published = -1;
    return;
  }
  if (has_tail) {
    const auto offset = static_cast<std::size_t>(record.num_committed - keep * config_.block_size);
    std::copy_n(prefix_->tokens_of(table[keep]).begin(), offset, tail_tokens_of(record));
  }
  state.end = keep > 0 ? prefix_->chain_at(table[keep - 1]) : prefix_->root(state.scope);
  state.num_published = keep;
  state.num_evicted_prefix_blocks = std::min(state.num_evicted_prefix_blocks, keep);
}

void manager_core::reserve_fork_publication(const sequence& parent, const sequence& child) {
  const std::span<const block_extras> extras = extras_of(parent);
  if (extras.empty()) return;
  std::vector<block_extras> copy(extras.begin(), extras.end());
  extras_[static_cast<std::uint32_t>(&child - records_)] = std::move(copy);
  for (const block_extras& extra : extras) prefix_->retain_extras(extra.extras);
}

void manager_core::fork_publication(const sequence& parent, const sequence& child) noexcept {
  publication_of(child) = publication_of(parent);
  prefix_->retain_scope(publication_of(child).scope);
  std::copy_n(tail_tokens_of(parent), config_.block_size, tail_tokens_of(child));
}

void manager_core::end_publication(const sequence& record) noexcept {
  prefix_->release_scope(publication_of(record).scope);
  release_block_extras(extras_of(record));
  extras_.erase(static_cast<std::uint32_t>(&record - records_));
}

// --- the whole cache

bool manager_core::reset_prefix_cache() { return prefix_ == nullptr || prefix_->reset(); }

void manager_core::advance_clock(std::int64_t now) noexcept {
  if (prefix_) prefix_->advance_clock(now);
}

void manager_core::drain_events(std::vector<cache_event>& events) {
  events.clear();
  if (prefix_) prefix_->drain_events(events);
}

void manager_core::drain_events(std::vector<cache_event>& events, stored_contents& stored) {
  events.clear();
  stored.clear();
  if (prefix_) prefix_->drain_events(events, stored);
}

}  // namespace bifolio::inline v0_2::detail
