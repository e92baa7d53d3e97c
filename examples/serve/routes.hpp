// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The server's paths on cpp-httplib: sockets, threads and headers, and nothing else.

#include <httplib.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <string>

#include "api.hpp"
#include "engine_thread.hpp"
#include "options.hpp"

namespace serve {

class routes {
 public:
  /// All are borrowed.
  routes(httplib::Server& server, generate::engine_thread& texts, const model_facts& model, const options& chosen);

  /// Completions that are not answered to their end yet.
  [[nodiscard]] std::int64_t num_open() const noexcept { return num_open_; }

 private:
  void complete(const httplib::ContentReader& body, httplib::Response& response, bool is_chat);
  [[nodiscard]] std::string read_body(const httplib::ContentReader& body) const;
  [[nodiscard]] std::string models() const;
  [[nodiscard]] std::string metrics();

  generate::engine_thread& texts_;
  const model_facts& model_;
  const options& chosen_;
  const std::int64_t start_ = std::time(nullptr);
  std::atomic<std::uint64_t> num_answers_{0};
  std::atomic<std::int64_t> num_open_{0};
  static constexpr std::array<int, 9> statuses{200, 400, 404, 405, 413, 429, 500, 503, 0};  // 0: any other
  std::array<std::atomic<std::int64_t>, statuses.size()> by_status_{};
};

/// Text of the page at /.
[[nodiscard]] const std::string& page();

}  // namespace serve
