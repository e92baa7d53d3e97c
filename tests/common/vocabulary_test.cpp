// SPDX-License-Identifier: Apache-2.0
// Ids, errors, views and checked sizes.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <type_traits>

#include "common/base/checked.hpp"

namespace {

using namespace bifolio;

TEST_CASE("ids of different kinds do not mix and do not become integers by themselves") {
  static_assert(!std::is_convertible_v<block_id, std::int32_t>);
  static_assert(!std::is_convertible_v<std::int32_t, block_id>);
  static_assert(!std::is_convertible_v<block_id, token_id>);
  static_assert(!std::is_convertible_v<slot_id, std::int64_t>);
  static_assert(std::is_same_v<decltype(to_index(block_id{3})), std::int32_t>);
  static_assert(to_index(slot_id{std::int64_t{1} << 40}) == std::int64_t{1} << 40);
  CHECK(to_index(invalid_block) == -1);
}

TEST_CASE("every error code has a name of its own") {
  std::set<std::string_view> names;
  for (std::int32_t code = 0; code <= static_cast<std::int32_t>(errc::internal); ++code) {
    const std::string_view name = to_string(static_cast<errc>(code));
    CHECK(name != "unknown");
    CHECK(names.insert(name).second);
  }
  CHECK(to_string(static_cast<errc>(99)) == "unknown");
  CHECK(to_string(alloc_status::ok) == "ok");
  CHECK(to_string(alloc_status::later) == "later");
  CHECK(to_string(alloc_status::never) == "never");
}

TEST_CASE("an error without a sentence says its code, and that a sentence is missing") {
  for (std::int32_t i = 1; i <= static_cast<std::int32_t>(errc::internal); ++i) {
    const auto code = static_cast<errc>(i);
    const error brief(code);
    CHECK(brief.code() == code);
    CHECK(std::string(brief.what()) == std::string(to_string(code)) + ": the host had no memory for the sentence");
    CHECK(std::string(error(code, "").what()) == brief.what());
  }
  const error unknown(static_cast<errc>(static_cast<std::int32_t>(errc::internal) + 1));
  CHECK(std::string(unknown.what()) == "");
}

TEST_CASE("an error carries its code and its sentence, also through a copy and as std::runtime_error") {
  const error original(errc::out_of_range, "7 blocks asked for, 3 free");
  const error copy(original);
  CHECK(copy.code() == errc::out_of_range);
  try {
    throw copy;
  } catch (const std::runtime_error& caught) {
    CHECK(std::string(caught.what()) == "7 blocks asked for, 3 free");
  }
}

TEST_CASE("a dense view steps over heads and tokens without gaps, in 64 bits") {
  float value = 0;
  const tensor_view view = dense_view<void>(&value, dtype::f32, 5, 3, 7);
  CHECK(view.head_stride == 7);
  CHECK(view.token_stride == 21);
  const const_tensor_view seen = as_const(view);
  CHECK(seen.data == &value);
  CHECK(seen.num_tokens == 5);
  CHECK(seen.token_stride == 21);
  const auto wide = dense_view<void>(&value, dtype::f32, 1, 1 << 20, 1 << 20);
  CHECK(wide.token_stride == std::int64_t{1} << 40);
}

TEST_CASE("checked arithmetic says when it would wrap") {
  using detail::checked_mul;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  static_assert(checked_mul<std::int64_t>(3, 5) == 15);
  CHECK(checked_mul(most, std::int64_t{1}) == most);
  CHECK(checked_mul(most / 2 + 1, std::int64_t{2}) == std::nullopt);
  CHECK(checked_mul(least, std::int64_t{-1}) == std::nullopt);
  CHECK(checked_mul<std::uint32_t>(65536u, 65536u) == std::nullopt);
}

template <class View>
concept can_be_planned_with = requires(backend& where, attention_plan& plan, const attention_spec& spec, View view) {
  where.plan_attention(plan, spec, view, 1);
};
template <class View>
concept can_be_attended_with = requires(attention_params params, View view) {
  params.batch = view;
};
template <class View>
concept can_be_put_into_params = requires(View view) {
  attention_params{.batch = view};
};

TEST_CASE("host arrays in the place of device arrays do not compile, nor the other way round") {
  static_assert(can_be_planned_with<host_step_view> && !can_be_planned_with<device_step_view>);
  static_assert(can_be_attended_with<device_step_view> && !can_be_attended_with<host_step_view>);
  static_assert(can_be_put_into_params<device_step_view> && !can_be_put_into_params<host_step_view>);
  static_assert(!std::is_constructible_v<device_step_view, host_step_view>);
  static_assert(!std::is_constructible_v<host_step_view, device_step_view>);

  step_batch batch;
  batch.query_start_loc = {0, 2};
  batch.seq_lens = {9};
  batch.block_tables = {3};
  batch.block_table_stride = 1;
  batch.slot_mapping = {7, 8};
  batch.query_positions = {5};
  const host_step_view host = batch.view();
  const device_step_view same = as_device_view(host);  // said aloud, it does
  CHECK(same.num_seqs == 1);
  CHECK(same.num_tokens == 2);
  CHECK(same.query_start_loc == host.query_start_loc);
  CHECK(same.seq_lens == host.seq_lens);
  CHECK(same.block_tables == host.block_tables);
  CHECK(same.block_table_stride == 1);
  CHECK(same.slot_mapping == host.slot_mapping);
  CHECK(same.query_positions == host.query_positions);
}

TEST_CASE("a product past its limit is refused with the factors and the limit") {
  CHECK(detail::bounded_product("the size", 1000, 10, std::int64_t{10}, std::size_t{10}) == 1000);
  const auto sentence = [](std::int64_t limit, auto... factors) {
    try {
      (void)detail::bounded_product("the size", limit, factors...);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      return std::string(problem.what());
    }
    return std::string("accepted");
  };
  CHECK(sentence(999, 10, 10, 10) == "the size is 10 * 10 * 10; the largest allowed value is 999");
  CHECK(sentence(INT64_MAX, INT64_MAX, 2).find("9223372036854775807 * 2") != std::string::npos);
  CHECK(sentence(INT64_MAX, std::int64_t{1} << 32, std::int64_t{1} << 32, 0) != "accepted");
}

}  // namespace
