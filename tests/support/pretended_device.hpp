// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CPU backend under the name of a device: what the layers above the seam do for devices (uploads, the choice of
/// who carries out a swap, a device that is lost) can be tested on any machine.

#include <bifolio/backend.hpp>
#include <bifolio/memory_resource.hpp>
#include <memory>
#include <span>
#include <string>

namespace bifolio::test {

/// Host memory that says it is a device's.
class pretended_device_memory final : public memory_resource {
 public:
  explicit pretended_device_memory(memory_resource& upstream, device where = {device_type::cuda, 0}) noexcept
      : upstream_(&upstream), where_(where) {}
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override {
    return upstream_->allocate(num_bytes, alignment);
  }
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override {
    upstream_->deallocate(pointer, num_bytes, alignment);
  }
  [[nodiscard]] device where() const noexcept override { return where_; }

 private:
  memory_resource* upstream_;
  device where_;
};

class pretended_device final : public backend {
 public:
  explicit pretended_device(device where = {device_type::cuda, 0}) : device_memory_(failing_, where) {}

  [[nodiscard]] int num_uploads() const noexcept { return num_uploads_; }
  [[nodiscard]] int num_swaps() const noexcept { return num_swaps_; }
  [[nodiscard]] failing_memory_resource& failing() noexcept { return failing_; }
  [[nodiscard]] counting_memory_resource& counted() noexcept { return counting_; }
  /// From now on every transfer is refused.
  void lose() noexcept { health_ = errc::device_lost; }

  [[nodiscard]] device where() const noexcept override { return device_memory_.where(); }
  [[nodiscard]] std::string description() const override { return "pretended"; }
  [[nodiscard]] errc health() const noexcept override { return health_; }
  [[nodiscard]] memory_resource& memory() noexcept override { return device_memory_; }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return failing_; }
  [[nodiscard]] errc upload(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    ++num_uploads_;
    return health_ == errc::ok ? cpu_->upload(dst, src, num_bytes, stream) : health_;
  }
  [[nodiscard]] errc download(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    return health_ == errc::ok ? cpu_->download(dst, src, num_bytes, stream) : health_;
  }
  [[nodiscard]] errc synchronize(stream_ref) noexcept override { return health_; }
  [[nodiscard]] errc append(const append_params& params, stream_ref stream) noexcept override {
    return cpu_->append(params, stream);
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    return cpu_->gather(params, stream);
  }
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                 stream_ref stream) noexcept override {
    return cpu_->copy_blocks(layers, copies, stream);
  }
  [[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return cpu_->convert_blocks(src, dst, copies, stream);
  }
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                 std::span<const block_copy> copies, stream_ref stream) noexcept override {
    ++num_swaps_;
    return cpu_->swap_blocks(src, dst, copies, stream);
  }
  void plan_attention(attention_plan& plan, const attention_spec& spec, const step_batch_view& batch,
                      std::int64_t num_blocks, stream_ref stream) override {
    cpu_->plan_attention(plan, spec, batch, num_blocks, stream);
  }
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref stream) noexcept override {
    return cpu_->attention(plan, params, stream);
  }
  [[nodiscard]] errc merge_states(const merge_params& params, stream_ref stream) noexcept override {
    return cpu_->merge_states(params, stream);
  }

 private:
  std::unique_ptr<backend> cpu_ = make_backend();
  counting_memory_resource counting_{default_host_memory()};
  failing_memory_resource failing_{counting_};
  pretended_device_memory device_memory_;
  errc health_ = errc::ok;
  int num_uploads_ = 0;
  int num_swaps_ = 0;
};

}  // namespace bifolio::test
