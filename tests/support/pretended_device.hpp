// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CPU backend under the name of a device: what the layers above the seam do for devices (uploads, the choice of
/// who carries out a swap, a device that is lost) can be tested on any machine.

#include <bifolio/backend.hpp>
#include <bifolio/memory_resource.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>

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
  [[nodiscard]] const void* last_source() const noexcept { return last_source_; }
  [[nodiscard]] int num_swaps() const noexcept { return num_swaps_; }
  [[nodiscard]] failing_memory_resource& failing() noexcept { return failing_; }
  [[nodiscard]] counting_memory_resource& counted() noexcept { return counting_; }
  /// From now on every transfer is refused.
  void lose() noexcept { health_ = errc::device_lost; }
  /// While the stream is stopped, an event that is recorded is not done before somebody waits for it.
  void stop_stream(bool stopped) noexcept { stopped_ = stopped; }
  /// Waits of the host for an event that was not done.
  [[nodiscard]] int num_event_waits() const noexcept { return num_event_waits_; }
  [[nodiscard]] int num_stream_waits() const noexcept { return num_stream_waits_; }
  /// What the next `record` answers, once.
  void fail_record(errc code) noexcept { next_record_ = code; }

  [[nodiscard]] device where() const noexcept override { return device_memory_.where(); }
  [[nodiscard]] std::string description() const override { return "pretended"; }
  [[nodiscard]] errc health() const noexcept override { return health_; }
  [[nodiscard]] memory_resource& memory() noexcept override { return device_memory_; }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return failing_; }
  [[nodiscard]] errc upload(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    if (health_ == errc::ok) ++num_uploads_;
    last_source_ = src;
    return health_ == errc::ok ? cpu_->upload(dst, src, num_bytes, stream) : health_;
  }
  [[nodiscard]] errc download(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    return health_ == errc::ok ? cpu_->download(dst, src, num_bytes, stream) : health_;
  }
  [[nodiscard]] errc synchronize(stream_ref) noexcept override {
    ++num_stream_waits_;
    return health_;
  }
  [[nodiscard]] event make_event() override { return event(std::make_unique<pretended_event>(*this)); }
  [[nodiscard]] errc record(event& point, stream_ref) noexcept override {
    if (health_ != errc::ok) return health_;
    if (const errc code = std::exchange(next_record_, errc::ok); code != errc::ok) return code;
    static_cast<pretended_event*>(point.state())->set(!stopped_);
    return errc::ok;
  }
  [[nodiscard]] errc wait(const event& point, stream_ref) noexcept override { return point.synchronize(); }
  [[nodiscard]] errc append(const append_params& params, stream_ref stream) noexcept override {
    return cpu_->append(params, stream);
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    return cpu_->gather(params, stream);
  }
  [[nodiscard]] errc rotate_append(const rotate_append_params& params, stream_ref stream) noexcept override {
    return cpu_->rotate_append(params, stream);
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
  void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& batch,
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
  class pretended_event final : public event_state {
   public:
    explicit pretended_event(pretended_device& owner) noexcept : owner_(&owner) {}
    void set(bool done) noexcept { done_ = done; }
    [[nodiscard]] device where() const noexcept override { return owner_->where(); }
    [[nodiscard]] errc query(bool& done) const noexcept override {
      if (owner_->health_ == errc::ok) done = done_;
      return owner_->health_;
    }
    [[nodiscard]] errc synchronize() const noexcept override {
      if (!std::exchange(done_, true)) ++owner_->num_event_waits_;
      return owner_->health_;
    }

   private:
    pretended_device* owner_;
    mutable bool done_ = true;
  };

  std::unique_ptr<backend> cpu_ = make_backend();
  counting_memory_resource counting_{default_host_memory()};
  failing_memory_resource failing_{counting_};
  pretended_device_memory device_memory_;
  errc health_ = errc::ok;
  int num_uploads_ = 0;
  const void* last_source_ = nullptr;
  int num_swaps_ = 0;
  int num_event_waits_ = 0;
  int num_stream_waits_ = 0;
  bool stopped_ = false;
  errc next_record_ = errc::ok;
};

}  // namespace bifolio::test
