// SPDX-License-Identifier: Apache-2.0
#include "conformance/whole_steps.hpp"

#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "reference/attention_accuracy.hpp"
#include "reference/attention_oracle.hpp"
#include "support/device_bytes.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"
#include "support/reach.hpp"

namespace bifolio::test {
namespace {

constexpr std::int32_t num_layers = 2;
constexpr std::size_t row_alignment = 16;
constexpr std::size_t max_open = 6;
constexpr std::int32_t longest = 900;  // tokens of a sequence: more than one split of every kernel

std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }

enum stream_of_values : std::uint8_t { query_values = 1, key_values, value_values, sink_values };

/// Tokens as layer after layer receives them, already rounded to their stored dtype: [num_tokens, num_heads, head_dim].
struct layer_rows {
  std::vector<float> k, v;
};

struct open_sequence {
  seq_id id = invalid_seq;
  std::int64_t length = 0;     // tokens in the cache
  std::int64_t num_known = 0;  // tokens of the prompt that are still to be computed
  bool swapped = false;
  std::vector<layer_rows> stored = std::vector<layer_rows>(num_layers);
};

/// What one sequence computes in this step.
struct part {
  std::size_t which = 0;  // of the open sequences
  std::int64_t num_tokens = 0;
  bool drafts = false;
  std::vector<std::vector<float>> q = std::vector<std::vector<float>>(num_layers);
};

/// One backend's caches and results.
struct side {
  side(const tested_backend& tested_on, const kv_layout& layout, std::int64_t num_blocks, std::int64_t num_host_blocks)
      : tested(&tested_on),
        where(&tested_on.get()),
        host_backend(make_backend()),
        engine(*where, {num_layers, num_blocks, layout}),
        host(*host_backend, {num_layers, num_host_blocks, layout}, &where->staging_memory()) {
    for (const kv_cache_view& view : engine.layers()) {
      // K half and V half are one allocation.
      std::vector<std::byte> nothing(to_size(num_blocks * layout.block_bytes()));
      poison(nothing, layout.k.code.type);
      require_ok(where->upload(view.k, nothing.data(), nothing.size(), {}), "upload");
      require_ok(where->synchronize({}), "synchronize");
    }
    for (const kv_cache_view& view : host.layers()) {
      poison({static_cast<std::byte*>(view.k), to_size(num_host_blocks * layout.block_bytes())}, layout.k.code.type);
    }
  }

