// SPDX-License-Identifier: Apache-2.0
// A model's cache from one configuration, on every backend: whatever happens to sequences, what attention gives is what
// the float64 oracle gives for their tokens; a scheduler drives it to the same texts in a small pool as in a large one.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/copy_audit.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/rotate_append.hpp>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference/attention_oracle.hpp"
#include "support/backends.hpp"
#include "support/device_bytes.hpp"
#include "support/random.hpp"
#include "support/token_ids.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t num_layers = 2, num_q_heads = 4, num_kv_heads = 2, head_dim = 8, block_size = 4;

model_cache_config tiny(std::int64_t num_blocks, std::int64_t num_host_blocks = 0) {
  model_cache_config config;
  config.num_layers = num_layers;
  config.attention.num_q_heads = num_q_heads;
  config.attention.num_kv_heads = num_kv_heads;
  config.attention.qk_head_dim = head_dim;
  config.attention.deterministic = true;
  config.cache = {.block_size = block_size, .num_blocks = num_blocks, .max_sequences = 512};
  config.cache.num_host_blocks = num_host_blocks;
  return config;
}

/// The same with a layer of each kind: attention to all tokens, to the last six in blocks of two, and a state that
/// keeps the text as a hash.
constexpr std::int32_t window = 6, state_layer = 2, num_draft_slots = 3;

model_cache_config grouped(std::int64_t num_blocks, std::int64_t num_host_blocks = 0) {
  model_cache_config config = tiny(0);
  const attention_spec spec = std::exchange(config.attention, {});
  config.num_layers = 3;
  config.cache.groups = {{.kind = group_kind::full,
                          .block_size = block_size,
                          .num_blocks = num_blocks,
                          .num_host_blocks = num_host_blocks},
                         {.kind = group_kind::window,
                          .block_size = 2,
                          .num_blocks = 2 * num_blocks,
                          .num_host_blocks = 2 * num_host_blocks,
                          .window = window},
                         {.kind = group_kind::state,
                          .block_size = 1,
                          .num_blocks = 2 * num_blocks,
                          .num_host_blocks = num_host_blocks,
                          .num_draft_slots = num_draft_slots}};
  config.groups = {{.layers = {0}, .attention = spec},
                   {.layers = {1}, .layout = layout_kind::nhd, .attention = spec},
                   {.layers = {state_layer}, .state_bytes = sizeof(std::uint64_t)}};
  return config;
}

/// Row of q (0), k (1) or v (2): a function of the token, its position and the layer.
std::vector<float> rows_of(std::uint64_t what, std::int32_t layer, std::int32_t num_heads,
                           std::span<const token_id> tokens, std::int64_t first_position) {
  std::vector<float> rows;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (std::int32_t i = 0; i < num_heads * head_dim; ++i) {
      rows.push_back(
          normal_from(hash_of(what, layer, to_index(tokens[t]), first_position + static_cast<std::int64_t>(t), i)));
    }
  }
  return rows;
}

using outputs = std::vector<std::vector<float>>;  // [num_layers], [num_tokens, num_q_heads, head_dim]

/// What a layer with this state says of a token.
void put_state(std::vector<float>& rows, std::uint64_t state) {
  for (std::int32_t i = 0; i < num_q_heads * head_dim; ++i) rows.push_back(normal_from(hash_of(state, i)));
}

/// Goes on from the states that the step reads, and leaves those that it writes.
std::vector<float> run_states(backend& where, model_step& step) {
  const layer_states states = step.states(state_layer);
  CHECK(states.state_bytes == sizeof(std::uint64_t));
  const step_batch& rows = step.inputs().groups[1];
  std::vector<float> said;
  for (std::size_t s = 0; s < rows.seq_lens.size(); ++s) {
    const std::int32_t* const ids = &rows.block_tables[s * static_cast<std::size_t>(rows.block_table_stride)];
    const auto at = [&](std::int32_t id) { return states.data + std::int64_t{id} * states.state_bytes; };
    std::uint64_t state = 1;
    if (block_id{ids[0]} != invalid_block) {
      require_ok(where.download(&state, at(ids[0]), sizeof state, {}), "download");
      require_ok(where.synchronize({}), "synchronize");
    }
    const std::int32_t begin = rows.query_start_loc[s], end = rows.query_start_loc[s + 1];
    const bool keeps_each = end - begin <= 1 + num_draft_slots;
    for (std::int32_t t = begin; t < end; ++t) {
      state = hash_of(state, to_index(step.inputs().tokens[static_cast<std::size_t>(t)]));
      put_state(said, state);
      if (!keeps_each && t + 1 < end) continue;
      require_ok(where.upload(at(ids[keeps_each ? 1 + t - begin : 1]), &state, sizeof state, {}), "upload");
      require_ok(where.synchronize({}), "synchronize");
    }
  }
  return said;
}

