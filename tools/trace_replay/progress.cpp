// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <fmt/format.h>

#include <string>

#include "tools/common/program.hpp"

namespace trace_replay {

bool progress_bar::due() noexcept { return enabled_ && clock::now() >= next_; }

void progress_bar::show(std::int64_t done, std::int64_t total, std::string_view note) {
  if (!due()) return;
  next_ = clock::now() + std::chrono::milliseconds(100);
  written_ = true;
  constexpr std::int64_t width = 30;
  const std::int64_t filled = total > 0 ? width * done / total : width;
  const std::string line = fmt::format("\r[{:#<{}}{:.<{}}] {:3} %  {} of {} requests  {}\x1b[K", "", filled, "",
                                       width - filled, total > 0 ? 100 * done / total : 100, done, total, note);
  tools::write_stderr(line);
}

void progress_bar::wipe() {
  if (!written_) return;
  tools::write_stderr("\r\x1b[K");
  written_ = false;
}

}  // namespace trace_replay
