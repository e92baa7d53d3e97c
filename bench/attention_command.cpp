// SPDX-License-Identifier: Apache-2.0
// bifolio_bench attention: one attention call over a paged cache that is read from memory, beside a probe of what that
// memory gives. Blocks are shuffled over a pool several times the last-level cache; when one call's keys and values are
// smaller than that, successive calls take turns among several sets of blocks.
#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention_setting.hpp"
#include "checks.hpp"
#include "commands.hpp"
#include "machine.hpp"
#include "probe.hpp"

namespace bifolio::bench {
namespace {

// A loop that only reads: the blocks of one set, in the order of the tables, K and V of a block one after the other.
struct gather_pass {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::size_t half_block_bytes = 0;
  const std::int32_t* tables = nullptr;
  std::int64_t num_entries = 0;
  std::int32_t num_workers = 1;
};

void gather_worker(void* context, std::int32_t worker) noexcept {
  const auto& pass = *static_cast<const gather_pass*>(context);
  const std::int64_t begin = pass.num_entries * worker / pass.num_workers;
  const std::int64_t end = pass.num_entries * (worker + 1) / pass.num_workers;
  std::uint64_t all = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto block = static_cast<std::size_t>(pass.tables[i]);
    all ^= read_bytes(pass.k + block * pass.half_block_bytes, pass.half_block_bytes);
    all ^= read_bytes(pass.v + block * pass.half_block_bytes, pass.half_block_bytes);
  }
  consume(all);
}

class attention_bench {
 public:
  attention_bench(const attention_options& options, const setting& s, backend& where, executor& workers)
      : options_(options), setting_(s), where_(where), workers_(workers), spec_(spec_of(s, options)) {
    make_cache();
    make_rows();
  }

  row measure() {
    // Calls and probe take turns: the speed of a shared machine moves by a tenth within seconds.
    constexpr int num_turns = 4;
    read_probe probe(workers_, pool_.data(), pool_.num_bytes());
    std::vector<double> probes{probe.gb_per_second(probe_seconds)};
    std::vector<double> calls;
    for (std::int64_t set = 0; set < std::min<std::int64_t>(num_sets_, 3); ++set) (void)time_once(set);
    for (int turn = 1; turn <= num_turns; ++turn) {
      add_calls(calls, static_cast<std::size_t>(options_.repeats * turn / num_turns), options_.seconds / num_turns);
      probes.push_back(probe.gb_per_second(probe_seconds));
    }
    attention_result result;
    result.device = options_.device;
    result.isa = isa_name_;
    result.threads = workers_.concurrency();
    result.time = summarize(calls);
    result.gather_gb_s = gather_gb_per_second();
    result.probe_gb_s = summarize(probes).median;
    return attention_row(setting_, options_, result);
  }

  void set_isa_name(std::string name) { isa_name_ = std::move(name); }

 private:
  static constexpr double probe_seconds = 0.15;

  void make_cache() {
    const kv_layout layout =
        make_layout(setting_.layout, spec_.kv_type, spec_.num_kv_heads, spec_.head_dim, spec_.block_size);
    blocks_per_seq_ = blocks_for(setting_.context, spec_.block_size);
    const std::int64_t blocks_per_set = blocks_per_seq_ * setting_.batch;
    const std::int64_t least_pool_bytes = bytes_beyond_cache(std::int64_t{320} << 20);
    num_sets_ = std::max<std::int64_t>(
        1, (least_pool_bytes + blocks_per_set * layout.block_bytes() - 1) / (blocks_per_set * layout.block_bytes()));
    const std::int64_t num_blocks = blocks_per_set * num_sets_;
    require_range("the cache's number of blocks", num_blocks, 1, std::int64_t{1} << 31);
    const std::size_t half = static_cast<std::size_t>(num_blocks * layout.block_elements()) * size_of(spec_.kv_type);
    pool_ = buffer(where_.memory(), 2 * half);
    fill_values(pool_.data(), spec_.kv_type, 2 * num_blocks * layout.block_elements(), options_.seed);
    kv_ = {pool_.data(), pool_.as<std::byte>() + half, num_blocks, layout};

    tables_.resize(static_cast<std::size_t>(num_blocks));
    std::iota(tables_.begin(), tables_.end(), 0);
    std::mt19937_64 random(options_.seed);
    std::shuffle(tables_.begin(), tables_.end(), random);
  }