outputs run_layers(backend& where, model_step& step) {
  outputs all;
  const step_inputs& inputs = step.inputs();
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    std::vector<float> rows[3];
    for (std::size_t t = 0; t < inputs.tokens.size(); ++t) {
      for (std::uint64_t what = 0; what < 3; ++what) {
        const std::vector<float> row =
            rows_of(what, layer, what == 0 ? num_q_heads : num_kv_heads, {&inputs.tokens[t], 1}, inputs.positions[t]);
        rows[what].insert(rows[what].end(), row.begin(), row.end());
      }
    }
    device_bytes q(where, bytes_of(rows[0]), 64), k(where, bytes_of(rows[1]), 64), v(where, bytes_of(rows[2]), 64);
    device_bytes out(where, bytes_of(rows[0]), 64);
    const auto view = [&](device_bytes& bytes, std::int32_t num_heads) {
      return dense_view(reinterpret_cast<float*>(bytes.data()), step.num_tokens(), num_heads, head_dim);
    };
    require_ok(
        step.attend(layer, view(q, num_q_heads), view(k, num_kv_heads), view(v, num_kv_heads), view(out, num_q_heads)),
        "attend");
    require_ok(where.synchronize({}), "synchronize");
    const std::vector<std::byte> bytes = out.read();
    std::vector<float> values(rows[0].size());
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    all.push_back(std::move(values));
  }
  if (!inputs.groups.empty() && step.num_tokens() > 0) all.push_back(run_states(where, step));
  return all;
}

/// The largest difference of a row of the step to the oracle's, over all layers.
double worst_of_row(const outputs& got, std::size_t first_row, const std::vector<token_id>& text,
                    std::int32_t query_len) {
  double worst = 0;
  const bool in_groups = got.size() > num_layers;
  const auto num_values = static_cast<std::size_t>(query_len * num_q_heads * head_dim);
  if (in_groups) {
    std::uint64_t state = 1;
    std::vector<float> said;
    for (const token_id token : text) put_state(said, state = hash_of(state, to_index(token)));
    const auto row = got[state_layer].begin() + static_cast<std::ptrdiff_t>(first_row * num_q_heads * head_dim);
    if (!std::equal(said.end() - static_cast<std::ptrdiff_t>(num_values), said.end(), row)) worst = 1e9;
  }
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    const std::vector<float> q =
        rows_of(0, layer, num_q_heads, std::span(text).last(static_cast<std::size_t>(query_len)),
                static_cast<std::int64_t>(text.size()) - query_len);
    const std::vector<float> k = rows_of(1, layer, num_kv_heads, text, 0), v = rows_of(2, layer, num_kv_heads, text, 0);
    const reference::attention_options options{.num_q_heads = num_q_heads,
                                               .num_kv_heads = num_kv_heads,
                                               .qk_head_dim = head_dim,
                                               .v_head_dim = head_dim,
                                               .window_left = in_groups && layer == 1 ? window - 1 : -1,
                                               .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
    const reference::dense_sequence seq{query_len, static_cast<std::int64_t>(text.size()), q.data(), k.data(),
                                        v.data()};
    const reference::attention_reference expected = reference::attend(options, seq);
    for (std::size_t i = 0; i < expected.out.size(); ++i) {
      const double value =
          static_cast<double>(got[static_cast<std::size_t>(layer)][first_row * num_q_heads * head_dim + i]);
      worst = std::max(worst, std::isnan(value) ? 1e9 : std::abs(value - expected.out[i]));
    }
  }
  return worst;
}

constexpr double bound = 2e-5;  // of float32 over at most some hundred keys of values about 1

std::string refusal(errc expected, const std::function<void()>& call) {
  try {
    call();
  } catch (const error& problem) {
    CHECK(problem.code() == expected);
    return problem.what();
  }
  return "accepted";
}

/// One sequence as the test knows it: committed tokens, and those of its prompt that are not computed yet.
struct known_sequence {
  std::vector<token_id> text;
  std::vector<token_id> pending;
  bool is_out = false;
};

/// Random operations on one cache.
class random_run {
 public:
  random_run(const tested_backend& tested, std::uint64_t seed, model_cache_config config)
      : where_(tested.get()),
        random_(seed),
        in_groups_(!config.groups.empty()),
        cache_(where_, with_prefixes(std::move(config), &audit_)) {}

