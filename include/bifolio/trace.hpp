// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A record of what a backend was asked to do and how long each call took, in the format of Chrome's traces, which
/// Perfetto (ui.perfetto.dev) and chrome://tracing open. A backend is wrapped, and the wrapper given to engines and
/// caches in its place; whoever does not wrap pays nothing.
///
///   trace_log log;
///   const auto traced = trace_backend(*where, log);
///   model_cache cache(*traced, …);   log.name_layers(cache.engine().layers());   …   file << log.chrome_json();
///
/// On a device whose calls return before they are done, a call's time is that of the host.

#include <bifolio/backend.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_layout.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
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
    std::uint64_t thread = 0;     ///< differs between threads that live at once
    std::int64_t step = -1;       ///< as `set_step` said; −1: none
    const void* layer = nullptr;  ///< the K plane of the layer that the call is about; null: of none, or of several
  };

  /// Keeps the last `capacity` ≥ 1 calls; allocates for them now. Throws `error`: invalid_argument, out_of_memory.
  explicit trace_log(std::int64_t capacity = 1 << 16);

  /// What is recorded from now on belongs to this step, and so do the last calls, back to the first one that began
  /// before `since_ns`. `model_cache` users take `now()` before `begin_step`, whose copies, uploads and planning are
  /// the step's too, and `model_step::plan().step` after it. −1: of no step.
  void set_step(std::int64_t step, std::int64_t since_ns = INT64_MAX) noexcept;
  /// Says which layers calls are about: layers[i] is layer i of the model, or numbers[i] where there are numbers, as
  /// of a group's engine (`model_group::layers`). Of an engine that is gone, another one may have the memory: the
  /// newest name counts. Throws `error`: invalid_argument (numbers.size() is neither 0 nor layers.size()),
  /// out_of_memory.
  void name_layers(std::span<const kv_cache_view> layers, std::span<const std::int32_t> numbers = {});
  /// Nanoseconds since the log was made.
  [[nodiscard]] std::int64_t now() const noexcept;
  /// Adds a call that began at `begin_ns` and ends now. Allocates nothing.
  void add(const char* name, std::int64_t begin_ns, std::int64_t size, const void* layer = nullptr) noexcept;

  [[nodiscard]] std::vector<entry> entries() const;
  /// Calls that are not kept any more.
  [[nodiscard]] std::int64_t num_lost() const noexcept;
  /// {"traceEvents":[{"name":"attention","ph":"X","ts":…,"dur":…,"pid":1,"tid":…,"args":{"size":…,"step":…,"layer":…}},
  /// …]}, times in microseconds. Rows of their own (`tid` 1 and 2) have a span for each step and for each layer of a
  /// step, from its first call to its last; a span ends where the next one of its row begins. The others are threads,
  /// in the order of their first calls. Throws `error` (out_of_memory).
  [[nodiscard]] std::string chrome_json() const;

 private:
  mutable std::mutex mutex_;
  std::chrono::steady_clock::time_point start_;
  std::vector<entry> ring_;
  std::map<const void*, std::int32_t> layers_;  // by K plane
  std::size_t next_ = 0;                        // of ring_
  std::int64_t num_added_ = 0;
  std::int64_t step_ = -1;
};

/// A backend that hands every call on to `inner` and records it in `log`; both are borrowed and outlive it. Plans of
/// the one are plans of the other. Throws `error` (out_of_memory).
[[nodiscard]] BIFOLIO_API std::unique_ptr<backend> trace_backend(backend& inner, trace_log& log);

}  // namespace bifolio::inline v0_2
