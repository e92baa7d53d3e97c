// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.hpp"

#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <cstring>
#include <string>

#include "common/attention/implementations.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "cpu/attention.hpp"
#include "cpu/cache_ops.hpp"
#include "cpu/executors.hpp"
#include "cpu/isa.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

errc copy_bytes(void* dst, const void* src, std::size_t num_bytes) noexcept {
  if (num_bytes == 0) return errc::ok;
  if (dst == nullptr || src == nullptr) return errc::invalid_argument;
  if (dst != src) std::memmove(dst, src, num_bytes);
  return errc::ok;
}

class cpu_event final : public event_state {
 public:
  [[nodiscard]] device where() const noexcept override { return {}; }
  [[nodiscard]] errc query(bool& done) const noexcept override {
    done = true;
    return errc::ok;
  }
  [[nodiscard]] errc synchronize() const noexcept override { return errc::ok; }
};

}  // namespace

cpu_backend::cpu_backend(const backend_options& options)
    : cpu_backend(kernels_for(options.isa.has_value() ? *options.isa : default_isa()), options) {}

cpu_backend::cpu_backend(const kernel_table& kernels, const backend_options& options)
    : kernels_(&kernels),
      own_executor_(options.own_executor == nullptr
                        ? make_executor(options.executor_choice.value_or(default_executor()), options.num_threads)
                        : nullptr),
      workers_(options.own_executor == nullptr ? own_executor_.get() : options.own_executor),
      memory_(options.host_memory == nullptr ? &default_host_memory() : options.host_memory),
      forced_attention_(detail::implementation_of_environment("cpu")) {
  if (workers_->concurrency() < 1) {
    detail::refuse(errc::invalid_argument, "the executor's concurrency() is ", workers_->concurrency(),
                   "; it must be at least 1");
  }
}

std::string cpu_backend::description() const {
  return "cpu: " + std::string(to_string(kernels_->isa)) + ", " + std::string(workers_->name()) + " x " +
         std::to_string(workers_->concurrency());
}

errc cpu_backend::upload(void* dst, const void* host_src, std::size_t num_bytes, stream_ref) noexcept {
  return copy_bytes(dst, host_src, num_bytes);
}

errc cpu_backend::download(void* host_dst, const void* src, std::size_t num_bytes, stream_ref) noexcept {
  return copy_bytes(host_dst, src, num_bytes);
}

errc cpu_backend::clear(void* dst, std::size_t num_bytes, stream_ref) noexcept {
  if (num_bytes == 0) return errc::ok;
  if (dst == nullptr) return errc::invalid_argument;
  if (const errc code = health(); code != errc::ok) return code;
  cpu::clear(*workers_, dst, num_bytes);
  return errc::ok;
}

event cpu_backend::make_event() {
  return detail::translate_bad_alloc("make_event", [] { return event(std::make_unique<cpu_event>()); });
}

errc cpu_backend::record(event& point, stream_ref) noexcept {
  return point.empty() || point.state()->where() != where() ? errc::invalid_argument : errc::ok;
}

errc cpu_backend::append(const append_params& params, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::append(*kernels_, *workers_, params);
}

errc cpu_backend::gather(const gather_params& params, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::gather(*kernels_, *workers_, params);
}

errc cpu_backend::rotate_append(const rotate_append_params& params, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::rotate_append(*kernels_, *workers_, params);
}

errc cpu_backend::copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                              stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::copy_blocks(*kernels_, *workers_, layers, copies);
}

errc cpu_backend::convert_blocks(const kv_cache_view& src, const kv_cache_view& dst, std::span<const block_copy> copies,
                                 stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::convert_blocks(*kernels_, *workers_, src, dst, copies);
}

errc cpu_backend::swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                              std::span<const block_copy> copies, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::swap_blocks(*kernels_, *workers_, src, dst, copies);
}

void cpu_backend::plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                                 std::int64_t num_blocks, stream_ref) {
  if (health() != errc::ok) refuse_lost_threads(workers_->name());
  cpu::plan_attention(*kernels_, forced_attention_, workers_->concurrency(), *memory_, plan, spec, host_batch,
                      num_blocks);
}

errc cpu_backend::attention(const attention_plan& plan, const attention_params& params, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::attention(*kernels_, *workers_, plan, params);
}

std::vector<std::string> cpu_backend::attention_kernels() const { return attention_kernel_names(*kernels_); }

std::vector<std::string> cpu_backend::describe(const attention_plan& plan, const attention_params& params) const {
  return cpu::describe(*kernels_, plan, params);
}

std::vector<std::string> cpu_backend::explain(const attention_plan& plan) const {
  return cpu::explain(*kernels_, plan);
}

errc cpu_backend::merge_states(const merge_params& params, stream_ref) noexcept {
  if (const errc code = health(); code != errc::ok) return code;
  return cpu::merge_states(*kernels_, *workers_, params);
}

}  // namespace bifolio::inline v0_2::cpu
