// SPDX-License-Identifier: Apache-2.0
#include "engine_thread.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/metrics.hpp>
#include <future>
#include <iterator>
#include <new>
#include <utility>

namespace generate {
namespace {

using clock = std::chrono::steady_clock;

engine_config config_of(const engine_options& o, std::int32_t max_positions) {
  engine_config config = engine_config_of(o, max_positions);
  config.watched = true;  // `frame` may be called
  return config;
}

}  // namespace

template <class Work>
auto engine_thread::ask(Work work) {
  const auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Work>()>>(std::move(work));
  auto result = task->get_future();
  post([task] { (*task)(); });
  return result.get();
}

open_order::open_order(const text_order& what, const tokenizer& tokens, engine_thread& whose)
    : whose_(whose), stops_(what.stops), letters_(what.num_sequences, 0), num_open_(what.num_sequences) {
  for (const text_request& text : what.texts) {
    texts_.insert(texts_.end(), static_cast<std::size_t>(text.num_samples), {tokens, text.prompt.back(), stops_});
    news_.num_prompt_tokens += std::ssize(text.prompt);
  }
}

text_news open_order::take(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !news_.pieces.empty() || news_.is_done; });
  std::vector<text_piece> pieces = std::exchange(news_.pieces, {});
  text_news taken = news_;  // counts and the failure are told again each time
  taken.pieces = std::move(pieces);
  return taken;
}

bool open_order::on_token(const new_token& token) {
  const bool is_first = std::exchange(letters_[token.sequence], token.letter) == 0;
  if (is_first && token.sequence == 0) {
    whose_.note_first_token(std::chrono::duration<double>(clock::now() - begin_).count());
  }
  {
    const std::lock_guard lock(mutex_);
    ++news_.num_new_tokens;
    if (is_first && token.sample == 0) news_.num_cached_tokens += token.num_cached_tokens;
  }
  if (token.is_end) return false;
  text_stream& text = texts_[token.sequence];
  if (text.add(token.id)) return true;  // its end follows
  if (std::string shown = text.take(); !shown.empty()) {
    give({token.sequence, std::move(shown), {}, token.letter});
  }
  return false;
}

void open_order::on_end(std::size_t sequence, ending how) {
  text_stream& text = texts_[sequence];
  give({sequence, text.take_rest(), text.is_stopped() ? ending::stopped : how, letters_[sequence]});
  if (--num_open_ == 0) whose_.end(shared_from_this(), {});
}

void open_order::give(text_piece next) {
  const std::lock_guard lock(mutex_);
  news_.pieces.push_back(std::move(next));
  changed_.notify_all();
}

engine_thread::engine_thread(const model_setup& on, cache_setup& cache, const engine_options& o, std::int32_t max_open)
    : tokens_(*on.model.tokens),
      max_open_(max_open),
      engine_(*on.placed.runner, *on.placed.where, cache.shape, config_of(o, on.max_positions)) {
  if (!o.events.empty()) log_.emplace(o.events);
  thread_ = std::thread([this] { run(); });
}

engine_thread::~engine_thread() {
  drain(true);
  post([this] { is_ending_ = true; });
  thread_.join();
}

std::shared_ptr<open_order> engine_thread::submit(const text_order& what) {
  const auto order = std::make_shared<open_order>(what, tokens_, *this);
  // As a value: a thread sanitizer does not know how libstdc++ counts the owners of an exception.
  if (const auto refusal = ask([&] { return begin(*order, what); })) throw order_refused(*refusal);
  return order;
}

void engine_thread::cancel(const std::shared_ptr<open_order>& order) {
  post([this, order] {
    if (open_.contains(order)) end(order, "the client left");
  });
}

void engine_thread::drain(bool cut) {
  post([this, cut] {
    is_draining_ = true;
    if (cut) end_all("the request was ended before its texts were complete");
  });
}

std::int64_t engine_thread::num_open() {
  return ask([this] { return std::ssize(open_); });
}

std::string engine_thread::metrics() {
  return ask([this] { return format_metrics(); });
}

