// SPDX-License-Identifier: Apache-2.0
// The CPU backend's own promises about attention: it agrees with float64, and equal bits come out whatever the threads,
// the cut into items, the chunks, the neighbours, the layout, the blocks and their order.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/memory_resource.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "reference/attention_accuracy.hpp"
#include "reference/attention_oracle.hpp"
#include "support/backends.hpp"
#include "support/elements.hpp"
#include "support/paged_cache.hpp"
#include "support/random.hpp"

using namespace bifolio;
using test::arrangement;

namespace {

struct seq_shape {
  std::int32_t query_len = 0;
  std::int32_t seq_len = 0;
  std::uint64_t name = 0;  ///< contents follow (name, position, head, dim)
};

struct problem {
  attention_spec spec;
  std::vector<seq_shape> seqs;
  float soft_cap = 0;
  bool alibi = false;
  bool sinks = false;
};

struct answer {
  std::vector<std::byte> out;  // dense, [num_tokens, num_q_heads, head_dim]
  std::vector<float> lse;
  friend bool operator==(const answer& a, const answer& b) {
    return a.out == b.out && a.lse.size() == b.lse.size() &&
           std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
  }
};

float element(dtype type, std::uint64_t kind, const seq_shape& seq, std::int64_t position, std::int64_t head,
              std::int64_t dim) {
  return test::stored_as(type, test::normal_from(test::hash_of(kind, seq.name, position, head, dim)));
}

std::vector<float> dense_rows(dtype type, std::uint64_t kind, const seq_shape& seq, std::int64_t first,
                              std::int64_t count, std::int32_t heads, std::int32_t dims) {
  std::vector<float> rows;
  rows.reserve(static_cast<std::size_t>(count * heads * dims));
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t d = 0; d < dims; ++d) rows.push_back(element(type, kind, seq, first + t, h, d));
    }
  }
  return rows;
}

std::vector<float> slopes_of(const problem& p) {
  std::vector<float> slopes;
  for (std::int32_t h = 0; h < p.spec.num_q_heads; ++h) slopes.push_back(0.05f / static_cast<float>(h + 1));
  return slopes;
}

std::vector<float> sinks_of(const problem& p) {
  std::vector<float> sinks;
  for (std::int32_t h = 0; h < p.spec.num_q_heads; ++h) sinks.push_back(static_cast<float>(h % 5) - 2.0f);
  return sinks;
}

float scale_of(const problem& p) { return 1.0f / std::sqrt(static_cast<float>(p.spec.qk_head_dim)); }

// The batch's arrays and contents, on the host.
struct prepared {
  std::vector<std::vector<float>> contents;
  std::vector<test::dense_kv> dense;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> lengths;
  std::vector<float> q_values;

  explicit prepared(const problem& p) {
    const attention_spec& s = p.spec;
    for (const seq_shape& seq : p.seqs) {
      contents.push_back(dense_rows(s.k_code.type, 1, seq, 0, seq.seq_len, s.num_kv_heads, s.qk_head_dim));
      contents.push_back(dense_rows(s.v_code.type, 2, seq, 0, seq.seq_len, s.num_kv_heads, s.v_head_dim));
      const auto q =
          dense_rows(s.q_type, 3, seq, seq.seq_len - seq.query_len, seq.query_len, s.num_q_heads, s.qk_head_dim);
      q_values.insert(q_values.end(), q.begin(), q.end());
      starts.push_back(starts.back() + seq.query_len);
      lengths.push_back(seq.seq_len);
    }
    for (std::size_t i = 0; i < p.seqs.size(); ++i) {
      dense.push_back({p.seqs[i].seq_len, contents[2 * i].data(), contents[2 * i + 1].data()});
    }
  }
};

