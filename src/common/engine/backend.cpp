// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstddef>

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

std::vector<std::string> backend::attention_kernels() const { return {}; }

std::vector<std::string> backend::describe(const attention_plan&, const attention_params&) const { return {}; }

std::vector<std::string> backend::explain(const attention_plan&) const { return {}; }

}  // namespace bifolio::inline v0_2
