// SPDX-License-Identifier: Apache-2.0
/// group_manager's prefix caching: how much of a prompt every group has, and what groups register.

#include <algorithm>
#include <bifolio/detail/group_manager.hpp>
#include <bit>
#include <cstring>
#include <numeric>

#include "common/base/make_room.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/layer_group.hpp"
#include "common/cache/manager_steps.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

/// Kind of the extra key that stands for the encoder's input of a prompt.
constexpr std::uint32_t cross_extra_kind = 0xffffffff;

// What a group other than the first registers: the n-th of its blocks that end in a block of the first group with these
// contents. The serial number alone identifies it; the key spreads it over the index.
content_key follower_key(std::uint64_t serial, std::int64_t offset) noexcept {
  std::uint64_t mixed = (serial + static_cast<std::uint64_t>(offset) * 0x9e3779b97f4a7c15ULL);
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebULL;
  return {mixed ^ mixed >> 31, serial};
}

std::int64_t round_down(std::int64_t value, std::int64_t multiple) noexcept { return value / multiple * multiple; }

}  // namespace

block_id group_manager::find_contents(const layer_group& group, const prefix_chain& first,
                                      std::int64_t offset) const noexcept {
  const token_id token{static_cast<std::int32_t>(offset)};
  return group.prefix()->find_block(follower_key(first.serial, offset), first, {&token, 1});
}

// --- looking up

extra_key group_manager::cross_extra(const prompt_view& prompt) const {
  const std::string_view salt = prompt.scope.salt;
  const std::array<std::uint64_t, 3> head{prompt.scope.adapter_id, static_cast<std::uint64_t>(prompt.cross.num_tokens),
                                          salt.size()};
  cross_value_.resize(sizeof head + salt.size() + prompt.cross.digest.size());
  std::memcpy(cross_value_.data(), head.data(), sizeof head);
  if (!salt.empty()) std::memcpy(cross_value_.data() + sizeof head, salt.data(), salt.size());
  std::copy(prompt.cross.digest.begin(), prompt.cross.digest.end(),
            cross_value_.begin() + static_cast<std::ptrdiff_t>(sizeof head + salt.size()));
  return {0, cross_extra_kind, cross_value_};
}

prompt_view group_manager::with_cross(const prompt_view& prompt) const {
  if (crosses_.empty()) {
    require_between("tokens of an encoder's output without a cross group", prompt.cross.num_tokens, 0, 0);
    return prompt;
  }
  require_between("tokens of an encoder's output", prompt.cross.num_tokens, 0, crosses_.front()->config.max_tokens);
  if (prompt.cross.num_tokens == 0 || prompt.cross.digest.empty()) return prompt;
  prompt_view whole = prompt;
  translate_bad_alloc("open", [&] {
    extras_.clear();
    extras_.push_back({0, cross_extra_kind, prompt.cross.digest});
    extras_.insert(extras_.end(), prompt.extras.begin(), prompt.extras.end());
  });
  whole.extras = extras_;
  return whole;
}

void group_manager::append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const {
  first_.prefix_->append_keys(with_cross(prompt), keys);
}

// The block of another group that is registered as its `index`-th after the text that the first group's hits hold.
block_id group_manager::find_in(const layer_group& group, std::int64_t index) const noexcept {
  const std::int64_t first_size = first_.config_.block_size;
  const std::int64_t own_size = group.config.block_size;
  const std::int64_t at = ((index + 1) * own_size - 1) / first_size;
  const prefix_chain contents = first_.prefix_->chain_at(first_.hits_[static_cast<std::size_t>(at)]);
  return find_contents(group, contents, index - at * first_size / own_size);
}

