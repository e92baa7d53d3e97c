// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager's check and digest: the whole state read once, for tests and for looking into a running server.

#include <algorithm>
#include <bifolio/detail/manager_core.hpp>
#include <bifolio/kv_layout.hpp>
#include <unordered_map>
#include <unordered_set>

#include "common/base/hash.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

std::string check_sequence(const sequence& record, const block_table& table, const kv_cache_config& config,
                           const block_pool& pool) {
  const std::int64_t needed = blocks_for(record.num_tokens, config.block_size);
  if (record.num_committed < 0 || record.num_committed > record.num_tokens)
    return "num_committed is not within num_tokens";
  if (record.num_tokens > config.max_seq_len) return "num_tokens exceeds max_seq_len";
  if (table.size() < needed) return "the table does not cover num_tokens";
  if (table.first() > 0 && config.sliding_window == 0) return "blocks were given back without a sliding window";
  std::unordered_set<std::int32_t> seen;
  for (std::int32_t i = table.first(); i < table.size(); ++i) {
    const block_id id = table[i];
    if (to_index(id) < 0 || to_index(id) >= pool.num_blocks()) return "entry " + std::to_string(i) + " is no block";
    if (!seen.insert(to_index(id)).second) return "block " + std::to_string(to_index(id)) + " is in the table twice";
    if (i >= needed && table.is_shared(i, pool)) return "a reserved block is shared";
  }
  const std::int32_t tail = record.num_tokens / config.block_size;
  if (record.writable_end > 0) {
    if (record.writable_end !=
        std::min<std::int64_t>(std::int64_t{table.size()} * config.block_size, config.max_seq_len)) {
      return "writable_end is not the end of the table";
    }
    if (tail < table.size() && record.num_tokens % config.block_size != 0 && table.is_shared(tail, pool)) {
      return "the tail is shared, but marked as its own";
    }
  }
  return {};
}

}  // namespace

std::string manager_core::check() const {
  if (std::string problem = pool_.check(); !problem.empty()) return problem;
  std::vector<std::uint32_t> refs(static_cast<std::size_t>(pool_.num_blocks()), 0);
  std::unordered_map<const block_chunk*, std::uint32_t> tables_of;
  std::vector<std::uint32_t> host_refs(static_cast<std::size_t>(config_.num_host_blocks), 0);
  std::int64_t open = 0, tokens = 0, entries = 0, swapped = 0;
  for (std::uint32_t i = 0; i < num_records_; ++i) {
    const sequence& record = records_[i];
    if ((record.generation & 1) == 0) continue;
    const bool is_out = record.writable_end == swapped_out;
    if (is_out && !host_) return "a sequence is swapped out, but there is no host pool";
    const block_pool& home = is_out ? host_->pool : pool_;
    if (std::string problem = check_sequence(record, tables_[i], config_, home); !problem.empty()) {
      return "sequence " + std::to_string(i) + ": " + problem;
    }
    ++open;
    tokens += record.num_tokens;
    entries += is_out ? 0 : tables_[i].size() - tables_[i].first();
    swapped += is_out ? 1 : 0;
    const block_chunk* last = nullptr;
    bool counts = true;
    tables_[i].for_each([&](block_id id, const block_chunk* chunk) {
      if (chunk != nullptr && chunk != last) {
        last = chunk;
        counts = ++tables_of[chunk] == 1;  // a chunk holds one reference for all of its tables
      }
      if (chunk == nullptr || counts) ++(is_out ? host_refs : refs)[static_cast<std::size_t>(to_index(id))];
    });
  }
  for (std::size_t b = 0; b < refs.size(); ++b) {
    const std::uint32_t held = pool_.num_refs(block_id{static_cast<std::int32_t>(b)});
    if (held != refs[b]) {
      return "block " + std::to_string(b) + " has " + std::to_string(held) + " references, tables hold " +
             std::to_string(refs[b]);
    }
  }
  if (prefix_) {
    if (std::string problem = prefix_->check(); !problem.empty()) return problem;
    if (std::string problem = publications_ == nullptr ? "" : check_publications(); !problem.empty()) return problem;
  }
  if (host_) {
    if (std::string problem = check_host(host_refs, swapped); !problem.empty()) return problem;
  }
  std::int64_t chunks_in_use = 0;
  for (const auto& [chunk, count] : tables_of) {
    if (chunk->num_tables != count) {
      return "a chunk counts " + std::to_string(chunk->num_tables) + " tables, " + std::to_string(count) + " use it";
    }
    ++chunks_in_use;
  }
  // A table's last chunk may hold nulls only (all of it left of the window); for_each does not meet that one.
  for (std::uint32_t i = 0; i < num_records_; ++i) {
    const sequence& record = records_[i];
    if ((record.generation & 1) != 0 && tables_[i].has_empty_tail_chunk()) ++chunks_in_use;
  }
  if (chunks_in_use + slab_.num_free() != slab_.num_chunks()) return "chunks of block tables were lost";
  std::int64_t free_records = 0;
  for (std::int32_t i = free_record_; i >= 0; i = records_[i].num_tokens) {
    if ((records_[i].generation & 1) != 0) return "an open sequence is in the list of free records";
    if (++free_records > num_records_) return "the list of free records has a loop";
  }
  if (open != num_sequences_ || open + free_records != num_records_) return "sequence records were lost";
  if (tokens != num_tokens_ || entries != num_entries_) return "the token or table entry counter is off";
  return {};
}