answer run(backend& where, const problem& p, const prepared& arrays, arrangement how = arrangement::hnd,
           std::uint64_t order = 0) {
  const test::paged_cache cache(
      where, how, {p.spec.k_code.type, p.spec.num_kv_heads, p.spec.qk_head_dim, p.spec.v_head_dim, p.spec.block_size},
      arrays.dense, {.order = order});
  std::vector<std::byte> q_bytes(arrays.q_values.size() * size_of(p.spec.q_type));
  for (std::size_t i = 0; i < arrays.q_values.size(); ++i) {
    test::store_element(q_bytes.data(), p.spec.q_type, static_cast<std::int64_t>(i), arrays.q_values[i]);
  }
  const std::vector<float> slopes = slopes_of(p);
  const std::vector<float> sinks = sinks_of(p);

  host_step_view batch;
  batch.num_seqs = static_cast<std::int32_t>(p.seqs.size());
  batch.num_tokens = arrays.starts.back();
  batch.query_start_loc = arrays.starts.data();
  batch.seq_lens = arrays.lengths.data();
  batch.block_tables = cache.tables().data();
  batch.block_table_stride = cache.table_stride();

  answer result;
  result.out.assign(arrays.q_values.size() * size_of(p.spec.out_type), std::byte{0x7f});
  result.lse.assign(static_cast<std::size_t>(batch.num_tokens * p.spec.num_q_heads), NAN);
  attention_params params;
  params.q =
      dense_view<const void>(q_bytes.data(), p.spec.q_type, batch.num_tokens, p.spec.num_q_heads, p.spec.qk_head_dim);
  params.out =
      dense_view<void>(result.out.data(), p.spec.out_type, batch.num_tokens, p.spec.num_q_heads, p.spec.qk_head_dim);
  params.lse = result.lse.data();
  params.kv = cache.view();
  params.batch = as_device_view(batch);
  params.scale = scale_of(p);
  params.soft_cap = p.soft_cap;
  params.alibi_slopes = p.alibi ? slopes.data() : nullptr;
  params.sinks = p.sinks ? sinks.data() : nullptr;

  attention_plan plan;
  where.plan_attention(plan, p.spec, batch, cache.view().num_blocks);
  CHECK_FALSE(find_problem(plan, params).has_value());
  if (!p.spec.implementation.empty()) {
    for (const std::string& kernel : where.describe(plan, params)) {
      CHECK((kernel.empty() || kernel.find(" " + std::string(p.spec.implementation)) != std::string::npos));
    }
  }
  REQUIRE(where.attention(plan, params) == errc::ok);
  const answer once = result;
  REQUIRE(where.attention(plan, params) == errc::ok);  // a plan serves many layers
  CHECK(once == result);
  return result;
}

answer run(backend& where, const problem& p) { return run(where, p, prepared(p)); }

// What float64 and a scalar float32 loop make of a problem's stored bits.
class oracle {
 public:
  oracle(const problem& p, const prepared& arrays)
      : spec_(p.spec), arrays_(arrays), slopes_(slopes_of(p)), sinks_(sinks_of(p)) {
    options_.num_q_heads = spec_.num_q_heads;
    options_.num_kv_heads = spec_.num_kv_heads;
    options_.qk_head_dim = spec_.qk_head_dim;
    options_.v_head_dim = spec_.v_head_dim;
    options_.causal = spec_.causal;
    options_.window_left = spec_.window_left;
    options_.window_right = spec_.window_right;
    options_.scale = scale_of(p);
    options_.soft_cap = p.soft_cap;
    options_.alibi_slopes = p.alibi ? slopes_.data() : nullptr;
    options_.sinks = p.sinks ? sinks_.data() : nullptr;
    for (std::size_t i = 0; i < p.seqs.size(); ++i) {
      const std::int64_t first = std::int64_t{arrays.starts[i]} * spec_.num_q_heads * spec_.qk_head_dim;
      seqs_.push_back({p.seqs[i].query_len, p.seqs[i].seq_len, arrays.q_values.data() + first,
                       arrays.contents[2 * i].data(), arrays.contents[2 * i + 1].data()});
      expected_.push_back(reference::attend(options_, seqs_.back()));
      scalar_.push_back(reference::attend_in_float32(options_, seqs_.back()));
    }
  }
  oracle(const oracle&) = delete;
  oracle& operator=(const oracle&) = delete;