std::string engine_thread::frame() {
  return ask([this] { return tools::to_json(engine_.frame()); });
}

std::string engine_thread::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void engine_thread::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void engine_thread::run() {
  bool is_busy = false;
  while (!is_ending_) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_busy || !work_.empty(); });
    const std::vector<std::function<void()>> work = std::exchange(work_, {});
    lock.unlock();
    for (const std::function<void()>& each : work) each();
    try {
      is_busy = failure().empty() && engine_.step();
      if (log_ && is_busy) log_->add(engine_.frame());
    } catch (const std::exception& problem) {
      const std::string why = fmt::format("the engine stopped: {}", problem.what());
      lock.lock();
      failure_ = why;
      lock.unlock();
      is_busy = false;
      end_all(why);
    }
  }
}

std::optional<order_refusal> engine_thread::begin(open_order& order, const text_order& what) {
  using reason = order_refusal::reason;
  if (std::string why = failure(); !why.empty()) return order_refusal{reason::stopped, why};
  if (is_draining_) return order_refusal{reason::ending, "no further requests are taken"};
  if (std::ssize(open_) >= max_open_) {
    ++num_refused_;
    return order_refusal{reason::full,
                         fmt::format("{} requests run or wait, which is the most; try again later", open_.size())};
  }
  try {
    for (const text_request& text : what.texts) engine_.submit(text, order);
  } catch (const std::bad_alloc&) {
    engine_.abort(order);
    return order_refusal{reason::full, "there is no memory for the request now; try again later"};
  } catch (const std::exception& problem) {
    engine_.abort(order);
    return order_refusal{reason::never, problem.what()};
  }
  open_.insert(order.shared_from_this());
  return {};
}

/// `why` is empty when all its texts are complete.
void engine_thread::end(const std::shared_ptr<open_order>& order, const std::string& why) {
  if (!why.empty()) ++num_cancelled_;
  engine_.abort(*order);
  open_.erase(order);
  const std::lock_guard lock(order->mutex_);
  order->news_.is_done = true;
  order->news_.failure = why;
  order->changed_.notify_all();
}

void engine_thread::end_all(const std::string& why) {
  for (const std::shared_ptr<open_order>& order : std::set(open_)) end(order, why);
}

void engine_thread::note_first_token(double seconds) {
  const auto bound = std::ranges::lower_bound(first_token_bounds, seconds);
  ++first_token_counts_[static_cast<std::size_t>(bound - first_token_bounds.begin())];
  first_token_seconds_ += seconds;
}

std::string engine_thread::format_metrics() const {
  std::string text = bifolio::prometheus_text(engine_.counts());
  const auto out = std::back_inserter(text);
  const auto add = [&out](const char* name, const char* type, const char* what, std::int64_t value) {
    fmt::format_to(out, "# HELP bifolio_{0} {1}\n# TYPE bifolio_{0} {2}\nbifolio_{0} {3}\n", name, what, type, value);
  };
  add("requests_open", "gauge", "Requests that run or wait.", std::ssize(open_));
  add("requests_refused_total", "counter", "Requests that were too many.", num_refused_);
  add("requests_cancelled_total", "counter", "Requests that ended before their texts were complete.", num_cancelled_);
  text +=
      "# HELP bifolio_time_to_first_token_seconds From a request's arrival to its first token.\n"
      "# TYPE bifolio_time_to_first_token_seconds histogram\n";
  std::int64_t below = 0;
  for (std::size_t i = 0; i < first_token_counts_.size(); ++i) {
    below += first_token_counts_[i];
    const std::string bound = i < first_token_bounds.size() ? fmt::format("{}", first_token_bounds[i]) : "+Inf";
    fmt::format_to(out, "bifolio_time_to_first_token_seconds_bucket{{le=\"{}\"}} {}\n", bound, below);
  }
  fmt::format_to(out, "bifolio_time_to_first_token_seconds_sum {}\nbifolio_time_to_first_token_seconds_count {}\n",
                 first_token_seconds_, below);
  return text;
}

}  // namespace generate
