// SPDX-License-Identifier: Apache-2.0
// bifolio_bench manager: what the cache logic costs on one core, in CPU time of the thread. Each row says in which
// order ids were visited. "random": every sequence or block of the pool in a random permutation, so that nearly every
// access misses the caches. "batch": the same 256 sequences (chosen at random) again and again, as the steps of one
// decode batch do. "in order": ids as they were handed out.
#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/scheduler.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "commands.hpp"
#include "memory_latency.hpp"
#include "model_rows.hpp"
#include "prefix_rows.hpp"
#include "row_timer.hpp"

namespace bifolio::bench {
namespace {

struct manager_options {
  std::int64_t blocks = 1'000'000;
  std::int64_t sequences = 100'000;
  std::int32_t block_size = 16;
  std::int32_t rounds = 21;
  std::uint64_t seed = 1;
};

void require_ok(alloc_status status, const char* what) {
  if (status != alloc_status::ok) {
    throw error(errc::internal, std::string(what) + " answered " + std::string(to_string(status)));
  }
}

class manager_bench : row_timer {
 public:
  manager_bench(const manager_options& options, double latency_ns, report& out)
      : row_timer(out, latency_ns), options_(options), random_(options.seed) {}

  void run() {
    pool_rows();
    sequence_rows();
    fork_rows();
    step_rows(false, 1);
    step_rows(true, 1);
    step_rows(false, 3);
    step_rows(true, 3);
    group_look_up_rows();
    build_rows();
    burst_rows();
  }

 private:
  template <class T>
  std::vector<T> shuffled(std::vector<T> values) {
    std::shuffle(values.begin(), values.end(), random_);
    return values;
  }

  /// The pool alone: all blocks are taken and given back, one per call and 64 per call.
  void pool_rows() {
    block_pool pool(options_.blocks);
    std::vector<block_id> ids(static_cast<std::size_t>(options_.blocks));
    for (const char* order : {"random", "random, hinted", "in order"}) {
      const bool random = order != std::string("in order");
      const std::size_t hint = order == std::string("random, hinted") ? 12 : 0;
      for (const std::size_t batch : {std::size_t{1}, std::size_t{64}}) {
        std::vector<double> allocating, freeing;
        for (std::int32_t round = 0; round <= options_.rounds; ++round) {
          time(allocating, options_.blocks, [&] {
            if (batch == 1) {
              for (block_id& id : ids) id = pool.allocate_one();
              return;
            }
            for (std::size_t i = 0; i < ids.size(); i += batch) {
              (void)pool.allocate(std::span(ids).subspan(i, std::min(batch, ids.size() - i)));
            }
          });
          std::sort(ids.begin(), ids.end());
          if (random) std::shuffle(ids.begin(), ids.end(), random_);
          time(freeing, options_.blocks, [&] {
            const std::span<const block_id> all(ids);
            for (std::size_t i = 0; i < ids.size(); i += batch) {
              if (batch > 1) {
                pool.release(all.subspan(i, std::min(batch, ids.size() - i)));
                continue;
              }
              if (hint > 0 && i + hint < ids.size()) pool.prefetch(all.subspan(i + hint, 1));
              pool.release(ids[i]);
            }
          });
        }
        allocating.erase(allocating.begin());  // of a queue that was never shuffled
        if (batch > 1 && hint > 0) continue;   // calls on many blocks prefetch by themselves
        const std::string per = batch == 1 ? "block" : "block, " + std::to_string(batch) + " a call";
        if (hint == 0) add("allocate", order, per, allocating);
        add("free", order, per, freeing);
      }
    }
  }

  kv_cache_config config(std::int64_t max_sequences) const {
    return {.block_size = options_.block_size,
            .num_blocks = options_.blocks,
            .max_sequences = static_cast<std::int32_t>(max_sequences)};
  }

