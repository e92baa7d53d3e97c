// SPDX-License-Identifier: Apache-2.0
#include "attention_checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <exception>
#include <initializer_list>
#include <set>

#include "conformance/attention_tables.hpp"
#include "support/codes.hpp"
#include "support/random.hpp"

namespace selftest {
namespace {

using namespace bifolio;
using namespace bifolio::test;

// Cases in a turn of `attention_cases`, one of each kind.
constexpr std::size_t cases_a_turn = 6;
constexpr std::size_t num_random = 2000;

/// One kernel per sequence of a planned call, empty for a sequence without new tokens; "attention" where the backend
/// does not say.
std::vector<std::string> kernels_of(const tested_backend& where, const attention_call& call) {
  const auto num_seqs = static_cast<std::size_t>(call.host_batch.num_seqs);
  std::vector<std::string> names = where.get().describe(call.planned, call.params);
  if (names.size() != num_seqs) names.assign(num_seqs, "attention");
  return names;
}

/// "cuda general" of "cuda general bf16 rows 16": kernels of one kind sum in one order.
std::string_view family_of(std::string_view kernel) {
  const std::size_t first = kernel.find(' ');
  return first == std::string_view::npos ? kernel : kernel.substr(0, kernel.find(' ', first + 1));
}

/// A finished call: its results, and what computed them.
struct outcome {
  attention_output output;
  std::vector<std::string> kernels;
};

outcome finish(const tested_backend& where, attention_call& call) {
  return {run_planned(where, call), kernels_of(where, call)};
}

outcome run_case(const tested_backend& where, const attention_case& c, const attention_contents& contents,
                 const attention_placement& placement) {
  attention_call call(where, c, contents, placement);
  call.plan();
  return finish(where, call);
}

/// The part of a case that some of its sequences make, and its numbers, which are those of the whole.
struct part_of_case {
  attention_case settings;
  attention_contents contents;

  explicit part_of_case(const prepared_case& whole, bool deterministic)
      : settings(without_sequences(whole.settings, deterministic)), contents(settings) {}

  /// Adds the query rows [begin, end) of sequence `s`, and the keys that a causal row among them can see.
  void add(const prepared_case& whole, std::size_t s, std::int32_t begin, std::int32_t end) {
    const batch_seq& seq = whole.settings.seqs[s];
    const attention_contents::sequence& from = whole.contents.seqs[s];
    const std::int32_t length = seq.seq_len - seq.query_len + end;
    settings.seqs.push_back({end - begin, length, seq.content >= 0 ? seq.content : static_cast<std::int32_t>(s)});
    const auto slice = [](const std::vector<float>& values, std::int64_t first, std::int64_t last) {
      return std::vector<float>(values.begin() + first, values.begin() + last);
    };
    const std::int64_t q_row = std::int64_t{settings.num_q_heads()} * settings.head_dim;
    const std::int64_t k_row = std::int64_t{settings.num_kv_heads} * settings.head_dim;
    const std::int64_t v_row = std::int64_t{settings.num_kv_heads} * settings.out_dim();
    attention_contents::sequence part{slice(from.q, begin * q_row, end * q_row),
                                      slice(from.k, 0, length * k_row),
                                      slice(from.v, 0, length * v_row),
                                      {}};
    if (settings.k_code) {
      part.k_given = slice(from.k_given, 0, length * k_row);
      part.v_given = slice(from.v_given, 0, length * v_row);
    }
    if (!from.bias.empty()) {
      const std::int64_t heads = settings.num_q_heads();
      for (std::int64_t row = begin * heads; row < end * heads; ++row) {
        const std::vector<float> keys = slice(from.bias, row * seq.seq_len, row * seq.seq_len + length);
        part.bias.insert(part.bias.end(), keys.begin(), keys.end());
      }
    }
    contents.seqs.push_back(std::move(part));
  }

  void add(const prepared_case& whole, std::size_t s) { add(whole, s, 0, whole.settings.seqs[s].query_len); }

