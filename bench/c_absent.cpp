// SPDX-License-Identifier: Apache-2.0
// Stands in for c_rows.cpp where the C interface is not built.
#include "model_rows.hpp"

namespace bifolio::bench {

void add_c_rows(std::int32_t, report&) {}

}  // namespace bifolio::bench
