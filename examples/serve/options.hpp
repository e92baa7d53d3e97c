// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine_options.hpp"

namespace serve {

struct options : generate::engine_options {
  std::string host = "127.0.0.1";
  std::int32_t port = 8080;     ///< 0: any that is free
  std::int32_t max_queue = 64;  ///< requests that run or wait; one more gets 429
  std::int32_t max_body_kib = 1024;
  std::int32_t write_seconds = 10;  ///< a client that takes nothing for so long is dropped
  std::int32_t drain_seconds = 30;  ///< after SIGTERM; what still runs then is cut
};

/// Throws `input_error` on anything that is not allowed. Returns nothing after --help or --version.
[[nodiscard]] std::optional<options> parse_options(int argc, const char* const* argv);

}  // namespace serve
