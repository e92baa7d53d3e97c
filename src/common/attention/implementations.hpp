// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The ordered list of attention implementations that every backend has: fastest first, the general one last. This file
/// knows no device: how a list is walked, how one implementation is forced by name, and what is said when it declines.
///
/// A list is a constant array of a type of the backend's own with at least
///
///   std::string_view name;                                              // static storage
///   bool accepts(const Problem& problem, std::string* why) const;  // or a function pointer of that name; `why` is
///   null
///                                                                  // or receives why it declines
///
/// `accepts` without a string allocates nothing, so that plans of every step and calls of every layer use the same
/// conditions that `backend::explain` puts into words.

#include <bifolio/attention.hpp>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {

/// How `accepts` says no: `return declines(why, "head_dim is ", head_dim, "; 64, 128 and 256 are compiled");`
/// The parts are text or numbers. Always false; `why` stays empty when there is no memory for the sentence.
template <class... Parts>
bool declines(std::string* why, const Parts&... parts) noexcept {
  if (why == nullptr) return false;
  why->clear();
  try {
    (append_part(*why, parts), ...);
  } catch (const std::bad_alloc&) {
    why->clear();
  }
  return false;
}

/// A name that must be taken, and what asked for it. Empty: the list decides.
struct forced_implementation {
  std::string_view name;
  std::string_view source;  ///< "attention_spec::implementation" or "BIFOLIO_ATTENTION"
};

/// The name that the environment variable BIFOLIO_ATTENTION forces on backends of `device` ("cpu", "cuda"): its value,
/// or what follows the colon of "cuda:general", which the other devices ignore. Empty where there is none. A backend
/// reads it once, when it is opened.
[[nodiscard]] std::string implementation_of_environment(std::string_view device);

/// The spec's name goes before that of the environment.
[[nodiscard]] forced_implementation forced_by(const attention_spec& spec, std::string_view environment) noexcept;

/// Throw `error` with all names: invalid_argument, unsupported (with why the implementation declines).
[[noreturn]] void refuse_unknown_implementation(const forced_implementation& forced,
                                                std::span<const std::string_view> names);
[[noreturn]] void refuse_declining_implementation(const forced_implementation& forced,
                                                  std::span<const std::string_view> names, std::string_view why);

template <class Entry>
[[nodiscard]] std::vector<std::string_view> names_of(std::span<const Entry> list) {
  std::vector<std::string_view> names;
  for (const Entry& entry : list) names.push_back(entry.name);
  return names;
}

/// The entry that `forced` names. Throws `error` when there is none of that name or it declines.
template <class Entry, class Problem>
[[nodiscard]] const Entry& forced_entry(std::span<const Entry> list, const Problem& problem,
                                        const forced_implementation& forced) {
  for (const Entry& entry : list) {
    if (entry.name != forced.name) continue;
    if (entry.accepts(problem, nullptr)) return entry;
    std::string why;
    (void)entry.accepts(problem, &why);
    refuse_declining_implementation(forced, names_of(list), why);
  }
  refuse_unknown_implementation(forced, names_of(list));
}

/// The state of a plan if `owner` made it, else null. Instead of a dynamic_cast per call: every maker of plan states
/// has an owner address of its own, and makes states of one type.
template <class State>
[[nodiscard]] State* state_of(const attention_plan& plan, const void* owner) noexcept {
  attention_plan_state* const state = plan.state.get();
  return state != nullptr && state->owner == owner ? static_cast<State*>(state) : nullptr;
}

}  // namespace bifolio::inline v0_2::detail