 private:
  // The numbers that do not belong to a sequence (slopes, sinks) come from the case without sequences.
  static attention_case without_sequences(attention_case c, bool deterministic) {
    c.seqs.clear();
    c.deterministic = deterministic;
    return c;
  }
};

/// One case on one target.
class case_run {
 public:
  case_run(const target& where, const prepared_case& what, report& said)
      : where_(where),
        what_(what),
        said_(said),
        name_(fmt::format("attention:{}", what.number)),
        placement_(placement_in_turn(what.settings, what.number / cases_a_turn)),
        random_(hash_of(what.settings.seed, what.number)) {}

  void run() {
    if (!attempt(promise::bounds, [&] { check_bounds_and_repeats(what_.settings); })) return;
    attempt(promise::threads, [&] { check_threads(); });
    // On a GPU the rest holds for deterministic plans.
    if (!where_.main.is_host && !what_.settings.deterministic) {
      attention_case steady = what_.settings;
      steady.deterministic = true;
      if (!attempt(promise::bounds, [&] { check_bounds_and_repeats(steady); })) return;
    }
    attempt(promise::blocks, [&] { check_blocks(); });
    attempt(promise::neighbours, [&] { check_neighbours(); });
    attempt(promise::chunks, [&] { check_chunks(); });
  }

 private:
  /// Runs `body`; what it throws is a failure of `about`. Returns whether it came to its end.
  template <class Body>
  bool attempt(promise about, const Body& body) {
    try {
      body();
      return true;
    } catch (const std::exception& problem) {
      count(about, all_kernels(), problem.what());
      return false;
    }
  }

  [[nodiscard]] std::set<std::string> all_kernels() const {
    std::set<std::string> names(whole_.kernels.begin(), whole_.kernels.end());
    names.erase("");
    if (names.empty()) names.insert("no new tokens");
    return names;
  }

  /// Counts one comparison of these kernels, which failed unless `problem` is empty.
  void count(promise about, const std::set<std::string>& kernels, const std::string& problem) {
    for (const std::string& kernel : kernels) {
      tally& counted = said_.row(where_.device, where_.isa, kernel).of(about);
      ++counted.num_compared;
      if (!problem.empty()) ++counted.num_failed;
    }
    if (problem.empty()) return;
    said_.add({where_.device, where_.isa, fmt::format("{}", fmt::join(kernels, ", ")), std::string(to_string(about)),
               name_, fmt::format("{} [{}]", problem, settings_of(what_.settings))});
  }

  /// Leaves the results in `whole_`.
  void check_bounds_and_repeats(const attention_case& c) {
    attention_call call(where_.main, c, what_.contents, placement_);
    call.plan();
    whole_.kernels = kernels_of(where_.main, call);
    whole_ = finish(where_.main, call);
    judge(c);
    std::string difference;
    for (const bool plan_again : {false, true}) {
      call.reset_outputs();
      if (plan_again) call.plan();
      difference += bit_difference(whole_.output, run_planned(where_.main, call));
    }
    count(promise::repeats, all_kernels(), difference);
  }

  void judge(const attention_case& c) {
    const arithmetic numbers = numbers_for(where_.main, c);
    const std::string problem = what_.expectation.problem_of(whole_.output, numbers);
    std::set<std::string> guilty;
    for (std::size_t s = 0; s < c.seqs.size(); ++s) {
      if (whole_.kernels[s].empty()) continue;
      const reference::accuracy_judge of_one = what_.expectation.judge(whole_.output, numbers, s, s + 1);
      attention_row& row = said_.row(where_.device, where_.isa, whole_.kernels[s]);
      worst_error& worst = size_of(c.out_type) == sizeof(float) ? row.of_f32 : row.of_narrow;
      if (!worst.share || of_one.worst_share() > *worst.share) worst = {of_one.worst_share(), name_};
      if (!of_one.problem().empty()) guilty.insert(whole_.kernels[s]);
    }
    // The statistical gates are of the whole call: no sequence alone need have broken them.
    if (problem.empty()) guilty.clear();
    if (!problem.empty() && guilty.empty()) guilty = all_kernels();
    std::set<std::string> innocent;
    for (const std::string& kernel : all_kernels()) {
      if (!guilty.contains(kernel)) innocent.insert(kernel);
    }
    count(promise::bounds, innocent, "");
    if (!guilty.empty()) count(promise::bounds, guilty, problem);
  }

