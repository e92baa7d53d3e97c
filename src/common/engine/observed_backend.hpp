// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bifolio::inline v0_2::detail {

/// Hands every call on to another backend, which is borrowed, and tells an observer of those that take time: what
/// `Observer::begin(name, size)` returns goes to `end(begun, name, size, layer)`, where `layer` is the K plane of the
/// one layer that a call is about, or null. An observer that throws nothing and allocates nothing.
template <class Observer>
class observed_backend final : public backend {
 public:
  /// `suffix` follows the description.
  template <class... Args>
  observed_backend(backend& inner, const char* suffix, Args&&... args)
      : inner_(&inner), suffix_(suffix), observer_(std::forward<Args>(args)...) {}

  [[nodiscard]] device where() const noexcept override { return inner_->where(); }
  [[nodiscard]] std::string description() const override { return inner_->description() + suffix_; }
  [[nodiscard]] errc health() const noexcept override { return inner_->health(); }
  [[nodiscard]] backend& unwrapped() noexcept override { return inner_->unwrapped(); }
  [[nodiscard]] memory_resource& memory() noexcept override { return inner_->memory(); }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return inner_->staging_memory(); }
  [[nodiscard]] memory_amount amount_of_memory() const override { return inner_->amount_of_memory(); }
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
    return noted(
        "append", params.k.num_tokens, [&] { return inner_->append(params, stream); }, params.kv.k);
  }
  [[nodiscard]] errc rotate_append(const rotate_append_params& params, stream_ref stream) noexcept override {
    return noted(
        "rotate_append", params.append.k.num_tokens, [&] { return inner_->rotate_append(params, stream); },
        params.append.kv.k);
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    return noted(
        "gather", params.k.num_tokens, [&] { return inner_->gather(params, stream); }, params.kv.k);
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
    const call_scope scope(observer_, "plan_attention", host_batch.num_tokens);
    inner_->plan_attention(plan, spec, host_batch, num_blocks, stream);
  }
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref stream) noexcept override {
    return noted(
        "attention", params.q.num_tokens, [&] { return inner_->attention(plan, params, stream); }, params.kv.k);
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
  class call_scope {
   public:
    call_scope(const Observer& observer, const char* name, std::int64_t size, const void* layer = nullptr) noexcept
        : observer_(observer), name_(name), size_(size), layer_(layer), begun_(observer.begin(name, size)) {}
    call_scope(const call_scope&) = delete;
    call_scope& operator=(const call_scope&) = delete;
    ~call_scope() { observer_.end(begun_, name_, size_, layer_); }

   private:
    const Observer& observer_;
    const char* name_;
    std::int64_t size_;
    const void* layer_;
    decltype(std::declval<const Observer&>().begin("", 0)) begun_;
  };

  template <class Size, class Call>
  errc noted(const char* name, Size size, const Call& call, const void* layer = nullptr) const noexcept {
    const call_scope scope(observer_, name, static_cast<std::int64_t>(size), layer);
    return call();
  }

  backend* inner_;
  const char* suffix_;
  Observer observer_;
};

}  // namespace bifolio::inline v0_2::detail