  void run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      switch (random_.between(0, 9)) {
        case 0:
        case 1:
          open();
          break;
        case 2:
          fork();
          break;
        case 3:
          roll_back();
          break;
        case 4:
          swap();
          break;
        case 5:
          end();
          break;
        default:
          step();
          break;
      }
      REQUIRE(cache_.manager().check() == "");
    }
    while (!seqs_.empty()) free(seqs_.begin()->first);
    CHECK(audit_.num_missed() == 0);
    CHECK(audit_.num_outstanding() == 0);
    const kv_cache_manager& manager = cache_.manager();
    for (std::int32_t g = 0; g < manager.num_groups(); ++g) {
      CHECK(manager.num_free_blocks(g) == manager.pool(g).num_blocks());
    }
    // The mix is worth its name.
    CHECK(num_steps_ > 5);  // most opens fill the pool before a step
    CHECK(num_refused_ > 0);
    CHECK(num_hits_ > 0);
    CHECK(num_out_ > 0);
    CHECK(cache_.stats().num_copied_blocks > 0);
  }

 private:
  static model_cache_config with_prefixes(model_cache_config config, copy_audit* audit) {
    config.cache.audit = audit;
    config.cache.prefix = {.enabled = true, .seed = hash_seed{1, 2}};
    return config;
  }

  seq_id pick() {
    return std::next(seqs_.begin(), random_.between(0, static_cast<std::int64_t>(seqs_.size()) - 1))->first;
  }

  void open() {
    // Of two families of prompts, so that many begin alike.
    std::vector<token_id> prompt;
    const std::int64_t length = random_.between(1, 30), family = random_.between(1, 2);
    for (std::int64_t i = 0; i < length; ++i) prompt.push_back(token_id{static_cast<std::int32_t>(family * 100 + i)});
    const open_result opened = cache_.open(prompt);
    if (opened.status != alloc_status::ok) {
      ++num_refused_;
      return;
    }
    if (opened.num_cached_tokens > 0) ++num_hits_;
    const auto cached = static_cast<std::ptrdiff_t>(opened.num_cached_tokens);
    seqs_[opened.seq] = {{prompt.begin(), prompt.begin() + cached}, {prompt.begin() + cached, prompt.end()}};
  }

  void fork() {
    if (seqs_.empty()) return;
    const seq_id parent = pick();
    if (seqs_[parent].is_out) return;
    const allocate_result forked = cache_.fork(parent);
    if (forked.status == alloc_status::ok) seqs_[forked.seq] = seqs_[parent];
  }

  void roll_back() {
    if (seqs_.empty()) return;
    const seq_id seq = pick();
    known_sequence& known = seqs_[seq];
    if (known.is_out) return;
    std::int64_t kept = random_.between(0, static_cast<std::int64_t>(known.text.size()));
    if (in_groups_ && kept > 0) kept = static_cast<std::int64_t>(known.text.size());  // where there is a state
    if (in_groups_ && cache_.manager().num_released_blocks(seq, 1) > 0)
      kept = static_cast<std::int64_t>(known.text.size());
    cache_.truncate(seq, kept);
    known.pending.clear();
    known.text.resize(static_cast<std::size_t>(kept));
  }

  void swap() {
    if (seqs_.empty()) return;
    const seq_id seq = pick();
    known_sequence& known = seqs_[seq];
    const alloc_status status = known.is_out ? cache_.swap_in({&seq, 1}) : cache_.swap_out({&seq, 1});
    if (status != alloc_status::ok) return;
    known.is_out = !known.is_out;
    if (known.is_out && !known.text.empty()) ++num_out_;
  }

  void end() {
    if (seqs_.size() > 3) free(pick());
  }
  void free(seq_id seq) {
    cache_.free(seq);
    seqs_.erase(seq);
  }

  void step() {
    std::vector<step_row> rows;
    std::vector<std::vector<token_id>> tokens;
    tokens.reserve(seqs_.size());
    for (const auto& [seq, known] : seqs_) {
      if (known.is_out || random_.one_in(3)) continue;
      std::vector<token_id> next = known.pending;
      if (next.empty()) {
        for (std::int64_t i = random_.between(1, 3); i > 0; --i) {
          next.push_back(token_id{static_cast<std::int32_t>(random_.between(0, 50))});
        }
      } else {
        std::int64_t count = random_.between(1, static_cast<std::int64_t>(next.size()));
        // Where `open` left off, there is a place for a snapshot.
        const std::int64_t held = cache_.manager().num_tokens(seq) - cache_.manager().num_committed(seq);
        if (in_groups_ && held > 0 && random_.one_in(2)) count = held;
        next.resize(static_cast<std::size_t>(count));
      }
      tokens.push_back(next);
      rows.push_back({seq, tokens.back()});
    }
    if (rows.empty()) return;
    std::vector<std::int64_t> before;
    for (const step_row& row : rows) before.push_back(cache_.manager().num_tokens(row.seq));
    model_step step = cache_.begin_step(rows);
    if (!step) {
      ++num_refused_;
      CHECK(step.status() != alloc_status::ok);
      check_not_longer(rows, before);
      return;
    }
    ++num_steps_;
    if (random_.one_in(8)) {
      step = {};  // dropped
      check_not_longer(rows, before);
      return;
    }
    const outputs got = run_layers(where_, step);
    std::size_t first_row = 0;
    std::vector<std::int32_t> accepted;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      known_sequence& known = seqs_[rows[i].seq];
      std::vector<token_id> whole = known.text;
      whole.insert(whole.end(), tokens[i].begin(), tokens[i].end());
      const auto query_len = static_cast<std::int32_t>(tokens[i].size());
      CHECK(worst_of_row(got, first_row, whole, query_len) < bound);
      first_row += tokens[i].size();
      accepted.push_back(static_cast<std::int32_t>(random_.between(0, query_len)));
      // Of a long step the state at its end is kept, and the one before it.
      if (in_groups_ && query_len > 1 + num_draft_slots && accepted.back() > 0) accepted.back() = query_len;
    }
    const bool in_parts = random_.one_in(2);
    in_parts ? step.commit(accepted) : step.commit();
    CHECK(!step);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      known_sequence& known = seqs_[rows[i].seq];
      const auto count = in_parts ? static_cast<std::size_t>(accepted[i]) : tokens[i].size();
      known.text.insert(known.text.end(), tokens[i].begin(), tokens[i].begin() + static_cast<std::ptrdiff_t>(count));
      if (!known.pending.empty() && count == tokens[i].size()) {
        known.pending.erase(known.pending.begin(), known.pending.begin() + static_cast<std::ptrdiff_t>(count));
      } else {
        known.pending.clear();
      }
      CHECK(cache_.manager().num_committed(rows[i].seq) == static_cast<std::int64_t>(known.text.size()));
    }
  }

  void check_not_longer(const std::vector<step_row>& rows, const std::vector<std::int64_t>& before) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t now = cache_.manager().num_tokens(rows[i].seq);
      in_groups_ ? CHECK(now <= before[i]) : CHECK(now == before[i]);
    }
  }

  backend& where_;
  random_source random_;
  bool in_groups_;
  copy_audit audit_;
  model_cache cache_;
  std::map<seq_id, known_sequence> seqs_;
  int num_steps_ = 0, num_refused_ = 0, num_hits_ = 0, num_out_ = 0;
};

