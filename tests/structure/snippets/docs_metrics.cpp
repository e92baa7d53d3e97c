// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
#include <bifolio/metrics.hpp>
#include <string>
#include <vector>

#if __has_include(<bifolio/kv_event_publisher.hpp>)
#include <bifolio/kv_event_publisher.hpp>
#endif

using namespace bifolio;

double seconds_now();

std::string scrape(const kv_cache_manager& manager, const scheduler& requests) {
  // snippet
  return body;
}

#if __has_include(<bifolio/kv_event_publisher.hpp>)
void send(kv_cache_manager& manager, kv_event_publisher& publisher, std::string& batch) {
  // snippet
}
#endif