// The largest multiple of the alignment, at most `length`, at which the group has all that later tokens need.
std::int64_t group_manager::longest_hit(const layer_group& group, std::int64_t length) const noexcept {
  if (group.states) {
    for (; length > 0; length -= alignment_) {
      const block_id last = first_.hits_[static_cast<std::size_t>(length / first_.config_.block_size) - 1];
      if (find_contents(group, first_.prefix_->chain_at(last), 0) != invalid_block) break;
    }
    return length;
  }
  const std::int64_t size = group.config.block_size;
  if (group.config.kind == group_kind::full) {
    std::int64_t num_found = 0;
    while (num_found < length / size && find_in(group, num_found) != invalid_block) ++num_found;
    return round_down(num_found * size, alignment_);
  }
  while (length > 0) {
    // A missing block is to the right of every shorter length, or in the window of it: go on where it begins.
    std::int64_t i = length / size;
    const std::int64_t first = group.core->first_visible_block(length);
    while (i > first && find_in(group, i - 1) != invalid_block) --i;
    if (i == first) return length;
    length = round_down((i - 1) * size, alignment_);
  }
  return 0;
}

void group_manager::find_cross(const prompt_view& prompt, joint_hits& found) const {
  for (layer_group* group : crosses_) {
    group->hits.clear();
    group->num_idle_hits = 0;
    const std::int64_t num_blocks = group->core->blocks_of(prompt.cross.num_tokens);
    if (num_blocks == 0 || group->prefix() == nullptr || prompt.cross.digest.empty()) continue;
    translate_bad_alloc("open", [&] {
      const extra_key extra = cross_extra(prompt);
      cross_tokens_.resize(static_cast<std::size_t>(num_blocks));
      for (std::size_t i = 0; i < cross_tokens_.size(); ++i) cross_tokens_[i] = token_id{static_cast<std::int32_t>(i)};
      group->hits.resize(static_cast<std::size_t>(num_blocks));
      const prefix_match match = group->prefix()->match({.tokens = cross_tokens_, .extras = {&extra, 1}}, group->hits);
      found.has_cross = match.num_blocks == num_blocks;
    });
    if (!found.has_cross) group->hits.clear();
    for (const block_id block : group->hits) group->num_idle_hits += group->pool().is_free(block) ? 1 : 0;
  }
}

void group_manager::look_up(const prompt_view& prompt, joint_hits& found) const {
  found.first = first_.look_up(prompt);
  found.is_cached = first_.prefix_ != nullptr && (prompt.cross.num_tokens == 0 || !prompt.cross.digest.empty());
  const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
  const std::int64_t size = first_.config_.block_size;
  // All blocks of the chain, also the last one of a prompt that is cached to its end.
  const std::int64_t chain = found.is_cached ? found.first.num_blocks * size : 0;
  found.num_first_tokens = round_down(std::min(chain, num_tokens - 1), alignment_);
  std::int64_t length = found.num_first_tokens;
  for (std::int64_t before = -1; before != length;) {
    before = length;
    for (const auto& group : groups_) {
      if (group->index > 0 && !group->is_cross() && length > 0) length = longest_hit(*group, length);
    }
  }
  found.num_tokens = length;
  found.first.num_tokens = length;
  found.first.num_blocks = length / size;
  found.first.copies_last = false;
  found.first.num_idle_blocks = 0;
  for (std::int64_t i = 0; i < found.first.num_blocks; ++i) {
    found.first.num_idle_blocks += first_.pool_.is_free(first_.hits_[static_cast<std::size_t>(i)]) ? 1 : 0;
  }
  if (length > 0) {
    found.first.end = first_.prefix_->chain_at(first_.hits_[static_cast<std::size_t>(found.first.num_blocks) - 1]);
  }
  collect_hits(found);
  find_cross(prompt, found);
}

void group_manager::collect_hits(const joint_hits& found) const {
  for (const auto& group : groups_) {
    if (group->index == 0 || group->is_cross()) continue;
    group->hits.clear();
    group->num_idle_hits = 0;
    if (found.num_tokens == 0) continue;
    translate_bad_alloc("open", [&] {
      if (group->states) {
        group->hits.push_back(find_contents(*group, found.first.end, 0));
        return;
      }
      const std::int64_t end = found.num_tokens / group->config.block_size;
      const std::int64_t first = group->core->first_visible_block(found.num_tokens);
      group->hits.reserve(static_cast<std::size_t>(std::max<std::int64_t>(0, end - first)));
      for (std::int64_t i = first; i < end; ++i) group->hits.push_back(find_in(*group, i));
    });
    for (const block_id block : group->hits) group->num_idle_hits += group->pool().is_free(block) ? 1 : 0;
  }
}

