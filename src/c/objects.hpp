// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the handles of the C interface lead to, and how its structs become those of the library.

#include <bifolio/cache_engine.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/rotate_append.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c/call.hpp"

namespace bifolio::inline v0_2::c {

struct backend_object {
  std::unique_ptr<executor> workers;  // of the caller's pool
  std::unique_ptr<backend> device;
  std::string description;
};

struct event_object {
  std::shared_ptr<backend_object> where;
  event point;
};

struct pool_object {
  explicit pool_object(std::int64_t num_blocks) : pool(num_blocks) {}
  block_pool pool;
};

/// Who is told of a prefix cache's events.
struct event_receiver {
  decltype(bifolio_manager_config::on_event) function = nullptr;
  void* user = nullptr;
};

struct manager_object {
  std::shared_ptr<void> owner;  // a cache; null where the manager is its own
  event_receiver receiver;      // the manager's own points to it
  std::optional<kv_cache_manager> own;
  kv_cache_manager* manager = nullptr;
  std::vector<block_copy> copies;    // of the last swap
  std::vector<cache_event> drained;  // scratch
  std::vector<bifolio_cache_event> events;
  std::string text;  // of the last metrics
};

struct batch_object {
  step_plan plan;  // scratch
  step_batch batch;
};

struct engine_object {
  std::shared_ptr<void> owner;  // a cache, or the backend
  std::unique_ptr<backend> host;
  std::optional<cache_engine> own;
  cache_engine* engine = nullptr;
};

struct plan_object {
  std::shared_ptr<backend_object> where;  // whose memory the plan holds
  attention_plan plan;
};

struct scheduler_object {
  scheduler_object(std::shared_ptr<manager_object> of, const scheduler_config& config)
      : manager(std::move(of)), requests(*manager->manager, config) {}
  std::shared_ptr<manager_object> manager;
  scheduler requests;
};

struct cache_object {
  cache_object(std::shared_ptr<backend_object> of, const model_cache_config& config,
               std::unique_ptr<event_receiver> told)
      : where(std::move(of)), receiver(std::move(told)), cache(*where->device, config) {}
  std::shared_ptr<backend_object> where;
  std::unique_ptr<event_receiver> receiver;  // the cache's manager points to it
  model_cache cache;
  std::vector<step_row> rows;  // scratch of begin
};

struct step_object {
  std::shared_ptr<cache_object> owner;
  std::shared_ptr<scheduler_object> requests;  // null: a step of rows
  model_step step;
  std::vector<bifolio_scheduled_row> rows;
  std::vector<bifolio_placeholder> placeholders;
  std::vector<sampled_token> sampled;  // scratch of commit
};

#define BIFOLIO_HANDLE(what)                               \
  template <>                                              \
  struct handle_traits<what##_object> {                    \
    using handle = bifolio_##what;                         \
    static constexpr handle_kind kind = handle_kind::what; \
    static constexpr const char* name = #what;             \
  }
BIFOLIO_HANDLE(backend);
BIFOLIO_HANDLE(event);
BIFOLIO_HANDLE(pool);
BIFOLIO_HANDLE(manager);
BIFOLIO_HANDLE(batch);
BIFOLIO_HANDLE(engine);
BIFOLIO_HANDLE(plan);
BIFOLIO_HANDLE(scheduler);
BIFOLIO_HANDLE(cache);
BIFOLIO_HANDLE(step);
#undef BIFOLIO_HANDLE

/// Any number as an element type: what is none becomes one that the library refuses by its number.
[[nodiscard]] constexpr dtype to_dtype(bifolio_dtype type) noexcept {
  return type >= 0 && type < 255 ? static_cast<dtype>(type) : static_cast<dtype>(255);
}
/// Throws `error` (invalid_argument).
[[nodiscard]] layout_kind to_layout(std::int32_t kind);

[[nodiscard]] inline tensor_view to_view(const bifolio_tensor& tensor) noexcept {
  return {tensor.data,     to_dtype(tensor.type), tensor.num_tokens, tensor.num_heads,
          tensor.head_dim, tensor.token_stride,   tensor.head_stride};
}
/// A tensor that need not be there.
[[nodiscard]] inline tensor_view to_view(const bifolio_tensor* tensor) noexcept {
  return tensor == nullptr ? tensor_view{} : to_view(*tensor);
}
[[nodiscard]] inline stream_ref to_stream(bifolio_stream stream) noexcept { return {stream}; }
[[nodiscard]] device_step_view to_view(const bifolio_batch_view& batch) noexcept;
[[nodiscard]] host_step_view to_view(const bifolio_host_batch_view& batch) noexcept;
[[nodiscard]] bifolio_batch_view from_view(const device_step_view& batch) noexcept;
[[nodiscard]] bifolio_host_batch_view from_view(const host_step_view& batch) noexcept;

/// Ids and plain numbers, pairs of ids and pairs of numbers lie in memory alike; what points to them is read by the
/// library alone.
template <class Id, class Number>
[[nodiscard]] std::span<const Id> to_ids(const Number* numbers, std::size_t count, const char* name) {
  static_assert(sizeof(Id) == sizeof(Number) && alignof(Id) == alignof(Number));
  return {reinterpret_cast<const Id*>(array(numbers, count, name)), count};
}
template <class Number, class Id>
[[nodiscard]] const Number* from_ids(const Id* ids) noexcept {
  static_assert(sizeof(Id) == sizeof(Number) && alignof(Id) == alignof(Number));
  return reinterpret_cast<const Number*>(ids);
}

/// The codes of K and V by name; null is f32, and for V the code of K. Throw `error` (invalid_argument).
[[nodiscard]] kv_code to_k_code(const char* name);
[[nodiscard]] kv_code to_v_code(const char* name, const kv_code& of_k);
[[nodiscard]] inline std::vector<float> to_scales(const float* scales, std::size_t count, const char* name) {
  const float* const first = array(scales, count, name);
  return {first, first + count};
}
[[nodiscard]] attention_spec to_spec(const bifolio_attention_spec* given, const char* name);
/// Without kv and batch.
[[nodiscard]] attention_params to_params(const bifolio_attention_params* given);
/// `v` is null where V is part of K.
[[nodiscard]] rotate_append_params to_params(const bifolio_rotate_params* given, const bifolio_tensor& k,
                                             const bifolio_tensor* v);
[[nodiscard]] bifolio_cache_event from_event(const cache_event& event) noexcept;
/// `receiver` is filled, and the configuration refers to it.
[[nodiscard]] kv_cache_config to_config(const bifolio_manager_config* given, event_receiver& receiver);

/// A prompt and the extra keys that its view borrows.
class prompt_of {
 public:
  explicit prompt_of(const bifolio_prompt* given);
  [[nodiscard]] const prompt_view& view() const noexcept { return view_; }

 private:
  std::vector<extra_key> extras_;
  prompt_view view_;
};

}  // namespace bifolio::inline v0_2::c
