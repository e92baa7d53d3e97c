// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <fmt/format.h>

#include <string>

namespace trace_replay {

void progress_bar::show(std::int64_t done, std::int64_t total, std::string_view note) {
  if (!line_.due()) return;
  constexpr std::int64_t width = 30;
  const std::int64_t filled = total > 0 ? width * done / total : width;
  line_.show(fmt::format("[{:#<{}}{:.<{}}] {:3} %  {} of {} requests  {}", "", filled, "", width - filled,
                         total > 0 ? 100 * done / total : 100, done, total, note));
}

}  // namespace trace_replay