  const tested_backend* tested;
  backend* where;
  std::unique_ptr<backend> host_backend;
  cache_engine engine;
  cache_engine host;
  attention_plan plan;
};

class whole_steps {
 public:
  whole_steps(const tested_backend& first, const tested_backend& second, const step_shape& shape, std::uint64_t seed,
              steps_tally& tally)
      : shape_(shape),
        random_(seed),
        seed_(seed),
        tally_(tally),
        manager_(config_of(shape)),
        layout_(make_layout(shape.layout, shape.type, shape.num_kv_heads, shape.head_dim, shape.block_size)) {
    for (const tested_backend* tested : {&first, &second}) {
      sides_.push_back(
          std::make_unique<side>(*tested, layout_, manager_.config().num_blocks, manager_.config().num_host_blocks));
    }
    for (std::int32_t h = 0; h < num_q_heads(); ++h) {
      // Slopes like those of the ALiBi paper; sinks around the logits.
      if (shape.alibi) {
        slopes_.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(num_q_heads())));
      }
      if (shape.sinks) sinks_.push_back(2.0f * normal_from(hash_of(seed, sink_values, h)));
    }
    spec_.num_q_heads = num_q_heads();
    spec_.num_kv_heads = shape.num_kv_heads;
    spec_.qk_head_dim = spec_.v_head_dim = shape.head_dim;
    spec_.block_size = shape.block_size;
    spec_.q_type = spec_.k_code.type = spec_.v_code.type = spec_.out_type = shape.type;
    spec_.window_left = shape.window > 0 ? shape.window - 1 : -1;
    spec_.deterministic = shape.deterministic;
  }

  std::string run(int num_steps) {
    for (int n = 0; n < num_steps; ++n) {
      std::string problem = one_step();
      if (problem.empty()) problem = compare_caches();
      if (problem.empty()) problem = manager_.check();
      if (!problem.empty()) return "step " + std::to_string(n) + ": " + problem;
      ++tally_.num_steps;
      ++num_done_;
    }
    return {};
  }

 private:
  /// The first step computes a whole prompt, the second one token more: the shortest run meets both kinds of kernels.
  [[nodiscard]] bool first() const { return num_done_ == 0; }
  [[nodiscard]] bool quiet() const { return num_done_ < 2; }

  static kv_cache_config config_of(const step_shape& shape) {
    kv_cache_config config;
    config.block_size = shape.block_size;
    config.num_blocks = blocks_for(1600, shape.block_size);  // not enough for all: sequences wait and end
    config.num_host_blocks = config.num_blocks / 2;
    config.sliding_window = shape.window;
    return config;
  }

  [[nodiscard]] std::int32_t num_q_heads() const { return shape_.num_kv_heads * shape_.group_size; }
  [[nodiscard]] std::int64_t kv_width() const { return std::int64_t{shape_.num_kv_heads} * shape_.head_dim; }
  [[nodiscard]] std::int64_t q_width() const { return std::int64_t{num_q_heads()} * shape_.head_dim; }

  /// New tokens that the oracle can afford to look at, of a sequence that is then `seq_len` long.
  [[nodiscard]] std::int64_t affordable(std::int64_t seq_len) const {
    return std::clamp<std::int64_t>(20'000'000 / (q_width() * std::max<std::int64_t>(seq_len, 1)), 1, 400);
  }

  std::string one_step() {
    for (std::int64_t n = quiet() ? 0 : random_.between(0, 3); n > 0; --n) {
      if (std::string problem = change_something(); !problem.empty()) return problem;
    }
    if (first() || (open_.size() < max_open && random_.one_in(3)) || num_resident() == 0) {
      open_one();
    }
    std::vector<part> parts;
    step_plan plan;
    schedule(parts, plan);
    if (parts.empty()) {  // no room, or nobody here
      if (!open_.empty()) free_one(to_size(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1)));
      return {};
    }
    for (const std::unique_ptr<side>& one : sides_) {
      require_ok(one->engine.copy_blocks(plan.copies), "copy_blocks");
    }
    tally_.num_copies += static_cast<std::int64_t>(plan.copies.size());
    manager_.build(batch_, plan);
    make_tokens(parts);
    std::string problem = compute(parts);
    if (problem.empty()) problem = read_back(parts);
    accept(parts);
    return problem;
  }

  [[nodiscard]] std::size_t num_resident() const {
    return to_size(std::count_if(open_.begin(), open_.end(), [](const open_sequence& one) { return !one.swapped; }));
  }

  // --- what happens between the attention calls

  std::string change_something() {
    if (open_.empty()) return {};
    const std::size_t at = to_size(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1));
    open_sequence& one = open_[at];
    if (random_.one_in(3)) return swap(at, !one.swapped);
    if (one.swapped) return {};
    if (random_.one_in(4) && open_.size() < max_open) {
      const allocate_result forked = manager_.fork(one.id);
      if (forked.status != alloc_status::ok) return {};
      open_sequence child = one;
      child.id = forked.seq;
      open_.push_back(std::move(child));
      ++tally_.num_forks;
    } else if (random_.one_in(5) && shape_.window == 0 && one.length > 1) {
      roll_back(one, one.length - random_.between(1, std::min<std::int64_t>(one.length - 1, 40)));
      ++tally_.num_rollbacks;
    } else if (random_.one_in(10)) {
      free_one(at);
    }
    return {};
  }

  void free_one(std::size_t at) {
    manager_.free(open_[at].id);
    std::swap(open_[at], open_.back());
    open_.pop_back();
  }

  void roll_back(open_sequence& one, std::int64_t length) {
    manager_.truncate(one.id, length);
    one.length = length;
    for (layer_rows& rows : one.stored) {
      rows.k.resize(to_size(length * kv_width()));
      rows.v.resize(to_size(length * kv_width()));
    }
  }

  std::string swap(std::size_t at, bool out) {
    const seq_id id = open_[at].id;
    std::vector<block_copy> copies;
    const alloc_status status = out ? manager_.swap_out({&id, 1}, copies) : manager_.swap_in({&id, 1}, copies);
    if (status != alloc_status::ok) return {};
    for (const std::unique_ptr<side>& one : sides_) {
      const errc code =
          out ? one->engine.swap_blocks_to(one->host, copies) : one->host.swap_blocks_to(one->engine, copies);
      if (code != errc::ok) return one->tested->name + ": swapping gave " + std::string(to_string(code));
      require_ok(one->where->synchronize({}), "synchronize");  // the host's blocks are compared
    }
    open_[at].swapped = out;
    (out ? tally_.num_blocks_out : tally_.num_blocks_in) += static_cast<std::int64_t>(copies.size());
    return {};
  }

  /// A prompt to be computed by the next steps. Of a long one the greater part is stored at once, as if another machine
  /// had computed it.
  void open_one() {
    open_sequence fresh;
    fresh.num_known = first() ? random_.between(66, 126) : random_.between(1, random_.one_in(2) ? 20 : 250);
    if (!quiet() && random_.one_in(3)) {
      const std::int64_t elsewhere = random_.between(1, longest - 150);
      const allocate_result opened = manager_.allocate(elsewhere);
      if (opened.status != alloc_status::ok) return;
      fresh.id = opened.seq;
      open_.push_back(std::move(fresh));
      std::vector<part> parts(1);
      parts[0].which = open_.size() - 1;
      parts[0].num_tokens = elsewhere;
      step_plan plan;
      plan.seqs = {{open_.back().id, static_cast<std::int32_t>(elsewhere), static_cast<std::int32_t>(elsewhere)}};
      plan.num_tokens = elsewhere;
      manager_.build(batch_, plan);
      make_tokens(parts);
      for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        for (const std::unique_ptr<side>& one : sides_) {
          rows_on_device rows(*this, *one->where, parts, layer);
          const device_step_view on_device = one->engine.upload(batch_);
          require_ok(one->engine.append(layer, rows.k, rows.v, on_device.slot_mapping), "append");
          require_ok(one->where->synchronize({}), "synchronize");  // rows end here
        }
      }
      accept(parts);
      return;
    }
    open_.push_back(std::move(fresh));  // slots are taken when its first tokens are computed
  }

  /// Which sequence computes how many tokens, with slots for them.
  void schedule(std::vector<part>& parts, step_plan& plan) {
    for (std::size_t at = 0; at < open_.size(); ++at) {
      open_sequence& one = open_[at];
      if (one.swapped || (!quiet() && at + 1 != open_.size() && random_.one_in(4))) continue;
      part next;
      next.which = at;
      if (one.num_known > 0) {
        const std::int64_t most = std::min(one.num_known, affordable(one.length + one.num_known));
        next.num_tokens = !quiet() && random_.one_in(3) ? random_.between(1, most) : most;
      } else {
        next.drafts = !quiet() && random_.one_in(3);
        next.num_tokens = next.drafts ? random_.between(2, 6) : 1;
      }
      if (one.length + next.num_tokens > longest) continue;
      if (one.id == invalid_seq) {
        const allocate_result opened = manager_.allocate(next.num_tokens);
        if (opened.status != alloc_status::ok) continue;
        one.id = opened.seq;
      } else {
        const append_result grown = manager_.append(one.id, next.num_tokens);
        if (grown.status != alloc_status::ok) continue;
        if (grown.has_copy()) plan.copies.push_back(grown.copy);
      }
      if (one.num_known > 0) {
        const bool whole = one.length == 0 && next.num_tokens == one.num_known;
        ++(whole ? tally_.num_prompts : tally_.num_chunks);
      } else {
        ++tally_.num_decodes;
        tally_.num_drafts += next.num_tokens - 1;
      }
      plan.seqs.push_back({one.id, static_cast<std::int32_t>(next.num_tokens),
                           static_cast<std::int32_t>(one.length + next.num_tokens)});
      plan.num_tokens += next.num_tokens;
      parts.push_back(std::move(next));
    }
    // Those for which there was no room never began.
    std::erase_if(open_, [](const open_sequence& one) { return one.id == invalid_seq; });
  }

  /// The numbers of the new tokens, kept as what the cache is to hold.
  void make_tokens(std::vector<part>& parts) {
    const auto fill = [&](std::vector<float>& values, std::int64_t count, std::uint64_t token_seed, bool rounded) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = normal_from(mix(token_seed + static_cast<std::uint64_t>(i)));
        values.push_back(rounded ? stored_as(shape_.type, value) : value);
      }
    };
    k_rows_.assign(num_layers, {});
    v_rows_.assign(num_layers, {});
    for (part& next : parts) {
      open_sequence& one = open_[next.which];
      for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        const auto at = to_size(layer);
        for (std::int64_t t = 0; t < next.num_tokens; ++t) {
          const std::uint64_t token = hash_of(seed_, layer, num_tokens_made_ + t);
          fill(next.q[at], q_width(), hash_of(token, query_values), true);
          fill(k_rows_[at], kv_width(), hash_of(token, key_values), shape_.fused);
          fill(v_rows_[at], kv_width(), hash_of(token, value_values), shape_.fused);
        }
        const auto keep = [&](const std::vector<float>& rows, std::vector<float>& stored) {
          const auto count = next.num_tokens * kv_width();
          for (auto value = rows.end() - count; value != rows.end(); ++value) {
            stored.push_back(stored_as(shape_.type, *value));
          }
        };
        keep(k_rows_[at], one.stored[at].k);
        keep(v_rows_[at], one.stored[at].v);
      }
      num_tokens_made_ += next.num_tokens;
    }
  }

  /// Drafts are accepted up to a random one; everything else as a whole.
  void accept(const std::vector<part>& parts) {
    for (const part& next : parts) {
      open_sequence& one = open_[next.which];
      const std::int64_t accepted = next.drafts ? random_.between(1, next.num_tokens) : next.num_tokens;
      const std::int64_t before = one.length;
      one.length += next.num_tokens;
      if (accepted < next.num_tokens) roll_back(one, before + accepted);
      manager_.commit(one.id, accepted);
      one.num_known = std::max<std::int64_t>(0, one.num_known - next.num_tokens);
      tally_.num_rejected += next.num_tokens - accepted;
    }
  }

  // --- one step's tensors

  [[nodiscard]] std::vector<std::byte> narrowed(const std::vector<float>& values, dtype type) const {
    std::vector<std::byte> bytes(values.size() * size_of(type));
    for (std::size_t i = 0; i < values.size(); ++i) {
      store_element(bytes.data(), type, static_cast<std::int64_t>(i), values[i]);
    }
    return bytes;
  }

  /// q, k and v of all new tokens of a layer: slices of one row in the cache's dtype, or dense, k and v in float32.
  struct rows_on_device {
    rows_on_device(const whole_steps& steps, backend& where, const std::vector<part>& parts, std::int32_t layer) {
      const step_shape& shape = steps.shape_;
      const auto at = to_size(layer);
      const std::int64_t num_tokens = static_cast<std::int64_t>(steps.batch_.slot_mapping.size());
      const std::int64_t q_width = steps.q_width();
      const std::int64_t kv_width = steps.kv_width();
      std::vector<float> all_q;
      for (const part& next : parts) all_q.insert(all_q.end(), next.q[at].begin(), next.q[at].end());
      const std::int32_t heads = steps.num_q_heads();
      if (!shape.fused) {
        first = device_bytes(where, steps.narrowed(all_q, shape.type), row_alignment);
        second = device_bytes(where, bytes_of(steps.k_rows_[at]), row_alignment);
        third = device_bytes(where, bytes_of(steps.v_rows_[at]), row_alignment);
        q = as_const(dense_view<void>(first.data(), shape.type, num_tokens, heads, shape.head_dim));
        k = as_const(dense_view<void>(second.data(), dtype::f32, num_tokens, shape.num_kv_heads, shape.head_dim));
        v = as_const(dense_view<void>(third.data(), dtype::f32, num_tokens, shape.num_kv_heads, shape.head_dim));
        return;
      }
      std::vector<float> rows;
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const auto take = [&](const std::vector<float>& from, std::int64_t width) {
          rows.insert(rows.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
        };
        take(all_q, q_width);
        take(steps.k_rows_[at], kv_width);
        take(steps.v_rows_[at], kv_width);
      }
      first = device_bytes(where, steps.narrowed(rows, shape.type), row_alignment);
      const auto slice = [&](std::int64_t start, std::int32_t num_heads) {
        return const_tensor_view{first.data() + start * static_cast<std::int64_t>(size_of(shape.type)),
                                 shape.type,
                                 num_tokens,
                                 num_heads,
                                 shape.head_dim,
                                 q_width + 2 * kv_width,
                                 shape.head_dim};
      };
      q = slice(0, heads);
      k = slice(q_width, shape.num_kv_heads);
      v = slice(q_width + kv_width, shape.num_kv_heads);
    }
    device_bytes first, second, third;
    const_tensor_view q, k, v;
  };

  /// Append and attention in every layer on both sides, each held to the oracle.
  std::string compute(const std::vector<part>& parts) {
    std::vector<device_step_view> on_device;
    for (const std::unique_ptr<side>& one : sides_) {
      on_device.push_back(one->engine.upload(batch_));
      one->where->plan_attention(one->plan, spec_, batch_.view(), manager_.config().num_blocks);
    }
    const bool with_lse = !random_.one_in(4);
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      const expectation expected = expect(parts, layer);
      for (std::size_t s = 0; s < sides_.size(); ++s) {
        std::string problem = attend(*sides_[s], on_device[s], parts, layer, with_lse, expected);
        if (!problem.empty()) {
          return sides_[s]->tested->name + ", layer " + std::to_string(layer) + ": " + problem + " (" +
                 describe(parts) + ")";
        }
      }
    }
    return {};
  }

  struct expectation {
    reference::attention_options options;
    std::vector<reference::dense_sequence> seqs;
    std::vector<reference::attention_reference> exact;
    std::vector<reference::scalar_attention> scalar;
  };
  [[nodiscard]] expectation expect(const std::vector<part>& parts, std::int32_t layer) const {
    expectation expected;
    expected.options = {.num_q_heads = num_q_heads(),
                        .num_kv_heads = shape_.num_kv_heads,
                        .qk_head_dim = shape_.head_dim,
                        .v_head_dim = shape_.head_dim,
                        .window_left = spec_.window_left,
                        .scale = scale(),
                        .soft_cap = shape_.soft_cap,
                        .alibi_slopes = slopes_.empty() ? nullptr : slopes_.data(),
                        .sinks = sinks_.empty() ? nullptr : sinks_.data()};
    for (const part& next : parts) {
      const open_sequence& one = open_[next.which];
      const layer_rows& rows = one.stored[to_size(layer)];
      expected.seqs.push_back(
          {next.num_tokens, one.length + next.num_tokens, next.q[to_size(layer)].data(), rows.k.data(), rows.v.data()});
      expected.exact.push_back(reference::attend(expected.options, expected.seqs.back()));
      expected.scalar.push_back(reference::attend_in_float32(expected.options, expected.seqs.back()));
    }
    return expected;
  }
  [[nodiscard]] float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  std::string attend(side& one, const device_step_view& batch, const std::vector<part>& parts, std::int32_t layer,
                     bool with_lse, const expectation& expected) {
    backend& where = *one.where;
    rows_on_device rows(*this, where, parts, layer);
    const std::int64_t num_tokens = rows.q.num_tokens;
    std::vector<std::byte> no_output(to_size(num_tokens * q_width()) * size_of(shape_.type));
    poison(no_output, shape_.type);
    device_bytes out(where, std::move(no_output), row_alignment);
    device_bytes lse(where, bytes_of(std::vector<float>(to_size(num_tokens * num_q_heads()), NAN)), row_alignment);
    device_bytes slopes(where, bytes_of(slopes_), alignof(float));
    device_bytes sinks(where, bytes_of(sinks_), alignof(float));
    require_ok(one.engine.append(layer, rows.k, rows.v, batch.slot_mapping), "append");
    attention_params params;
    params.q = rows.q;
    params.out = dense_view<void>(out.data(), shape_.type, num_tokens, num_q_heads(), shape_.head_dim);
    if (with_lse) params.lse = reinterpret_cast<float*>(lse.data());
    params.kv = one.engine.layers()[to_size(layer)];
    params.batch = batch;
    params.scale = scale();
    params.soft_cap = shape_.soft_cap;
    if (shape_.alibi) params.alibi_slopes = reinterpret_cast<const float*>(slopes.data());
    if (shape_.sinks) params.sinks = reinterpret_cast<const float*>(sinks.data());
    if (const errc code = where.attention(one.plan, params); code != errc::ok) {
      return "attention gave " + std::string(to_string(code));
    }
    for (const std::string& name : where.describe(one.plan, params)) ++tally_.kernels[name];
    record_attention(where, one.plan, params);

    const std::vector<std::byte> out_bytes = out.read();
    const std::vector<std::byte> lse_bytes = lse.read();
    std::vector<float> got(out_bytes.size() / size_of(shape_.type));
    for (std::size_t i = 0; i < got.size(); ++i) {
      got[i] = load_element(out_bytes.data(), shape_.type, static_cast<std::int64_t>(i));
    }
    std::vector<float> got_lse(lse_bytes.size() / sizeof(float));
    std::memcpy(got_lse.data(), lse_bytes.data(), lse_bytes.size());
    reference::accuracy_judge judge(
        {one.tested->numbers_for(shape_.type, shape_.type, shape_.type, shape_.head_dim), shape_.type, shape_.type});
    std::size_t row = 0;
    for (std::size_t s = 0; s < expected.seqs.size(); ++s) {
      judge.add(expected.options, expected.seqs[s], expected.exact[s], expected.scalar[s],
                got.data() + row * to_size(shape_.head_dim), with_lse ? got_lse.data() + row : nullptr);
      row += expected.exact[s].lse.size();
    }
    tally_.worst_share = std::max(tally_.worst_share, judge.worst_share());
    return judge.problem();
  }

  // --- comparing

  /// Every token of the step's sequences, gathered on both sides, is what was appended.
  std::string read_back(const std::vector<part>& parts) {
    std::vector<std::int64_t> slots;
    for (const part& next : parts) {
      const open_sequence& one = open_[next.which];
      for (std::int64_t p = 0; p < one.length + next.num_tokens; ++p) {
        slots.push_back(to_index(manager_.slot_at(one.id, p)));
      }
    }
    const auto num_rows = static_cast<std::int64_t>(slots.size());
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      std::vector<float> expected_k, expected_v;
      for (const part& next : parts) {
        const layer_rows& rows = open_[next.which].stored[to_size(layer)];
        expected_k.insert(expected_k.end(), rows.k.begin(), rows.k.end());
        expected_v.insert(expected_v.end(), rows.v.begin(), rows.v.end());
      }
      std::vector<std::byte> k_bytes = narrowed(expected_k, shape_.type);
      std::vector<std::byte> v_bytes = narrowed(expected_v, shape_.type);
      std::vector<std::byte> nothing(k_bytes.size());
      poison(nothing, shape_.type);
      // What the window gave back has no slot and stays as it was.
      const std::size_t row_bytes = to_size(kv_width()) * size_of(shape_.type);
      for (std::size_t r = 0; r < slots.size(); ++r) {
        if (slots[r] >= 0) continue;
        std::memcpy(k_bytes.data() + r * row_bytes, nothing.data(), row_bytes);
        std::memcpy(v_bytes.data() + r * row_bytes, nothing.data(), row_bytes);
      }
      for (const std::unique_ptr<side>& one : sides_) {
        device_bytes k(*one->where, nothing, row_alignment);
        device_bytes v(*one->where, nothing, row_alignment);
        device_bytes slots_there(*one->where, bytes_of(slots), alignof(std::int64_t));
        const auto view = [&](device_bytes& bytes) {
          return dense_view<void>(bytes.data(), shape_.type, num_rows, shape_.num_kv_heads, shape_.head_dim);
        };
        require_ok(one->where->gather({one->engine.layers()[to_size(layer)], view(k), view(v),
                                       reinterpret_cast<const std::int64_t*>(slots_there.data())}),
                   "gather");
        if (k.read() != k_bytes || v.read() != v_bytes) {
          return one->tested->name + ": stored tokens of layer " + std::to_string(layer) +
                 " read back as something else (" + describe(parts) + ")";
        }
      }
    }
    return {};
  }

  /// Every byte of both pools.
  std::string compare_caches() {
    for (std::size_t layer = 0; layer < num_layers; ++layer) {
      const auto pool_of = [&](side& one) {
        std::vector<std::byte> bytes(to_size(one.engine.config().num_blocks * layout_.block_bytes()));
        require_ok(one.where->download(bytes.data(), one.engine.layers()[layer].k, bytes.size(), {}), "download");
        require_ok(one.where->synchronize({}), "synchronize");
        return bytes;
      };
      if (pool_of(*sides_[0]) != pool_of(*sides_[1])) return "the caches differ in layer " + std::to_string(layer);
      const std::size_t host_bytes = to_size(sides_[0]->host.config().num_blocks * layout_.block_bytes());
      if (std::memcmp(sides_[0]->host.layers()[layer].k, sides_[1]->host.layers()[layer].k, host_bytes) != 0) {
        return "the blocks in host memory differ in layer " + std::to_string(layer);
      }
    }
    return {};
  }

  [[nodiscard]] std::string describe(const std::vector<part>& parts) const {
    std::string text = "query_len/seq_len";
    for (const part& next : parts) {
      text += " " + std::to_string(next.num_tokens) + "/" + std::to_string(open_[next.which].length + next.num_tokens);
    }
    return text;
  }

  step_shape shape_;
  random_source random_;
  std::uint64_t seed_;
  steps_tally& tally_;
  kv_cache_manager manager_;
  kv_layout layout_;
  attention_spec spec_;
  std::vector<float> slopes_, sinks_;  // [num_q_heads], or empty
  std::vector<std::unique_ptr<side>> sides_;
  std::vector<open_sequence> open_;
  step_batch batch_;
  std::vector<std::vector<float>> k_rows_, v_rows_;  // by layer, of this step, as appended
  std::int64_t num_tokens_made_ = 0;
  int num_done_ = 0;  // steps
};

}  // namespace

