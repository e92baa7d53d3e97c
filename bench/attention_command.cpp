// SPDX-License-Identifier: Apache-2.0
// bifolio_bench attention: options to rows, for one call or for a suite of published rows.
#include <algorithm>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <charconv>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "attention_setting.hpp"
#include "attention_suites.hpp"
#include "checks.hpp"
#include "commands.hpp"
#include "machine.hpp"

namespace bifolio::bench {
namespace {

// What rows are made from: options in plural give one row per combination.
struct row_options {
  std::vector<std::string> q_dtypes{"bf16"};
  std::vector<std::string> kv_dtypes{"bf16"};
  std::vector<std::int32_t> batches{1};
  std::vector<std::int32_t> query_lens{1};
  std::vector<std::int32_t> contexts{16384};
  std::string seqs;
  std::vector<std::int32_t> q_heads{32};
  std::vector<std::int32_t> kv_heads{8};
  std::vector<std::int32_t> head_dims{128};
  std::int32_t latent_dim = 0;
  std::vector<std::int32_t> block_sizes{16};
  std::vector<std::string> layouts{"hnd"};
  std::int32_t window = -1;
  float soft_cap = 0;
  bool alibi = false;
  bool non_causal = false;
  bool deterministic = false;
};

void add_row_options(CLI::App& app, row_options& o) {
  app.add_option("--dtype", o.q_dtypes, "Dtypes of queries and outputs: " + std::string(tensor_dtype_names))
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--kv-dtype", o.kv_dtypes,
                 "Codes of keys and values: f32, f16, bf16, e4m3, e5m2, i8, e4m3-token, i8-token, u8-token …; two of "
                 "them as K/V")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--batch", o.batches, "Numbers of sequences")->delimiter(',')->capture_default_str();
  app.add_option("--query-len", o.query_lens, "New tokens of each sequence")->delimiter(',')->capture_default_str();
  app.add_option("--context", o.contexts, "Tokens visible in each sequence, new ones included")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--seqs", o.seqs,
                 "Unequal sequences instead of --batch, --query-len and --context, as COUNTxNEW/CONTEXT with commas: "
                 "1x2048/2048,63x1/4096. CONTEXT may be a range LOW:HIGH, drawn log-uniformly");
  app.add_option("--q-heads", o.q_heads, "Numbers of query heads")->delimiter(',')->capture_default_str();
  app.add_option("--kv-heads", o.kv_heads, "Numbers of KV heads")->delimiter(',')->capture_default_str();
  app.add_option("--head-dim", o.head_dims, "Elements of a head")->delimiter(',')->capture_default_str();
  app.add_option("--latent-dim", o.latent_dim,
                 "V is the first dims of K, as many (multi-head latent attention); 0 = V of its own")
      ->capture_default_str();
  app.add_option("--block-size", o.block_sizes, "Tokens in a block")->delimiter(',')->capture_default_str();
  app.add_option("--layout", o.layouts, "hnd, nhd, x_split")->delimiter(',')->capture_default_str();
  app.add_option("--window", o.window, "Sliding window: positions visible before the token's own; -1 = all")
      ->capture_default_str();
  app.add_option("--soft-cap", o.soft_cap, "Logit soft cap; 0 = none")->capture_default_str();
  app.add_flag("--alibi", o.alibi, "ALiBi with the slopes of its paper");
  app.add_flag("--non-causal", o.non_causal, "Every token attends to the whole context");
  app.add_flag("--deterministic", o.deterministic, "Results independent of the rest of the batch (optional on a GPU)");
}

[[noreturn]] void refuse_seqs(std::string_view text) {
  throw error(errc::invalid_argument,
              "--seqs '" + std::string(text) + "' is not of the form COUNTxNEW/CONTEXT or COUNTxNEW/LOW:HIGH");
}

std::vector<sequence_shape> parse_seqs(std::string_view text, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<sequence_shape> seqs;
  for (std::string_view left = text; !left.empty();) {
    const std::string_view part = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), part.size() + 1));
    const char* at = part.data();
    const char* const end = at + part.size();
    const auto number = [&](char after) {
      std::int32_t value = 0;
      const auto [next, code] = std::from_chars(at, end, value);
      if (code != std::errc{} || value < 1 || (after != 0 && (next == end || *next != after))) refuse_seqs(part);
      at = next + (after != 0 ? 1 : 0);
      return value;
    };
    const std::int32_t count = number('x');
    const std::int32_t query_len = number('/');
    const std::int32_t low = number(0);
    std::int32_t high = low;
    if (at != end && *at == ':') {
      ++at;
      high = number(0);
    }
    if (at != end || high < low) refuse_seqs(part);
    require_range("the count in --seqs", count, 1, 1 << 20);
    require_range("the context in --seqs", low, query_len, 1 << 30);
    std::uniform_real_distribution<double> logarithm(std::log(low), std::log(high));
    for (std::int32_t i = 0; i < count; ++i) {
      const double drawn = low == high ? low : std::exp(logarithm(random));
      seqs.push_back({query_len, std::clamp(static_cast<std::int32_t>(drawn), low, high)});
    }
  }
  if (seqs.empty()) refuse_seqs(text);
  return seqs;
}