// --- opening

admission group_manager::can_open(const prompt_view& prompt, std::int64_t step_tokens, const group_blocks& promised) {
  joint_hits found;
  look_up(with_cross(prompt), found);
  require_between("step_tokens", step_tokens, 0, INT64_MAX);
  admission answer{alloc_status::ok, found.num_tokens};
  if (first_.num_sequences_ == config_.max_sequences) answer.status = alloc_status::later;
  const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
  for (const auto& group : groups_) {
    const std::int64_t others = promised[static_cast<std::size_t>(group->index)];
    require_between("num_promised", others, 0, max_num_blocks);
    std::int64_t peak = blocks_at_peak(num_tokens, step_tokens, group->index);
    if (group->is_cross()) peak = group->core->blocks_of(prompt.cross.num_tokens);
    if (peak + group->watermark > group->config.num_blocks) {
      answer.status = alloc_status::never;
      return answer;
    }
    // Hits in use cost nothing.
    const std::int64_t num_hits =
        group->index == 0 ? found.first.num_blocks : static_cast<std::int64_t>(group->hits.size());
    const std::int64_t num_idle = group->index == 0 ? found.first.num_idle_blocks : group->num_idle_hits;
    const std::int64_t needed = std::max<std::int64_t>(0, peak - (num_hits - num_idle));
    if (needed + group->watermark + others > group->pool().num_free()) answer.status = alloc_status::later;
  }
  return answer;
}

alloc_status group_manager::open_status(const joint_hits& found, std::int64_t num_tokens) const {
  alloc_status status = first_.free_record_ < 0 ? alloc_status::later : alloc_status::ok;
  for (const auto& group : groups_) {
    if (group->is_cross()) continue;
    const auto num_hits = static_cast<std::int64_t>(group->hits.size());
    std::int64_t live = 0;
    std::int64_t taken = 0;
    if (group->states) {
      const std::int64_t fresh = group->states->slots_for(num_tokens - found.num_tokens);
      live = fresh + num_hits;
      taken = fresh + group->num_idle_hits;
    } else {
      const std::int64_t fresh = group->core->blocks_of(num_tokens) - found.num_tokens / group->config.block_size;
      live = fresh + (group->index == 0 ? found.first.num_blocks : num_hits);
      taken = fresh + (group->index == 0 ? found.first.num_idle_blocks : group->num_idle_hits);
    }
    if (live > group->config.num_blocks) return alloc_status::never;
    if (taken > group->pool().num_free()) status = worse(status, alloc_status::later);
  }
  return status;
}