  void check_threads() {
    if (where_.others.empty()) return;
    const tested_backend& other = where_.others[what_.number % where_.others.size()];
    const outcome got = run_case(other, what_.settings, what_.contents, placement_);
    const std::string difference = bit_difference(whole_.output, got.output);
    count(promise::threads, all_kernels(),
          difference.empty() ? difference : fmt::format("{}: {}", other.name, difference));
  }

  void check_blocks() {
    attention_case c = what_.settings;
    c.deterministic = true;
    attention_placement other = placement_;
    other.cache = {what_.settings.seed + 1, placement_.cache.spare_blocks + 8, placement_.cache.table_padding + 4};
    const outcome got = run_case(where_.main, c, what_.contents, other);
    for (std::size_t s = 0; s < c.seqs.size(); ++s) {
      compare_rows(promise::blocks, s, rows_of(c, got.output, s), got.kernels[s]);
    }
  }

  void check_neighbours() {
    const std::size_t num_seqs = what_.settings.seqs.size();
    if (num_seqs < 2) return;
    std::vector<std::size_t> order(num_seqs);
    for (std::size_t s = 0; s < num_seqs; ++s) order[s] = s;
    random_.shuffle(order);
    order.resize(static_cast<std::size_t>(random_.between(1, static_cast<std::int64_t>(num_seqs) - 1)));
    part_of_case part(what_, true);
    for (const std::size_t s : order) part.add(what_, s);
    const outcome got = run_case(where_.main, part.settings, part.contents, placement_);
    for (std::size_t i = 0; i < order.size(); ++i) {
      compare_rows(promise::neighbours, order[i], rows_of(part.settings, got.output, i), got.kernels[i]);
    }
  }

  /// Every sequence whose rows see nothing that comes after them, in up to three chunks; one call for the first chunks
  /// of all, one for the second ones, and so on.
  void check_chunks() {
    const attention_case& c = what_.settings;
    // Contents of other kinds depend on the length of the sequence, which a chunk does not know.
    if (!c.causal || c.values != value_kind::normal) return;
    std::vector<std::vector<std::int32_t>> ends(c.seqs.size());
    for (std::size_t s = 0; s < c.seqs.size(); ++s) {
      const batch_seq& seq = c.seqs[s];
      if (seq.query_len < 2 || seq.query_len > seq.seq_len) continue;
      const auto first = static_cast<std::int32_t>(random_.one_in(3) ? 1 : random_.between(1, seq.query_len - 1));
      ends[s] = {first};
      if (first + 1 < seq.query_len && random_.one_in(2)) {
        ends[s].push_back(static_cast<std::int32_t>(random_.between(first + 1, seq.query_len - 1)));
      }
      ends[s].push_back(seq.query_len);
    }
    std::vector<attention_output> joined(c.seqs.size());
    std::vector<bool> same_kernel(c.seqs.size(), true);
    for (std::size_t round = 0; round < 3; ++round) {
      part_of_case part(what_, true);
      std::vector<std::size_t> members;
      for (std::size_t s = 0; s < c.seqs.size(); ++s) {
        if (round >= ends[s].size()) continue;
        members.push_back(s);
        part.add(what_, s, round == 0 ? 0 : ends[s][round - 1], ends[s][round]);
      }
      if (members.empty()) break;
      const outcome got = run_case(where_.main, part.settings, part.contents, placement_);
      for (std::size_t i = 0; i < members.size(); ++i) {
        append(joined[members[i]], rows_of(part.settings, got.output, i));
        if (!comparable(members[i], got.kernels[i])) same_kernel[members[i]] = false;
      }
    }
    for (std::size_t s = 0; s < c.seqs.size(); ++s) {
      if (!ends[s].empty() && same_kernel[s]) compare_rows(promise::chunks, s, joined[s], whole_.kernels[s]);
    }
  }