std::string describe(const step_shape& s) {
  std::ostringstream text;
  text << to_string(s.type) << ", head_dim " << s.head_dim << ", " << s.num_kv_heads * s.group_size << "/"
       << s.num_kv_heads << " heads, " << to_string(s.layout) << ", block_size " << s.block_size
       << (s.fused ? ", fused rows" : ", dense rows");
  if (s.deterministic) text << ", deterministic";
  if (s.window > 0) text << ", window " << s.window;
  if (s.soft_cap > 0) text << ", soft_cap " << s.soft_cap;
  if (s.alibi) text << ", alibi";
  if (s.sinks) text << ", sinks";
  return text.str();
}

std::vector<step_shape> step_shapes(std::uint64_t seed, int count) {
  // Every family of kernels in the first three, so that a run of few shapes meets them all.
  std::vector<step_shape> shapes{
      {},
      {.layout = layout_kind::x_split},
      {.type = dtype::f16, .head_dim = 64, .num_kv_heads = 1, .group_size = 8, .block_size = 32, .fused = true},
      {.type = dtype::f16, .head_dim = 256, .group_size = 2, .block_size = 64, .layout = layout_kind::nhd},
      {.head_dim = 64, .group_size = 5, .window = 200, .soft_cap = 5, .alibi = true, .sinks = true},
      {.group_size = 3, .block_size = 5, .fused = true},
      {.type = dtype::f16, .group_size = 6, .layout = layout_kind::nhd, .deterministic = true},
      {.type = dtype::f16,
       .head_dim = 64,
       .num_kv_heads = 3,
       .group_size = 1,
       .block_size = 32,
       .layout = layout_kind::x_split,
       .fused = true,
       .window = 70},
      {.head_dim = 256, .num_kv_heads = 1, .group_size = 7, .block_size = 8, .layout = layout_kind::x_split},
      {.head_dim = 80, .group_size = 2, .block_size = 16, .layout = layout_kind::x_split, .sinks = true},
  };
  random_source random(hash_of(seed, 0x57e9));
  const std::vector<std::int32_t> dims{64, 128, 128, 256};
  const std::vector<std::int32_t> blocks{16, 16, 32, 64, 8, 128, 1, 24};
  const std::vector<layout_kind> layouts{layout_kind::hnd, layout_kind::hnd, layout_kind::nhd, layout_kind::x_split};
  while (shapes.size() < to_size(count)) {
    step_shape s;
    s.type = random.one_in(2) ? dtype::bf16 : dtype::f16;
    s.head_dim = random.pick(dims);
    s.group_size = static_cast<std::int32_t>(random.between(1, 8));
    s.num_kv_heads = static_cast<std::int32_t>(random.between(1, s.group_size > 4 ? 2 : 3));
    s.block_size = random.pick(blocks);
    s.layout = random.pick(layouts);
    s.fused = random.one_in(2);
    s.deterministic = random.one_in(4);
    s.window = random.one_in(4) ? static_cast<std::int32_t>(random.between(1, 300)) : 0;
    s.soft_cap = random.one_in(4) ? 0.5f + 30.0f * random.unit() : 0.0f;
    s.alibi = random.one_in(4);
    s.sinks = random.one_in(4);
    shapes.push_back(s);
  }
  shapes.resize(to_size(count));
  return shapes;
}