  /// A full house: all sequences open, nine tenths of the blocks in use, and both in random order.
  void sequence_rows() {
    kv_cache_manager manager(config(options_.sequences));
    const std::int64_t blocks_each = std::max<std::int64_t>(1, options_.blocks * 9 / 10 / options_.sequences);
    const std::int64_t tokens_each = blocks_each * options_.block_size;
    std::vector<seq_id> all;
    const auto fill = [&] {
      while (static_cast<std::int64_t>(all.size()) < options_.sequences) {
        const allocate_result got = manager.allocate(tokens_each);
        require_ok(got.status, "allocate");
        all.push_back(got.seq);
      }
    };
    std::vector<double> opening, closing;
    fill();
    for (int round = 0; round < 5; ++round) {  // lets go of a random half, so that blocks and records mix
      all = shuffled(std::move(all));
      const std::size_t half = all.size() / 2;
      time(closing, static_cast<std::int64_t>(all.size() - half) * blocks_each, [&] {
        for (std::size_t i = half; i < all.size(); ++i) manager.free(all[i]);
      });
      const std::size_t kept = half;
      all.resize(kept);
      time(opening, (options_.sequences - static_cast<std::int64_t>(kept)) * blocks_each, fill);
    }
    const std::string per = "block, " + std::to_string(blocks_each) + " a sequence";
    add("open a sequence", "random", per, opening);
    add("free a sequence", "random", per, closing);

    const std::vector<seq_id> everyone = shuffled(all);
    const std::vector<seq_id> batch(everyone.begin(),
                                    everyone.begin() + std::min<std::ptrdiff_t>(256, std::ssize(everyone)));
    append_rows(manager, everyone, "random", 0);
    append_rows(manager, everyone, "random, hinted", 12);
    append_rows(manager, batch, "batch", 0);
  }

