// SPDX-License-Identifier: Apache-2.0
#include "c/call.hpp"

#include <bifolio/dtype.hpp>
#include <bifolio/version.hpp>

namespace bifolio::inline v0_2::c {
namespace {

// Plain bytes: they need no memory, and outlive everything that the thread destroys.
thread_local char last_error[1024] = "";

}  // namespace

void set_last_error(std::string_view sentence) noexcept {
  const std::size_t count = std::min(sentence.size(), sizeof last_error - 1);
  std::memcpy(last_error, sentence.data(), count);
  last_error[count] = '\0';
}

bifolio_status report(errc code, const char* call) noexcept {
  if (code == errc::ok) return BIFOLIO_OK;
  return guarded([&]() -> bifolio_status { detail::refuse(code, call, " returned ", to_string(code)); });
}

void refuse_handle(const char* kind, std::uint64_t handle) {
  if (handle == 0) detail::refuse(errc::invalid_argument, "the handle of a ", kind, " is null");
  detail::refuse(errc::not_found, "the handle ", handle, " is no open ", kind,
                 ": it was destroyed, or is a handle of something else");
}

void refuse_null(const char* name) { detail::refuse(errc::invalid_argument, name, " is null"); }

void refuse_size(const char* name, std::size_t size, std::size_t expected) {
  detail::refuse(errc::invalid_argument, "the size of ", name, " is ", size, "; it must be sizeof the struct, here ",
                 expected, " (its _init function sets it)");
}

}  // namespace bifolio::inline v0_2::c

using namespace bifolio;

uint32_t bifolio_version(void) {
  return BIFOLIO_VERSION_MAJOR * 10000 + BIFOLIO_VERSION_MINOR * 100 + BIFOLIO_VERSION_PATCH;
}

const char* bifolio_last_error(void) { return c::last_error; }

const char* bifolio_status_name(bifolio_status status) {
  constexpr const char* answers[] = {"ok", "later", "never", "idle"};
  if (status >= 0 && status <= BIFOLIO_IDLE) return answers[status];
  // Names of the table of codes are string literals.
  if (status < 0 && status >= BIFOLIO_INTERNAL) return to_string(static_cast<errc>(-status)).data();
  return "unknown";
}

bifolio_status bifolio_parse_dtype(const char* name, bifolio_dtype* out) {
  return c::done([&] {
    bifolio_dtype& type = c::at(out, "out");
    type = static_cast<bifolio_dtype>(parse_dtype(&c::at(name, "name")));
  });
}

size_t bifolio_dtype_bytes(bifolio_dtype type) {
  return type >= 0 && type < static_cast<bifolio_dtype>(num_dtypes) ? size_of(static_cast<dtype>(type)) : 0;
}

bifolio_tensor bifolio_dense_tensor(const void* data, bifolio_dtype type, int64_t num_tokens, int32_t num_heads,
                                    int32_t head_dim) {
  return {const_cast<void*>(data),
          type,
          num_heads,
          num_tokens,
          head_dim,
          0,
          static_cast<int64_t>(num_heads) * head_dim,
          head_dim};
}
