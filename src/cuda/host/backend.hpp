// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One CUDA device as a `backend`. Calls go to the caller's stream and do not wait for it, except `synchronize`; they
/// restore the current device and leave the runtime's last-error slot clean. `slot_mapping` is device memory and is not
/// checked on the host: slots past the cache are skipped like negative ones.

#include <bifolio/backend.hpp>
#include <memory>

#include "cuda/host/memory.hpp"

namespace bifolio::inline v0_2::cuda {

/// Thread-safe: holds no state that a call changes, but for the first sticky error.
class cuda_backend final : public backend {
 public:
  /// `api` must outlive the backend. Throws `error` as device_state does.
  cuda_backend(const runtime_api& api, std::int32_t index);

  [[nodiscard]] const std::shared_ptr<const device_state>& state() const noexcept { return state_; }

  [[nodiscard]] device where() const noexcept override { return state_->where(); }
  [[nodiscard]] std::string description() const override;
  [[nodiscard]] errc health() const noexcept override { return state_->health(); }

  [[nodiscard]] memory_resource& memory() noexcept override { return memory_; }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return staging_memory_; }
  /// Pinned host memory is copied after the call returns; ordinary memory has been read when `upload` returns, and
  /// `download` returns when it has been written.
  [[nodiscard]] errc upload(void* dst, const void* host_src, std::size_t num_bytes, stream_ref) noexcept override;
  [[nodiscard]] errc download(void* host_dst, const void* src, std::size_t num_bytes, stream_ref) noexcept override;
  [[nodiscard]] errc synchronize(stream_ref) noexcept override;
  [[nodiscard]] errc clear(void* dst, std::size_t num_bytes, stream_ref) noexcept override;

  [[nodiscard]] event make_event() override;
  [[nodiscard]] errc record(event& point, stream_ref) noexcept override;
  /// Events of this and of other CUDA devices are waited for in the stream, all others on the host.
  [[nodiscard]] errc wait(const event& point, stream_ref) noexcept override;

  [[nodiscard]] memory_amount amount_of_memory() const override;
  [[nodiscard]] errc append(const append_params& params, stream_ref) noexcept override;
  [[nodiscard]] errc gather(const gather_params& params, stream_ref) noexcept override;
  [[nodiscard]] errc rotate_append(const rotate_append_params& params, stream_ref) noexcept override;
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                 stream_ref) noexcept override;
  [[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies, stream_ref) noexcept override;
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                 std::span<const block_copy> copies, stream_ref) noexcept override;

  void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                      std::int64_t num_blocks, stream_ref) override;
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref) noexcept override;
  [[nodiscard]] std::vector<std::string> attention_kernels() const override;
  [[nodiscard]] std::vector<std::string> describe(const attention_plan& plan,
                                                  const attention_params& params) const override;
  [[nodiscard]] std::vector<std::string> explain(const attention_plan& plan) const override;
  [[nodiscard]] errc merge_states(const merge_params& params, stream_ref) noexcept override;

 private:
  std::shared_ptr<const device_state> state_;
  device_memory_resource memory_;
  pinned_memory_resource staging_memory_;
};

}  // namespace bifolio::inline v0_2::cuda