open_result group_manager::open(const prompt_view& asked, std::int64_t num_new_tokens) {
  require_between("num_new_tokens", num_new_tokens, 1, INT64_MAX);
  const prompt_view prompt = with_cross(asked);
  joint_hits found;
  look_up(prompt, found);
  const auto prompt_len = static_cast<std::int64_t>(prompt.tokens.size());
  sequence_marks marks;
  marks.is_cached = found.is_cached;
  if (found.is_cached) {
    if (found.num_first_tokens > found.num_tokens) marks.longer_hit = static_cast<std::int32_t>(found.num_first_tokens);
    marks.last_border = static_cast<std::int32_t>(round_down(prompt_len - 1, alignment_));
    if (snapshot_interval_ > 0) {
      marks.last_spaced = static_cast<std::int32_t>(round_down(prompt_len - 1, snapshot_interval_));
    }
  }
  std::int64_t num_tokens = found.num_tokens + std::min(num_new_tokens, prompt_len - found.num_tokens);
  num_tokens = std::min(num_tokens, next_cut(marks, found.num_tokens));
  alloc_status status = open_status(found, num_tokens);
  const auto num_cross = static_cast<std::int64_t>(prompt.cross.num_tokens);
  for (const layer_group* group : crosses_) {
    const std::int64_t needed = found.has_cross ? group->num_idle_hits : group->core->blocks_of(num_cross);
    status = worse(status, status_of(needed, group->pool()));
  }
  if (status != alloc_status::ok) return {.status = status};

  std::int64_t most = 1;
  for (const auto& group : groups_) {
    if (group->states) most = std::max(most, group->states->slots_for(num_tokens - found.num_tokens));
    if (group->index == 0 || group->states) continue;
    const std::int32_t size = group->core->blocks_of(group->is_cross() ? num_cross : num_tokens);
    group->core->reserve_allocate(size);
    most = std::max<std::int64_t>(most, size);
  }
  const std::int64_t num_fresh = first_.blocks_of(num_tokens) - found.first.num_blocks;
  translate_bad_alloc("open", [&] { reserve_all_events(num_fresh, most); });
  if (num_cross > 0 && found.is_cached && !crosses_.empty()) {
    marks.cross_key = translate_bad_alloc("open", [&] {
      const extra_key extra = cross_extra(prompt);
      return crosses_.front()->prefix()->acquire_extras({&extra, 1}, 0);
    });
  }
  scope_id scope = default_scope;
  try {
    scope = first_.reserve_open(prompt, first_.blocks_of(num_tokens), num_fresh);
  } catch (...) {
    if (marks.cross_key != no_extras) crosses_.front()->prefix()->release_extras(marks.cross_key);
    throw;
  }

  open_result result{.status = alloc_status::ok, .num_cached_tokens = found.num_tokens};
  result.num_cached_cross_tokens = found.has_cross ? num_cross : 0;
  block_copy none;
  const std::span<const block_id> first_hits =
      std::span<const block_id>(first_.hits_).first(static_cast<std::size_t>(found.first.num_blocks));
  result.seq = first_.open_sharing({num_tokens, found.num_tokens, 0, first_hits, false}, none);
  const sequence& record = *first_.find(result.seq);
  if (first_.prefix_) {
    first_.start_publication(record, prompt, found.first, scope);
    if (!found.is_cached) first_.publication_of(record).num_published = -1;
  }
  for (const auto& group : groups_) {
    if (group->index == 0) continue;
    const auto num_hits = static_cast<std::int64_t>(group->hits.size());
    if (group->states) {
      const std::uint32_t index = index_of(result.seq);
      group->states->open(index, found.num_tokens, num_hits > 0 ? group->hits.front() : invalid_block);
      group->states->append(index, found.num_tokens, num_tokens - found.num_tokens);
      if (group->prefix() != nullptr) group->prefix()->count_lookup(1, num_hits);
      continue;
    }
    const std::int64_t length = group->is_cross() ? num_cross : num_tokens;
    const std::int64_t cached = group->is_cross() ? result.num_cached_cross_tokens : found.num_tokens;
    const auto num_null =
        static_cast<std::int32_t>(group->is_cross() ? 0 : cached / group->config.block_size - num_hits);
    const seq_id opened = group->core->open_sharing({length, cached, num_null, group->hits, false}, none);
    if (group->is_cross()) group->core->find(opened)->writable_end = 0;  // never appended to, and soon shared
    if (group->prefix() != nullptr) {
      const std::int64_t asked_for = group->is_cross() ? num_cross : prompt_len;
      group->prefix()->count_lookup(
          group->is_cross() ? group->core->blocks_of(asked_for) : group->core->whole_blocks(asked_for), num_hits);
    }
  }
  if (!states_.empty() && found.num_first_tokens > 0) {
    const std::vector<block_id>& hits = states_.front()->hits;
    rolling_worth_.count(!hits.empty() && is_rolling_[static_cast<std::size_t>(to_index(hits.front()))]);
  }
  // Where one prompt went on, others may: what is taken now is as likely as any.
  for (const auto& group : groups_) {
    if (prompt.retention.expires_at != 0 || group->index == 0 || group->is_cross()) continue;
    const std::int64_t end =
        group->states ? found.num_tokens / first_.config_.block_size : found.num_tokens / group->config.block_size;
    std::int64_t i = end - static_cast<std::int64_t>(group->hits.size());
    for (const block_id hit : group->hits) raise_level(*group, hit, likely_hint(record, i++).priority);
  }
  note_room(index_of(result.seq));
  marks_[index_of(result.seq)] = marks;
  return result;
}

