// SPDX-License-Identifier: Apache-2.0
// bifolio_bench attention on the CPU: one attention call over a paged cache that is read from memory, next to a probe
// of what that memory gives. Blocks are shuffled over a pool several times the last-level cache; when the keys and
// values of one call are smaller than that, successive calls take turns among several sets of blocks.
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
#include "machine.hpp"
#include "probe.hpp"
#include "tests/support/busy_processes.hpp"

namespace bifolio::bench {
namespace {

// A loop that only reads: the blocks of one set, in the order of the tables, K and V of a block one after the other.
struct gather_pass {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::size_t k_block_bytes = 0;
  std::size_t v_block_bytes = 0;
  const std::int32_t* ids = nullptr;
  std::int64_t num_entries = 0;
  std::int32_t num_workers = 1;
};

void gather_worker(void* context, std::int32_t worker) noexcept {
  const auto& pass = *static_cast<const gather_pass*>(context);
  const std::int64_t begin = pass.num_entries * worker / pass.num_workers;
  const std::int64_t end = pass.num_entries * (worker + 1) / pass.num_workers;
  std::uint64_t all = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto block = static_cast<std::size_t>(pass.ids[i]);
    all ^= read_bytes(pass.k + block * pass.k_block_bytes, pass.k_block_bytes);
    all ^= read_bytes(pass.v + block * pass.v_block_bytes, pass.v_block_bytes);
  }
  consume(all);
}

class attention_bench {
 public:
  attention_bench(const measuring_options& options, const setting& s, backend& where, executor& workers)
      : options_(options),
        setting_(s),
        where_(where),
        workers_(workers),
        spec_(spec_of(s)),
        lengths_(s),
        slopes_(slopes_of(s)),
        scales_(static_cast<std::size_t>(s.kv_heads), bench_scale) {
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
    return attention_row(setting_, result);
  }

  void set_isa_name(std::string name) { isa_name_ = std::move(name); }

 private:
  static constexpr double probe_seconds = 0.15;

  void make_cache() {
    const kv_layout layout = make_layout(setting_.layout, spec_.k_code, spec_.v_code, spec_.num_kv_heads,
                                         spec_.qk_head_dim, spec_.v_head_dim, spec_.block_size, spec_.v_in_k);
    const std::int64_t blocks_per_set = lengths_.num_blocks;
    const std::int64_t least_pool_bytes = bytes_beyond_cache(std::int64_t{320} << 20);
    num_sets_ = std::max<std::int64_t>(
        1, (least_pool_bytes + blocks_per_set * layout.block_bytes() - 1) / (blocks_per_set * layout.block_bytes()));
    const std::int64_t num_blocks = blocks_per_set * num_sets_;
    require_range("the cache's number of blocks", num_blocks, 1, std::int64_t{1} << 31);
    pool_ = buffer(where_.memory(), static_cast<std::size_t>(num_blocks * layout.block_bytes()));
    fill_pool(pool_.data(), spec_.k_code, static_cast<std::int64_t>(pool_.num_bytes()), options_.seed);
    kv_ = {pool_.data(),   pool_.as<std::byte>() + num_blocks * layout.block_bytes(layout.k),
           num_blocks,     layout,
           scales_.data(), scales_.data()};

    ids_.resize(static_cast<std::size_t>(num_blocks));
    std::iota(ids_.begin(), ids_.end(), 0);
    std::mt19937_64 random(options_.seed);
    std::shuffle(ids_.begin(), ids_.end(), random);
    for (std::int64_t set = 0; set < num_sets_; ++set) {
      tables_.push_back(tables_of(setting_, lengths_, ids_.data() + set * blocks_per_set));
    }
  }

