// SPDX-License-Identifier: Apache-2.0
// Structs of the C interface with any numbers in them, and calls on what they made, in any order: statuses, never more.
// Pointers lead to memory of the size that their struct says; what a caller may not do in C cannot be found out.
#include <bifolio/c/bifolio.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "choices.hpp"
#include "fuzz_target.hpp"

namespace {

using bifolio::fuzz::choices;
using bifolio::fuzz::flaw;

/// Every status is documented, and a refusal has a sentence.
bool is_ok(bifolio_status status) {
  if (std::string(bifolio_status_name(status)) == "unknown") flaw("a status that does not exist");
  if (status < 0 && bifolio_last_error()[0] == '\0') flaw("a refusal without a sentence");
  if (status == BIFOLIO_INTERNAL) flaw(bifolio_last_error());
  return status == BIFOLIO_OK;
}

std::int32_t any_number(choices& from) {
  constexpr std::array<std::int32_t, 8> unlikely{-1, INT32_MIN, INT32_MAX, 1 << 24, -2, 1 << 16, 1 << 30, 0};
  const std::uint8_t first = from.byte();
  return first < 224 ? first % 64 : unlikely[first % 8];
}
/// Of something that memory is taken for.
std::int32_t any_count(choices& from) {
  const std::uint8_t first = from.byte();
  return first < 240 ? first % 48 : first < 250 ? first * 8 : -first;
}

const char* any_code(choices& from) {
  constexpr std::array<const char*, 8> names{nullptr, "f32", "bf16", "f16", "e4m3", "i8-token", "u4", ""};
  return names[from.below(8)];
}

/// Numbers whose product is terabytes are sound, and refused for the memory of the machine alone, which the address
/// sanitizer does not let a program survive.
bool is_modest(std::int64_t num_heads, std::int64_t head_dim, std::int64_t v_head_dim, std::int64_t block_size) {
  const std::int64_t widest = std::max(head_dim, v_head_dim);
  if (num_heads < 1 || widest < 1 || block_size < 1) return true;  // refused
  return num_heads <= 4096 && widest <= 4096 && block_size <= 4096 && num_heads * widest * block_size <= 1 << 14;
}

template <class Struct>
Struct made(bifolio_status (*init)(Struct*, std::size_t), choices& from) {
  Struct result;
  if (init(&result, sizeof result) != BIFOLIO_OK) flaw("a struct of the size of the header was refused");
  if (from.below(64) == 1) result.size = from.byte() % sizeof result;  // more would be a promise to have as much
  return result;
}

/// Handles of one input; a call takes what there is, also null, and numbers that no handle has.
class calls {
 public:
  explicit calls(choices& from) : from_(from) {
    bifolio_backend_options options;
    (void)bifolio_backend_options_init(&options, sizeof options);
    options.executor = "serial";
    if (!is_ok(bifolio_backend_create("cpu", &options, &backend_))) flaw("no CPU");
    (void)bifolio_batch_create(&batch_);
    (void)bifolio_plan_create(&plan_);
  }
  calls(const calls&) = delete;
  calls& operator=(const calls&) = delete;
  ~calls() {
    (void)bifolio_step_destroy(step_);
    (void)bifolio_scheduler_destroy(scheduler_);
    (void)bifolio_cache_destroy(cache_);
    (void)bifolio_engine_destroy(engine_);
    (void)bifolio_manager_destroy(manager_);
    (void)bifolio_pool_destroy(pool_);
    (void)bifolio_plan_destroy(plan_);
    (void)bifolio_batch_destroy(batch_);
    (void)bifolio_backend_destroy(backend_);
  }

