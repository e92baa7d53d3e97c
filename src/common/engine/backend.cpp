// SPDX-License-Identifier: Apache-2.0
#include <bifolio/backend.hpp>

namespace bifolio {

event_state::~event_state() = default;

backend::~backend() = default;

std::vector<std::string> backend::attention_kernels() const { return {}; }

std::vector<std::string> backend::describe(const attention_plan&, const attention_params&) const { return {}; }

std::vector<std::string> backend::explain(const attention_plan&) const { return {}; }

}  // namespace bifolio
