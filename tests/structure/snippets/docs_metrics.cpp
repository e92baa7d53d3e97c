// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
#include <bifolio/metrics.hpp>
#include <string>
#include <vector>
using namespace bifolio;
std::string scrape(const kv_cache_manager& manager, const scheduler& requests) {
  // snippet
  return body;
}