  void make_rows() {
    const std::int64_t num_tokens = std::int64_t{setting_.batch} * setting_.query_len;
    const std::int64_t elements = num_tokens * spec_.num_q_heads * spec_.head_dim;
    q_ = buffer(where_.memory(), static_cast<std::size_t>(elements) * size_of(spec_.q_type));
    out_ = buffer(where_.memory(), static_cast<std::size_t>(elements) * size_of(spec_.out_type));
    fill_values(q_.data(), spec_.q_type, elements, options_.seed + 1);
    for (std::int32_t i = 0; i <= setting_.batch; ++i) starts_.push_back(i * setting_.query_len);
    lengths_.assign(static_cast<std::size_t>(setting_.batch), setting_.context);
    params_.q = dense_view<const void>(q_.data(), spec_.q_type, num_tokens, spec_.num_q_heads, spec_.head_dim);
    params_.out = dense_view<void>(out_.data(), spec_.out_type, num_tokens, spec_.num_q_heads, spec_.head_dim);
    params_.kv = kv_;
    params_.scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
    params_.soft_cap = options_.soft_cap;
    params_.batch.num_seqs = setting_.batch;
    params_.batch.num_tokens = num_tokens;
    params_.batch.query_start_loc = starts_.data();
    params_.batch.seq_lens = lengths_.data();
    params_.batch.block_table_stride = blocks_per_seq_;
    use_set(0);
    where_.plan_attention(plan_, spec_, params_.batch, kv_.num_blocks);
    if (const auto problem = find_problem(plan_, params_)) throw error(*problem);
  }

  void use_set(std::int64_t set) {
    params_.batch.block_tables = tables_.data() + set * blocks_per_seq_ * setting_.batch;
  }

  double time_once(std::int64_t set) {
    use_set(set);
    const auto start = std::chrono::steady_clock::now();
    const errc code = where_.attention(plan_, params_);
    const double seconds = seconds_since(start);
    require_ok(code, "attention");
    return seconds;
  }

  // Calls for so many seconds, and until there are so many samples.
  void add_calls(std::vector<double>& samples, std::size_t count, double seconds) {
    const auto begin = std::chrono::steady_clock::now();
    while (samples.size() < count || seconds_since(begin) < seconds) {
      samples.push_back(time_once((static_cast<std::int64_t>(samples.size()) + 3) % num_sets_));
    }
  }

  double gather_gb_per_second() {
    gather_pass pass;
    pass.k = static_cast<const std::byte*>(kv_.k);
    pass.v = static_cast<const std::byte*>(kv_.v);
    pass.half_block_bytes = static_cast<std::size_t>(kv_.layout.block_bytes() / 2);
    pass.num_entries = blocks_per_seq_ * setting_.batch;
    pass.num_workers = workers_.concurrency();
    const double bytes = static_cast<double>(pass.num_entries * kv_.layout.block_bytes());
    std::vector<double> samples;
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t call = 0; call < 5 || seconds_since(begin) < 0.3; ++call) {
      pass.tables = tables_.data() + call % num_sets_ * pass.num_entries;
      const auto start = std::chrono::steady_clock::now();
      workers_.run(pass.num_workers, &gather_worker, &pass);
      samples.push_back(bytes / seconds_since(start) * 1e-9);
    }
    return summarize(samples).median;
  }

  const attention_options& options_;
  setting setting_;
  backend& where_;
  executor& workers_;
  attention_spec spec_;
  std::string isa_name_;
  std::int64_t blocks_per_seq_ = 0;
  std::int64_t num_sets_ = 1;
  buffer pool_, q_, out_;
  kv_cache_view kv_;
  std::vector<std::int32_t> tables_;  // [num_sets, batch, blocks_per_seq]
  std::vector<std::int32_t> starts_, lengths_;
  attention_params params_;
  attention_plan plan_;
};