  // Row by row.
  void check(cpu_isa isa, const answer& got) const {
    reference::accuracy_judge judge({.numbers = test::numbers_of(isa, spec_.q_type, spec_.k_code.type, spec_.out_type),
                                     .kv_type = spec_.k_code.type,
                                     .out_type = spec_.out_type,
                                     .statistical = true});
    for (std::size_t i = 0; i < seqs_.size(); ++i) {
      const std::int64_t first_row = std::int64_t{arrays_.starts[i]} * spec_.num_q_heads;
      const std::int64_t num_rows = std::int64_t{seqs_[i].query_len} * spec_.num_q_heads;
      std::vector<float> out(static_cast<std::size_t>(num_rows * spec_.qk_head_dim));
      for (std::size_t e = 0; e < out.size(); ++e) {
        out[e] = test::load_element(got.out.data(), spec_.out_type,
                                    first_row * spec_.qk_head_dim + static_cast<std::int64_t>(e));
      }
      judge.add(options_, seqs_[i], expected_[i], scalar_[i], out.data(), got.lse.data() + first_row);
    }
    CHECK_MESSAGE(judge.problem().empty(), judge.problem());
  }

 private:
  attention_spec spec_;
  const prepared& arrays_;
  std::vector<float> slopes_;
  std::vector<float> sinks_;
  reference::attention_options options_;
  std::vector<reference::dense_sequence> seqs_;
  std::vector<reference::attention_reference> expected_;
  std::vector<reference::scalar_attention> scalar_;
};

std::unique_ptr<backend> open(cpu_isa isa, executor_kind kind, std::int32_t threads) {
  backend_options options;
  options.isa = isa;
  options.executor_choice = kind;
  options.num_threads = threads;
  return make_backend({}, options);
}

std::unique_ptr<backend> serial(cpu_isa isa) { return open(isa, executor_kind::serial, 0); }

// Executors of this build that run several workers.
std::vector<executor_kind> parallel_executors() {
  std::vector<executor_kind> kinds;
  for (const executor_kind kind : {executor_kind::threads, executor_kind::openmp, executor_kind::tbb}) {
    try {
      (void)make_executor(kind, 2);
      kinds.push_back(kind);
    } catch (const error&) {
    }
  }
  return kinds;
}

problem mixed_problem(dtype kv, std::int32_t q_heads, std::int32_t kv_heads, std::int32_t head_dim,
                      std::int32_t block_size) {
  problem p;
  p.spec.num_q_heads = q_heads;
  p.spec.num_kv_heads = kv_heads;
  p.spec.qk_head_dim = p.spec.v_head_dim = head_dim;
  p.spec.block_size = block_size;
  p.spec.k_code.type = p.spec.v_code.type = kv;
  p.seqs = {{1, 700, 1}, {37, 130, 2}, {1, 1, 3}, {3, 64, 4}, {0, 5, 5}, {5, 1100, 6}};
  return p;
}

// One decoding sequence of 4000 tokens in 250 blocks, as arrays alone.
struct long_batch {
  std::vector<std::int32_t> starts{0, 1};
  std::vector<std::int32_t> lengths{4000};
  std::vector<std::int32_t> table = std::vector<std::int32_t>(250, 3);
  [[nodiscard]] host_step_view view() const {
    return {1, 1, starts.data(), lengths.data(), table.data(), 250, nullptr};
  }
};

std::vector<std::string> implementations_of(const backend& where) { return where.explain(attention_plan()); }

// Whether its instruction set has kernels of this implementation for this dtype of the KV cache.
bool has_kernels(const backend& where, dtype kv, const std::string& implementation) {
  const std::string wanted = " " + std::string(to_string(kv)) + " " + implementation;
  for (const std::string& kernel : where.attention_kernels()) {
    if (kernel.find(wanted) != std::string::npos) return true;
  }
  return false;
}

errc planning_error(backend& where, const attention_spec& spec) {
  attention_plan plan;
  try {
    where.plan_attention(plan, spec, long_batch().view(), 250);
  } catch (const error& problem) {
    CHECK(plan.state == nullptr);
    return problem.code();
  }
  return errc::ok;
}

}  // namespace

