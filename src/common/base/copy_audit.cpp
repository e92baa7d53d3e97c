// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/copy_audit.hpp>
#include <bifolio/layer_groups.hpp>
#include <iterator>
#include <new>

#include "common/base/log.hpp"

namespace bifolio::inline v0_2 {
namespace {

const char* name_of(copy_kind kind) noexcept {
  switch (kind) {
    case copy_kind::on_write:
      return "copy on write";
    case copy_kind::swap_out:
      return "swap out";
    case copy_kind::swap_in:
      return "swap in";
  }
  return "copy";
}

template <class Allocating>
void unless_out_of_memory(Allocating allocating) noexcept {
  try {
    allocating();
  } catch (const std::bad_alloc&) {  // the header says what that leaves out
  }
}

}  // namespace

std::string to_string(const announced_copy& what) {
  std::string sentence = name_of(what.kind);
  sentence +=
      " of block " + std::to_string(to_index(what.copy.src)) + " to block " + std::to_string(to_index(what.copy.dst));
  if (what.group != 0) sentence += " in layer group " + std::to_string(what.group);
  return sentence + ", announced when sequence " + std::to_string(to_index(what.seq)) + " had " +
         std::to_string(what.num_tokens) + " tokens, was never carried out";
}

std::vector<announced_copy> copy_audit::missed() const {
  const std::lock_guard lock(mutex_);
  return missed_;
}

std::int64_t copy_audit::num_missed() const noexcept {
  const std::lock_guard lock(mutex_);
  return num_missed_;
}

std::int64_t copy_audit::num_outstanding() const noexcept {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(outstanding_.size());
}

std::optional<error> copy_audit::find_problem() const {
  const std::lock_guard lock(mutex_);
  if (num_missed_ == 0) return std::nullopt;
  std::string sentence = missed_.empty() ? std::string("a copy was never carried out") : to_string(missed_.front());
  if (num_missed_ > 1) sentence += "; " + std::to_string(num_missed_ - 1) + " more";
  return error(errc::failed_precondition, sentence);
}

void copy_audit::ignore_group(std::int32_t group) noexcept {
  if (group < 0 || group >= max_layer_groups) return;
  const std::lock_guard lock(mutex_);
  ignored_groups_ |= std::uint32_t{1} << group;
  std::erase_if(outstanding_, [&](const announced_copy& each) { return each.group == group; });
}

void copy_audit::carried_out(copy_kind kind, std::int32_t group, std::span<const block_copy> copies) noexcept {
  forget(kind, group, copies);
}

void copy_audit::forget(copy_kind kind, std::int32_t group, std::span<const block_copy> copies) noexcept {
  if (copies.empty()) return;
  const std::lock_guard lock(mutex_);
  std::erase_if(outstanding_, [&](const announced_copy& each) {
    return each.kind == kind && each.group == group &&
           std::find(copies.begin(), copies.end(), each.copy) != copies.end();
  });
}

void copy_audit::announce(copy_kind kind, std::int32_t group, std::span<const block_copy> copies, seq_id seq,
                          std::int64_t num_tokens) noexcept {
  const std::lock_guard lock(mutex_);
  if ((ignored_groups_ >> group & 1) != 0) return;
  unless_out_of_memory([&] {
    for (const block_copy& copy : copies) outstanding_.push_back({kind, group, copy, seq, num_tokens});
  });
}

void copy_audit::fork(seq_id parent, seq_id child) noexcept {
  const std::lock_guard lock(mutex_);
  unless_out_of_memory([&] {
    const std::size_t num_before = outstanding_.size();
    for (std::size_t i = 0; i < num_before; ++i) {
      if (outstanding_[i].seq != parent) continue;
      announced_copy of_child = outstanding_[i];
      of_child.seq = child;
      outstanding_.push_back(of_child);
    }
  });
}

void copy_audit::free(seq_id seq) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(outstanding_, [&](const announced_copy& each) { return each.seq == seq; });
}

std::vector<announced_copy> copy_audit::take_due(seq_id seq, std::int64_t num_committed) noexcept {
  std::vector<announced_copy> due;
  const std::lock_guard lock(mutex_);
  unless_out_of_memory([&] {
    const auto is_due = [&](const announced_copy& each) { return each.seq == seq && each.num_tokens < num_committed; };
    due.reserve(static_cast<std::size_t>(std::count_if(outstanding_.begin(), outstanding_.end(), is_due)));
    std::copy_if(outstanding_.begin(), outstanding_.end(), std::back_inserter(due), is_due);
    std::erase_if(outstanding_, is_due);
  });
  return due;
}

void copy_audit::report(const announced_copy& what) noexcept {
  {
    const std::lock_guard lock(mutex_);
    ++num_missed_;
    unless_out_of_memory([&] {
      if (missed_.size() < max_kept) missed_.push_back(what);
    });
  }
  if (!detail::is_logging()) return;
  unless_out_of_memory([&] { detail::log(log_level::warning, to_string(what)); });
}

}  // namespace bifolio::inline v0_2
