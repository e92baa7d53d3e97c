// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/trace.hpp>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/refuse.hpp"
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
  void end(std::int64_t begin, const char* name, std::int64_t size, const void* layer) const noexcept {
    log_->add(name, begin, size, layer);
  }

 private:
  trace_log* log_;
};

// Rows of the file: `tid`. Threads come after them.
constexpr std::size_t steps_row = 1, layers_row = 2, first_thread_row = 3;

struct span_of_row {
  std::string name;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::string args;
};

/// A number of nanoseconds as one of microseconds.
void append_microseconds(std::string& out, std::int64_t ns) {
  out += std::to_string(ns / 1000);
  const std::string rest = std::to_string(1000 + ns % 1000);
  out += '.';
  out.append(rest, 1, 3);
}

/// As a string of JSON. A name is whatever its caller took for one.
void append_quoted(std::string& out, std::string_view text) {
  constexpr std::string_view digits = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    if (const auto byte = static_cast<unsigned char>(c); byte < 0x20) {
      out.append("\\u00") += digits[byte >> 4];
      out += digits[byte & 15];
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  out += '"';
}

void begin_event(std::string& out, std::string_view name) {
  out += out.back() == '[' ? "\n" : ",\n";
  out += "{\"name\":";
  append_quoted(out, name);
}

void append_span(std::string& out, const span_of_row& what, std::size_t row) {
  begin_event(out, what.name);
  out += ",\"ph\":\"X\",\"ts\":";
  append_microseconds(out, what.begin_ns);
  out += ",\"dur\":";
  append_microseconds(out, what.end_ns - what.begin_ns);
  out += ",\"pid\":1,\"tid\":" + std::to_string(row) + ",\"args\":{" + what.args + "}}";
}

/// What a viewer calls a row, or without a row the process.
void append_title(std::string& out, std::string_view title, std::size_t row = 0) {
  begin_event(out, row == 0 ? "process_name" : "thread_name");
  out += ",\"ph\":\"M\",\"pid\":1,\"tid\":" + std::to_string(row) + ",\"args\":{\"name\":";
  append_quoted(out, title);
  out += "}}";
}

/// Viewers take spans of a row that lie in one another, and no others that have a time in common.
void append_row(std::string& out, std::vector<span_of_row>& spans, std::size_t row) {
  std::ranges::sort(spans, {}, &span_of_row::begin_ns);
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (i + 1 < spans.size()) spans[i].end_ns = std::min(spans[i].end_ns, spans[i + 1].begin_ns);
    append_span(out, spans[i], row);
  }
}

std::string args_of(std::int64_t step, const std::int32_t* layer) {
  std::string args = "\"step\":" + std::to_string(step);
  if (layer != nullptr) args += ",\"layer\":" + std::to_string(*layer);
  return args;
}

/// Widens the span of a step, or of one of its layers, so that it has the call in it.
template <class Key>
void widen(std::map<Key, span_of_row>& spans, const Key& key, const span_of_row& call, const auto& name,
           std::string args) {
  const auto [found, is_new] = spans.try_emplace(key, span_of_row{{}, call.begin_ns, call.end_ns, {}});
  span_of_row& span = found->second;
  if (is_new) {
    span.name = name();
    span.args = std::move(args);
  }
  span.begin_ns = std::min(span.begin_ns, call.begin_ns);
  span.end_ns = std::max(span.end_ns, call.end_ns);
}

template <class Key>
std::vector<span_of_row> values_of(std::map<Key, span_of_row>&& spans) {
  std::vector<span_of_row> values;
  values.reserve(spans.size());
  for (auto& [key, span] : spans) values.push_back(std::move(span));
  return values;
}

}  // namespace

trace_log::trace_log(std::int64_t capacity) : start_(std::chrono::steady_clock::now()) {
  detail::require_between("capacity", capacity, 1, std::int64_t{1} << 40);
  detail::translate_bad_alloc("trace_log", [&] { ring_.resize(static_cast<std::size_t>(capacity)); });
}

