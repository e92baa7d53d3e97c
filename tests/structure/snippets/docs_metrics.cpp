// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
#include <bifolio/metrics.hpp>
#include <string>
#include <vector>
using namespace bifolio;
[[maybe_unused]] void scrape([[maybe_unused]] const kv_cache_manager& manager,
                             [[maybe_unused]] const scheduler& requests) {
  // snippet
}

#include <bifolio/kv_event_publisher.hpp>
#include <bifolio/kv_events.hpp>
double seconds_now();
void send_events([[maybe_unused]] kv_cache_manager& manager, [[maybe_unused]] kv_event_publisher& publisher,
                 [[maybe_unused]] std::string& batch) {
  // snippet
}

#include <bifolio/model_cache.hpp>
#include <bifolio/trace.hpp>
void trace_a_step([[maybe_unused]] model_cache& cache, [[maybe_unused]] trace_log& log,
                  [[maybe_unused]] const std::vector<step_row>& rows) {
  // snippet
}