std::string steps_tally::text() const {
  std::ostringstream text;
  text << num_steps << " steps: " << num_prompts << " prompts, " << num_chunks << " chunks, " << num_decodes
       << " decodes with " << num_drafts << " drafts (" << num_rejected << " rejected), " << num_rollbacks
       << " rollbacks, " << num_forks << " forks, " << num_copies << " blocks copied, " << num_blocks_out
       << " swapped out, " << num_blocks_in << " in; largest error over its bound " << worst_share;
  for (const auto& [name, count] : kernels) text << "\n  " << name << ": " << count;
  return text.str();
}

std::string run_whole_steps(const tested_backend& first, const tested_backend& second, const step_shape& shape,
                            std::uint64_t seed, int num_steps, steps_tally& tally) {
  return whole_steps(first, second, shape, seed, tally).run(num_steps);
}

std::string run_whole_steps(const tested_backend& first, const tested_backend& second, std::uint64_t seed,
                            int num_steps, steps_tally& tally) {
  const int steps_each = std::clamp(num_steps / 10, 3, 25);
  std::string problems;
  std::uint64_t number = 0;
  for (const step_shape& shape : step_shapes(seed, std::max(3, num_steps / steps_each))) {
    std::string problem;
    try {
      problem = run_whole_steps(first, second, shape, hash_of(seed, number), steps_each, tally);
    } catch (const std::exception& failure) {
      problem = failure.what();
    }
    if (!problem.empty())
      problems += "shape " + std::to_string(number) + " (" + describe(shape) + "): " + problem + "\n";
    ++number;
  }
  return problems;
}

}  // namespace bifolio::test
