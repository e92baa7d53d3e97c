// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/rotate_append.hpp>
#include <bifolio/trace.hpp>
#include <functional>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// Hands calls on, and notes each in the log when it is over.
class tracing_backend final : public backend {
 public:
  tracing_backend(backend& inner, trace_log& log) : inner_(&inner), log_(&log) {}

  [[nodiscard]] device where() const noexcept override { return inner_->where(); }
  [[nodiscard]] std::string description() const override { return inner_->description() + ", traced"; }
  [[nodiscard]] errc health() const noexcept override { return inner_->health(); }
  [[nodiscard]] memory_resource& memory() noexcept override { return inner_->memory(); }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return inner_->staging_memory(); }
  [[nodiscard]] errc upload(void* dst, const void* host_src, std::size_t num_bytes,
                            stream_ref stream) noexcept override {
    return noted("upload", num_bytes, [&] { return inner_->upload(dst, host_src, num_bytes, stream); });
  }
  [[nodiscard]] errc download(void* host_dst, const void* src, std::size_t num_bytes,
                              stream_ref stream) noexcept override {
    return noted("download", num_bytes, [&] { return inner_->download(host_dst, src, num_bytes, stream); });
  }
  [[nodiscard]] errc synchronize(stream_ref stream) noexcept override {
    return noted("synchronize", 0, [&] { return inner_->synchronize(stream); });
  }
  [[nodiscard]] errc clear(void* dst, std::size_t num_bytes, stream_ref stream) noexcept override {
    return noted("clear", num_bytes, [&] { return inner_->clear(dst, num_bytes, stream); });
  }
  [[nodiscard]] event make_event() override { return inner_->make_event(); }
  [[nodiscard]] errc record(event& point, stream_ref stream) noexcept override { return inner_->record(point, stream); }
  [[nodiscard]] errc wait(const event& point, stream_ref stream) noexcept override {
    return noted("wait", 0, [&] { return inner_->wait(point, stream); });
  }
  [[nodiscard]] errc append(const append_params& params, stream_ref stream) noexcept override {
    return noted("append", params.k.num_tokens, [&] { return inner_->append(params, stream); });
  }
  [[nodiscard]] errc rotate_append(const rotate_append_params& params, stream_ref stream) noexcept override {
    return noted("rotate_append", params.append.k.num_tokens, [&] { return inner_->rotate_append(params, stream); });
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    return noted("gather", params.k.num_tokens, [&] { return inner_->gather(params, stream); });
  }
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                 stream_ref stream) noexcept override {
    return noted("copy_blocks", copies.size(), [&] { return inner_->copy_blocks(layers, copies, stream); });
  }
  [[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return noted("convert_blocks", copies.size(), [&] { return inner_->convert_blocks(src, dst, copies, stream); });
  }
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                 std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return noted("swap_blocks", copies.size(), [&] { return inner_->swap_blocks(src, dst, copies, stream); });
  }
  void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                      std::int64_t num_blocks, stream_ref stream) override {
    const std::int64_t begin = log_->now();
    inner_->plan_attention(plan, spec, host_batch, num_blocks, stream);
    log_->add("plan_attention", begin, host_batch.num_tokens);
  }
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref stream) noexcept override {
    return noted("attention", params.q.num_tokens, [&] { return inner_->attention(plan, params, stream); });
  }
  [[nodiscard]] std::vector<std::string> attention_kernels() const override { return inner_->attention_kernels(); }
  [[nodiscard]] std::vector<std::string> describe(const attention_plan& plan,
                                                  const attention_params& params) const override {
    return inner_->describe(plan, params);
  }
  [[nodiscard]] std::vector<std::string> explain(const attention_plan& plan) const override {
    return inner_->explain(plan);
  }
  [[nodiscard]] errc merge_states(const merge_params& params, stream_ref stream) noexcept override {
    return noted("merge_states", params.out.num_tokens, [&] { return inner_->merge_states(params, stream); });
  }

 private:
  template <class Size, class Call>
  errc noted(const char* name, Size size, const Call& call) const noexcept {
    const std::int64_t begin = log_->now();
    const errc code = call();
    log_->add(name, begin, static_cast<std::int64_t>(size));
    return code;
  }

  backend* inner_;
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
  return detail::translate_bad_alloc("trace_backend", [&] { return std::make_unique<tracing_backend>(inner, log); });
}

}  // namespace bifolio::inline v0_2