  void one() {
    switch (from_.below(20)) {
      case 0:
        return make_manager();
      case 1:
        return make_scheduler();
      case 2:
        return make_cache();
      case 3:
        return make_engine();
      case 4:
        return pool_calls();
      case 5:
        return submit();
      case 6:
        return begin_scheduled();
      case 7:
        return commit_sampled();
      case 8:
        return begin_rows();
      case 9:
        return commit_rows();
      case 10:
        return open();
      case 11:
        return plan_attention();
      case 12:
        return move_blocks();
      case 13:
        return attend();
      case 14:
        return swap();
      case 15:
        return look();
      default:
        return change_sequence();
    }
  }

 private:
  template <class Handle>
  static void replace(Handle& old, Handle made, bifolio_status (*destroy)(Handle)) {
    if (old != nullptr && destroy(old) != BIFOLIO_OK) flaw("an open handle was not destroyed");
    old = made;
  }

  bifolio_manager_config manager_config() {
    auto config = made(bifolio_manager_config_init, from_);
    config.block_size = any_number(from_);
    config.num_blocks = any_count(from_);
    config.max_sequences = any_count(from_);
    const std::uint8_t more = from_.byte();
    config.prefix_caching = more & 1;
    config.record_events = more >> 1 & 1;
    config.deduplicate = more >> 2 & 1;
    if ((more & 8) != 0) config.num_host_blocks = any_count(from_);
    if ((more & 16) != 0) config.sliding_window = any_number(from_);
    if ((more & 32) != 0) config.max_seq_len = any_number(from_);
    if ((more & 64) != 0) config.watermark = static_cast<double>(any_number(from_)) / 16;
    if ((more & 128) != 0) config.prefix_caching = any_number(from_);
    if (config.prefix_caching != 0 && config.block_size > 4096) config.block_size = 16;  // it keeps a tail of tokens
    config.has_seed = 1;
    return config;
  }
  void make_manager() {
    const auto config = manager_config();
    bifolio_manager made_now = nullptr;
    if (is_ok(bifolio_manager_create(&config, &made_now))) replace(manager_, made_now, bifolio_manager_destroy);
  }
  void make_scheduler() {
    auto config = made(bifolio_scheduler_config_init, from_);
    config.max_tokens_per_step = any_number(from_);
    config.max_running = any_count(from_);
    config.max_chunk_tokens = any_number(from_);
    config.vocab_size = any_number(from_);
    config.max_steps_in_flight = any_count(from_);
    config.preemption = any_number(from_);
    bifolio_scheduler made_now = nullptr;
    if (is_ok(bifolio_scheduler_create(manager_, &config, &made_now))) {
      replace(scheduler_, made_now, bifolio_scheduler_destroy);
    }
  }

