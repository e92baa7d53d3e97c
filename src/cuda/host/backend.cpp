// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/backend.hpp"

#include <bifolio/cuda.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "cuda/host/attention.hpp"
#include "cuda/host/cache_ops.hpp"
#include "cuda/host/event.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

cuda_backend& require_cuda(backend& where) {
  auto* const cuda = dynamic_cast<cuda_backend*>(&where.unwrapped());
  if (cuda == nullptr) {
    detail::refuse(errc::invalid_argument, "the backend is of device '", to_string(where.where()),
                   "'; a CUDA backend is needed");
  }
  return *cuda;
}

/// Runs `call` with the device current, unless the device cannot be used.
template <class Call>
errc on_device(const device_state& state, Call call) noexcept {
  const device_scope scope(state);
  return scope.status() != errc::ok ? scope.status() : call();
}

}  // namespace

cuda_backend::cuda_backend(const runtime_api& api, std::int32_t index)
    : state_(std::make_shared<const device_state>(api, index)), memory_(state_), staging_memory_(state_) {}

std::string cuda_backend::description() const {
  const device_numbers& numbers = state_->numbers();
  std::string text = to_string(where()) + ": " + state_->name() + ", sm_" + std::to_string(numbers.compute_capability) +
                     ", " + std::to_string(numbers.num_sms) + " SMs";
  if (state_->first_cause() != cudaSuccess) text += ", lost: " + cuda::describe(state_->first_cause());
  return text;
}

memory_amount cuda_backend::amount_of_memory() const {
  state_->require_health();
  const device_scope scope(*state_);
  constexpr const char* problem = "the device's memory cannot be asked for";
  // The driver's function needs the runtime's context, which the first call that needs one makes.
  state_->require(state_->api().free_device(nullptr), problem);
  void* entry = nullptr;
  state_->require(state_->api().get_driver_entry_point("cuMemGetInfo", &entry, 3020), problem);
  if (entry == nullptr) detail::refuse(errc::unsupported, problem, ": the driver has no such function");
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  // Errors of the driver have the numbers of the runtime's.
  state_->require(
      static_cast<cudaError_t>(reinterpret_cast<int (*)(std::size_t*, std::size_t*)>(entry)(&free_bytes, &total_bytes)),
      problem);
  return {static_cast<std::int64_t>(total_bytes), static_cast<std::int64_t>(free_bytes)};
}

errc cuda_backend::upload(void* dst, const void* host_src, std::size_t num_bytes, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept {
    if (num_bytes == 0) return errc::ok;
    if (dst == nullptr || host_src == nullptr) return errc::invalid_argument;
    return state_->report(
        state_->api().memcpy_async(dst, host_src, num_bytes, cudaMemcpyHostToDevice, handle_of(stream)));
  });
}

errc cuda_backend::download(void* host_dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept {
    if (num_bytes == 0) return errc::ok;
    if (host_dst == nullptr || src == nullptr) return errc::invalid_argument;
    return state_->report(
        state_->api().memcpy_async(host_dst, src, num_bytes, cudaMemcpyDeviceToHost, handle_of(stream)));
  });
}

errc cuda_backend::clear(void* dst, std::size_t num_bytes, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept {
    if (num_bytes == 0) return errc::ok;
    if (dst == nullptr) return errc::invalid_argument;
    return state_->report(state_->api().memset_async(dst, 0, num_bytes, handle_of(stream)));
  });
}

errc cuda_backend::synchronize(stream_ref stream) noexcept {
  return on_device(*state_,
                   [&]() noexcept { return state_->report(state_->api().stream_synchronize(handle_of(stream))); });
}

event cuda_backend::make_event() {
  return detail::translate_bad_alloc("make_event", [&] { return event(std::make_unique<cuda_event>(state_)); });
}

errc cuda_backend::record(event& point, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept {
    cuda_event* const ours = cuda_event_of(point);
    if (ours == nullptr || ours->where() != where()) return errc::invalid_argument;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (const errc code = state_->report(state_->api().stream_is_capturing(handle_of(stream), &capture));
        code != errc::ok) {
      return code;
    }
    const errc code = state_->report(state_->api().event_record(ours->handle(), handle_of(stream)));
    if (code == errc::ok) ours->set_captured(capture != cudaStreamCaptureStatusNone);
    return code;
  });
}

errc cuda_backend::wait(const event& point, stream_ref stream) noexcept {
  if (point.empty()) return errc::invalid_argument;
  if (const errc code = state_->health(); code != errc::ok) return code;
  const cuda_event* const ours = cuda_event_of(point);
  if (ours == nullptr) return point.synchronize();
  if (const errc code = ours->state().health(); code != errc::ok) return code;
  return on_device(*state_, [&]() noexcept {
    return state_->report(state_->api().stream_wait_event(handle_of(stream), ours->handle()));
  });
}

errc cuda_backend::append(const append_params& params, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::append(*state_, params, stream); });
}

errc cuda_backend::gather(const gather_params& params, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::gather(*state_, params, stream); });
}

errc cuda_backend::rotate_append(const rotate_append_params& params, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::rotate_append(*state_, params, stream); });
}

errc cuda_backend::copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                               stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::copy_blocks(*state_, layers, copies, stream); });
}

errc cuda_backend::convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                  std::span<const block_copy> copies, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::convert_blocks(*state_, src, dst, copies, stream); });
}

errc cuda_backend::swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                               std::span<const block_copy> copies, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::swap_blocks(*state_, src, dst, copies, stream); });
}

void cuda_backend::plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                                  std::int64_t num_blocks, stream_ref stream) {
  cuda::plan_attention(state_, plan, spec, host_batch, num_blocks, stream);
}

errc cuda_backend::attention(const attention_plan& plan, const attention_params& params, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::attention(*state_, plan, params, stream); });
}

std::vector<std::string> cuda_backend::attention_kernels() const { return attention_kernel_names(*state_); }

std::vector<std::string> cuda_backend::describe(const attention_plan& plan, const attention_params& params) const {
  return cuda::describe(*state_, plan, params);
}

std::vector<std::string> cuda_backend::explain(const attention_plan& plan) const {
  return cuda::explain(*state_, plan);
}

errc cuda_backend::merge_states(const merge_params& params, stream_ref stream) noexcept {
  return on_device(*state_, [&]() noexcept { return cuda::merge_states(*state_, params, stream); });
}

std::unique_ptr<memory_resource> make_stream_memory(backend& where, stream_ref stream) {
  const cuda_backend& cuda = require_cuda(where);
  return detail::translate_bad_alloc("make_stream_memory", [&]() -> std::unique_ptr<memory_resource> {
    return std::make_unique<stream_memory_resource>(cuda.state(), stream);
  });
}

void reserve_plan(backend& where, attention_plan& plan, const attention_spec& spec, std::int32_t max_num_seqs,
                  std::int64_t max_num_tokens, std::int32_t max_seq_len) {
  reserve_attention(require_cuda(where).state(), plan, spec, max_num_seqs, max_num_tokens, max_seq_len);
}

}  // namespace bifolio::inline v0_2::cuda