// --- registering

// The level of what is likely to be asked for. What is less likely has lower ones, and so is evicted before.
retention_hint group_manager::likely_hint(const sequence& record, std::int64_t index) const noexcept {
  retention_hint hint = first_.publication_of(record).retention;
  hint.priority = std::clamp(likely_policy_->level(hint, index), retention_hint::lowest, retention_hint::highest);
  return hint;
}

// Multiples of the snapshot interval that are 1, 2, 4, … of them before the last one in a prompt come before the
// others: a prompt that leaves the text there or later computes at most twice what it does not share with the earlier
// prompt. The last border is worth less than one interval more than the last multiple, where there is one.
block_level group_manager::level_of_state(const sequence_marks& marks, std::int64_t position,
                                          block_level likely) const noexcept {
  const auto second = std::min<block_level>(retention_hint::lowest + 1, likely);
  if (position == marks.longer_hit || position == marks.last_spaced || snapshot_interval_ == 0) return likely;
  if (position % snapshot_interval_ == 0) {
    const auto distance = static_cast<std::uint64_t>((marks.last_spaced - position) / snapshot_interval_);
    return position < marks.last_spaced && std::has_single_bit(distance) ? second : retention_hint::lowest;
  }
  return position == marks.last_border ? retention_hint::lowest : likely;
}

// The same for a block with the tokens from `begin` to `end`: the best of the places in whose window it is. After the
// prompt the window moves on, and takes its blocks out of it.
block_level group_manager::level_in_window(const sequence_marks& marks, std::int64_t begin, std::int64_t end,
                                           std::int64_t window, block_level likely) const noexcept {
  const auto is_seen_from = [&](std::int64_t length) { return begin < length && end > length - window + 1; };
  const bool is_spaced = snapshot_interval_ > 0;
  if (begin >= marks.last_border || is_seen_from(marks.longer_hit)) return likely;
  if (is_seen_from(is_spaced ? marks.last_spaced : marks.last_border)) return likely;
  for (std::int64_t back = snapshot_interval_; is_spaced && back < marks.last_spaced; back *= 2) {
    if (is_seen_from(marks.last_spaced - back)) return std::min<block_level>(retention_hint::lowest + 1, likely);
  }
  return retention_hint::lowest;
}

// What is registered already may have been less likely to be asked for then.
void group_manager::raise_level(const layer_group& group, block_id block, block_level level) const noexcept {
  if (group.pool().level(block) < level) group.pool().set_level(block, level);
}

// Whether it was not registered before.
bool group_manager::publish_as(layer_group& group, block_id block, const prefix_chain& contents, std::int64_t offset,
                               std::int64_t index, const retention_hint& hint) noexcept {
  const token_id token{static_cast<std::int32_t>(offset)};
  const publish_result published =
      group.prefix()->publish(block, follower_key(contents.serial, offset), contents, {&token, 1}, index, hint);
  if (published.duplicate_of == invalid_block) return true;
  if (hint.expires_at == 0) raise_level(group, published.duplicate_of, hint.priority);
  return false;
}

void group_manager::first_published(const sequence& record, std::int32_t index, const prefix_chain& contents) noexcept {
  const std::int64_t first_size = first_.config_.block_size;
  const std::ptrdiff_t at = &record - first_.records_;
  const std::int64_t end = (std::int64_t{index} + 1) * first_size;
  if (!states_.empty() && end % alignment_ == 0) publish_states(record, end, contents);
  for (const auto& group : groups_) {
    if (group->index == 0 || !group->has_positions()) continue;
    const std::int64_t size = group->config.block_size;
    const block_table& table = group->core->tables_[at];
    const std::int64_t begin = std::int64_t{index} * first_size / size;
    for (std::int64_t i = begin; i < end / size; ++i) {
      if (i < table.first() || i >= table.size()) continue;
      retention_hint hint = likely_hint(record, i);
      if (group->config.kind == group_kind::window) {
        hint.priority =
            level_in_window(marks_of(record), i * size, (i + 1) * size, group->config.window, hint.priority);
      }
      (void)publish_as(*group, table[static_cast<std::int32_t>(i)], contents, i - begin, i, hint);
    }
  }
}