  bifolio_attention_spec spec() {
    auto result = made(bifolio_attention_spec_init, from_);
    result.num_q_heads = any_number(from_);
    result.num_kv_heads = any_number(from_);
    result.qk_head_dim = any_number(from_);
    result.v_head_dim = from_.flag() ? any_number(from_) : 0;
    result.block_size = from_.flag() ? any_number(from_) : 0;
    result.q_type = from_.below(4);
    result.out_type = from_.below(4);
    const std::uint8_t more = from_.byte();
    result.v_in_k = (more & 1) != 0 ? any_number(from_) : 0;
    if ((more & 2) != 0) result.window_left = any_number(from_);
    if ((more & 4) != 0) result.window_right = any_number(from_);
    if ((more & 8) != 0) result.causal = any_number(from_);
    result.k_code = any_code(from_);
    result.v_code = (more & 16) != 0 ? any_code(from_) : nullptr;
    if ((more & 32) != 0) result.implementation = "nothing of this name";
    return result;
  }
  void make_cache() {
    const auto logic = manager_config();
    const auto attention = spec();
    auto config = made(bifolio_cache_config_init, from_);
    config.num_layers = from_.below(4);
    config.layout = from_.below(4);
    config.attention = &attention;
    config.manager = from_.below(16) != 1 ? &logic : nullptr;
    config.memory_bytes = from_.flag() ? any_number(from_) % (1 << 20) : 0;
    std::array<std::int32_t, 4> windows{};
    for (std::int32_t& window : windows) window = any_number(from_);
    if (from_.flag()) config.layer_windows = windows.data();
    const std::vector<float> scales(64, 0.5f);
    config.k_scales = config.v_scales = scales.data();
    config.num_k_scales = from_.below(64);
    config.num_v_scales = from_.below(64);
    const std::int32_t block_size = config.manager != nullptr ? logic.block_size : 16;
    if (!is_modest(attention.num_kv_heads, attention.qk_head_dim, attention.v_head_dim, block_size)) return;
    bifolio_cache made_now = nullptr;
    if (!is_ok(bifolio_cache_create(backend_, &config, &made_now))) return;
    (void)bifolio_step_destroy(step_);
    step_ = nullptr;
    replace(cache_, made_now, bifolio_cache_destroy);
    bifolio_manager manager = nullptr;
    if (!is_ok(bifolio_cache_manager(cache_, &manager))) flaw("a cache without a manager");
    replace(manager_, manager, bifolio_manager_destroy);
    bifolio_engine engine = nullptr;
    if (!is_ok(bifolio_cache_engine(cache_, &engine))) flaw("a cache without an engine");
    replace(engine_, engine, bifolio_engine_destroy);
  }
  void make_engine() {
    auto config = made(bifolio_engine_config_init, from_);
    config.num_layers = from_.below(4);
    config.layout = from_.below(4);
    config.num_blocks = any_count(from_);
    config.num_kv_heads = any_number(from_);
    config.qk_head_dim = any_number(from_);
    config.v_head_dim = from_.flag() ? any_number(from_) : 0;
    config.block_size = any_number(from_);
    config.v_in_k = from_.below(3);
    config.k_code = any_code(from_);
    config.v_code = any_code(from_);
    const std::vector<float> scales(64, 0.5f);
    config.k_scales = config.v_scales = scales.data();
    config.num_k_scales = from_.below(64);
    config.num_v_scales = from_.below(64);
    config.on_host = from_.below(3);
    if (!is_modest(config.num_kv_heads, config.qk_head_dim, config.v_head_dim, config.block_size)) return;
    bifolio_engine made_now = nullptr;
    if (is_ok(bifolio_engine_create(backend_, &config, &made_now))) replace(engine_, made_now, bifolio_engine_destroy);
  }

  void pool_calls() {
    if (pool_ == nullptr) {
      (void)is_ok(bifolio_pool_create(any_count(from_), &pool_));
      return;
    }
    std::array<bifolio_block, 16> blocks{};
    const std::size_t count = from_.below(17);
    for (bifolio_block& block : blocks) block = any_number(from_);
    const std::uint8_t what = from_.below(3);
    if (what == 0) (void)is_ok(bifolio_pool_allocate(pool_, blocks.data(), count));
    if (what == 1) (void)is_ok(bifolio_pool_retain(pool_, blocks.data(), count));
    if (what == 2) (void)is_ok(bifolio_pool_release(pool_, blocks.data(), count));
    std::int64_t num_free = 0;
    if (!is_ok(bifolio_pool_num_free(pool_, &num_free)) || num_free < 0) flaw("a pool that cannot be counted");
  }