// The lengths of each batch, and what the row calls them.
std::vector<std::pair<std::vector<sequence_shape>, std::string>> batches_of(const row_options& o, std::uint64_t seed) {
  std::vector<std::pair<std::vector<sequence_shape>, std::string>> batches;
  if (!o.seqs.empty()) {
    batches.emplace_back(parse_seqs(o.seqs, seed), o.seqs);
    return batches;
  }
  for (const std::int32_t batch : o.batches) {
    for (const std::int32_t query_len : o.query_lens) {
      for (const std::int32_t context : o.contexts) {
        require_range("--batch", batch, 1, 1 << 20);
        require_range("--query-len", query_len, 1, 1 << 20);
        require_range("--context", context, query_len, 1 << 30);
        batches.emplace_back(std::vector<sequence_shape>(static_cast<std::size_t>(batch), {query_len, context}),
                             "equal");
      }
    }
  }
  return batches;
}

std::vector<setting> settings_of(const row_options& o, std::uint64_t seed) {
  std::vector<setting> settings;
  setting s;
  s.window = o.window;
  s.soft_cap = o.soft_cap;
  s.alibi = o.alibi;
  s.non_causal = o.non_causal;
  s.deterministic = o.deterministic;
  const auto batches = batches_of(o, seed);
  for (const auto& kv : o.kv_dtypes) {
    const std::size_t slash = kv.find('/');
    s.kv = parse_kv_code(kv.substr(0, slash));
    s.v = slash == std::string::npos ? s.kv : parse_kv_code(kv.substr(slash + 1));
    for (const auto& q : o.q_dtypes) {
      s.q_type = parse_dtype(q);
      for (const auto& layout : o.layouts) {
        s.layout = parse_layout(layout);
        for (const std::int32_t head_dim : o.head_dims) {
          require_range("--head-dim", s.head_dim = head_dim, 1, 1 << 16);
          require_range("--latent-dim", s.latent_dim = o.latent_dim, 0, head_dim);
          for (const std::int32_t block_size : o.block_sizes) {
            require_range("--block-size", s.block_size = block_size, 1, 1 << 16);
            for (const std::int32_t q_heads : o.q_heads) {
              require_range("--q-heads", s.q_heads = q_heads, 1, 1 << 16);
              for (const std::int32_t kv_heads : o.kv_heads) {
                require_range("--kv-heads", s.kv_heads = kv_heads, 1, 1 << 16);
                for (const auto& [seqs, lengths] : batches) {
                  s.seqs = seqs;
                  s.lengths = lengths;
                  settings.push_back(s);
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

std::vector<setting> settings_of_suite(std::string_view name, std::uint64_t seed) {
  std::vector<setting> settings;
  for (const char* const line : suite_lines(name)) {
    row_options row;
    CLI::App parser;
    add_row_options(parser, row);
    parser.parse(line, false);
    for (setting& s : settings_of(row, seed)) settings.push_back(std::move(s));
  }
  return settings;
}

void run_attention(const measuring_options& options, const std::vector<setting>& settings, report& out) {
  require_range("--repeats", options.repeats, 1, 1'000'000);
  require_min_time(options.seconds);
  require_range("--busy", options.busy, 0, 1024);
  if (parse_device(options.device).type == device_type::cpu) {
    if (options.apart) {
      throw error(errc::invalid_argument, "--apart is for --device cuda: kernels of the CPU take whole batches");
    }
    if (options.spaced) {
      throw error(errc::invalid_argument, "--spaced is for --device cuda: calls on the CPU never overlap");
    }
    run_cpu_attention(options, settings, out);
  } else {
    run_cuda_attention(options, settings, out);
  }
}

}  // namespace

void add_attention_command(CLI::App& program, command& run) {
  auto o = std::make_shared<measuring_options>();
  auto rows = std::make_shared<row_options>();
  auto suite = std::make_shared<std::string>();
  CLI::App* sub = program.add_subcommand(
      "attention", "One attention call over shuffled blocks. Options in plural take lists (a,b): one row per value");
  sub->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--suite", *suite, "The rows of a published table instead of the options of rows: " + suite_names());
  CLI::App* const of_rows = sub->add_option_group("rows", "What is computed");
  add_row_options(*of_rows, *rows);
  sub->add_option("--threads", o->threads, "Workers; 0 = what the executor takes")->capture_default_str();
  sub->add_option("--executor", o->executor, "threads, openmp, tbb or serial")->capture_default_str();
  sub->add_option("--isa", o->isas, isa_choice())->delimiter(',');
  sub->add_option("--busy", o->busy, "Processes that do nothing but compute, beside the measurement on the CPU")
      ->capture_default_str();
  sub->add_flag("--spaced", o->spaced,
                "On CUDA also: each call after a kernel of 1.5 us that fills every SM and has no programmatic launch, "
                "less the time of that kernel alone (spaced_us)");
  sub->add_flag(
      "--apart", o->apart,
      "On CUDA also, of a batch with sequences of one new token and of several: the time of two calls, one for "
      "each kind (apart_us)");
  sub->add_option("--repeats", o->repeats, "Least number of samples")->capture_default_str();
  sub->add_option("--min-time", o->seconds, "Least seconds of samples")->capture_default_str();
  sub->add_option("--seed", o->seed, "Of contents, block order and drawn lengths")->capture_default_str();
  sub->callback([=, &run] {
    for (const CLI::Option* const option : of_rows->get_options()) {
      if (suite->empty() || option->count() == 0) continue;
      throw error(errc::invalid_argument, "--suite has rows of its own and does not take " + option->get_name());
    }
    run = [=](report& out) {
      run_attention(*o, suite->empty() ? settings_of(*rows, o->seed) : settings_of_suite(*suite, o->seed), out);
    };
  });
}

}  // namespace bifolio::bench