/// The token that is sampled from a row: a hash of its bits.
token_id sample(const outputs& got, std::int32_t row) {
  std::uint64_t h = 7;
  for (const std::vector<float>& layer : got) {
    for (std::int32_t i = 0; i < num_q_heads * head_dim; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &layer[static_cast<std::size_t>(row * num_q_heads * head_dim + i)], sizeof bits);
      h = mix(h ^ bits);
    }
  }
  return token_id{static_cast<std::int32_t>(h % 50)};
}

using texts = std::map<std::uint64_t, std::vector<token_id>>;

/// Six requests through a scheduler, `in_flight` steps at a time.
texts serve(backend& where, model_cache_config config, std::int32_t in_flight, scheduler_stats& stats) {
  config.max_steps_in_flight = in_flight;
  copy_audit audit;
  config.cache.audit = &audit;
  model_cache cache(where, config);
  scheduler requests(cache.manager(), {.max_tokens_per_step = 16,
                                       .vocab_size = 50,
                                       .max_steps_in_flight = in_flight,
                                       .preemption = preemption_mode::swap});
  for (std::int32_t r = 0; r < 6; ++r) {
    request asked;
    for (std::int32_t i = 0; i < 3 + 7 * r; ++i) asked.prompt.push_back(token_id{(r * 13 + i * 7) % 50});
    asked.max_new_tokens = 24;
    REQUIRE(requests.submit(asked).status == alloc_status::ok);
  }
  texts said;
  while (model_step step = cache.begin_step(requests)) {
    CHECK(step.status() == alloc_status::ok);
    const outputs got = run_layers(where, step);
    std::vector<sampled_token> sampled;
    for (const std::int32_t row : step.inputs().sample_rows) sampled.push_back({sample(got, row)});
    for (finished_sequence& done : step.commit(sampled)) said[to_index(done.request)] = std::move(done.tokens);
    REQUIRE(cache.manager().check() == "");
    REQUIRE(requests.check() == "");
  }
  CHECK_FALSE(requests.has_work());
  CHECK(audit.num_missed() == 0);
  CHECK(audit.num_outstanding() == 0);
  stats = requests.stats();
  return said;
}

}  // namespace

TEST_CASE(
    "whatever happens to the sequences of a model's cache, attention gives what the oracle gives for their tokens") {
  CAPTURE(seed_note());
  for (const tested_backend* tested : one_per_family(0)) {
    CAPTURE(tested->name);
    random_run(*tested, hash_of(test_seed(), 31), tiny(24, 24)).run(400);
    random_run(*tested, hash_of(test_seed(), 32), grouped(36, 24)).run(600);
  }
}

TEST_CASE("a scheduler drives a model's cache to the same texts in a small pool, swapping, as in a large one") {
  for (const tested_backend* tested : one_per_family(1)) {
    CAPTURE(tested->name);
    scheduler_stats roomy, tight, swapping;
    const texts expected = serve(tested->get(), tiny(200), 1, roomy);
    CHECK(expected.size() == 6);
    CHECK(roomy.num_preemptions == 0);
    CHECK(serve(tested->get(), tiny(18), 1, tight) == expected);
    CHECK(tight.num_preemptions > 0);
    CHECK(serve(tested->get(), tiny(18, 40), 1, swapping) == expected);
    CHECK(swapping.num_swap_ins > 0);
  }
}

TEST_CASE("a scheduler drives layer groups to the same texts with hits, preemption, swaps and samples as without") {
  for (const tested_backend* tested : one_per_family(1)) {
    CAPTURE(tested->name);
    scheduler_stats roomy, tight, swapping, caching;
    const texts expected = serve(tested->get(), grouped(200), 1, roomy);
    CHECK(expected.size() == 6);
    CHECK(roomy.num_preemptions == 0);
    CHECK(serve(tested->get(), grouped(18), 1, tight) == expected);
    CHECK(tight.num_preemptions > 0);
    CHECK(serve(tested->get(), grouped(18, 40), 1, swapping) == expected);
    CHECK(swapping.num_swap_ins > 0);
    model_cache_config keeps = grouped(18);
    keeps.cache.prefix.enabled = true;
    CHECK(serve(tested->get(), keeps, 1, caching) == expected);
    CHECK(caching.num_cached_tokens > 0);  // what was preempted found itself
  }
}

