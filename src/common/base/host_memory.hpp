// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/memory_resource.hpp>
#include <string>

namespace bifolio::inline v0_2::detail {

/// `host_memory_amount` of a Linux whose files are below `root` ("" for the machine's own).
[[nodiscard]] BIFOLIO_API memory_amount linux_memory_amount(const std::string& root);

}  // namespace bifolio::inline v0_2::detail