  void make_rows() {
    const std::int64_t num_tokens = setting_.num_tokens();
    const std::int64_t rows = num_tokens * spec_.num_q_heads;
    q_ = buffer(where_.memory(), static_cast<std::size_t>(rows * spec_.qk_head_dim) * size_of(spec_.q_type));
    out_ = buffer(where_.memory(), static_cast<std::size_t>(rows * spec_.v_head_dim) * size_of(spec_.out_type));
    fill_values(q_.data(), spec_.q_type, rows * spec_.qk_head_dim, options_.seed + 1);
    params_.q = dense_view<const void>(q_.data(), spec_.q_type, num_tokens, spec_.num_q_heads, spec_.qk_head_dim);
    params_.out = dense_view<void>(out_.data(), spec_.out_type, num_tokens, spec_.num_q_heads, spec_.v_head_dim);
    params_.kv = kv_;
    params_.scale = 1.0f / std::sqrt(static_cast<float>(spec_.qk_head_dim));
    params_.soft_cap = setting_.soft_cap;
    if (!slopes_.empty()) params_.alibi_slopes = slopes_.data();
    const host_step_view batch{.num_seqs = static_cast<std::int32_t>(setting_.seqs.size()),
                               .num_tokens = num_tokens,
                               .query_start_loc = lengths_.starts.data(),
                               .seq_lens = lengths_.contexts.data(),
                               .block_tables = tables_.front().data(),
                               .block_table_stride = lengths_.table_stride};
    params_.batch = as_device_view(batch);
    where_.plan_attention(plan_, spec_, batch, kv_.num_blocks);
    if (const auto problem = find_problem(plan_, params_)) throw error(*problem);
  }

  void use_set(std::int64_t set) { params_.batch.block_tables = tables_[static_cast<std::size_t>(set)].data(); }

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
    pass.k_block_bytes = static_cast<std::size_t>(kv_.layout.block_bytes(kv_.layout.k));
    // Where V is part of K there is no other plane.
    pass.v_block_bytes = static_cast<std::size_t>(kv_.layout.block_bytes() - kv_.layout.block_bytes(kv_.layout.k));
    pass.num_entries = lengths_.num_blocks;
    pass.num_workers = workers_.concurrency();
    const double bytes = static_cast<double>(pass.num_entries * kv_.layout.block_bytes());
    std::vector<double> samples;
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t call = 0; call < 5 || seconds_since(begin) < 0.3; ++call) {
      pass.ids = ids_.data() + call % num_sets_ * pass.num_entries;
      const auto start = std::chrono::steady_clock::now();
      workers_.run(pass.num_workers, &gather_worker, &pass);
      samples.push_back(bytes / seconds_since(start) * 1e-9);
    }
    return summarize(samples).median;
  }

  const measuring_options& options_;
  setting setting_;
  backend& where_;
  executor& workers_;
  attention_spec spec_;
  std::string isa_name_;
  step_lengths lengths_;
  std::vector<float> slopes_;
  std::vector<float> scales_;  // static ones of K and V
  std::int64_t num_sets_ = 1;
  buffer pool_, q_, out_;
  kv_cache_view kv_;
  std::vector<std::int32_t> ids_;                  // [num_sets, blocks of a set], shuffled
  std::vector<std::vector<std::int32_t>> tables_;  // per set
  attention_params params_;
  attention_plan plan_;
};

}  // namespace

void run_cpu_attention(const measuring_options& options, const std::vector<setting>& settings, report& out) {
  const test::busy_processes company(options.busy);
  if (company.size() != options.busy) throw error(errc::unsupported, "the system does not make --busy processes");
  const auto workers = make_executor(parse_executor(options.executor), options.threads);
  std::vector<cpu_isa> isas;
  for (const auto& name : options.isas) isas.push_back(parse_isa(name));
  if (isas.empty()) isas.push_back(default_isa());
  out.fact("executor", std::string(workers->name()) + " x " + std::to_string(workers->concurrency()));
  if (options.busy > 0) out.fact("busy processes", std::to_string(options.busy));
  for (const cpu_isa isa : isas) {
    backend_options opening;
    opening.own_executor = workers.get();
    opening.isa = isa;
    const auto opened = make_backend(parse_device(options.device), opening);
    for (const setting& s : settings) {
      attention_bench bench(options, s, *opened, *workers);
      bench.set_isa_name(std::string(to_string(isa)));
      out.add(bench.measure());
    }
  }
}

}  // namespace bifolio::bench
