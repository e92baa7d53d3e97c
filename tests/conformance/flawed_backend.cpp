// SPDX-License-Identifier: Apache-2.0
#include "conformance/flawed_backend.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "support/elements.hpp"

namespace bifolio::test {
namespace {

constexpr float none_seen = -std::numeric_limits<float>::infinity();
constexpr std::int64_t split_size = 64;

class flawed_backend final : public backend {
 public:
  flawed_backend(backend& real, flaw value) : real_(real), flaw_(value) {}

  [[nodiscard]] device where() const noexcept override { return real_.where(); }
  [[nodiscard]] std::string description() const override { return "flawed: " + std::string(to_string(flaw_)); }
  [[nodiscard]] errc health() const noexcept override { return real_.health(); }
  [[nodiscard]] memory_resource& memory() noexcept override { return real_.memory(); }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return real_.staging_memory(); }
  [[nodiscard]] errc upload(void* dst, const void* src, std::size_t bytes, stream_ref stream) noexcept override {
    return real_.upload(dst, src, bytes, stream);
  }
  [[nodiscard]] errc download(void* dst, const void* src, std::size_t bytes, stream_ref stream) noexcept override {
    return real_.download(dst, src, bytes, stream);
  }
  [[nodiscard]] errc synchronize(stream_ref stream) noexcept override { return real_.synchronize(stream); }
  [[nodiscard]] event make_event() override { return real_.make_event(); }
  [[nodiscard]] errc record(event& point, stream_ref stream) noexcept override { return real_.record(point, stream); }
  [[nodiscard]] errc wait(const event& point, stream_ref stream) noexcept override { return real_.wait(point, stream); }
  [[nodiscard]] errc append(const append_params& params, stream_ref stream) noexcept override {
    if (flaw_ != flaw::appends_before_slots) return real_.append(params, stream);
    std::vector<std::int64_t> slots(params.slot_mapping, params.slot_mapping + params.k.num_tokens);
    for (std::int64_t& slot : slots) slot = std::max<std::int64_t>(slot - 1, 0);
    append_params shifted = params;
    shifted.slot_mapping = slots.data();
    return real_.append(shifted, stream);
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    return real_.gather(params, stream);
  }
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                 stream_ref stream) noexcept override {
    if (flaw_ == flaw::drops_last_copy && !copies.empty()) copies = copies.first(copies.size() - 1);
    return real_.copy_blocks(layers, copies, stream);
  }
  [[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return real_.convert_blocks(src, dst, copies, stream);
  }
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                 std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return real_.swap_blocks(src, dst, copies, stream);
  }
  [[nodiscard]] errc merge_states(const merge_params& params, stream_ref stream) noexcept override {
    return real_.merge_states(params, stream);
  }
  void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& batch, std::int64_t,
                      stream_ref) override {
    plan.spec = spec;
    plan.num_seqs = batch.num_seqs;
    plan.num_tokens = batch.num_tokens;
  }
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref) noexcept override {
    for (std::int32_t s = 0; s < params.batch.num_seqs; ++s) {
      const std::int64_t first = params.batch.query_start_loc[s];
      const std::int64_t query_len = params.batch.query_start_loc[s + 1] - first;
      for (std::int64_t t = 0; t < query_len; ++t) {
        for (std::int32_t h = 0; h < plan.spec.num_q_heads; ++h) row(plan.spec, params, s, first, query_len, t, h);
      }
    }
    return errc::ok;
  }

 private:
  struct partial {
    float maximum = none_seen;
    float sum = 0;
    std::vector<float> out;
  };

  [[nodiscard]] bool visible(const attention_spec& spec, std::int64_t p, std::int64_t j) const {
    const std::int64_t last = flaw_ == flaw::mask_one_too_far ? p + 1 : flaw_ == flaw::mask_one_too_short ? p - 1 : p;
    const std::int64_t left = spec.window_left + (flaw_ == flaw::window_one_too_far ? 1 : 0);
    return !(spec.causal && j > last) && !(spec.window_left >= 0 && j < p - left) &&
           !(spec.window_right >= 0 && j > p + spec.window_right);
  }

  // Of the row of q `token`, whose position is `p`.
  [[nodiscard]] float bias_of(const attention_spec& spec, const attention_params& params, std::int64_t token,
                              std::int64_t p, std::int32_t h, std::int64_t j) const {
    const attention_bias_view& bias = params.bias;
    if (bias.data == nullptr) return 0;
    if (flaw_ == flaw::bias_of_wrong_head) h -= h % (spec.num_q_heads / spec.num_kv_heads);
    if (flaw_ == flaw::bias_by_position) token = std::clamp<std::int64_t>(p, 0, params.q.num_tokens - 1);
    return load_element(
        bias.data, bias.type,
        (bias.num_tokens > 1 ? token * bias.token_stride : 0) + (bias.num_heads > 1 ? h * bias.head_stride : 0) + j);
  }

  void row(const attention_spec& spec, const attention_params& params, std::int32_t s, std::int64_t first,
           std::int64_t query_len, std::int64_t t, std::int32_t h) const {
    const kv_layout& layout = params.kv.layout;
    const std::int32_t* table = params.batch.block_tables + s * params.batch.block_table_stride;
    const std::int64_t seq_len = params.batch.seq_lens[s];
    const std::int64_t p = flaw_ == flaw::top_left_alignment ? t : seq_len - query_len + t;
    const std::int32_t kv_head =
        flaw_ == flaw::wrong_head_map ? h % spec.num_kv_heads : h / (spec.num_q_heads / spec.num_kv_heads);
    const std::int64_t q_at = (first + t) * params.q.token_stride + h * params.q.head_stride;
    const std::int64_t out_at = (first + t) * params.out.token_stride + h * params.out.head_stride;
    const float sink = params.sinks == nullptr ? none_seen : params.sinks[h];
    const auto value_at = [&](const void* base, const kv_plane& plane, std::int64_t j, std::int32_t i) {
      std::int32_t block = table[j / spec.block_size];
      if (flaw_ == flaw::reads_next_block_in_pool) block = static_cast<std::int32_t>(j / spec.block_size);
      const auto token = static_cast<std::int32_t>(j % spec.block_size);
      return load_element(base, plane.code.type, plane.strides.offset(block_id{block}, kv_head, token, i));
    };

    const std::int32_t v_first =
        flaw_ == flaw::v_at_end_of_k && layout.v_in_k ? layout.k.head_dim - layout.v.head_dim : 0;
    const float scale = scale_of(spec, params);
    partial total;
    total.out.assign(static_cast<std::size_t>(spec.v_head_dim), 0.0f);
    bool sink_open = true;
    bool hidden = false;
    const std::int64_t end =
        flaw_ == flaw::tail_multiplied_by_zero ? blocks_for(seq_len, spec.block_size) * spec.block_size : seq_len;
    for (std::int64_t begin = 0; begin < std::max<std::int64_t>(end, 1); begin += split_size) {
      partial part;
      part.out.assign(static_cast<std::size_t>(spec.v_head_dim), 0.0f);
      std::int64_t stop = std::min(begin + split_size, end);
      if (flaw_ == flaw::drops_last_key_of_split && stop < end) --stop;
      std::vector<std::pair<std::int64_t, float>> logits;
      if (sink_open || flaw_ == flaw::sink_twice) part.maximum = sink;
      for (std::int64_t j = begin; j < stop; ++j) {
        if (!visible(spec, p, j)) continue;
        if (j >= seq_len) {
          logits.emplace_back(j, none_seen);
          continue;
        }
        float dot = 0;
        for (std::int32_t i = 0; i < spec.qk_head_dim; ++i) {
          dot += load_element(params.q.data, params.q.type, q_at + i) * value_at(params.kv.k, layout.k, j, i);
        }
        const auto capped = [&](float x) {
          return params.soft_cap > 0 ? params.soft_cap * std::tanh(x / params.soft_cap) : x;
        };
        const float bias = bias_of(spec, params, first + t, p, h, j);
        float logit = flaw_ == flaw::cap_before_scale  ? scale * capped(dot)
                      : flaw_ == flaw::bias_before_cap ? capped(scale * dot + bias)
                                                       : capped(scale * dot);
        if (params.alibi_slopes != nullptr) {
          logit += params.alibi_slopes[h] * static_cast<float>(flaw_ == flaw::alibi_from_zero ? j : j - p);
        }
        if (flaw_ != flaw::bias_before_cap) logit += bias;
        if (flaw_ == flaw::half_precision_logits) logit = stored_as(dtype::bf16, logit);
        logits.emplace_back(j, logit);
        part.maximum = std::max(part.maximum, logit);
      }
      if (flaw_ == flaw::nan_for_hidden_rows && !logits.empty()) hidden = part.maximum == none_seen;
      if (part.maximum == none_seen) continue;
      if (sink_open || flaw_ == flaw::sink_twice) part.sum = std::exp(sink - part.maximum);
      sink_open = false;
      for (const auto& [j, logit] : logits) {
        const float weight = std::exp(logit - part.maximum);
        part.sum += weight;
        for (std::int32_t i = 0; i < spec.v_head_dim; ++i) {
          part.out[static_cast<std::size_t>(i)] += weight * value_at(params.kv.v_data(), layout.v, j, v_first + i);
        }
      }
      const float maximum = std::max(total.maximum, part.maximum);
      const bool rescale = flaw_ != flaw::merge_without_rescaling;
      const float old_weight = total.maximum == none_seen ? 0.0f : rescale ? std::exp(total.maximum - maximum) : 1.0f;
      const float new_weight = rescale ? std::exp(part.maximum - maximum) : 1.0f;
      for (std::size_t i = 0; i < part.out.size(); ++i) {
        total.out[i] = total.out[i] * old_weight + part.out[i] * new_weight;
      }
      total.sum = total.sum * old_weight + part.sum * new_weight;
      total.maximum = maximum;
    }

    const bool empty = total.maximum == none_seen;
    if (empty && flaw_ == flaw::leaves_empty_rows) return;
    for (std::int32_t i = 0; i < spec.v_head_dim; ++i) {
      float value = empty ? 0.0f : total.out[static_cast<std::size_t>(i)] / total.sum;
      if (empty && (flaw_ == flaw::nan_for_empty_rows || hidden)) value = std::numeric_limits<float>::quiet_NaN();
      if (flaw_ == flaw::truncates_output && params.out.type == dtype::bf16) {
        value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xffff0000u);
      }
      store_element(params.out.data, params.out.type, out_at + i, value);
    }
    if (flaw_ == flaw::writes_past_head)
      store_element(params.out.data, params.out.type, out_at + spec.v_head_dim, 0.0f);
    if (params.lse == nullptr) return;
    float lse = empty ? none_seen : total.maximum + std::log(total.sum);
    if (flaw_ == flaw::lse_in_base_2) lse *= 1.442695f;
    if (flaw_ == flaw::sink_forgotten_in_lse && params.sinks != nullptr) {
      lse = total.maximum + std::log(total.sum - std::exp(sink - total.maximum));
    }
    params.lse[(first + t) * spec.num_q_heads + h] = lse;
  }

  backend& real_;
  flaw flaw_;
};

}  // namespace