std::vector<setting> settings_of(const attention_options& options) {
  std::vector<setting> settings;
  for (const auto& kv : options.kv_dtypes) {
    for (const auto& q : options.q_dtypes) {
      for (const auto& layout : options.layouts) {
        for (const std::int32_t block_size : options.block_sizes) {
          for (const std::int32_t kv_heads : options.kv_heads) {
            for (const std::int32_t batch : options.batches) {
              for (const std::int32_t query_len : options.query_lens) {
                for (const std::int32_t context : options.contexts) {
                  require_range("--batch", batch, 1, 1 << 20);
                  require_range("--query-len", query_len, 1, 1 << 20);
                  require_range("--context", context, query_len, 1 << 30);
                  require_range("--kv-heads", kv_heads, 1, 1 << 16);
                  require_range("--block-size", block_size, 1, 1 << 16);
                  settings.push_back({parse_dtype(q), parse_dtype(kv), batch, query_len, context, kv_heads, block_size,
                                      parse_layout(layout)});
                }
              }
            }
          }
        }
      }
    }
  }
  return settings;
}

void run_attention(const attention_options& options, report& out) {
  require_range("--q-heads", options.q_heads, 1, 1 << 16);
  require_range("--head-dim", options.head_dim, 1, 1 << 16);
  require_range("--repeats", options.repeats, 1, 1'000'000);
  require_min_time(options.seconds);
  const std::vector<setting> settings = settings_of(options);
  const device where = parse_device(options.device);
  if (where.type == device_type::cuda) {
    run_cuda_attention(options, settings, out);
    return;
  }
  const auto workers = make_executor(parse_executor(options.executor), options.threads);
  std::vector<cpu_isa> isas;
  for (const auto& name : options.isas) isas.push_back(parse_isa(name));
  if (isas.empty()) isas.push_back(default_isa());
  out.fact("executor", std::string(workers->name()) + " x " + std::to_string(workers->concurrency()));
  for (const cpu_isa isa : isas) {
    backend_options opening;
    opening.own_executor = workers.get();
    opening.isa = isa;
    const auto opened = make_backend(where, opening);
    for (const setting& s : settings) {
      attention_bench bench(options, s, *opened, *workers);
      bench.set_isa_name(std::string(to_string(isa)));
      out.add(bench.measure());
    }
  }
}

}  // namespace

void add_attention_command(CLI::App& program, command& run) {
  auto o = std::make_shared<attention_options>();
  CLI::App* sub = program.add_subcommand(
      "attention", "One attention call over shuffled blocks. Options in plural take lists (a,b): one row for each");
  sub->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--dtype", o->q_dtypes, "Dtypes of queries and outputs: f32, f16, bf16")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--kv-dtype", o->kv_dtypes, "Dtypes of keys and values")->delimiter(',')->capture_default_str();
  sub->add_option("--batch", o->batches, "Numbers of sequences")->delimiter(',')->capture_default_str();
  sub->add_option("--query-len", o->query_lens, "New tokens of each sequence")->delimiter(',')->capture_default_str();
  sub->add_option("--context", o->contexts, "Tokens visible in each sequence, new ones included")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--q-heads", o->q_heads, "Query heads")->capture_default_str();
  sub->add_option("--kv-heads", o->kv_heads, "Numbers of KV heads")->delimiter(',')->capture_default_str();
  sub->add_option("--head-dim", o->head_dim, "Elements of a head")->capture_default_str();
  sub->add_option("--block-size", o->block_sizes, "Tokens in a block")->delimiter(',')->capture_default_str();
  sub->add_option("--layout", o->layouts, "hnd, nhd, x_split")->delimiter(',')->capture_default_str();
  sub->add_option("--threads", o->threads, "Workers; 0 = what the executor's runtime takes")->capture_default_str();
  sub->add_option("--executor", o->executor, "openmp, tbb or serial")->capture_default_str();
  sub->add_option("--isa", o->isas, isa_choice())->delimiter(',');
  sub->add_option("--window", o->window, "Sliding window: positions visible before the token's own; -1 = all")
      ->capture_default_str();
  sub->add_option("--soft-cap", o->soft_cap, "Logit soft cap; 0 = none")->capture_default_str();
  sub->add_flag("--non-causal", o->non_causal, "Every token sees the whole context");
  sub->add_flag("--deterministic", o->deterministic, "Results independent of batch mates (a GPU's choice)");
  sub->add_option("--repeats", o->repeats, "Calls at the least")->capture_default_str();
  sub->add_option("--min-time", o->seconds, "Seconds of calls at the least")->capture_default_str();
  sub->add_option("--seed", o->seed, "Of contents and block order")->capture_default_str();
  sub->callback([o, &run] { run = [o](report& out) { run_attention(*o, out); }; });
}

}  // namespace bifolio::bench
