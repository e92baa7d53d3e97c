// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstddef>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {

event_state::~event_state() = default;

backend::~backend() = default;

errc backend::rotate_append(const rotate_append_params&, stream_ref) noexcept { return errc::unsupported; }

errc backend::clear(void* dst, std::size_t num_bytes, stream_ref stream) noexcept {
  static constexpr std::array<std::byte, 1 << 16> zeros{};
  for (std::size_t done = 0; done < num_bytes; done += zeros.size()) {
    const std::size_t count = std::min(zeros.size(), num_bytes - done);
    if (const errc code = upload(static_cast<std::byte*>(dst) + done, zeros.data(), count, stream); code != errc::ok) {
      return code;
    }
  }
  return errc::ok;
}

memory_amount backend::amount_of_memory() const {
  return detail::translate_bad_alloc("amount_of_memory", [] { return host_memory_amount(); });
}

std::int64_t memory_budget(const backend& where, const memory_reserve& reserve) {
  if (!(reserve.fraction >= 0 && reserve.fraction <= 1)) {
    detail::refuse(errc::invalid_argument, "the reserve's fraction ", reserve.fraction, " is not between 0 and 1");
  }
  detail::require_between("the reserve's bytes", reserve.bytes, 0, INT64_MAX);
  const memory_amount amount = where.amount_of_memory();
  if (amount.total_bytes == 0) {
    detail::refuse(
        errc::unsupported, "the system does not say how much memory the device '",
        [&](std::string& sentence) { sentence += to_string(where.where()); }, "' has");
  }
  const auto share = static_cast<std::int64_t>(reserve.fraction * static_cast<double>(amount.total_bytes));
  return std::max<std::int64_t>(0, amount.free_bytes - std::max(share, reserve.bytes));
}

std::vector<std::string> backend::attention_kernels() const { return {}; }

std::vector<std::string> backend::describe(const attention_plan&, const attention_params&) const { return {}; }

std::vector<std::string> backend::explain(const attention_plan&) const { return {}; }

}  // namespace bifolio::inline v0_2
