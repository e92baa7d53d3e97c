// SPDX-License-Identifier: Apache-2.0
/// Traces through the cache logic: what the program trace_replay does.

#include "tools/trace_replay/replay.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sstream>

#include "cache.hpp"
#include "tools/trace_replay/input_error.hpp"
#include "tools/trace_replay/sweep.hpp"

using namespace bifolio;

namespace bifolio_python {
namespace {

trace_replay::policy_kind parse_policy(const std::string& name) {
  using trace_replay::policy_kind;
  if (name == "lru") return policy_kind::lru;
  if (name == "priority") return policy_kind::priority;
  if (name == "s3_fifo") return policy_kind::s3_fifo;
  refuse(errc::invalid_argument, "a policy is '" + name + "'; it must be lru, priority or s3_fifo");
}

/// The table as JSON and as Markdown, and the curves.
std::tuple<std::string, std::string, std::string, std::string> replay(const std::string& path,
                                                                      const std::vector<std::int64_t>& blocks,
                                                                      const std::vector<std::string>& policies,
                                                                      bool cache_only, std::int64_t requests,
                                                                      std::int32_t block_size, double speed) {
  if (blocks.empty() || policies.empty()) {
    refuse(errc::invalid_argument, "blocks and policies must have at least one entry each");
  }
  trace_replay::options chosen;
  chosen.trace_path = path;
  chosen.num_blocks = blocks;
  for (const std::string& name : policies) chosen.policies.push_back(parse_policy(name));
  chosen.cache_only = cache_only;
  chosen.max_requests = requests;
  chosen.simulation.block_size = block_size;
  chosen.simulation.speed = speed;
  const nb::gil_scoped_release unlocked;
  try {
    const std::vector<trace_replay::report> said = trace_replay::replay_all(chosen);
    std::ostringstream json, text;
    trace_replay::print_sweep(json, said, tools::output_format::json);
    trace_replay::print_sweep(text, said, tools::output_format::md);
    return {json.str(), text.str(), trace_replay::sweep_svg(said), trace_replay::html_report(said)};
  } catch (const trace_replay::input_error& problem) {
    refuse(errc::invalid_argument, problem.what());
  }
}

}  // namespace

void define_replay(nb::module_& module) {
  module.def("replay", &replay, nb::arg("path"), nb::arg("blocks"), nb::arg("policies"), nb::arg("cache_only"),
             nb::arg("requests"), nb::arg("block_size"), nb::arg("speed"));
}

}  // namespace bifolio_python