  /// `tokens`, `extras` and `salt` have to live as long.
  bifolio_prompt prompt(std::vector<bifolio_token>& tokens, std::array<bifolio_extra_key, 2>& extras) {
    auto result = made(bifolio_prompt_init, from_);
    tokens.resize(from_.byte());
    for (bifolio_token& token : tokens) token = from_.below(3);
    if (!tokens.empty() && from_.below(16) == 1) tokens.back() = any_number(from_);
    result.tokens = tokens.data();
    result.num_tokens = tokens.size();
    const std::uint8_t more = from_.byte();
    if ((more & 1) != 0) result.salt = "salt", result.salt_bytes = from_.below(5);
    if ((more & 2) != 0) result.adapter_id = from_.word();
    if ((more & 4) != 0) {
      for (bifolio_extra_key& extra : extras) {
        extra = {any_number(from_), from_.byte(), from_.below(16) == 1 ? 1u : 0u, "extra", from_.below(6)};
      }
      result.extras = extras.data();
      result.num_extras = from_.below(3);
    }
    if ((more & 8) != 0) result.retention = any_number(from_);
    if ((more & 16) != 0) result.expires_at = any_number(from_);
    return result;
  }
  void submit() {
    std::vector<bifolio_token> tokens;
    std::array<bifolio_extra_key, 2> extras{};
    const auto asked = prompt(tokens, extras);
    auto what = made(bifolio_request_init, from_);
    what.prompt = &asked;
    what.max_new_tokens = any_number(from_);
    what.num_samples = any_count(from_);
    what.beam_width = from_.flag() ? any_count(from_) : 0;
    what.max_draft_tokens = from_.flag() ? any_number(from_) : 0;
    what.priority = any_number(from_);
    (void)is_ok(bifolio_scheduler_submit(scheduler_, &what, &request_));
  }
  void open() {
    std::vector<bifolio_token> tokens;
    std::array<bifolio_extra_key, 2> extras{};
    const auto what = prompt(tokens, extras);
    bifolio_open_result opened{};
    const bool by_cache = from_.flag();
    if (is_ok(by_cache ? bifolio_cache_open(cache_, &what, &opened, nullptr)
                       : bifolio_manager_open(manager_, &what, any_number(from_), &opened))) {
      seqs_[from_.below(4)] = opened.seq;
    }
  }

  [[nodiscard]] bifolio_seq any_seq() {
    const std::uint8_t which = from_.byte();
    return which < 250 ? seqs_[which % 4] : which;
  }
  void change_sequence() {
    const bifolio_seq seq = any_seq();
    bifolio_seq made_now = 0;
    bifolio_block_copy copy{};
    std::array<bifolio_token, 64> tokens{};
    const bool by_cache = from_.flag();
    switch (from_.below(8)) {
      case 0:
        if (is_ok(bifolio_manager_allocate(manager_, any_number(from_), &made_now))) seqs_[from_.below(4)] = made_now;
        return;
      case 1:
        return (void)is_ok(bifolio_manager_append(manager_, seq, any_number(from_), any_number(from_), &copy));
      case 2:
        return (void)is_ok(
            bifolio_manager_commit(manager_, seq, from_.flag() ? tokens.data() : nullptr, from_.below(65)));
      case 3:
        if (is_ok(by_cache ? bifolio_cache_fork(cache_, seq, &made_now)
                           : bifolio_manager_fork(manager_, seq, &made_now))) {
          seqs_[from_.below(4)] = made_now;
        }
        return;
      case 4:
        return (void)is_ok(bifolio_manager_truncate(manager_, seq, any_number(from_)));
      case 5:
        return (void)is_ok(by_cache ? bifolio_cache_free(cache_, seq) : bifolio_manager_free(manager_, seq));
      case 6:
        return (void)is_ok(bifolio_manager_advance_clock(manager_, any_number(from_)));
      default:
        return (void)is_ok(bifolio_manager_reset_prefix_cache(manager_));
    }
  }
  void swap() {
    const std::array<bifolio_seq, 3> seqs{any_seq(), any_seq(), any_seq()};
    const std::size_t count = from_.below(4);
    const bifolio_block_copy* copies = nullptr;
    std::size_t num_copies = 0;
    switch (from_.below(4)) {
      case 0:
        return (void)is_ok(bifolio_manager_swap_out(manager_, seqs.data(), count, &copies, &num_copies));
      case 1:
        return (void)is_ok(bifolio_manager_swap_in(manager_, seqs.data(), count, &copies, &num_copies));
      case 2:
        return (void)is_ok(bifolio_cache_swap_out(cache_, seqs.data(), count, nullptr));
      default:
        return (void)is_ok(bifolio_cache_swap_in(cache_, seqs.data(), count, nullptr));
    }
  }