TEST_CASE("attention agrees with float64 for every ISA, dtype and option") {
  for (const dtype kv : tensor_dtypes) {
    for (const std::int32_t head_dim : {1, 8, 71, 80, 128}) {
      const problem plain = mixed_problem(kv, 6, 2, head_dim, 16);
      problem featured = plain;
      featured.spec.q_type = dtype::bf16;
      featured.spec.out_type = dtype::f16;
      featured.spec.window_left = 100;
      featured.soft_cap = 3.0f;
      featured.alibi = true;
      featured.sinks = true;
      problem two_sided = featured;
      two_sided.spec.causal = false;
      two_sided.spec.window_right = 9;
      two_sided.spec.out_type = dtype::bf16;
      const prepared plain_arrays(plain);
      const prepared featured_arrays(featured);
      const oracle plain_oracle(plain, plain_arrays);
      const oracle featured_oracle(featured, featured_arrays);
      const oracle two_sided_oracle(two_sided, featured_arrays);
      for (const cpu_isa isa : supported_isas()) {
        CAPTURE(to_string(isa));
        CAPTURE(to_string(kv));
        CAPTURE(head_dim);
        const auto where = serial(isa);
        plain_oracle.check(isa, run(*where, plain, plain_arrays));
        featured_oracle.check(isa, run(*where, featured, featured_arrays, arrangement::nhd));
        two_sided_oracle.check(isa, run(*where, two_sided, featured_arrays, arrangement::x_split));
      }
    }
  }
}

TEST_CASE("each implementation agrees with float64 where it is forced by name, on every ISA") {
  for (const dtype kv : tensor_dtypes) {
    problem p = mixed_problem(kv, 6, 2, 71, 16);
    p.spec.q_type = p.spec.out_type = kv;
    p.spec.window_left = 100;
    p.soft_cap = 3.0f;
    p.alibi = true;
    p.sinks = true;
    const prepared arrays(p);
    const oracle expected(p, arrays);
    for (const cpu_isa isa : supported_isas()) {
      const auto where = serial(isa);
      for (const std::string& name : implementations_of(*where)) {
        p.spec.implementation = name;
        CAPTURE(to_string(isa));
        CAPTURE(to_string(kv));
        CAPTURE(name);
        if (!has_kernels(*where, kv, name)) {
          CHECK(planning_error(*where, p.spec) == errc::unsupported);
          continue;
        }
        expected.check(isa, run(*where, p, arrays));
        expected.check(isa, run(*where, p, arrays, arrangement::x_split, 3));
      }
    }
  }
}

TEST_CASE("without a name the first implementation that accepts computes the call, and explain says why") {
  const long_batch batch;
  for (const cpu_isa isa : supported_isas()) {
    const auto where = serial(isa);
    CHECK(implementations_of(*where) == std::vector<std::string>{"tiles", "dots", "integers", "vectors"});
    for (const dtype kv : tensor_dtypes) {
      for (const bool one_type : {true, false}) {
        CAPTURE(to_string(isa));
        CAPTURE(to_string(kv));
        CAPTURE(one_type);
        attention_spec spec = mixed_problem(kv, 6, 2, 64, 16).spec;
        spec.q_type = spec.out_type = one_type ? kv : kv == dtype::f32 ? dtype::bf16 : dtype::f32;
        attention_plan plan;
        where->plan_attention(plan, spec, batch.view(), 250);
        CHECK(plan.spec.implementation.empty());
        const std::vector<std::string> sentences = where->explain(plan);
        REQUIRE(sentences.size() == 4);
        bool taken = false;
        for (std::size_t i = 0; i < sentences.size(); ++i) {
          const std::string name = implementations_of(*where)[i];
          CAPTURE(sentences[i]);
          const bool accepts = has_kernels(*where, kv, name) && (one_type || name == "vectors");
          const char* const said = !accepts ? " declines: " : taken ? " " : " takes all 1 sequences";
          CHECK(sentences[i].rfind(name + said, 0) == 0);
          taken = taken || accepts;
        }
        CHECK(taken);
      }
    }
  }
}

TEST_CASE("a name that no implementation has, or whose implementation declines, is refused while planning") {
  for (const cpu_isa isa : supported_isas()) {
    const auto where = serial(isa);
    attention_spec spec = mixed_problem(dtype::f32, 6, 2, 64, 16).spec;
    spec.implementation = "general";
    CHECK(planning_error(*where, spec) == errc::invalid_argument);
    spec.implementation = "tiles";  // of float32, which no ISA has
    CHECK(planning_error(*where, spec) == errc::unsupported);
    std::string text = "vectors";
    spec.implementation = text;
    attention_plan plan;
    where->plan_attention(plan, spec, long_batch().view(), 250);
    text = "not it ";
    CHECK(plan.spec.implementation == "vectors");
    CHECK(where->explain(plan)[0] == "tiles is not asked: vectors is forced");
  }
}

