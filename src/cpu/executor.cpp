// SPDX-License-Identifier: Apache-2.0
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>
#include <string>

#include "common/base/fork_generation.hpp"
#include "common/base/refuse.hpp"
#include "cpu/executors.hpp"

namespace bifolio::inline v0_2 {

executor::executor() noexcept : fork_generation_(detail::fork_generation()) {}
executor::~executor() = default;

errc executor::health() const noexcept {
  return fork_generation_ == detail::fork_generation() ? errc::ok : errc::failed_precondition;
}

std::string_view to_string(executor_kind kind) noexcept {
  switch (kind) {
    case executor_kind::threads:
      return "threads";
    case executor_kind::openmp:
      return "openmp";
    case executor_kind::tbb:
      return "tbb";
    case executor_kind::serial:
      return "serial";
  }
  return "unknown";
}

executor_kind parse_executor(std::string_view text) {
  if (text == "threads") return executor_kind::threads;
  if (text == "openmp") return executor_kind::openmp;
  if (text == "tbb") return executor_kind::tbb;
  if (text == "serial") return executor_kind::serial;
  detail::refuse(errc::invalid_argument, "executor '", text, "' is not one of threads, openmp, tbb, serial");
}

void cpu::refuse_lost_threads(std::string_view name) {
  detail::refuse(errc::failed_precondition, "the executor '", name,
                 "' had threads in the process that this one was forked from, and has none of them here; use the "
                 "executor 'serial', or fork before the first call that computes");
}

executor_kind default_executor() noexcept { return executor_kind::threads; }

std::unique_ptr<executor> make_executor(executor_kind kind, std::int32_t num_threads) {
  constexpr std::int32_t max_threads = 4096;
  if (num_threads < 0 || num_threads > max_threads) {
    detail::refuse(errc::invalid_argument, "num_threads is ", num_threads, "; it must be 0 (automatic) to ",
                   max_threads);
  }
  switch (kind) {
    case executor_kind::threads:
      return cpu::make_threads_executor(num_threads);
#if BIFOLIO_HAS_OPENMP
    case executor_kind::openmp:
      return cpu::make_openmp_executor(num_threads);
#endif
#if BIFOLIO_HAS_TBB
    case executor_kind::tbb:
      return cpu::make_tbb_executor(num_threads);
#endif
    case executor_kind::serial:
      return cpu::make_serial_executor();
    default:
      break;
  }
  detail::refuse(errc::unsupported, "the executor '", to_string(kind), "' was left out of this build");
}

}  // namespace bifolio::inline v0_2
