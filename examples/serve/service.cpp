// SPDX-License-Identifier: Apache-2.0
#include "service.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <random>
#include <utility>

#include "tools/common/utf8.hpp"

namespace serve {
namespace {

using bifolio::request_id;
using bifolio::token_id;

generate::engine_config config_of(const generate::model_setup& on, const service_limits& limits) {
  return {.max_positions = on.max_positions,
          .max_batch_tokens = limits.max_batch_tokens,
          .max_running = limits.max_running,
          .prefix_caching = limits.prefix_caching,
          .preemption = limits.preemption,
          .deterministic = limits.deterministic,
          .watched = true};
}

/// Bytes at the end of `text` that may be the beginning of a stop string.
std::size_t possible_stop(std::string_view text, const std::vector<std::string>& stops) {
  std::size_t most = 0;
  for (const std::string& stop : stops) {
    for (std::size_t n = std::min(stop.size() - 1, text.size()); n > most; --n) {
      if (text.ends_with(std::string_view(stop).substr(0, n))) most = n;
    }
  }
  return most;
}

}  // namespace

call::call(completion_request what) : what_(std::move(what)) {
  num_open_ = what_.prompts.size() * static_cast<std::size_t>(what_.num_samples);
  texts_.resize(num_open_);
  for (std::size_t i = 0; i < num_open_; ++i) {
    texts_[i].before = what_.prompts[i / static_cast<std::size_t>(what_.num_samples)].back();
  }
  for (const auto& prompt : what_.prompts) news_.used.prompt_tokens += static_cast<std::int64_t>(prompt.size());
}

call::news call::take(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !news_.pieces.empty() || news_.is_done; });
  news taken = news_;
  news_.pieces.clear();
  return taken;
}

service::service(generate::model_setup& on, generate::cache_setup& cache, const service_limits& limits)
    : on_(on),
      limits_(limits),
      engine_(*on.placed.runner, cache.blocks, config_of(on, limits), *this, cache.host()),
      num_seeds_(std::random_device()()) {
  if (!limits.events.empty()) log_.emplace(limits.events);
  thread_ = std::thread([this] { run(); });
}

service::~service() {
  {
    const std::lock_guard lock(mutex_);
    is_draining_ = is_cut_ = is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<call> service::submit(completion_request what) {
  std::shared_ptr<call> one;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw api_error(500, failure_);
    if (is_draining_) throw api_error(503, "the server is shutting down");
    if (counts_.num_calls >= limits_.max_calls) {
      ++counts_.num_refused;
      throw api_error(429, fmt::format("{} requests run or wait, which is the most; try again later (--max-queue)",
                                       counts_.num_calls));
    }
    if (!what.seed) what.seed = num_seeds_++ * 0x9e3779b97f4a7c15u;
    one = std::make_shared<call>(std::move(what));
    arrived_.push_back(one);
    ++counts_.num_calls;
  }
  changed_.notify_all();
  std::unique_lock lock(one->mutex_);
  one->changed_.wait(lock, [&] { return one->state_ != call::state::queued; });
  if (one->state_ == call::state::refused) throw api_error(400, one->news_.failure);
  return one;
}

void service::cancel(const std::shared_ptr<call>& one) {
  {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(one);
  }
  changed_.notify_all();
}

void service::drain(bool cut) {
  {
    const std::lock_guard lock(mutex_);
    is_draining_ = true;
    is_cut_ = is_cut_ || cut;
  }
  changed_.notify_all();
}

service_counts service::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string service::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::string service::frame() {
  std::unique_lock lock(mutex_);
  const std::uint64_t wanted = ++num_wanted_frames_;
  changed_.notify_all();
  framed_.wait_for(lock, std::chrono::seconds(5), [&] { return num_frames_ >= wanted || !failure_.empty(); });
  return frame_;
}

void service::run() {
  bool is_busy = false;
  try {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return is_busy || !arrived_.empty() || !cancelled_.empty() || num_frames_ < num_wanted_frames_ || is_cut_ ||
               is_ending_;
      });
      take_orders(lock);
      if (is_ending_ && places_.empty()) return;
      lock.unlock();
      is_busy = engine_.step();
      lock.lock();
      counts_.cache = engine_.manager().stats();
      counts_.schedule = engine_.schedule().stats();
      if (const bifolio::prefix_cache* prefix = engine_.manager().prefix()) counts_.prefix = prefix->stats();
      const bool is_wanted = num_frames_ < num_wanted_frames_;
      const std::uint64_t wanted = num_wanted_frames_;
      lock.unlock();
      if (log_ && is_busy) log_->add(engine_.frame());
      if (!is_wanted) continue;
      std::string drawn = tools::to_json(engine_.frame());
      lock.lock();
      frame_ = std::move(drawn);
      num_frames_ = wanted;
      framed_.notify_all();
    }
  } catch (const std::exception& problem) {
    std::unique_lock lock(mutex_);
    failure_ = fmt::format("the engine stopped: {}", problem.what());
    std::vector<std::shared_ptr<call>> left = std::move(arrived_);
    lock.unlock();
    for (auto& [id, where] : places_) left.push_back(where.whose);
    for (const std::shared_ptr<call>& one : left) {
      const std::lock_guard held(one->mutex_);
      one->news_.failure = failure_;
      one->state_ = call::state::refused;
      one->news_.is_done = true;
      one->changed_.notify_all();
    }
    framed_.notify_all();
  }
}