// A state at a place where hits begin stays registered. One that decoding passed does until the next one: it is there
// for what goes on after this sequence.
void group_manager::publish_states(const sequence& record, std::int64_t position,
                                   const prefix_chain& contents) noexcept {
  const auto index = static_cast<std::uint32_t>(&record - first_.records_);
  if (!states_.front()->states->can_resume(index, position)) return;
  sequence_marks& marks = marks_[index];
  if (marks.rolling.serial != 0) {
    for (const layer_group* group : states_) {
      const block_id before = find_contents(*group, marks.rolling, 0);
      if (before == invalid_block) continue;
      const std::uint32_t num_own = group->states->of(index).front().slot == before ? 1 : 0;
      if (group->pool().num_refs(before) <= num_own) group->prefix()->unregister(before);
    }
    marks.rolling = {};
  }
  const std::int64_t block = position / first_.config_.block_size - 1;
  retention_hint hint = likely_hint(record, block);
  hint.priority = level_of_state(marks, position, hint.priority);
  const bool is_place = position == marks.longer_hit || position == marks.last_spaced || position == marks.last_border;
  bool is_rolling = !is_place && (snapshot_interval_ == 0 || position % snapshot_interval_ != 0);
  if (is_rolling && !rolling_worth_.is_likely()) hint.priority = retention_hint::lowest;
  for (layer_group* group : states_) {
    const block_id slot = group->states->at(index, position);
    if (slot == invalid_block) continue;
    const bool is_new = publish_as(*group, slot, contents, 0, block, hint);
    if (is_new && group == states_.front()) is_rolling_[static_cast<std::size_t>(to_index(slot))] = is_rolling;
    is_rolling = is_new && is_rolling;
  }
  if (is_rolling) marks.rolling = contents;
}

void group_manager::publish_cross(const sequence& record, layer_group& group) noexcept {
  const extras_id key = marks_[static_cast<std::size_t>(&record - group.core->records_)].cross_key;
  if (key == no_extras) return;
  const block_table& table = group.core->table_of(record);
  prefix_chain end = group.prefix()->root(default_scope);
  for (std::int32_t i = 0; i < table.size(); ++i) {
    const token_id token{i};
    end = group.prefix()->publish(table[i], end, {&token, 1}, i, {}, i == 0 ? key : no_extras).end;
  }
}

// The first group lost contents, so nothing that is registered under them can be found again.
void group_manager::removed(const prefix_chain& contents) noexcept {
  for (const auto& group : groups_) {
    if (group->index == 0 || group->is_cross()) continue;
    for (std::int64_t offset = 0; offset < group->blocks_per_first; ++offset) {
      const block_id block = find_contents(*group, contents, offset);
      if (block != invalid_block) group->prefix()->unregister(block);
    }
  }
}

bool group_manager::reset_prefix_cache() {
  if (!first_.prefix_) return true;
  for (const auto& group : groups_) {
    if (!group->prefix()->is_idle()) return false;
  }
  if (records_events_) {
    translate_bad_alloc("reset", [&] {
      for (const auto& group : groups_) group->prefix()->reserve_events(1);
    });
  }
  for (std::size_t i = groups_.size(); i-- > 0;) (void)groups_[i]->prefix()->reset();
  return true;
}

void group_manager::advance_clock(std::int64_t now) noexcept {
  for (const auto& group : groups_) {
    if (group->prefix() != nullptr) group->prefix()->advance_clock(now);
  }
}

}  // namespace bifolio::inline v0_2::detail
