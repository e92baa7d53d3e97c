// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CPU as a backend: one kernel table, one executor, ordinary host memory.

#include <bifolio/backend.hpp>
#include <bifolio/executor.hpp>
#include <memory>
#include <string>

#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu {

/// Thread-safe: holds no state that a call changes. Each call that would use the executor checks its health first.
class cpu_backend final : public backend {
 public:
  /// Throws `error`: unsupported (an ISA or executor that is not here), invalid_argument (thread count).
  explicit cpu_backend(const backend_options& options);
  /// The same with these kernels, which outlive it, instead of an ISA's: tests put their own around them.
  cpu_backend(const kernel_table& kernels, const backend_options& options);

  [[nodiscard]] device where() const noexcept override { return {}; }
  [[nodiscard]] std::string description() const override;
  [[nodiscard]] errc health() const noexcept override { return workers_->health(); }

  [[nodiscard]] memory_resource& memory() noexcept override { return *memory_; }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return *memory_; }
  [[nodiscard]] errc upload(void* dst, const void* host_src, std::size_t num_bytes, stream_ref) noexcept override;
  [[nodiscard]] errc download(void* host_dst, const void* src, std::size_t num_bytes, stream_ref) noexcept override;
  [[nodiscard]] errc synchronize(stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc clear(void* dst, std::size_t num_bytes, stream_ref) noexcept override;

  /// Calls are finished when they return: an event of the CPU is always done.
  [[nodiscard]] event make_event() override;
  [[nodiscard]] errc record(event& point, stream_ref) noexcept override;
  [[nodiscard]] errc wait(const event& point, stream_ref) noexcept override { return point.synchronize(); }

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
  const kernel_table* kernels_;
  std::unique_ptr<executor> own_executor_;  // null when the caller brought one
  executor* workers_;
  memory_resource* memory_;
  std::string forced_attention_;  // what BIFOLIO_ATTENTION named when this was opened
};

}  // namespace bifolio::inline v0_2::cpu