TEST_CASE("BIFOLIO_ATTENTION forces an implementation of backends that are opened after it was set") {
  const cpu_isa isa = supported_isas().back();
  const auto before = serial(isa);
  REQUIRE(setenv("BIFOLIO_ATTENTION", "vectors", 1) == 0);
  const auto forced = serial(isa);
  REQUIRE(setenv("BIFOLIO_ATTENTION", "tiles of wood", 1) == 0);
  const auto refusing = serial(isa);
  REQUIRE(unsetenv("BIFOLIO_ATTENTION") == 0);
  attention_spec spec = mixed_problem(dtype::bf16, 6, 2, 64, 16).spec;
  attention_plan plan;
  before->plan_attention(plan, spec, long_batch().view(), 250);
  CHECK(plan.spec.implementation.empty());
  forced->plan_attention(plan, spec, long_batch().view(), 250);
  CHECK(plan.spec.implementation == "vectors");
  CHECK(planning_error(*refusing, spec) == errc::invalid_argument);
  attention_spec unknown = spec;
  unknown.implementation = "tiles of wood";
  std::string sentence;
  try {
    before->plan_attention(plan, unknown, long_batch().view(), 250);
  } catch (const error& refused) {
    sentence = refused.what();
  }
  CAPTURE(sentence);
  CHECK(sentence.find("tiles, ") != std::string::npos);  // a list with commas between the names, and none before
  CHECK(sentence.find(" ,") == std::string::npos);
  CHECK(sentence.find(", ,") == std::string::npos);
  spec.implementation = "vectors";  // goes before the environment
  CHECK(planning_error(*refusing, spec) == errc::ok);
}

TEST_CASE("bits do not depend on threads, executor, layout, block size or block order") {
  for (const dtype kv : tensor_dtypes) {
    for (const std::int32_t head_dim : {64, 71}) {
      problem p = mixed_problem(kv, 8, 2, head_dim, 16);
      p.seqs.push_back({1, 5000, 7});
      const prepared arrays(p);
      for (const cpu_isa isa : supported_isas()) {
        CAPTURE(to_string(isa));
        CAPTURE(to_string(kv));
        CAPTURE(head_dim);
        const auto alone = serial(isa);
        p.spec.block_size = 16;
        const answer expected = run(*alone, p, arrays);
        for (const executor_kind kind : parallel_executors()) {
          for (const std::int32_t threads : {2, 5}) CHECK(run(*open(isa, kind, threads), p, arrays) == expected);
        }
        for (const arrangement how : test::all_arrangements) {
          CAPTURE(test::to_string(how));
          CHECK(run(*alone, p, arrays, how, 5) == expected);
        }
        for (const std::int32_t block_size : {1, 5, 64, 128}) {
          CAPTURE(block_size);
          p.spec.block_size = block_size;
          CHECK(run(*alone, p, arrays, arrangement::hnd, 9) == expected);
        }
      }
    }
  }
}

TEST_CASE("bits do not depend on the chunks of a prefill or on the neighbours in a batch") {
  const auto kinds = parallel_executors();
  for (const cpu_isa isa : supported_isas()) {
    const auto where = kinds.empty() ? serial(isa) : open(isa, kinds[0], 3);
    for (const std::int32_t group : {1, 3, 8}) {
      for (const bool windowed : {false, true}) {
        problem whole = mixed_problem(dtype::bf16, 2 * group, 2, 64, 16);
        if (windowed) whole.spec.window_left = 90;
        whole.alibi = windowed;
        whole.seqs = {{150, 640, 11}};
        CAPTURE(to_string(isa));
        CAPTURE(group);
        CAPTURE(windowed);
        const answer expected = run(*where, whole);
        const std::size_t token_bytes = static_cast<std::size_t>(whole.spec.num_q_heads) * 64 * sizeof(float);
        std::int32_t done = 0;
        for (const std::int32_t chunk : {1, 2, 7, 40, 64, 33, 1, 1, 1}) {
          problem part = whole;
          part.seqs = {{1, 77, 12}, {chunk, 490 + done + chunk, 11}, {6, 6, 13}};
          const answer got = run(*where, part);
          const std::size_t first = static_cast<std::size_t>(done) * token_bytes;
          const std::size_t size = static_cast<std::size_t>(chunk) * token_bytes;
          CHECK(std::memcmp(got.out.data() + token_bytes, expected.out.data() + first, size) == 0);
          done += chunk;
        }
        CHECK(done == 150);
      }
    }
  }
}