std::string_view to_string(flaw value) noexcept {
  constexpr std::string_view names[] = {"none",
                                        "mask_one_too_far",
                                        "mask_one_too_short",
                                        "top_left_alignment",
                                        "window_one_too_far",
                                        "sink_twice",
                                        "sink_forgotten_in_lse",
                                        "tail_multiplied_by_zero",
                                        "merge_without_rescaling",
                                        "wrong_head_map",
                                        "reads_next_block_in_pool",
                                        "alibi_from_zero",
                                        "cap_before_scale",
                                        "lse_in_base_2",
                                        "nan_for_empty_rows",
                                        "leaves_empty_rows",
                                        "writes_past_head",
                                        "truncates_output",
                                        "half_precision_logits",
                                        "drops_last_key_of_split",
                                        "bias_before_cap",
                                        "bias_of_wrong_head",
                                        "bias_by_position",
                                        "nan_for_hidden_rows",
                                        "v_at_end_of_k",
                                        "drops_last_copy",
                                        "appends_before_slots"};
  static_assert(std::size(names) == static_cast<std::size_t>(flaw::appends_before_slots) + 1);
  return names[static_cast<int>(value)];
}

tested_backend make_flawed_backend(backend& real, flaw value) {
  tested_backend result;
  result.name = "flawed-" + std::string(to_string(value));
  result.family = result.name;
  result.owned = std::make_unique<flawed_backend>(real, value);
  return result;
}

}  // namespace bifolio::test