  /// The CPU promises equal bits whatever kernel computes; a GPU between calls that take the same one.
  [[nodiscard]] bool comparable(std::size_t s, const std::string& kernel) const {
    return where_.main.is_host || family_of(whole_.kernels[s]) == family_of(kernel);
  }

  void compare_rows(promise about, std::size_t s, const attention_output& got, const std::string& kernel) {
    if (whole_.kernels[s].empty() || !comparable(s, kernel)) return;
    const std::string difference = bit_difference(rows_of(what_.settings, whole_.output, s), got);
    count(about, {whole_.kernels[s]}, difference.empty() ? difference : fmt::format("sequence {}: {}", s, difference));
  }

  const target& where_;
  const prepared_case& what_;
  report& said_;
  std::string name_;
  attention_placement placement_;
  random_source random_;
  outcome whole_;
};

/// Pairs of codes in turn: each comes as K and as V, most often with another one. GPUs have kernels for K and V of one
/// code beside 16-bit queries, which are every second case, and of a K in the type of the queries beside codes of V.
std::vector<attention_case> coded_cases(std::uint64_t seed) {
  const std::vector<kv_code>& codes = all_codes();
  const std::vector<attention_case> of_one = half_precision_cases(hash_of(seed, 0xc0de), num_random / 2);
  const std::vector<attention_case> of_two = random_cases(hash_of(seed, 0xc0de), num_random / 2);
  std::vector<attention_case> cases;
  for (std::size_t n = 0; n < num_random / 2; ++n) {
    const kv_code& code = codes[n % codes.size()];
    const attention_case& one = of_one.at(n);
    const bool is_wide = size_of(code.type) == 2;
    const auto narrow = static_cast<std::size_t>(
        std::ranges::find_if(codes, [](const kv_code& c) { return size_of(c.type) == 1; }) - codes.begin());
    const kv_code& of_v = is_wide ? codes[narrow + n % (codes.size() - narrow)] : code;
    cases.push_back(with_codes(one, is_wide ? kv_code{one.q_type} : code, of_v));
    cases.push_back(with_codes(of_two.at(n), code, codes[n * 5 / 3 % codes.size()]));
  }
  return cases;
}

}  // namespace

std::vector<attention_case> attention_cases(std::uint64_t seed) {
  random_source random(hash_of(seed, 0xa77));
  const auto joined = [&](std::initializer_list<std::vector<attention_case>> tables) {
    std::vector<attention_case> all;
    for (const std::vector<attention_case>& table : tables) all.insert(all.end(), table.begin(), table.end());
    random.shuffle(all);
    return all;
  };
  // The shapes that GPUs have kernels of their own for are kinds of their own: random ones rarely meet them.
  const std::array<std::vector<attention_case>, cases_a_turn> kinds{
      joined({half_precision_option_cases(), half_precision_value_cases(), half_precision_length_cases(),
              half_precision_shape_cases()}),
      joined({decode_cases(), prefill_cases(), empty_cases(), head_dim_cases(), block_size_cases(), group_cases(),
              length_cases(), dtype_cases(), layout_cases(), option_cases(), value_cases(), covering_cases(seed)}),
      joined({x_split_cases()}),
      half_precision_cases(seed, static_cast<int>(num_random)),
      random_cases(seed, static_cast<int>(num_random)),
      coded_cases(seed),
  };
  std::vector<attention_case> cases;
  for (std::size_t turn = 0; turn < num_random; ++turn) {
    for (const std::vector<attention_case>& kind : kinds) {
      if (turn < kind.size()) cases.push_back(kind[turn]);
    }
  }
  return cases;
}

prepared_case::prepared_case(std::size_t place, attention_case the_case)
    : number(place), settings(std::move(the_case)), contents(settings), expectation(settings, contents) {}

void check_attention_case(const target& where, const prepared_case& what, report& said) {
  case_run(where, what, said).run();
}

std::vector<std::string> known_kernels(const backend& where) {
  std::vector<std::string> names = where.attention_kernels();
  // Computes only where a program asks for it by name.
  std::erase_if(names, [](const std::string& name) { return name.find(" integers") != std::string::npos; });
  return names;
}

}  // namespace selftest