  void take_step(bifolio_step made_now) {
    (void)bifolio_step_destroy(step_);
    step_ = made_now;
    bifolio_step_view view{};
    view.size = sizeof view;
    if (!is_ok(bifolio_step_get(step_, &view))) flaw("a step without its arrays");
    num_rows_ = view.num_rows;
    num_step_tokens_ = view.num_tokens;
    num_sampled_ = view.num_sample_rows;
  }
  void begin_scheduled() {
    bifolio_step made_now = nullptr;
    if (is_ok(bifolio_step_begin_scheduled(cache_, scheduler_, nullptr, &made_now))) take_step(made_now);
  }
  void begin_rows() {
    std::array<bifolio_token, 64> tokens{};
    std::array<bifolio_step_row, 3> rows{};
    for (bifolio_step_row& row : rows) row = {any_seq(), from_.flag() ? tokens.data() : nullptr, from_.below(65)};
    bifolio_step made_now = nullptr;
    if (is_ok(bifolio_step_begin(cache_, rows.data(), from_.below(4), nullptr, &made_now))) take_step(made_now);
  }
  void commit_sampled() {
    std::vector<bifolio_sampled_token> sampled(num_sampled_ + (from_.below(16) == 1 ? 1 : 0));
    for (bifolio_sampled_token& one : sampled) {
      one = {any_number(from_), from_.below(8) == 1 ? 1 : 0, from_.flag() ? -1 : any_number(from_)};
    }
    if (is_ok(bifolio_step_commit_sampled(step_, sampled.data(), sampled.size(), nullptr, nullptr))) step_ = nullptr;
    if (from_.below(8) == 1) (void)is_ok(bifolio_scheduler_abort(scheduler_, request_));
  }
  void commit_rows() {
    std::array<std::int32_t, 16> accepted{};
    for (std::int32_t& count : accepted) count = any_number(from_);
    const bool all = from_.flag();
    const std::size_t count = from_.below(16) == 1 ? from_.below(17) : num_rows_;
    if (count > accepted.size()) return;
    if (is_ok(bifolio_step_commit(step_, all ? nullptr : accepted.data(), count))) step_ = nullptr;
  }

  void plan_attention() {
    const auto asked = spec();
    std::array<std::int32_t, 5> starts{};
    std::array<std::int32_t, 4> lengths{};
    std::array<std::int32_t, 4 * 8> tables{};
    std::array<std::int64_t, 64> slots{};
    for (std::size_t i = 1; i < starts.size(); ++i) starts[i] = starts[i - 1] + from_.below(4);
    if (from_.below(16) == 1) starts[from_.below(5)] = any_number(from_);
    for (std::int32_t& length : lengths) length = any_number(from_);
    for (std::int32_t& block : tables) block = any_number(from_);
    bifolio_host_batch_view batch{};
    batch.num_seqs = from_.below(5);
    batch.num_tokens = from_.below(8) == 1 ? from_.below(65) : starts[static_cast<std::size_t>(batch.num_seqs)];
    batch.query_start_loc = starts.data();
    batch.seq_lens = lengths.data();
    batch.block_tables = tables.data();
    batch.block_table_stride = from_.below(9);
    batch.slot_mapping = slots.data();
    if (!is_modest(asked.num_q_heads, asked.qk_head_dim, asked.v_head_dim, asked.block_size)) return;
    (void)is_ok(bifolio_plan_attention(backend_, plan_, &asked, &batch, any_count(from_), nullptr));
  }

  /// Copies are checked against the engine's blocks, so that any numbers may stand in them.
  void move_blocks() {
    std::array<bifolio_block_copy, 4> copies{};
    for (bifolio_block_copy& copy : copies) copy = {any_number(from_), any_number(from_)};
    const std::size_t count = from_.below(5);
    switch (from_.below(3)) {
      case 0:
        return (void)is_ok(bifolio_engine_copy_blocks(engine_, copies.data(), count, nullptr));
      case 1:
        return (void)is_ok(bifolio_engine_swap_blocks(engine_, engine_, copies.data(), count, nullptr));
      default:
        return (void)is_ok(bifolio_engine_convert_blocks(engine_, engine_, copies.data(), count, nullptr));
    }
  }