TEST_CASE("several steps of a scheduler are begun before the first is committed, and the last alone is computed") {
  const auto where = make_backend();
  model_cache_config config = tiny(100);
  config.max_steps_in_flight = 2;
  model_cache cache(*where, config);
  scheduler requests(cache.manager(), {.max_steps_in_flight = 2});
  request asked;
  asked.prompt = to_ids({1, 2, 3});
  asked.max_new_tokens = 8;
  REQUIRE(requests.submit(asked).status == alloc_status::ok);
  model_step first = cache.begin_step(requests);
  const outputs of_first = run_layers(*where, first);
  model_step second = cache.begin_step(requests);
  REQUIRE(second.inputs().placeholders.size() == 1);
  CHECK(second.inputs().tokens[0] == token_id{-1});
  CHECK(first.append(0, {}, {}) == errc::failed_precondition);
  CHECK(refusal(errc::failed_precondition, [&] { (void)cache.begin_step(requests); }).find("2 steps are begun") !=
        std::string::npos);
  const sampled_token one{token_id{5}};
  CHECK(refusal(errc::invalid_argument, [&] { (void)second.commit({&one, 1}); }) != "accepted");
  (void)first.commit({&one, 1});
  (void)run_layers(*where, second);
  (void)second.commit({&one, 1});
  CHECK(requests.output(request_id{1}).size() == 2);
}

TEST_CASE("layers with windows of their own are planned by themselves, and agree with the oracle") {
  for (const tested_backend* tested : one_per_family(2)) {
    model_cache_config config = tiny(20);
    config.layer_windows = {2, 2};
    model_cache all_alike(tested->get(), config);
    CHECK(&all_alike.spec_of(0) == &all_alike.spec_of(1));
    config.layer_windows = {2, -1};
    model_cache cache(tested->get(), config);
    CHECK(cache.spec_of(0).window_left == 2);
    CHECK(cache.spec_of(1).window_left == -1);
    const std::vector<token_id> prompt = to_ids({1, 2, 3, 4, 5, 6, 7, 8, 9});
    model_step step = cache.begin_step({{cache.open(prompt).seq, prompt}});
    const outputs got = run_layers(tested->get(), step);
    // Each layer by the oracle of its own window, and not by the other's.
    const auto worst_in = [&](std::int32_t layer, std::int32_t visible) {
      const std::vector<float>& values = got[static_cast<std::size_t>(layer)];
      double worst = 0;
      const std::vector<float> q = rows_of(0, layer, num_q_heads, prompt, 0);
      const std::vector<float> k = rows_of(1, layer, num_kv_heads, prompt, 0),
                               v = rows_of(2, layer, num_kv_heads, prompt, 0);
      const reference::attention_reference expected =
          reference::attend({.num_q_heads = num_q_heads,
                             .num_kv_heads = num_kv_heads,
                             .qk_head_dim = head_dim,
                             .v_head_dim = head_dim,
                             .window_left = visible,
                             .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))},
                            {static_cast<std::int64_t>(prompt.size()), static_cast<std::int64_t>(prompt.size()),
                             q.data(), k.data(), v.data()});
      for (std::size_t i = 0; i < expected.out.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(values[i]) - expected.out[i]));
      }
      return worst;
    };
    CHECK(worst_in(0, 2) < bound);
    CHECK(worst_in(1, -1) < bound);
    CHECK(worst_in(0, -1) > 1e-2);
  }
}