/// What other threads asked for. Leaves the lock while the engine is called.
void service::take_orders(std::unique_lock<std::mutex>& lock) {
  const std::vector<std::shared_ptr<call>> arrived = std::exchange(arrived_, {});
  std::vector<std::shared_ptr<call>> cancelled = std::exchange(cancelled_, {});
  const bool is_cut = std::exchange(is_cut_, false);
  lock.unlock();
  for (const std::shared_ptr<call>& one : arrived) accept(one);
  if (is_cut) {
    for (const auto& [id, where] : places_) cancelled.push_back(where.whose);
  }
  for (const std::shared_ptr<call>& one : cancelled) {
    if (one->num_open_ == 0) continue;
    for (const request_id id : one->ids_) {
      engine_.abort(id);
      places_.erase(id);
    }
    one->num_open_ = 0;
    finish(*one, true);
  }
  lock.lock();
}

void service::accept(const std::shared_ptr<call>& one) {
  const completion_request& what = one->what_;
  std::string refusal;
  for (std::size_t p = 0; p < what.prompts.size() && refusal.empty(); ++p) {
    const std::size_t first = p * static_cast<std::size_t>(what.num_samples);
    bifolio::submit_result submitted;
    try {
      submitted = engine_.submit({.prompt = what.prompts[p],
                                  .max_new_tokens = what.max_tokens,
                                  .num_samples = what.num_samples,
                                  .how = what.how,
                                  .seed = *what.seed,
                                  .first_stream = first});
    } catch (const bifolio::error& problem) {
      refusal = problem.what();
      break;
    }
    if (submitted.status == bifolio::alloc_status::ok) {
      one->ids_.push_back(submitted.id);
      places_[submitted.id] = {one, first};
    } else {
      refusal = fmt::format("a prompt of {} tokens and {} texts of {} can never fit into the pool of {} blocks of {}",
                            what.prompts[p].size(), what.num_samples, what.max_tokens,
                            engine_.manager().config().num_blocks, engine_.manager().config().block_size);
    }
  }
  if (!refusal.empty()) {
    for (const request_id id : one->ids_) {
      engine_.abort(id);
      places_.erase(id);
    }
    one->num_open_ = 0;
    const std::lock_guard lock(mutex_);
    --counts_.num_calls;
  }
  const std::lock_guard lock(one->mutex_);
  one->state_ = refusal.empty() ? call::state::accepted : call::state::refused;
  one->news_.failure = refusal;
  one->changed_.notify_all();
}

/// All choices have ended.
void service::finish(call& one, bool cut) {
  {
    const std::lock_guard lock(mutex_);
    --counts_.num_calls;
    if (cut) ++counts_.num_cancelled;
  }
  const std::lock_guard lock(one.mutex_);
  one.news_.is_done = true;
  if (cut) one.news_.failure = "the request was ended before its texts were complete";
  one.changed_.notify_all();
}

/// Hands out what is held of a choice: all of it at its end, else what can be neither a stop nor half a character.
void service::give(call& one, std::size_t choice, bool is_end, const char* finish_reason) {
  call::text& text = one.texts_[choice];
  std::size_t ready = text.held.size();
  if (!is_end) {
    ready -= possible_stop(text.held, one.what_.stops);
    ready = tools::complete_utf8(std::string_view(text.held).substr(0, ready));
  }
  if (ready == 0 && !is_end) return;
  piece next{choice, text.held.substr(0, ready), finish_reason, text.letter};
  text.held.erase(0, ready);
  const std::lock_guard lock(one.mutex_);
  one.news_.pieces.push_back(std::move(next));
  one.changed_.notify_all();
}

void service::note_first_token(const call& one) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - one.begin_).count();
  const auto bound = std::ranges::lower_bound(first_token_bounds, seconds);
  const std::lock_guard lock(mutex_);
  ++counts_.first_token_counts[static_cast<std::size_t>(bound - first_token_bounds.begin())];
  counts_.first_token_seconds += seconds;
}

bool service::on_token(request_id request, std::int32_t sample, token_id token) {
  place& where = places_.at(request);
  call& one = *where.whose;
  const std::size_t choice = where.first_choice + static_cast<std::size_t>(sample);
  call::text& text = one.texts_[choice];
  const bool is_first = !std::exchange(text.has_begun, true);
  if (is_first && choice == 0) note_first_token(one);
  {
    const std::lock_guard lock(one.mutex_);
    ++one.news_.used.completion_tokens;
    if (is_first && sample == 0) one.news_.used.cached_tokens += engine_.num_cached_tokens(request);
  }
  text.letter = engine_.letter(request, sample);
  const std::vector<std::int32_t>& ends = on_.config().eos_ids;
  if (std::ranges::find(ends, to_index(token)) != ends.end()) return false;  // the model's own end; it has no text
  text.held += on_.model.tokens->decode(std::exchange(text.before, token), token);
  for (const std::string& stop : one.what_.stops) {
    const std::size_t found = text.held.find(stop);
    if (found == std::string::npos) continue;
    text.held.resize(found);
    text.is_cut = true;
  }
  if (!text.is_cut) give(one, choice, false, nullptr);
  return text.is_cut;
}

void service::on_end(request_id request, std::int32_t sample, generate::ending how) {
  const auto where = places_.find(request);
  call& one = *where->second.whose;
  const std::shared_ptr<call> kept = where->second.whose;
  const std::size_t choice = where->second.first_choice + static_cast<std::size_t>(sample);
  const bool is_length = how == generate::ending::steps && !one.texts_[choice].is_cut;
  give(one, choice, true, is_length ? "length" : "stop");
  if (--one.num_open_ == 0) {
    for (const request_id id : one.ids_) places_.erase(id);
    finish(one, false);
  }
}

}  // namespace serve
