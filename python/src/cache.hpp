// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache of a model, its steps and its schedulers, as bifolio/_cache.py and _scheduler.py use them.

#include <bifolio/bifolio.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace bifolio_python {

/// What a refusal for lack of blocks is thrown as.
struct out_of_blocks {
  bifolio::alloc_status status;
};
void require_blocks(bifolio::alloc_status status);

using settings_dict = nb::typed<nb::dict, nb::str, nb::any>;  // keyword arguments that the Python side has checked

struct cache_settings {
  std::string device;
  std::int32_t num_threads = 0;
  double reserve = 0.1;  ///< of all memory, for others, where the size is not said
  bifolio::model_cache_config model{};
};

class core_cache {
 public:
  explicit core_cache(const cache_settings& settings);

  [[nodiscard]] bifolio::model_cache& cache() { return *cache_; }
  [[nodiscard]] bifolio::device where() const { return where_->where(); }
  [[nodiscard]] std::string description() const { return where_->description(); }
  /// Held while sequences change: a finalizer of a sequence may run in another thread while a long call has released
  /// the GIL. Its holder never waits for the GIL.
  [[nodiscard]] std::mutex& changes() { return changes_; }

 private:
  std::unique_ptr<bifolio::backend> where_;
  std::optional<bifolio::model_cache> cache_;
  std::mutex changes_;
};

/// Tokens that a sequence of a request has got: request, sample, tokens, why it ended ("length", "stop", or "").
using new_tokens = std::tuple<std::uint64_t, std::int32_t, std::vector<std::int32_t>, std::string>;

class core_scheduler {
 public:
  core_scheduler(core_cache& cache, const bifolio::scheduler_config& config)
      : cache_(&cache), requests_(cache.cache().manager(), config) {}

  [[nodiscard]] std::uint64_t submit(bifolio::request what, std::vector<std::int32_t> stop_tokens);
  [[nodiscard]] core_cache& cache() { return *cache_; }
  [[nodiscard]] bifolio::scheduler& requests() { return requests_; }
  /// Commits with one token for each that the plan wants, or one for each row to sample from, which is then the token
  /// of all samples that fork there.
  [[nodiscard]] std::vector<new_tokens> commit(bifolio::model_step& step, const std::vector<std::int32_t>& tokens);
  void forget(std::uint64_t request);

 private:
  core_cache* cache_;
  bifolio::scheduler requests_;
  std::mutex submissions_;
  std::map<std::uint64_t, std::vector<std::int32_t>> stop_tokens_;              // of requests that have any
  std::map<std::pair<std::uint64_t, std::int32_t>, std::size_t> num_reported_;  // tokens of a sample
  std::set<std::uint64_t> aborted_;  // requests since the last commit: they get no more tokens
};

class core_step {
 public:
  /// One row for each sequence: its next tokens, or with `counts` how many, unknown, tokens.
  core_step(core_cache& cache, const std::vector<std::pair<std::uint64_t, std::vector<std::int32_t>>>& given,
            const std::vector<std::int32_t>& counts, std::uintptr_t stream);
  /// The next step of a scheduler, empty when it has nothing to do.
  core_step(core_scheduler& requests, std::uintptr_t stream);

  [[nodiscard]] bool is_open() const { return static_cast<bool>(step_); }
  [[nodiscard]] bifolio::model_step& step();
  [[nodiscard]] nb::object attend(std::int32_t layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                                  std::optional<float> scale, float soft_cap, nb::handle sinks, nb::handle slopes,
                                  nb::handle lse);
  void commit(const std::optional<std::vector<std::int32_t>>& accepted);
  [[nodiscard]] std::vector<new_tokens> commit_sampled(const std::vector<std::int32_t>& tokens);
  void drop();

 private:
  core_cache* cache_;
  core_scheduler* requests_ = nullptr;
  bifolio::model_step step_;
};

[[nodiscard]] std::vector<bifolio::token_id> to_tokens(const std::vector<std::int32_t>& numbers);

void define_cache(nb::module_& module);
void define_scheduler(nb::module_& module);
void define_attention(nb::module_& module);
void define_replay(nb::module_& module);

}  // namespace bifolio_python