  /// Every sequence begins and ends at a block border.
  void append_rows(kv_cache_manager& manager, const std::vector<seq_id>& sequences, const std::string& order,
                   std::size_t hint) {
    const auto count = static_cast<std::int64_t>(sequences.size());
    const auto visit = [&](const auto& operation) {
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        if (hint > 0 && i + hint < sequences.size()) manager.prefetch(sequences[i + hint]);
        operation(sequences[i]);
      }
    };
    const auto append = [&](seq_id seq) { require_ok(manager.append(seq, 1).status, "append"); };
    const auto roll_back = [&](seq_id seq) { manager.truncate(seq, manager.num_tokens(seq) - options_.block_size); };
    const std::int32_t passes = std::max<std::int32_t>(1, static_cast<std::int32_t>(100'000 / count));
    std::vector<double> fresh, in_place, rolling_back;
    for (std::int32_t round = 0; round < options_.rounds; ++round) {
      std::vector<double> fresh_passes, in_place_passes, rolling_back_passes;
      for (std::int32_t pass = 0; pass < passes; ++pass) {
        time(fresh_passes, count, [&] { visit(append); });
        time(in_place_passes, count * (options_.block_size - 1), [&] {
          for (std::int32_t k = 1; k < options_.block_size; ++k) visit(append);
        });
        time(rolling_back_passes, count, [&] { visit(roll_back); });
      }
      fresh.push_back(mean(fresh_passes));
      in_place.push_back(mean(in_place_passes));
      rolling_back.push_back(mean(rolling_back_passes));
    }
    if (options_.block_size > 1) add("append in place", order, "call", in_place);
    add("append with a new block", order, "call", fresh);
    add("truncate by a block", order, "call", rolling_back);
  }

  static double mean(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }

  /// Parents of 1000 blocks fill half of the pool; a child is forked off each in turn, then all children go.
  void fork_rows() {
    constexpr std::int64_t blocks = 1000;
    const std::int64_t num_parents = std::min<std::int64_t>(500, options_.blocks / blocks / 2);
    if (num_parents == 0) return;  // the pool is too small for one
    kv_cache_manager manager(config(2 * num_parents));
    std::vector<seq_id> parents;
    for (std::int64_t i = 0; i < num_parents; ++i) {
      parents.push_back(manager.allocate(blocks * options_.block_size).seq);
    }
    parents = shuffled(std::move(parents));
    std::vector<seq_id> children(parents.size());
    std::vector<double> forking, ending, forking_warm;
    for (std::int32_t round = 0; round < options_.rounds; ++round) {
      time(forking, num_parents, [&] {
        for (std::size_t i = 0; i < parents.size(); ++i) children[i] = manager.fork(parents[i]).seq;
      });
      time(ending, num_parents, [&] {
        for (const seq_id child : children) manager.free(child);
      });
      time(forking_warm, num_parents, [&] {
        for (seq_id& child : children) child = manager.fork(parents[0]).seq;
      });
      for (const seq_id child : children) manager.free(child);
    }
    add("fork of 1000 blocks", "random", "call", forking);
    add("fork of 1000 blocks", "the same parent", "call", forking_warm);
    add("free of that fork", "random", "call", ending);
  }

  /// schedule + build + commit of 256 sequences that decode with 1000 ± 500 tokens of context each. With prefix caching
  /// 16 of them fill a block in each step, which is named and published. With three layer groups: full attention, a
  /// window of 512 tokens, and a state.
  void step_rows(bool caches_prefixes, int num_groups) {
    constexpr std::int32_t batch = 256;
    const std::int64_t tokens = 1000;
    if (options_.blocks < batch * 2 * (tokens / options_.block_size + 20)) return;
    kv_cache_config cache = config(batch);
    cache.prefix.enabled = caches_prefixes;
    if (num_groups == 3) cache.groups = three_groups(8 * batch);
    kv_cache_manager manager(cache);
    scheduler plans(manager, {.max_tokens_per_step = 8192, .max_running = batch});
    std::vector<double> scheduling, building, committing, whole;
    step_inputs inputs;
    std::vector<sampled_token> sampled;
    const auto steps = static_cast<std::int32_t>(options_.rounds) * 16;
    for (std::int32_t i = 0; i < batch; ++i) {
      const auto length = static_cast<std::size_t>(tokens / 2 + i * tokens / batch);
      // Each prompt is another, so that nothing is shared.
      require_ok(plans.submit({std::vector<token_id>(length, token_id{i}), steps + 200, 1}).status, "submit");
    }
    for (std::int32_t timed = 0; timed < steps;) {
      const auto start = clock::now();
      const step_plan& plan = plans.schedule();
      const auto scheduled = clock::now();
      plans.build(inputs);
      const auto built = clock::now();
      sampled.assign(inputs.sample_rows.size(), {token_id{2}});
      const auto sampled_at = clock::now();
      const bool decodes = plan.num_tokens == batch && sampled.size() == batch;
      (void)plans.commit(plan, sampled);
      const auto end = clock::now();
      if (!decodes) continue;
      ++timed;
      const auto ns = [](auto from, auto to) { return std::chrono::duration<double, std::nano>(to - from).count(); };
      scheduling.push_back(ns(start, scheduled));
      building.push_back(ns(scheduled, built));
      committing.push_back(ns(sampled_at, end));
      whole.push_back(scheduling.back() + building.back() + committing.back());
    }
    const std::string name = std::string("decode step, batch 256") + (num_groups > 1 ? ", 3 groups" : "") +
                             (caches_prefixes ? ", prefixes" : "") + ": ";
    add(name + "schedule", "batch", "step", scheduling);
    add(name + "build", "batch", "step", building);
    add(name + "commit", "batch", "step", committing);
    add(name + "all", "batch", "step", whole);
  }

  [[nodiscard]] std::vector<group_config> three_groups(std::int64_t num_states) const {
    return {
        {.kind = group_kind::full, .block_size = options_.block_size, .num_blocks = options_.blocks},
        {.kind = group_kind::window, .block_size = options_.block_size, .num_blocks = options_.blocks, .window = 512},
        {.kind = group_kind::state, .block_size = 1, .num_blocks = num_states}};
  }

  /// A prompt of which every block but the last is cached, looked up again and again: per block that a group holds of
  /// it.
  void group_look_up_rows() {
    const std::int64_t num_blocks = std::min<std::int64_t>(2048, options_.blocks / 4);
    const auto num_tokens = static_cast<std::size_t>(num_blocks * options_.block_size + 1);
    std::vector<token_id> prompt(num_tokens);
    for (token_id& token : prompt) token = token_id{static_cast<std::int32_t>(random_() % 100000)};
    std::vector<double> one_group, three;
    for (const bool grouped : {false, true}) {
      kv_cache_config cache = config(4);
      cache.prefix.enabled = true;
      // A window as long as the prompt, so that every block of it is looked up.
      if (grouped) cache.groups = three_groups(16);
      if (grouped) cache.groups[1].window = static_cast<std::int32_t>(num_tokens);
      kv_cache_manager manager(cache);
      std::vector<content_key> keys;
      const prompt_view view{.tokens = prompt};
      seq_id seq = manager.open(view, static_cast<std::int64_t>(num_tokens)).seq;
      for (;;) {
        const auto done = static_cast<std::size_t>(manager.num_committed(seq));
        const auto end = static_cast<std::size_t>(manager.num_tokens(seq));
        manager.commit(seq, std::span(prompt).subspan(done, end - done));
        if (end == num_tokens) break;
        require_ok(manager.append(seq, static_cast<std::int64_t>(num_tokens - end)).status, "append");
      }
      manager.free(seq);
      manager.append_keys(view, keys);
      const prompt_view known{.tokens = prompt, .keys = keys};
      const std::int64_t looked_up = grouped ? 2 * num_blocks + 1 : num_blocks;
      for (std::int32_t round = 0; round < options_.rounds; ++round) {
        time(grouped ? three : one_group, looked_up, [&] {
          if (manager.can_open(known).num_cached_tokens != num_blocks * options_.block_size) {
            throw error(errc::internal, "the prompt is not cached");
          }
        });
      }
    }
    add("look up a prompt, keys known", "the same prompt", "block", one_group);
    add("look up a prompt, keys known, 3 groups", "the same prompt", "group block", three);
  }

  /// build of 256 sequences of 32768 tokens that grow by one per step, each at another place in its block. The mean and
  /// the far end of the distribution have rows of their own: a step that moves all table rows shows there alone.
  void build_rows() {
    constexpr std::int32_t batch = 256;
    constexpr std::int32_t tokens = 32768;
    constexpr std::int32_t steps = 4096;
    if (options_.blocks < batch * (std::int64_t{tokens + steps} / options_.block_size + 1)) return;
    kv_cache_manager manager(config(batch));
    step_plan plan;
    for (std::int32_t i = 0; i < batch; ++i) {
      const allocate_result got = manager.allocate(tokens - 3 * i);
      require_ok(got.status, "allocate");
      plan.seqs.push_back({.seq = got.seq, .query_len = 1, .seq_len = tokens - 3 * i});
    }
    step_batch arrays;
    manager.build(arrays, plan);  // the first one fills every row
    std::vector<double> building;
    for (std::int32_t step = 0; step < steps; ++step) {
      for (scheduled_seq& row : plan.seqs) {
        require_ok(manager.append(row.seq, 1).status, "append");
        ++row.seq_len;
      }
      time(building, 1, [&] { manager.build(arrays, plan); });
    }
    const std::string name = "build, 256 x 32k tokens";
    add(name, "batch", "step", building);
    add(name + ": mean", "batch", "step", {mean(building)});
    std::sort(building.begin(), building.end());
    add(name + ": p99", "batch", "step", {building[building.size() * 99 / 100]});
    add(name + ": max", "batch", "step", {building.back()});
  }

  /// A schedule call that receives `count` requests at once and admits one of them.
  void burst_rows() {
    for (const std::int32_t count : {1'000, 10'000}) {
      for (const bool one_priority : {true, false}) {
        std::vector<double> scheduling;
        for (std::int32_t round = 0; round < options_.rounds; ++round) {
          kv_cache_manager manager({.block_size = options_.block_size, .num_blocks = 1024, .max_sequences = 8});
          scheduler plans(manager, {.max_running = 1});
          for (std::int32_t i = 0; i < count; ++i) {
            request one{std::vector<token_id>(16, token_id{i}), 16, 1};
            one.priority = one_priority ? 0 : static_cast<std::int32_t>(random_() % 1000);
            require_ok(plans.submit(std::move(one)).status, "submit");
          }
          time(scheduling, 1, [&] { (void)plans.schedule(); });
        }
        add("schedule, " + std::to_string(count) + " arrivals", one_priority ? "in order" : "random priorities", "step",
            scheduling);
      }
    }
  }

  manager_options options_;
  std::mt19937_64 random_;
};

void run_manager(const manager_options& options, report& out) {
  require_range("--blocks", options.blocks, 1, max_num_blocks);
  require_range("--sequences", options.sequences, 1, std::min<std::int64_t>(std::int64_t{1} << 24, options.blocks));
  require_range("--block-size", options.block_size, 1, 1 << 20);
  require_range("--rounds", options.rounds, 2, 1'000'000);
  out.fact("pool", std::to_string(options.blocks) + " blocks of " + std::to_string(options.block_size) + " tokens, " +
                       std::to_string(options.sequences) + " sequences, one core");
  // The pool's metadata: 64 bytes a block.
  const double latency_ns = memory_latency_ns(options.blocks * 64, options.seed);
  out.fact("memory latency", std::to_string(static_cast<int>(latency_ns + 0.5)) + " ns over " +
                                 std::to_string(options.blocks * 64 >> 20) +
                                 " MiB; column latencies: ns in units of it");
  manager_bench(options, latency_ns, out).run();
  add_model_rows(options.block_size, options.rounds, out);
  add_c_rows(options.rounds, out);
  add_prefix_rows({options.blocks, options.block_size, options.rounds, options.seed, latency_ns}, out);
}

}  // namespace

void add_manager_command(CLI::App& program, command& run) {
  auto o = std::make_shared<manager_options>();
  CLI::App* sub = program.add_subcommand("manager", "Block pool, tables, manager and scheduler: ns an operation");
  sub->add_option("--blocks", o->blocks, "Blocks of the pool")->capture_default_str();
  sub->add_option("--sequences", o->sequences, "Sequences open at once")->capture_default_str();
  sub->add_option("--block-size", o->block_size, "Tokens in a block")->capture_default_str();
  sub->add_option("--rounds", o->rounds, "Samples of each row")->capture_default_str();
  sub->add_option("--seed", o->seed, "Of the orders")->capture_default_str();
  sub->callback([o, &run] { run = [o](report& out) { run_manager(*o, out); }; });
}

}  // namespace bifolio::bench
