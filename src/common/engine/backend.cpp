// SPDX-License-Identifier: Apache-2.0
#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>

namespace bifolio {

event_state::~event_state() = default;

backend::~backend() = default;

errc backend::rotate_append(const rotate_append_params&, stream_ref) noexcept { return errc::unsupported; }

std::vector<std::string> backend::attention_kernels() const { return {}; }

std::vector<std::string> backend::describe(const attention_plan&, const attention_params&) const { return {}; }

std::vector<std::string> backend::explain(const attention_plan&) const { return {}; }

}  // namespace bifolio