TEST_CASE("a plan is made again in the memory it holds") {
  counting_memory_resource memory(default_host_memory());
  backend_options options;
  options.host_memory = &memory;
  const auto where = make_backend({}, options);
  const problem p = mixed_problem(dtype::f32, 4, 2, 64, 16);
  long_batch batch;
  attention_plan plan;
  where->plan_attention(plan, p.spec, batch.view(), 250);
  const std::int64_t allocations = memory.num_allocations();
  CHECK(allocations > 0);
  batch.lengths[0] = 3000;
  where->plan_attention(plan, p.spec, batch.view(), 250);
  CHECK(memory.num_allocations() == allocations);
}

TEST_CASE("a plan that finds no memory stays as it was") {
  failing_memory_resource memory(default_host_memory());
  backend_options options;
  options.host_memory = &memory;
  const auto where = make_backend({}, options);
  const problem p = mixed_problem(dtype::f32, 4, 2, 64, 16);
  const long_batch batch;
  int refusals = 0;
  for (std::int64_t nth = 1;; ++nth) {
    attention_plan plan;
    memory.fail_at(nth);
    try {
      where->plan_attention(plan, p.spec, batch.view(), 250);
      memory.fail_at(0);
      CHECK(plan.num_seqs == 1);
      break;
    } catch (const error& refused) {
      CHECK(refused.code() == errc::out_of_memory);
      CHECK(plan.state == nullptr);
      CHECK(plan.num_seqs == 0);
      ++refusals;
    }
  }
  CHECK(refusals > 0);
}

TEST_CASE("wrong batches are refused with a sentence and the code that is promised") {
  const auto where = make_backend();
  attention_spec spec;
  spec.num_q_heads = 4;
  spec.num_kv_heads = 2;
  spec.qk_head_dim = spec.v_head_dim = 8;
  spec.block_size = 16;
  std::vector<std::int32_t> starts{0, 2};
  std::vector<std::int32_t> lengths{20};
  std::vector<std::int32_t> table{4, 2, 2147480000};
  const host_step_view good{1, 2, starts.data(), lengths.data(), table.data(), 3, nullptr};
  const auto code_of = [&](const attention_spec& s, const host_step_view& b, std::int64_t num_blocks) {
    attention_plan plan;
    try {
      where->plan_attention(plan, s, b, num_blocks);
    } catch (const error& refused) {
      CHECK(std::string(refused.what()).size() > 20);
      CHECK(plan.state == nullptr);
      return refused.code();
    }
    return errc::ok;
  };
  CHECK(code_of(spec, good, 5) == errc::ok);
  CHECK(code_of(spec, good, 4) == errc::out_of_range);
  CHECK(code_of(spec, good, -1) == errc::invalid_argument);
  attention_spec bad = spec;
  bad.num_q_heads = 5;
  CHECK(code_of(bad, good, 5) == errc::invalid_argument);
  bad = spec;
  bad.qk_head_dim = 0;
  CHECK(code_of(bad, good, 5) == errc::invalid_argument);
  host_step_view batch = good;
  batch.num_tokens = 3;
  CHECK(code_of(spec, batch, 5) == errc::invalid_argument);
  lengths[0] = 49;
  CHECK(code_of(spec, good, 5) == errc::out_of_range);
  lengths[0] = -1;
  CHECK(code_of(spec, good, 5) == errc::invalid_argument);
  lengths[0] = 20;
  table[1] = -7;
  CHECK(code_of(spec, good, 5) == errc::out_of_range);
  // Blocks left of the window are free again, and nobody reads their entries.
  table[0] = 2147480000;
  table[1] = 2;
  bad = spec;
  bad.window_left = 2;
  CHECK(code_of(bad, good, 5) == errc::ok);
}
