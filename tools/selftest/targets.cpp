// SPDX-License-Identifier: Apache-2.0
#include "targets.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <optional>
#include <thread>

#include "report.hpp"

namespace selftest {
namespace {

using bifolio::backend_options;
using bifolio::cpu_isa;
using bifolio::device;
using bifolio::device_type;
using bifolio::errc;
using bifolio::error;
using bifolio::test::open_tested;
using bifolio::test::tested_backend;

target open_cpu(cpu_isa isa) {
  target result;
  result.device = "cpu";
  result.isa = to_string(isa);
  const std::string family = "cpu-" + result.isa;
  backend_options options;
  options.isa = isa;
  std::optional<tested_backend> main = open_tested(family, family, {}, options);
  if (!main) throw error(errc::unsupported, fmt::format("the CPU backend did not open with {}", result.isa));
  result.main = std::move(*main);
  const auto add = [&](const std::string& name) {
    if (auto other = open_tested(fmt::format("{} with {}", family, name), family, {}, options)) {
      result.others.push_back(std::move(*other));
    }
  };
  // oneTBB complains of more threads than there are cores.
  const auto num_threads = static_cast<std::int32_t>(std::clamp(std::thread::hardware_concurrency(), 2u, 3u));
  options.executor_choice = bifolio::executor_kind::serial;
  add("the calling thread alone");
  for (const bifolio::executor_kind kind : bifolio::test::threaded_executors()) {
    options.executor_choice = kind;
    options.num_threads = num_threads;
    add(fmt::format("{} threads of {}", num_threads, to_string(kind)));
  }
  result.reversed = bifolio::test::make_reversed_executor(5);
  options.own_executor = result.reversed.get();
  add("5 workers in reversed order");
  return result;
}

std::optional<target> open_gpu(std::int32_t index) {
  const device where{device_type::cuda, index};
  target result;
  result.device = to_string(where);
  result.isa = std::string(no_isa);
  std::optional<tested_backend> main = open_tested(result.device, result.device, where, {});
  if (!main) return std::nullopt;
  result.main = std::move(*main);
  return result;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const cpu_isa isa : bifolio::supported_isas()) names.emplace_back(to_string(isa));
  return names;
}

}  // namespace

std::string supported_isa_names() { return fmt::format("{}", fmt::join(isa_names(), ", ")); }

std::vector<target> open_targets(const target_choice& choice) {
  const bool all = choice.device == "all";
  if (!all && choice.device != "cpu" && choice.device.rfind("cuda", 0) != 0) {
    throw error(errc::invalid_argument,
                fmt::format("--device is '{}', allowed are all, cpu, cuda and cuda:N", choice.device));
  }
  for (const std::string& isa : choice.isas) {
    const std::vector<std::string> allowed = isa_names();
    if (std::find(allowed.begin(), allowed.end(), isa) != allowed.end()) continue;
    throw error(errc::invalid_argument,
                fmt::format("--isa is '{}'; this machine supports {}", isa, fmt::join(allowed, ", ")));
  }
  std::vector<target> targets;
  if (all || choice.device == "cpu") {
    for (const cpu_isa isa : bifolio::supported_isas()) {
      const bool wanted =
          choice.isas.empty() || std::find(choice.isas.begin(), choice.isas.end(), to_string(isa)) != choice.isas.end();
      if (wanted) targets.push_back(open_cpu(isa));
    }
  }
  if (all || choice.device == "cuda") {
    for (std::int32_t index = 0;; ++index) {
      std::optional<target> gpu = open_gpu(index);
      if (!gpu) break;
      targets.push_back(std::move(*gpu));
    }
  } else if (choice.device != "cpu") {
    if (auto gpu = open_gpu(bifolio::parse_device(choice.device).index)) targets.push_back(std::move(*gpu));
  }
  if (targets.empty()) {
    throw error(errc::invalid_argument,
                fmt::format("--device is '{}', which this machine or this build does not have; there is cpu with {}",
                            choice.device, supported_isa_names()));
  }
  return targets;
}

}  // namespace selftest
