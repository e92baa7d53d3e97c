// SPDX-License-Identifier: Apache-2.0
#include "model_rows.hpp"

#include <bifolio/model_cache.hpp>
#include <bifolio/trace.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "row_timer.hpp"

namespace bifolio::bench {
namespace {

constexpr std::int32_t batch = 256, num_layers = 32, num_tokens = 1000;

/// Answers ok and does nothing, so that what is left is the host's own work.
class idle_backend final : public backend {
 public:
  [[nodiscard]] device where() const noexcept override { return {}; }
  [[nodiscard]] std::string description() const override { return "idle"; }
  [[nodiscard]] errc health() const noexcept override { return errc::ok; }
  [[nodiscard]] memory_resource& memory() noexcept override { return default_host_memory(); }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return default_host_memory(); }
  [[nodiscard]] errc upload(void*, const void*, std::size_t, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc download(void*, const void*, std::size_t, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc synchronize(stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] event make_event() override { return {}; }
  [[nodiscard]] errc record(event&, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc wait(const event&, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc append(const append_params&, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc gather(const gather_params&, stream_ref) noexcept override { return errc::ok; }
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view>, std::span<const block_copy>,
                                 stream_ref) noexcept override {
    return errc::ok;
  }
  [[nodiscard]] errc convert_blocks(const kv_cache_view&, const kv_cache_view&, std::span<const block_copy>,
                                    stream_ref) noexcept override {
    return errc::ok;
  }
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view>, std::span<const kv_cache_view>,
                                 std::span<const block_copy>, stream_ref) noexcept override {
    return errc::ok;
  }
  void plan_attention(attention_plan&, const attention_spec&, const host_step_view&, std::int64_t,
                      stream_ref) override {}
  [[nodiscard]] errc attention(const attention_plan&, const attention_params&, stream_ref) noexcept override {
    return errc::ok;
  }
  [[nodiscard]] errc merge_states(const merge_params&, stream_ref) noexcept override { return errc::ok; }
};

class model_bench : row_timer {
 public:
  model_bench(std::int32_t block_size, std::int32_t rounds, report& out)
      : row_timer(out),
        rounds_(rounds),
        cache_(where_, config(block_size)),
        traced_cache_(*traced_, config(block_size)) {
    open(cache_, rows_);
    open(traced_cache_, traced_rows_);
    log_.name_layers(traced_cache_.engine().layers());
  }

  void run() {
    std::vector<double> by_hand, with_cache, traced;
    for (std::int32_t round = 0; round < rounds_; ++round) {
      for (int i = 0; i < 8; ++i) time(by_hand, 1, [&] { step_by_hand(); });
      for (int i = 0; i < 8; ++i) time(with_cache, 1, [&] { step_with(cache_, rows_, nullptr); });
      for (int i = 0; i < 8; ++i) time(traced, 1, [&] { step_with(traced_cache_, traced_rows_, &log_); });
      for (const step_row& row : rows_) cache_.truncate(row.seq, num_tokens);
      for (const step_row& row : traced_rows_) traced_cache_.truncate(row.seq, num_tokens);
    }
    add("decode step, batch 256, 32 layers, by hand", "batch", "step", by_hand);
    add("decode step, batch 256, 32 layers, model_cache", "batch", "step", with_cache);
    add("decode step, batch 256, 32 layers, traced", "batch", "step", traced);
  }

 private:
  static model_cache_config config(std::int32_t block_size) {
    model_cache_config config;
    config.num_layers = num_layers;
    config.attention.num_q_heads = config.attention.num_kv_heads = config.attention.qk_head_dim = 1;
    config.cache.block_size = block_size;
    config.cache.num_blocks = batch * ((num_tokens + 100) / block_size + 2);
    return config;
  }

  /// Sequences of num_tokens tokens.
  static void open(model_cache& cache, std::vector<step_row>& rows) {
    const std::vector<token_id> prompt(num_tokens);
    for (step_row& row : rows) row.seq = cache.open(prompt).seq;
    std::vector<step_row> prompts = rows;
    for (step_row& row : prompts) row.tokens = prompt;
    cache.begin_step(prompts).commit();
  }

  void step_with(model_cache& cache, const std::vector<step_row>& rows, trace_log* log) {
    const std::int64_t since = log != nullptr ? log->now() : 0;
    model_step step = cache.begin_step(rows);
    if (log != nullptr) log->set_step(step.plan().step, since);
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      require_ok(step.attend(layer, tensor_, tensor_, tensor_, out_), "attend");
    }
    step.commit();
  }

  void step_by_hand() {
    kv_cache_manager& manager = cache_.manager();
    cache_engine& engine = cache_.engine();
    backend& device = where_;
    plan_.seqs.clear();
    plan_.copies.clear();
    inputs_.tokens.clear();
    inputs_.positions.clear();
    for (const step_row& row : rows_) {
      if (!manager.append_in_place(row.seq, 1)) {
        const append_result grown = manager.append(row.seq, 1);
        if (grown.status != alloc_status::ok) throw error(errc::internal, "no block is left");
        if (grown.has_copy()) plan_.copies.push_back(grown.copy);
      }
      const auto length = static_cast<std::int32_t>(manager.num_tokens(row.seq));
      plan_.seqs.push_back({.seq = row.seq, .query_len = 1, .seq_len = length});
      inputs_.tokens.push_back(row.tokens[0]);
      inputs_.positions.push_back(length - 1);
    }
    require_ok(engine.copy_blocks(plan_.copies), "copy_blocks");
    manager.build(inputs_.batch, plan_);
    const device_step_view arrays = engine.upload(inputs_.batch);
    device.plan_attention(attention_, cache_.spec_of(0), inputs_.batch.view(), manager.config().num_blocks);
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      require_ok(engine.append(layer, tensor_, tensor_, arrays.slot_mapping), "append");
      attention_params params;
      params.q = tensor_;
      params.out = out_;
      params.kv = engine.layers()[static_cast<std::size_t>(layer)];
      params.batch = arrays;
      require_ok(device.attention(attention_, params), "attention");
    }
    for (const step_row& row : rows_) manager.commit(row.seq, 1);
  }

  std::int32_t rounds_;
  idle_backend where_;
  trace_log log_;
  std::unique_ptr<backend> traced_ = trace_backend(where_, log_);
  model_cache cache_, traced_cache_;
  token_id token_{1};
  std::vector<step_row> rows_ = std::vector<step_row>(batch, step_row{.tokens = {&token_, 1}}), traced_rows_ = rows_;
  float data_[batch] = {};
  const_tensor_view tensor_ = dense_view(std::as_const(data_), batch, 1, 1);
  tensor_view out_ = dense_view(data_, batch, 1, 1);
  step_plan plan_;
  step_inputs inputs_;
  attention_plan attention_;
};

}  // namespace

void add_model_rows(std::int32_t block_size, std::int32_t rounds, report& out) {
  model_bench(block_size, rounds, out).run();
}

}  // namespace bifolio::bench
