// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The engine on a thread of its own, between requests that come from any thread and the texts that go back. It never
/// waits for a reader: what a reader has not taken yet is kept, at most the tokens that its request allows.

#include <array>
#include <bifolio/stats.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api.hpp"
#include "engine.hpp"
#include "model_setup.hpp"
#include "tools/common/pool_log.hpp"

namespace serve {

/// One request on its way. Thread-safe.
class call {
 public:
  explicit call(completion_request what);

  struct news {
    std::vector<piece> pieces;
    bool is_done = false;  ///< nothing follows
    usage used;
    std::string failure;  ///< why the engine could not go on; empty: it could
  };
  /// What came since the last time; waits for it up to `patience`.
  [[nodiscard]] news take(std::chrono::milliseconds patience);
  [[nodiscard]] const completion_request& what() const noexcept { return what_; }

 private:
  friend class service;
  enum class state : std::uint8_t { queued, accepted, refused };
  struct text {  // one choice, of the engine's thread alone
    bifolio::token_id before{};
    std::string held;  // not given out yet: it may be the beginning of a stop string or of a character
    bool has_begun = false;
    bool is_cut = false;  // at a stop string
    char letter = '#';
  };

  completion_request what_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::vector<bifolio::request_id> ids_;  // of the engine, one per prompt; the engine's thread alone
  std::vector<text> texts_;
  std::size_t num_open_;  // choices

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  state state_ = state::queued;
  news news_;
};

struct service_limits {
  std::int32_t max_calls = 64;  ///< that run or wait
  std::int32_t max_running = 64;
  bool prefix_caching = true;
  bifolio::preemption_mode preemption = bifolio::preemption_mode::automatic;
  bool deterministic = false;
  std::int32_t max_batch_tokens = 256;
  std::filesystem::path events;  ///< a log of the pool; empty: none
};

struct service_counts {
  bifolio::cache_stats cache;
  bifolio::prefix_stats prefix;
  bifolio::scheduler_stats schedule;
  std::int64_t num_calls = 0;  ///< open now
  std::int64_t num_refused = 0;
  std::int64_t num_cancelled = 0;
  std::array<std::int64_t, 9> first_token_counts{};  ///< by `first_token_bounds`, the last one without a bound
  double first_token_seconds = 0;                    ///< their sum
};
inline constexpr std::array<double, 8> first_token_bounds{0.005, 0.02, 0.05, 0.1, 0.5, 1, 5, 20};

class service final : generate::engine_observer {
 public:
  /// Both are borrowed. Throws `bifolio::error`, `input_error`.
  service(generate::model_setup& on, generate::cache_setup& cache, const service_limits& limits);
  service(const service&) = delete;
  service& operator=(const service&) = delete;
  /// Ends what runs.
  ~service() override;

  /// Throws `api_error`: 429 when the queue is full, 503 while it ends, 400 for what the pool can never hold, 500.
  [[nodiscard]] std::shared_ptr<call> submit(completion_request what);
  /// Nobody wants it any more. Nothing for one that has ended.
  void cancel(const std::shared_ptr<call>& one);
  /// Takes no further requests. With `cut`, ends those that run too.
  void drain(bool cut);

  [[nodiscard]] service_counts counts();
  /// The pool as it is now, as JSON (`tools::to_json`).
  [[nodiscard]] std::string frame();
  /// Empty, or why the engine stopped.
  [[nodiscard]] std::string failure();

 private:
  void run();
  void take_orders(std::unique_lock<std::mutex>& lock);
  void accept(const std::shared_ptr<call>& one);
  void finish(call& one, bool cut);
  void give(call& one, std::size_t choice, bool is_end, const char* finish_reason);
  void note_first_token(const call& one);
  bool on_token(bifolio::request_id request, std::int32_t sample, bifolio::token_id token) override;
  void on_end(bifolio::request_id request, std::int32_t sample, generate::ending how) override;

  struct place {  // of a request of the engine
    std::shared_ptr<call> whose;
    std::size_t first_choice = 0;
  };

  generate::model_setup& on_;
  service_limits limits_;
  generate::engine engine_;
  std::optional<tools::pool_log_writer> log_;
  std::map<bifolio::request_id, place> places_;  // the engine's thread alone

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_, framed_;
  std::vector<std::shared_ptr<call>> arrived_, cancelled_;
  service_counts counts_;
  std::string frame_, failure_;
  std::uint64_t num_frames_ = 0, num_wanted_frames_ = 0, num_seeds_ = 0;
  bool is_draining_ = false, is_cut_ = false, is_ending_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace serve