TEST_CASE("a configuration is completed, and refused by name where its numbers do not fit together") {
  const auto where = make_backend();
  model_cache_config config = tiny(0);
  config.memory_bytes = 100'000;
  config.host_memory_bytes = 50'000;
  const model_cache cache(*where, config);
  const std::int64_t block_bytes = std::int64_t{num_layers} * 2 * block_size * num_kv_heads * head_dim * 4;
  CHECK(cache.config().cache.num_blocks == 100'000 / block_bytes);
  CHECK(cache.config().cache.num_host_blocks == 50'000 / block_bytes);
  CHECK(cache.config().attention.v_head_dim == head_dim);
  CHECK(cache.config().attention.block_size == block_size);
  CHECK(cache.engine().config().num_blocks == cache.manager().config().num_blocks);

  const auto sentence = [&](const std::function<void(model_cache_config&)>& change) {
    model_cache_config changed = tiny(10);
    change(changed);
    return refusal(errc::invalid_argument, [&] { const model_cache refused(*where, changed); });
  };
  const auto says = [&](const char* part, const std::function<void(model_cache_config&)>& change) {
    const std::string got = sentence(change);
    CHECK_MESSAGE(got.find(part) != std::string::npos, part, ": ", got);
  };
  says("num_layers", [](auto& c) { c.num_layers = 0; });
  says("given twice: 10 blocks and 5 bytes", [](auto& c) { c.memory_bytes = 5; });
  says("the cache of 5 bytes is less than one block", [](auto& c) { c.cache.num_blocks = 0, c.memory_bytes = 5; });
  says("the host's cache of 5 bytes", [](auto& c) { c.host_memory_bytes = 5; });
  says("memory_bytes", [](auto& c) { c.cache.num_blocks = 0, c.memory_bytes = -1; });
  says("attention.block_size is 8 and cache.block_size 4", [](auto& c) { c.attention.block_size = 8; });
  says("layer_windows has 3 entries", [](auto& c) { c.layer_windows = {1, 1, 1}; });
  says("window_left of a layer is 9; the cache keeps 6 tokens (cache.sliding_window)",
       [](auto& c) { c.cache.sliding_window = 6, c.attention.window_left = 9; });
  says("window_left of a layer is -1", [](auto& c) { c.cache.sliding_window = 6, c.layer_windows = {2, -1}; });
  says("sliding_window -2147483648 is not between 0 and", [](auto& c) { c.cache.sliding_window = INT32_MIN; });
  says("max_steps_in_flight", [](auto& c) { c.max_steps_in_flight = 0; });
  says("num_kv_heads", [](auto& c) { c.attention.num_kv_heads = 0; });
  model_cache_config slides = tiny(10);
  slides.cache.sliding_window = 6;
  CHECK(model_cache(*where, slides).spec_of(0).window_left == 5);
}

TEST_CASE("wrong use of a step is refused with a sentence, and changes nothing") {
  const auto where = make_backend();
  model_cache cache(*where, tiny(10, 4));
  const std::vector<token_id> tokens = to_ids({1, 2, 3, 4, 5});
  const seq_id seq = cache.open(tokens).seq, other = cache.open(to_ids({9})).seq, gone = cache.open(tokens).seq;
  cache.free(gone);
  const std::uint64_t before = cache.manager().digest();
  const auto refused = [&](errc code, const char* part, const std::function<void()>& call) {
    const std::string got = refusal(code, call);
    CHECK_MESSAGE(got.find(part) != std::string::npos, part, ": ", got);
    CHECK(cache.manager().digest() == before);
  };
  refused(errc::invalid_argument, "no rows", [&] { (void)cache.begin_step(std::span<const step_row>()); });
  refused(errc::invalid_argument, "row 1 of a step has 0 tokens", [&] {
    (void)cache.begin_step({{seq, tokens}, {other}});
  });
  refused(errc::invalid_argument, "has -3 tokens", [&] { (void)cache.begin_step({{seq, {}, -3}}); });
  refused(errc::invalid_argument, "5 tokens and num_tokens 4", [&] { (void)cache.begin_step({{seq, tokens, 4}}); });
  refused(errc::invalid_argument, "two rows", [&] { (void)cache.begin_step({{seq, tokens}, {seq, tokens}}); });
  refused(errc::not_found, "", [&] { (void)cache.begin_step({{seq, tokens}, {gone, tokens}}); });
  refused(errc::invalid_argument, "max_seq_len", [&] { (void)cache.begin_step({{seq, {}, 2'000'000}}); });
  kv_cache_manager foreign({.num_blocks = 4});
  scheduler of_foreign(foreign, {});
  refused(errc::invalid_argument, "another manager", [&] { (void)cache.begin_step(of_foreign); });
  model_step empty;
  CHECK(empty.attend(0, {}, {}, {}, {}) == errc::failed_precondition);
  refused(errc::failed_precondition, "the step is empty", [&] { empty.commit(); });

  // Blocks for 40 tokens: all rows or none.
  CHECK(cache.begin_step({{other, {}, 1}, {seq, {}, 60}}).status() == alloc_status::never);
  CHECK(cache.begin_step({{other, {}, 20}, {seq, {}, 25}}).status() == alloc_status::later);
  CHECK(cache.manager().num_tokens(other) == 1);
  CHECK(cache.manager().num_tokens(seq) == 5);

  model_step step = cache.begin_step({{seq, tokens}});
  const std::uint64_t begun = cache.manager().digest();
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { cache.free(seq); }, [&] { cache.truncate(seq, 0); },
                                          [&] {
                                            (void)cache.swap_out({&seq, 1});
                                          },
                                          [&] {
                                            (void)cache.begin_step({{other, {}, 1}});
                                          },
                                          [&] { (void)step.commit(std::span<const sampled_token>()); }}) {
    CHECK(refusal(errc::failed_precondition, call) != "accepted");
  }
  const std::int32_t numbers[] = {6, 0};
  CHECK(refusal(errc::invalid_argument, [&] { step.commit(std::span(numbers, 1)); }).find("6 tokens of row 0") !=
        std::string::npos);
  CHECK(refusal(errc::invalid_argument, [&] { step.commit(numbers); }).find("2 numbers") != std::string::npos);
  CHECK(cache.manager().digest() == begun);
  std::vector<float> rows(5 * num_q_heads * head_dim), out(rows.size());
  const auto q = dense_view(rows.data(), 5, num_q_heads, head_dim),
             kv = dense_view(rows.data(), 5, num_kv_heads, head_dim);
  const auto to = dense_view(out.data(), 5, num_q_heads, head_dim);
  CHECK(step.attend(num_layers, q, kv, kv, to) == errc::out_of_range);
  CHECK(step.attend(-1, q, kv, kv, to) == errc::out_of_range);
  CHECK(step.attention(num_layers, {.q = q, .out = to}) == errc::out_of_range);
  CHECK(step.attend(0, q, dense_view(rows.data(), 4, num_kv_heads, head_dim), kv, to) == errc::invalid_argument);
  attention_params params{.q = q, .out = to};
  params.soft_cap = -1;
  CHECK(step.attend(0, params, kv, kv) == errc::invalid_argument);
  const auto problem = find_problem(step.attention_plan_of(0), step.complete(0, params));
  REQUIRE(problem);
  CHECK(std::string(problem->what()).find("soft_cap is -1") != std::string::npos);
  rotate_append_params stored;
  stored.append.k = stored.append.v = dense_view(static_cast<const float*>(rows.data()), 5, num_kv_heads, head_dim);
  CHECK(step.rotate_append(0, stored) == errc::ok);
  CHECK(step.rotate_append(num_layers, stored) == errc::out_of_range);
  stored.append.k.num_tokens = stored.append.v.num_tokens = 4;
  CHECK(step.rotate_append(0, stored) == errc::invalid_argument);
  // A sequence that was changed underneath is noticed.
  cache.manager().free(seq);
  CHECK(refusal(errc::not_found, [&] { step.commit(); }).find("was changed on the manager") != std::string::npos);
  step = {};
  CHECK(cache.manager().check() == "");
}

