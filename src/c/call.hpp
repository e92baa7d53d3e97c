// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What every function of the C interface does: no exception leaves it, errors become a status and a sentence, handles
/// and structs with a size are checked.

#include <bifolio/c/bifolio.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "c/handles.hpp"
#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::c {

/// The sentence of this thread's last error. Text that is too long is cut.
void set_last_error(std::string_view sentence) noexcept;

[[nodiscard]] constexpr bifolio_status status_of(errc code) noexcept { return -static_cast<bifolio_status>(code); }
[[nodiscard]] constexpr bifolio_status status_of(alloc_status status) noexcept {
  return static_cast<bifolio_status>(status);
}
static_assert(status_of(errc::internal) == BIFOLIO_INTERNAL &&
              status_of(errc::invalid_argument) == BIFOLIO_INVALID_ARGUMENT &&
              status_of(alloc_status::never) == BIFOLIO_NEVER &&
              status_of(errc::out_of_memory) == BIFOLIO_OUT_OF_MEMORY);

/// Runs a call. `body` returns a bifolio_status, and may throw.
template <class Body>
[[nodiscard]] bifolio_status guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const error& problem) {
    set_last_error(problem.what());
    return status_of(problem.code());
  } catch (const std::bad_alloc&) {
    set_last_error("the host has no memory for the call");
    return BIFOLIO_OUT_OF_MEMORY;
  } catch (const std::exception& problem) {
    set_last_error(problem.what());
    return BIFOLIO_INTERNAL;
  } catch (...) {
    set_last_error("an exception of an unknown type");
    return BIFOLIO_INTERNAL;
  }
}

/// The same for a body that returns nothing.
template <class Body>
[[nodiscard]] bifolio_status done(const Body& body) noexcept {
  return guarded([&] {
    body();
    return bifolio_status{BIFOLIO_OK};
  });
}

/// Status of a call that returns an errc and no sentence.
[[nodiscard]] bifolio_status report(errc code, const char* call) noexcept;

/// The same with the sentence that `find_problem` finds, as std::optional<error>, where the code is its code.
template <class Find>
[[nodiscard]] bifolio_status report(errc code, const char* call, const Find& find_problem) {
  if (code == errc::ok) return BIFOLIO_OK;
  if (const auto problem = find_problem(); problem && problem->code() == code) throw *problem;
  return report(code, call);
}

[[noreturn]] void refuse_handle(const char* kind, std::uint64_t handle);

/// Kind and name of an object's handles; specialised in objects.hpp.
template <class Object>
struct handle_traits;

/// Throws `error`: invalid_argument for null, not_found for what is no open handle of this kind.
template <class Object>
[[nodiscard]] Object& get(typename handle_traits<Object>::handle handle) {
  const auto number = reinterpret_cast<std::uint64_t>(handle);
  void* const object = handles().find(number, handle_traits<Object>::kind);
  if (object == nullptr) [[unlikely]]
    refuse_handle(handle_traits<Object>::name, number);
  return *static_cast<Object*>(object);
}
template <class Object>
[[nodiscard]] std::shared_ptr<Object> share(typename handle_traits<Object>::handle handle) {
  (void)get<Object>(handle);
  return std::static_pointer_cast<Object>(
      handles().share(reinterpret_cast<std::uint64_t>(handle), handle_traits<Object>::kind));
}
template <class Object>
[[nodiscard]] typename handle_traits<Object>::handle open_handle(std::shared_ptr<Object> object) {
  return reinterpret_cast<typename handle_traits<Object>::handle>(
      handles().insert(handle_traits<Object>::kind, std::move(object)));
}
/// Null does nothing.
template <class Object>
[[nodiscard]] bifolio_status destroy(typename handle_traits<Object>::handle handle) noexcept {
  return done([&] {
    const auto number = reinterpret_cast<std::uint64_t>(handle);
    if (number == 0) return;
    const std::shared_ptr<void> object = handles().take(number, handle_traits<Object>::kind);
    if (object == nullptr) refuse_handle(handle_traits<Object>::name, number);
  });
}

[[noreturn]] void refuse_null(const char* name);

/// What a pointer points to; throws `error` (invalid_argument) for null.
template <class T>
[[nodiscard]] T& at(T* pointer, const char* name) {
  if (pointer == nullptr) [[unlikely]]
    refuse_null(name);
  return *pointer;
}
/// An array of the caller; null is allowed when it is empty.
template <class T>
[[nodiscard]] T* array(T* pointer, std::size_t count, const char* name) {
  if (pointer == nullptr && count != 0) [[unlikely]]
    refuse_null(name);
  return pointer;
}

[[noreturn]] void refuse_size(const char* name, std::size_t size, std::size_t expected);

/// What a struct was as long as in its first version: as now, but for those that have grown.
template <class Struct>
inline constexpr std::size_t first_size = sizeof(Struct);
template <>
inline constexpr std::size_t first_size<bifolio_manager_config> = offsetof(bifolio_manager_config, on_event);
/// Nobody's struct is longer; a size that was never set is usually.
inline constexpr std::size_t max_size = 4096;

template <class Struct>
void check_size(std::size_t size, const char* name) {
  // No size between the two is a version's: it would cut a field.
  if ((size < sizeof(Struct) && size != first_size<Struct>) || size > max_size) [[unlikely]]
    refuse_size(name, size, sizeof(Struct));
}

/// `given` as this version knows it: 0 in what an earlier version did not have. One that is longer, of a later version,
/// must be 0 in what is not known here.
template <class Struct>
[[nodiscard]] Struct read_struct(const Struct* given, const char* name) {
  const std::size_t size = at(given, name).size;
  check_size<Struct>(size, name);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  const std::size_t num_known = std::min(size, sizeof(Struct));
  if (std::any_of(bytes + num_known, bytes + size, [](unsigned char b) { return b != 0; })) {
    detail::refuse(errc::unsupported, name,
                   " has fields that this version of the library does not know; they must be 0");
  }
  Struct known{};
  std::memcpy(&known, given, num_known);
  return known;
}

/// Fills a struct of `size` bytes: what the caller knows of it, and 0 for what this version does not know.
template <class Struct>
[[nodiscard]] bifolio_status init_struct(Struct* out, std::size_t size, const Struct& defaults,
                                         const char* name) noexcept {
  return done([&] {
    (void)at(out, name);
    check_size<Struct>(size, name);
    std::memset(static_cast<void*>(out), 0, size);
    std::memcpy(static_cast<void*>(out), &defaults, std::min(size, sizeof defaults));
    out->size = size;
  });
}

/// Writes a result into a struct whose `size` the caller set.
template <class Struct>
void write_struct(Struct* out, const Struct& value, const char* name) {
  const std::size_t size = at(out, name).size;
  check_size<Struct>(size, name);
  std::memcpy(static_cast<void*>(out), &value, std::min(size, sizeof value));
  out->size = size;
}

}  // namespace bifolio::inline v0_2::c
