// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/trace.hpp>
#include <functional>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/engine/observed_backend.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// Notes each call in the log when it is over.
class log_observer {
 public:
  explicit log_observer(trace_log& log) : log_(&log) {}
  [[nodiscard]] std::int64_t begin(const char*, std::int64_t) const noexcept { return log_->now(); }
  void end(std::int64_t begin, const char* name, std::int64_t size) const noexcept { log_->add(name, begin, size); }

 private:
  trace_log* log_;
};

/// A number of nanoseconds as one of microseconds.
void append_microseconds(std::string& out, std::int64_t ns) {
  out += std::to_string(ns / 1000);
  const std::string rest = std::to_string(1000 + ns % 1000);
  out += '.';
  out.append(rest, 1, 3);
}

void append_event(std::string& out, std::string_view name, const trace_log::entry& what, std::uint64_t thread) {
  out += out.back() == '[' ? "\n" : ",\n";
  out += "{\"name\":\"";
  out += name;
  out += "\",\"ph\":\"X\",\"ts\":";
  append_microseconds(out, what.begin_ns);
  out += ",\"dur\":";
  append_microseconds(out, what.duration_ns);
  out += ",\"pid\":1,\"tid\":" + std::to_string(thread) + ",\"args\":{\"size\":" + std::to_string(what.size) +
         ",\"step\":" + std::to_string(what.step) + "}}";
}

}  // namespace

trace_log::trace_log(std::int64_t capacity) : start_(std::chrono::steady_clock::now()) {
  detail::require_between("capacity", capacity, 1, std::int64_t{1} << 40);
  detail::translate_bad_alloc("trace_log", [&] { ring_.resize(static_cast<std::size_t>(capacity)); });
}

void trace_log::set_step(std::int64_t step) noexcept {
  const std::lock_guard lock(mutex_);
  step_ = step;
}

std::int64_t trace_log::now() const noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
}

void trace_log::add(const char* name, std::int64_t begin_ns, std::int64_t size) noexcept {
  const std::int64_t duration = now() - begin_ns;
  const auto thread = static_cast<std::uint64_t>(std::hash<std::thread::id>()(std::this_thread::get_id()) % 1000000);
  const std::lock_guard lock(mutex_);
  ring_[static_cast<std::size_t>(num_added_++ % static_cast<std::int64_t>(ring_.size()))] = {name, begin_ns, duration,
                                                                                             size, thread,   step_};
}

std::vector<trace_log::entry> trace_log::entries() const {
  const std::lock_guard lock(mutex_);
  return detail::translate_bad_alloc("entries", [&] {
    const auto capacity = static_cast<std::int64_t>(ring_.size());
    std::vector<entry> kept;
    for (std::int64_t i = std::max<std::int64_t>(0, num_added_ - capacity); i < num_added_; ++i) {
      kept.push_back(ring_[static_cast<std::size_t>(i % capacity)]);
    }
    return kept;
  });
}

std::int64_t trace_log::num_lost() const noexcept {
  const std::lock_guard lock(mutex_);
  return std::max<std::int64_t>(0, num_added_ - static_cast<std::int64_t>(ring_.size()));
}

std::string trace_log::chrome_json() const {
  const std::vector<entry> kept = entries();
  return detail::translate_bad_alloc("chrome_json", [&] {
    std::string out = "{\"traceEvents\":[";
    std::map<std::int64_t, entry> steps;  // from the first call to the end of the last
    for (const entry& each : kept) {
      append_event(out, each.name, each, each.thread);
      if (each.step < 0) continue;
      entry& step = steps.try_emplace(each.step, each).first->second;
      const std::int64_t end = std::max(step.begin_ns + step.duration_ns, each.begin_ns + each.duration_ns);
      step.begin_ns = std::min(step.begin_ns, each.begin_ns);
      step.duration_ns = end - step.begin_ns;
      step.size = 0;
    }
    constexpr std::uint64_t row_of_steps = 0;
    for (const auto& [number, step] : steps) append_event(out, "step " + std::to_string(number), step, row_of_steps);
    out += "\n]}\n";
    return out;
  });
}

std::unique_ptr<backend> trace_backend(backend& inner, trace_log& log) {
  return detail::translate_bad_alloc("trace_backend", [&] {
    return std::make_unique<detail::observed_backend<log_observer>>(inner, ", traced", log);
  });
}

}  // namespace bifolio::inline v0_2