void trace_log::set_step(std::int64_t step, std::int64_t since_ns) noexcept {
  const std::lock_guard lock(mutex_);
  step_ = step;
  const std::int64_t num_kept = std::min(num_added_, static_cast<std::int64_t>(ring_.size()));
  std::size_t at = next_;
  for (std::int64_t i = 0; i < num_kept; ++i) {
    at = at == 0 ? ring_.size() - 1 : at - 1;
    if (ring_[at].begin_ns < since_ns) return;
    ring_[at].step = step;
  }
}

void trace_log::name_layers(std::span<const kv_cache_view> layers, std::span<const std::int32_t> numbers) {
  if (!numbers.empty() && numbers.size() != layers.size()) {
    detail::refuse(errc::invalid_argument, "name_layers got ", layers.size(), " layers and ", numbers.size(),
                   " numbers; there must be one for each, or none");
  }
  const std::lock_guard lock(mutex_);
  detail::translate_bad_alloc("name_layers", [&] {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      layers_[layers[i].k] = numbers.empty() ? static_cast<std::int32_t>(i) : numbers[i];
    }
  });
}

std::int64_t trace_log::now() const noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
}

void trace_log::add(const char* name, std::int64_t begin_ns, std::int64_t size, const void* layer) noexcept {
  const std::int64_t duration = now() - begin_ns;
  const auto thread = static_cast<std::uint64_t>(std::hash<std::thread::id>()(std::this_thread::get_id()));
  const std::lock_guard lock(mutex_);
  ring_[next_] = {name, begin_ns, duration, size, thread, step_, layer};
  next_ = next_ + 1 == ring_.size() ? 0 : next_ + 1;
  ++num_added_;
}

std::vector<trace_log::entry> trace_log::entries() const {
  const std::lock_guard lock(mutex_);
  return detail::translate_bad_alloc("entries", [&] {
    const auto next = ring_.begin() + static_cast<std::ptrdiff_t>(next_);
    std::vector<entry> kept;
    if (num_added_ >= static_cast<std::int64_t>(ring_.size())) kept.assign(next, ring_.end());
    kept.insert(kept.end(), ring_.begin(), next);
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
    std::map<const void*, std::int32_t> numbers;
    {
      const std::lock_guard lock(mutex_);
      numbers = layers_;
    }
    std::string out = "{\"traceEvents\":[";
    append_title(out, "bifolio");
    append_title(out, "steps", steps_row);
    append_title(out, "layers", layers_row);
    std::map<std::uint64_t, std::size_t> rows;  // of threads
    std::map<std::int64_t, span_of_row> steps;
    std::map<std::pair<std::int64_t, std::int32_t>, span_of_row> layers;  // by step and layer
    for (const entry& each : kept) {
      const auto [row, is_new] = rows.try_emplace(each.thread, first_thread_row + rows.size());
      if (is_new) append_title(out, "thread " + std::to_string(rows.size()), row->second);
      const auto layer = numbers.find(each.layer);
      const std::int32_t* const number = layer == numbers.end() ? nullptr : &layer->second;
      const span_of_row call{each.name, each.begin_ns, each.begin_ns + each.duration_ns,
                             "\"size\":" + std::to_string(each.size) + "," + args_of(each.step, number)};
      append_span(out, call, row->second);
      if (each.step < 0) continue;
      widen(
          steps, each.step, call, [&] { return "step " + std::to_string(each.step); }, args_of(each.step, nullptr));
      if (number == nullptr) continue;
      widen(
          layers, {each.step, *number}, call, [&] { return "layer " + std::to_string(*number); },
          args_of(each.step, number));
    }
    auto step_spans = values_of(std::move(steps));
    auto layer_spans = values_of(std::move(layers));
    append_row(out, step_spans, steps_row);
    append_row(out, layer_spans, layers_row);
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