// No sequence writes a published block, and its tokens are those that were committed.
std::string manager_core::check_publications() const {
  for (std::uint32_t i = 0; i < num_records_; ++i) {
    const sequence& record = records_[i];
    if ((record.generation & 1) == 0) continue;
    const publication& state = publications_[i];
    const std::string name = "sequence " + std::to_string(i);
    if (state.num_published < 0) continue;
    if (state.num_published != whole_blocks(record.num_committed)) {
      return name + " has published " + std::to_string(state.num_published) + " blocks of " +
             std::to_string(whole_blocks(record.num_committed));
    }
    if (state.num_evicted_prefix_blocks > state.num_published)
      return name + " has more evicted prefix blocks than published blocks";
    const block_table& table = tables_[i];
    const std::int32_t last = state.num_published - 1;
    if (record.writable_end == swapped_out || last < std::max(state.num_evicted_prefix_blocks, table.first())) continue;
    // The serial may differ: when the contents were forgotten and a fork has published the block anew.
    if (prefix_->chain_at(table[last]).key != state.end.key) return name + " does not end where its last block does";
    const std::int32_t tail = whole_blocks(record.num_tokens);
    if (record.writable_end != 0 && ends_in_block(record.num_tokens) && prefix_->holds(table[tail])) {
      return name + " may write into a published block";
    }
  }
  return {};
}

std::string manager_core::check_host(std::span<const std::uint32_t> refs, std::int64_t num_swapped) const {
  if (std::string problem = host_->pool.check(); !problem.empty()) return "host pool: " + problem;
  for (std::size_t b = 0; b < refs.size(); ++b) {
    const std::uint32_t held = host_->pool.num_refs(block_id{static_cast<std::int32_t>(b)});
    if (held != refs[b]) {
      return "host block " + std::to_string(b) + " has " + std::to_string(held) + " references, tables hold " +
             std::to_string(refs[b]);
    }
    const block_id original = host_->on_device[b];
    if (original != invalid_block &&
        to_index(host_->on_host[static_cast<std::size_t>(to_index(original))]) != static_cast<std::int32_t>(b)) {
      return "host block " + std::to_string(b) + " and its original do not refer to each other";
    }
  }
  const auto num_links = [](const std::vector<block_id>& links) {
    return static_cast<std::int64_t>(links.size()) - std::count(links.begin(), links.end(), invalid_block);
  };
  if (num_links(host_->on_device) != num_links(host_->on_host)) return "links between the pools are one-sided";
  if (num_swapped != host_->num_swapped_sequences) return "the counter of sequences swapped out is off";
  return {};
}

std::uint64_t manager_core::digest() const noexcept {
  digest_builder hash;
  hash.add(pool_.digest());
  for (std::uint32_t i = 0; i < num_records_; ++i) {
    const sequence& record = records_[i];
    hash.add(record.generation - first_generation_);
    if ((record.generation & 1) == 0) continue;
    hash.add(static_cast<std::uint64_t>(record.num_tokens));
    hash.add(static_cast<std::uint64_t>(record.num_committed));
    hash.add(static_cast<std::uint64_t>(tables_[i].first()));
    hash.add(static_cast<std::uint64_t>(tables_[i].size()));
    hash.add(record.writable_end == swapped_out ? 1 : 0);
    if (publications_ != nullptr) {
      const publication& state = publications_[i];
      hash.add(static_cast<std::uint64_t>(state.num_published));
      hash.add(static_cast<std::uint64_t>(state.num_evicted_prefix_blocks));
      hash.add(state.end.serial);
      hash.add(prefix_->root(state.scope).serial);
      hash.add(state.retention.priority);
      hash.add(static_cast<std::uint64_t>(state.retention.expires_at));
      for (const block_extras& extras : extras_of(record)) {
        hash.add(static_cast<std::uint64_t>(extras.index));
        hash.add(static_cast<std::uint64_t>(extras.extras));
      }
      if (state.num_published >= 0) {
        for (std::int32_t k = 0; k < record.num_committed - state.num_published * config_.block_size; ++k) {
          hash.add(static_cast<std::uint64_t>(to_index(tail_tokens_of(record)[k])));
        }
      }
    }
    tables_[i].for_each([&](block_id id, const block_chunk*) { hash.add(static_cast<std::uint64_t>(to_index(id))); });
  }
  for (std::int32_t i = free_record_; i >= 0; i = records_[i].num_tokens) hash.add(static_cast<std::uint64_t>(i));
  if (prefix_) hash.add(prefix_->digest());
  if (host_) {
    hash.add(host_->pool.digest());
    for (const block_id original : host_->on_device) hash.add(static_cast<std::uint64_t>(to_index(original)));
  }
  return hash.value();
}

}  // namespace bifolio::inline v0_2::detail