TEST_CASE("a fork has the committed tokens of its first sequence, which goes on with what it has begun") {
  const auto where = make_backend();
  model_cache cache(*where, tiny(20));
  std::vector<token_id> prompt = to_ids({1, 2, 3, 4, 5, 6});
  const seq_id a = cache.open(prompt).seq;
  const seq_id b = cache.fork(a).seq;  // before anything is computed
  CHECK(cache.manager().num_tokens(b) == 0);
  std::vector<token_id> others = to_ids({9, 8, 7, 6, 5, 4, 3});
  {
    model_step step = cache.begin_step({{a, prompt}, {b, others}});
    const outputs got = run_layers(*where, step);
    CHECK(worst_of_row(got, 0, prompt, 6) < bound);
    CHECK(worst_of_row(got, 6, others, 7) < bound);
    const seq_id c = cache.fork(a).seq;  // in the middle of a step
    CHECK(cache.manager().num_tokens(c) == 0);
    cache.free(c);
    step.commit();
  }
  const seq_id d = cache.fork(a).seq;
  CHECK(cache.manager().num_tokens(d) == 6);
  const std::vector<token_id> x = to_ids({40}), y = to_ids({41});
  model_step step = cache.begin_step({{a, x}, {d, y}});
  CHECK(step.plan().copies.size() == 1);
  const outputs got = run_layers(*where, step);
  std::vector<token_id> of_a = prompt, of_d = prompt;
  of_a.push_back(x[0]), of_d.push_back(y[0]);
  CHECK(worst_of_row(got, 0, of_a, 1) < bound);
  CHECK(worst_of_row(got, 1, of_d, 1) < bound);
}

