// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A record of what a backend was asked to do and how long each call took, in the format of Chrome's traces, which
/// Perfetto (ui.perfetto.dev) and chrome://tracing open. A backend is wrapped, and the wrapper given to engines and
/// caches in its place; whoever does not wrap pays nothing.
///
///   trace_log log;
///   const auto traced = trace_backend(*where, log);
///   model_cache cache(*traced, …);   …   file << log.chrome_json();
///
/// On a device whose calls return before they are done, a call's time is that of the host.

#include <bifolio/backend.hpp>
#include <bifolio/export.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

/// Calls in the order in which they ended. Thread-safety: all functions from any thread.
class BIFOLIO_API trace_log {
 public:
  /// One call: `name` outlives the log. What `size` counts is in the name's row of docs/metrics.md.
  struct entry {
    const char* name = "";
    std::int64_t begin_ns = 0;  ///< since the log was made
    std::int64_t duration_ns = 0;
    std::int64_t size = 0;
    std::uint64_t thread = 0;
    std::int64_t step = -1;  ///< as `set_step` said; −1: none
  };

  /// Keeps the last `capacity` ≥ 1 calls; allocates for them now. Throws `error`: invalid_argument, out_of_memory.
  explicit trace_log(std::int64_t capacity = 1 << 16);

  /// What is recorded from now on belongs to this step. `model_cache` users pass `model_step::plan().step`; what
  /// `begin_step` called before (copies, uploads, planning) counts towards the step before.
  void set_step(std::int64_t step) noexcept;
  /// Nanoseconds since the log was made.
  [[nodiscard]] std::int64_t now() const noexcept;
  /// Adds a call that began at `begin_ns` and ends now. Allocates nothing.
  void add(const char* name, std::int64_t begin_ns, std::int64_t size) noexcept;

  [[nodiscard]] std::vector<entry> entries() const;
  /// Calls that are not kept any more.
  [[nodiscard]] std::int64_t num_lost() const noexcept;
  /// {"traceEvents":[{"name":"attention","ph":"X","ts":…,"dur":…,"pid":1,"tid":…,"args":{"size":…,"step":…}},…]}, times
  /// in microseconds, and a span for each step, from its first call to its last. Throws `error` (out_of_memory).
  [[nodiscard]] std::string chrome_json() const;

 private:
  mutable std::mutex mutex_;
  std::chrono::steady_clock::time_point start_;
  std::vector<entry> ring_;
  std::int64_t num_added_ = 0;
  std::int64_t step_ = -1;
};

/// A backend that hands every call on to `inner` and records it in `log`; both are borrowed and outlive it. Plans of
/// the one are plans of the other. Throws `error` (out_of_memory).
[[nodiscard]] BIFOLIO_API std::unique_ptr<backend> trace_backend(backend& inner, trace_log& log);

}  // namespace bifolio::inline v0_2
