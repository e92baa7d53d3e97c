// SPDX-License-Identifier: Apache-2.0
/// Sentences for what the calls of a layer return as a code.

#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>

#include "common/base/refuse.hpp"
#include "common/engine/validate_attention.hpp"
#include "common/engine/validate_cache.hpp"
#include "common/engine/validate_rotate.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// What a check says, with its sentence.
template <class Check>
std::optional<error> explain(const Check& check) {
  std::string sentence;
  const errc code = check(&sentence);
  if (code == errc::ok) return std::nullopt;
  return detail::make_error(code, sentence);
}

}  // namespace

std::optional<error> find_problem(const attention_plan& plan, const attention_params& params) {
  return explain([&](std::string* sentence) { return validate::attention(plan, params, sentence); });
}

std::optional<error> find_problem(const append_params& params, device where) {
  return explain([&](std::string* sentence) {
    return where.type == device_type::cpu ? validate::append(params, sentence)
                                          : validate::append_on_device(params, sentence);
  });
}

std::optional<error> find_problem(const rotate_append_params& params, device where) {
  return explain([&](std::string* sentence) {
    const errc code = validate::rotate_append(params, sentence);
    return code == errc::ok && where.type == device_type::cpu ? validate::rotate_append_arrays(params, sentence) : code;
  });
}

std::optional<error> find_problem(const gather_params& params, device where) {
  return explain([&](std::string* sentence) {
    return where.type == device_type::cpu ? validate::gather(params, sentence)
                                          : validate::gather_on_device(params, sentence);
  });
}

std::optional<error> find_problem(const merge_params& params) {
  return explain([&](std::string* sentence) { return validate::merge(params, sentence); });
}

std::optional<error> find_copy_problem(std::span<const kv_cache_view> layers, std::span<const block_copy> copies) {
  return explain([&](std::string* sentence) { return validate::copy_blocks(layers, copies, sentence); });
}

std::optional<error> find_convert_problem(const kv_cache_view& src, const kv_cache_view& dst,
                                          std::span<const block_copy> copies) {
  return explain([&](std::string* sentence) { return validate::convert_blocks(src, dst, copies, sentence); });
}

std::optional<error> find_swap_problem(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                       std::span<const block_copy> copies) {
  return explain([&](std::string* sentence) { return validate::swap_blocks(src, dst, copies, sentence); });
}

}  // namespace bifolio::inline v0_2