TEST_CASE("codes with scales are stored, swapped and attended to") {
  const auto where = make_backend();
  const std::vector<token_id> prompt = to_ids({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (const char* name : {"bf16", "i8-token", "i8"}) {
    CAPTURE(name);
    model_cache_config config = tiny(10, 10);
    config.attention.k_code = config.attention.v_code = parse_kv_code(name);
    if (config.attention.k_code.has_static_scales()) {
      CHECK(refusal(errc::invalid_argument, [&] { const model_cache refused(*where, config); }) != "accepted");
      config.k_scales = config.v_scales = std::vector<float>(num_layers, 4.0f / 127);
    }
    model_cache cache(*where, config);
    const seq_id seq = cache.open(prompt).seq;
    {
      model_step step = cache.begin_step({{seq, prompt}});
      const double worst = worst_of_row(run_layers(*where, step), 0, prompt, 10);
      CHECK(worst < 0.08);
      CHECK(worst > bound);
      step.commit();
    }
    const seq_id twin = cache.fork(seq).seq;
    REQUIRE(cache.swap_out({&twin, 1}) == alloc_status::ok);
    REQUIRE(cache.swap_in({&twin, 1}) == alloc_status::ok);
    const std::vector<token_id> next = to_ids({11});
    const auto decoded = [&](seq_id of) {
      model_step step = cache.begin_step({{of, next}});
      return run_layers(*where, step);
    };
    CHECK(decoded(seq) == decoded(twin));
  }
}

TEST_CASE("layers of groups are refused by name where their numbers do not fit together") {
  const auto where = make_backend();
  const auto says = [&](const char* part, const std::function<void(model_cache_config&)>& change) {
    model_cache_config changed = grouped(10);
    change(changed);
    const std::string got = refusal(errc::invalid_argument, [&] { const model_cache refused(*where, changed); });
    CHECK_MESSAGE(got.find(part) != std::string::npos, part, ": ", got);
  };
  says("cache.groups has 3 layer groups and groups 2", [](auto& c) { c.groups.pop_back(); });
  says("cache.groups has 0 layer groups and groups 3", [](auto& c) { c.cache.groups.clear(); });
  says("attention, layer_windows or scales", [](auto& c) { c.attention.num_q_heads = 4; });
  says("memory is 5 bytes", [](auto& c) { c.memory_bytes = 5; });
  says("layer 1 is in groups 0 and 1", [](auto& c) { c.groups[0].layers = {0, 1}; });
  says("layer 3 of 4 is in no group", [](auto& c) { c.num_layers = 4; });
  says("a layer of a group, 3 is not between 0 and 2", [](auto& c) { c.groups[0].layers = {3}; });
  says("groups[1] has no layers", [](auto& c) { c.groups[1].layers.clear(); });
  says("groups[2].state_bytes is 6", [](auto& c) { c.groups[2].state_bytes = 6; });
  says("groups[2] is of kind state and is given attention", [](auto& c) { c.groups[2].attention.num_q_heads = 1; });
  says("groups[2] is of kind state and is given attention", [](auto& c) { c.groups[2].layer_windows = {1}; });
  says("groups[0].state_bytes is 8", [](auto& c) { c.groups[0].state_bytes = 8; });
  says("groups[1].attention.block_size is 4 and cache.groups[1].block_size 2",
       [](auto& c) { c.groups[1].attention.block_size = 4; });
  says("groups[0].layer_windows has 2 entries", [](auto& c) { c.groups[0].layer_windows = {1, 1}; });
  says("tokens (cache.groups[1].window), so it must be", [](auto& c) { c.groups[1].layer_windows = {7}; });
  says("window_left of a layer is 9", [](auto& c) { c.groups[1].attention.window_left = 9; });

  model_cache cache(*where, grouped(10));
  CHECK(cache.group_of(1) == 1);
  CHECK(cache.spec_of(0).window_left == -1);
  CHECK(cache.spec_of(1).window_left == window - 1);
  CHECK(cache.engine(1).config().layout.block_size == 2);
  CHECK(cache.engine(2).config().num_blocks == 20);
  CHECK(cache.host_engine(2) == nullptr);

  const std::vector<token_id> tokens = to_ids({1, 2, 3, 4, 5});
  const open_result opened = cache.open(tokens);
  model_step step = cache.begin_step({{opened.seq, tokens}});
  CHECK(step.append(state_layer, {}, {}) == errc::unsupported);
  CHECK(step.attention(state_layer, {}) == errc::unsupported);
  CHECK(step.rotate_append(state_layer, {}) == errc::unsupported);
  CHECK(step.append(3, {}, {}) == errc::out_of_range);
  const auto problem = step.find_problem(state_layer, attention_params{}, {}, {});
  REQUIRE(problem.has_value());
  CHECK(std::string(problem->what()).find("layer 2 is of group 2, of kind state") != std::string::npos);
  const std::int32_t three = 3;  // of five tokens, of which the state after the third is not kept
  CHECK(refusal(errc::failed_precondition, [&] {
          step.commit({&three, 1});
        }).find("group 2 does not keep the state") != std::string::npos);
  step.commit();
  CHECK(cache.manager().num_committed(opened.seq) == 5);
}

TEST_CASE("a model without full attention has an index of texts as its first group, and finds its windows and states") {
  const auto where = make_backend();
  model_cache_config config = grouped(40);
  config.cache.prefix.enabled = true;
  config.num_layers = 2;
  config.groups[0] = {};
  config.groups[1].layers = {0};
  config.groups[2].layers = {1};
  model_cache cache(*where, config);
  const std::vector<token_id> prompt = to_ids({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  std::vector<token_id> rest = prompt;
  const open_result first = cache.open(prompt);
  while (!rest.empty()) {  // steps end where a state is to be left
    const std::int64_t held = cache.manager().num_tokens(first.seq) - cache.manager().num_committed(first.seq);
    const std::int64_t limit = held > 0 ? held : cache.manager().step_limit(first.seq);
    const auto count = std::min<std::int64_t>(limit, std::ssize(rest));
    cache.begin_step({{first.seq, std::span(rest).first(static_cast<std::size_t>(count))}}).commit();
    rest.erase(rest.begin(), rest.begin() + count);
  }
  CHECK(cache.open(prompt).num_cached_tokens == 8);
}

TEST_CASE("an audit misses no copies of a first group without layers, of which there is nothing to copy") {
  const auto where = make_backend();
  copy_audit audit;
  model_cache_config config;
  config.num_layers = 1;
  config.cache = {.block_size = 4, .max_sequences = 8, .max_seq_len = 64};
  config.cache.prefix.enabled = true;
  config.cache.audit = &audit;
  config.cache.groups = {
      {.kind = group_kind::full, .block_size = 4, .num_blocks = 32, .num_host_blocks = 32},
      {.kind = group_kind::window, .block_size = 4, .num_blocks = 32, .num_host_blocks = 32, .window = 8}};
  config.groups.resize(2);
  config.groups[1].layers = {0};
  config.groups[1].attention = {.num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = 8};
  model_cache cache(*where, config);
  const std::vector<token_id> prompt(6, token_id{3});
  const std::vector<token_id> next(1, token_id{4});
  const seq_id a = cache.open(prompt).seq;
  cache.begin_step({{a, prompt}}).commit();
  const seq_id b = cache.fork(a).seq;
  const auto decode = [&] {
    model_step step = cache.begin_step({{b, next}});
    REQUIRE(step.status() == alloc_status::ok);
    step.commit();
  };
  decode();  // copies the block that both write to
  CHECK(audit.num_outstanding() == 0);
  REQUIRE(cache.swap_out(std::span(&b, 1)) == alloc_status::ok);
  REQUIRE(cache.swap_in(std::span(&b, 1)) == alloc_status::ok);
  CHECK(audit.num_outstanding() == 0);
  decode(), decode();
  cache.free(b);
  cache.free(a);
  CHECK(audit.num_missed() == 0);
}