  /// A layer of the step, with tensors as large as their extents say, which are not always the step's.
  void attend() {
    const auto tensor = [&](std::vector<float>& memory) {
      const std::int64_t tokens = from_.below(16) == 1 ? from_.below(40) : num_step_tokens_;
      const std::int32_t heads = from_.below(12), dims = from_.below(64);
      memory.assign(static_cast<std::size_t>(tokens * heads * dims) + 1, 0.25f);
      bifolio_tensor made_now = bifolio_dense_tensor(memory.data(), BIFOLIO_F32, tokens, heads, dims);
      if (from_.below(16) == 1) made_now.type = from_.below(4);  // smaller elements
      if (from_.below(16) == 1) made_now.reserved = 1;
      return made_now;
    };
    std::vector<float> memory[4];
    const bifolio_tensor q = tensor(memory[0]), k = tensor(memory[1]), v = tensor(memory[2]), out = tensor(memory[3]);
    const std::int32_t layer = any_number(from_);
    if (from_.flag()) return (void)is_ok(bifolio_step_attend(step_, layer, &q, &k, &v, &out));
    if (from_.flag()) return (void)is_ok(bifolio_step_append(step_, layer, &k, &v));
    auto params = made(bifolio_attention_params_init, from_);
    params.q = q;
    params.out = out;
    params.scale = static_cast<float>(any_number(from_));
    params.has_scale = from_.below(3);
    params.soft_cap = from_.flag() ? static_cast<float>(any_number(from_)) : 0;
    (void)is_ok(bifolio_step_attention(step_, layer, &params));
  }

  void look() {
    bifolio_cache_stats stats{};
    stats.size = sizeof stats;
    if (manager_ != nullptr) {
      if (!is_ok(bifolio_manager_stats(manager_, &stats))) flaw("a manager without numbers");
      (void)is_ok(bifolio_manager_check(manager_));
      const bifolio_cache_event* events = nullptr;
      std::size_t num_events = 0;
      (void)is_ok(bifolio_manager_drain_events(manager_, &events, &num_events));
    }
    if (scheduler_ != nullptr) (void)is_ok(bifolio_scheduler_check(scheduler_));
    const char* text = nullptr;
    (void)is_ok(bifolio_metrics_json(manager_, scheduler_, &text));
    const bifolio_token* tokens = nullptr;
    std::size_t num_tokens = 0;
    (void)is_ok(bifolio_scheduler_output(scheduler_, request_, any_number(from_), &tokens, &num_tokens));
    std::int64_t slot = 0;
    (void)is_ok(bifolio_manager_slot_at(manager_, any_seq(), any_number(from_), &slot));
  }

  choices& from_;
  bifolio_backend backend_ = nullptr;
  bifolio_pool pool_ = nullptr;
  bifolio_manager manager_ = nullptr;
  bifolio_batch batch_ = nullptr;
  bifolio_engine engine_ = nullptr;
  bifolio_plan plan_ = nullptr;
  bifolio_scheduler scheduler_ = nullptr;
  bifolio_cache cache_ = nullptr;
  bifolio_step step_ = nullptr;
  bifolio_request_id request_ = 0;
  std::array<bifolio_seq, 4> seqs_{};
  std::size_t num_rows_ = 0;
  std::int64_t num_step_tokens_ = 0;
  std::size_t num_sampled_ = 0;
};

}  // namespace

BIFOLIO_FUZZ_TARGET(c_interface) {
  choices from(input);
  calls of(from);
  for (int count = 0; count < 200 && !from.empty(); ++count) of.one();
}
