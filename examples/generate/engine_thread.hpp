// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The engine on a thread of its own, which does what other threads ask for between two steps. It never waits for a
/// reader: what a reader has not taken yet is kept, at most the tokens that its request allows.

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine.hpp"
#include "model_setup.hpp"
#include "text_stream.hpp"
#include "tools/common/pool_log.hpp"

namespace generate {

/// What one caller wants: texts that are numbered from 0 on by `text_request::first_sequence`.
struct text_order {
  std::vector<text_request> texts;
  std::vector<std::string> stops;
  std::size_t num_sequences = 0;  ///< samples of all texts
};

/// A part of a sequence's text. `letter`: as in `new_token`.
struct text_piece {
  std::size_t sequence = 0;
  std::string text;
  std::optional<ending> ended_by;  ///< with the last piece
  char letter = '#';
};

/// What has come of an order since the last time; the numbers count from its beginning.
struct text_news {
  std::vector<text_piece> pieces;
  bool is_done = false;  ///< nothing follows
  std::string failure;   ///< why it ended before its texts were complete
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_cached_tokens = 0;  ///< of these, found in the prefix cache
  std::int64_t num_new_tokens = 0;
};

/// Why an order was not taken.
struct order_refusal {
  enum class reason : std::uint8_t {
    never,    ///< the pool could never hold it
    full,     ///< too many run or wait
    ending,   ///< no more are taken
    stopped,  ///< the engine failed
  };
  reason why;
  std::string sentence;
};

class order_refused : public std::runtime_error {
 public:
  explicit order_refused(const order_refusal& refusal) : std::runtime_error(refusal.sentence), why(refusal.why) {}
  order_refusal::reason why;
};

class engine_thread;

/// An order on its way: the engine's thread fills it, a reader's empties it.
class open_order final : sequence_observer, public std::enable_shared_from_this<open_order> {
 public:
  open_order(const text_order& what, const tokenizer& tokens, engine_thread& whose);

  /// What came since the last time; waits for it up to `patience`. Thread-safe.
  [[nodiscard]] text_news take(std::chrono::milliseconds patience);

 private:
  friend class engine_thread;
  bool on_token(const new_token& token) override;
  void on_end(std::size_t sequence, ending how) override;
  void give(text_piece next);

  // Of the engine's thread alone.
  engine_thread& whose_;
  std::vector<std::string> stops_;
  std::vector<text_stream> texts_;  // by sequence
  std::vector<char> letters_;       // of those that have begun; else 0
  std::size_t num_open_;            // sequences
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  text_news news_;
};

/// Thread-safe. Calls that return something wait for the step that runs, but for `failure`.
class engine_thread {
 public:
  /// Model and cache are borrowed; at most `max_open` orders run or wait. Throws `bifolio::error`, `input_error`.
  engine_thread(const model_setup& on, cache_setup& cache, const engine_options& o, std::int32_t max_open);
  engine_thread(const engine_thread&) = delete;
  engine_thread& operator=(const engine_thread&) = delete;
  /// Ends what runs.
  ~engine_thread();

  /// Throws `order_refused`.
  [[nodiscard]] std::shared_ptr<open_order> submit(const text_order& what);
  /// Nobody wants it any more. Nothing for one that has ended.
  void cancel(const std::shared_ptr<open_order>& order);
  /// Takes no further orders. With `cut`, ends those that run too.
  void drain(bool cut);

  /// That run or wait.
  [[nodiscard]] std::int64_t num_open();
  /// The counters of the cache, of the scheduler and of orders, in Prometheus' text format.
  [[nodiscard]] std::string metrics();
  /// The pool as JSON (`tools::to_json`).
  [[nodiscard]] std::string frame();
  /// Empty, or why the engine stopped.
  [[nodiscard]] std::string failure();

 private:
  friend class open_order;
  void post(std::function<void()> work);
  template <class Work>
  auto ask(Work work);  // what it returns on the engine's thread; it does not throw
  void run();
  [[nodiscard]] std::optional<order_refusal> begin(open_order& order, const text_order& what);
  void end(const std::shared_ptr<open_order>& order, const std::string& why);
  void end_all(const std::string& why);
  void note_first_token(double seconds);
  [[nodiscard]] std::string format_metrics() const;

  static constexpr std::array<double, 8> first_token_bounds{0.005, 0.02, 0.05, 0.1, 0.5, 1, 5, 20};  // seconds

  // Of the engine's thread alone.
  const tokenizer& tokens_;
  std::int32_t max_open_;
  engine engine_;
  std::optional<tools::pool_log_writer> log_;
  std::set<std::shared_ptr<open_order>> open_;
  std::int64_t num_refused_ = 0, num_cancelled_ = 0;
  std::array<std::int64_t, first_token_bounds.size() + 1> first_token_counts_{};  // the last one without a bound
  double first_token_seconds_ = 0;                                                // their sum
  bool is_draining_ = false, is_ending_ = false;

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  std::vector<std::function<void()>> work_;
  std::string failure_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace generate
