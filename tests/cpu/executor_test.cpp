// SPDX-License-Identifier: Apache-2.0
// Executors where threads fail them: in a child made by fork(), which has none of its parent's threads, and where the
// system makes no more. An executable of its own: nothing here may have used a runtime before a case forks, and
// pthread_create is replaced.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/thread_executor.hpp"

namespace {

// Threads that may be made next to those that are there; negative: any number.
std::atomic<int> places{-1};

struct start_of_thread {
  void* (*function)(void*);
  void* argument;
};

void* run_in_place(void* opaque) {
  const start_of_thread start = *static_cast<start_of_thread*>(opaque);
  delete static_cast<start_of_thread*>(opaque);
  void* result = start.function(start.argument);
  if (places.load() >= 0) places.fetch_add(1);
  return result;
}

}  // namespace

// The program's definition goes before that of the C library, for the runtimes' shared libraries too.
extern "C" [[gnu::visibility("default")]] int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                                             void* (*function)(void*), void* argument) {
  using creation = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<creation>(dlsym(RTLD_NEXT, "pthread_create"));
  if (places.load() < 0) return real(thread, attributes, function, argument);
  int left = places.load();
  do {
    if (left == 0) return EAGAIN;
  } while (!places.compare_exchange_weak(left, left - 1));
  return real(thread, attributes, &run_in_place, new start_of_thread{function, argument});
}

namespace bifolio::test {
namespace {

/// Attention of many sequences that share one prompt, enough for several workers.
class work {
 public:
  explicit work(backend& where) : where_(&where), engine_(where, {1, num_blocks, layout()}) {
    for (std::size_t i = 0; i < keys_.size(); ++i) keys_[i] = static_cast<float>(i % 97) / 97;
    for (std::size_t i = 0; i < queries_.size(); ++i) queries_[i] = static_cast<float>(i % 89) / 89;
    for (std::int64_t i = 0; i < num_tokens; ++i) slots_.push_back(i);
    batch_.query_start_loc.push_back(0);
    batch_.block_table_stride = num_blocks;
    for (std::int32_t s = 0; s < num_seqs; ++s) {
      batch_.query_start_loc.push_back(s + 1);
      batch_.seq_lens.push_back(num_tokens);
      for (std::int32_t b = 0; b < num_blocks; ++b) batch_.block_tables.push_back(b);
      batch_.slot_mapping.push_back(-1);
    }
    for (float& value : out_) value = -1;
  }

  [[nodiscard]] errc append() noexcept {
    const auto rows = dense_view<const void>(keys_.data(), dtype::f32, num_tokens, num_heads, head_dim);
    return where_->append({engine_.layers()[0], rows, rows, slots_.data()});
  }
  void plan() {
    where_->plan_attention(plan_,
                           {.num_q_heads = num_heads,
                            .num_kv_heads = num_heads,
                            .qk_head_dim = head_dim,
                            .v_head_dim = head_dim,
                            .block_size = block_size},
                           batch_.view(), num_blocks);
  }
  [[nodiscard]] errc attend() noexcept {
    attention_params params;
    params.q = dense_view<const void>(queries_.data(), dtype::f32, num_seqs, num_heads, head_dim);
    params.out = dense_view<void>(out_.data(), dtype::f32, num_seqs, num_heads, head_dim);
    params.kv = engine_.layers()[0];
    params.batch = as_device_view(batch_.view());
    params.scale = 0.125F;
    return where_->attention(plan_, params);
  }
  [[nodiscard]] errc gather() noexcept {
    const auto rows = [](std::vector<float>& to) {
      return dense_view<void>(to.data(), dtype::f32, num_tokens, num_heads, head_dim);
    };
    return where_->gather({engine_.layers()[0], rows(gathered_k_), rows(gathered_v_), slots_.data()});
  }
  [[nodiscard]] errc merge() noexcept {
    const attention_state_view state{dense_view<const void>(queries_.data(), dtype::f32, num_seqs, num_heads, head_dim),
                                     lse_.data()};
    merge_params params{state, state, dense_view<void>(out_.data(), dtype::f32, num_seqs, num_heads, head_dim)};
    return where_->merge_states(params);
  }

  /// All of it; the codes of all calls are to be equal.
  [[nodiscard]] errc all() {
    const errc first = append();
    const bool same = attend() == first && gather() == first && merge() == first;
    return same ? first : errc::internal;
  }
  [[nodiscard]] const std::vector<float>& out() const noexcept { return out_; }

 private:
  static constexpr std::int32_t num_seqs = 64, num_heads = 8, head_dim = 64, block_size = 16, num_blocks = 64;
  static constexpr std::int32_t num_tokens = num_blocks * block_size;
  static kv_layout layout() { return make_layout(layout_kind::hnd, dtype::f32, num_heads, head_dim, block_size); }

  backend* where_;
  cache_engine engine_;
  std::vector<float> keys_ = std::vector<float>(std::size_t{num_tokens} * num_heads * head_dim);
  std::vector<float> gathered_k_ = keys_, gathered_v_ = keys_;
  std::vector<float> queries_ = std::vector<float>(std::size_t{num_seqs} * num_heads * head_dim);
  std::vector<float> out_ = queries_;
  std::vector<float> lse_ = std::vector<float>(std::size_t{num_seqs} * num_heads);
  std::vector<std::int64_t> slots_;
  step_batch batch_;
  attention_plan plan_;
};

std::unique_ptr<backend> open(executor_kind kind, std::int32_t num_threads = 3) {
  backend_options options;
  options.executor_choice = kind;
  options.num_threads = num_threads;
  return make_backend({}, options);
}

/// How a child ended.
constexpr int right = 0, wrong = 1, threw = 2, hangs = 3, died = 4;

/// Runs `what`, which returns `right` or `wrong`, in a child of this process, and gives it `limit` to end.
template <class What>
int in_child(std::chrono::milliseconds limit, What what) {
  std::fflush(nullptr);  // else a child that ends by exit() would write it again
  const pid_t child = fork();
  if (child == 0) {
    int how = threw;
    try {
      how = what();
    } catch (...) {
    }
    std::_Exit(how);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return hangs;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : died;
}

// Each case happens in a child of the test's process, which has used no runtime; a grandchild is what it is about.
constexpr std::chrono::seconds whole_case{60};
// The work takes milliseconds, also under a sanitizer; what waits for threads that are not there waits for ever.
constexpr std::chrono::seconds soon{5};

template <class Call>
bool refuses(Call call) {
  try {
    call();
  } catch (const error& refused) {
    return refused.code() == errc::failed_precondition && std::string(refused.what()).size() > 40;
  }
  return false;
}

bool is_built(executor_kind kind) {
  try {
    return make_executor(kind, 1) != nullptr;
  } catch (const error&) {
    return false;
  }
}

TEST_CASE("a threaded executor that was used before a fork refuses in the child, and serial works there") {
  for (const executor_kind kind : {executor_kind::openmp, executor_kind::tbb}) {
    if (!is_built(kind)) continue;
    CAPTURE(to_string(kind));
    CHECK(in_child(whole_case, [&] {
            auto where = open(kind);
            auto mine = std::make_unique<work>(*where);
            mine->plan();
            if (mine->all() != errc::ok) return wrong;
            if (in_child(soon, [&] {
                  if (where->health() != errc::failed_precondition) return wrong;
                  if (mine->all() != errc::failed_precondition) return wrong;
                  if (!refuses([&] { mine->plan(); })) return wrong;
                  if (!refuses([&] { (void)make_executor(kind); })) return wrong;
                  if (!refuses([&] { (void)open(kind); })) return wrong;
                  const std::vector<float> before = mine->out();
                  mine.reset();
                  where.reset();
                  const auto other = open(executor_kind::serial);
                  work again(*other);
                  again.plan();
                  return again.append() == errc::ok && again.attend() == errc::ok && again.merge() == errc::ok ? right
                                                                                                               : wrong;
                }) != right) {
              return wrong;
            }
            return mine->all() == errc::ok ? right : wrong;  // the parent goes on
          }) == right);
  }
}

TEST_CASE("the library's own threads were used before a fork: the child starts new ones, and so does its child") {
  CHECK(in_child(whole_case, [&] {
          auto where = open(executor_kind::threads);
          auto mine = std::make_unique<work>(*where);
          mine->plan();
          if (mine->all() != errc::ok) return wrong;
          const std::vector<float> expected = mine->out();
          const auto again = [&] {
            mine->plan();
            return mine->all() == errc::ok && mine->out() == expected && where->health() == errc::ok;
          };
          const auto grandchild = [&] {
            if (!again()) return wrong;
            mine.reset();
            where.reset();
            return right;
          };
          if (in_child(soon, [&] { return again() && in_child(soon, grandchild) == right ? right : wrong; }) != right) {
            return wrong;
          }
          return again() ? right : wrong;  // the parent goes on
        }) == right);
}

TEST_CASE("a fork while another thread computes leaves a child that computes") {
  CHECK(in_child(whole_case, [&] {
          const auto workers = make_executor(executor_kind::threads, 3);
          std::atomic<bool> ends{false};
          std::thread busy([&] {
            while (!ends.load())
              workers->run(
                  3, [](void*, std::int32_t) noexcept {}, nullptr);
          });
          int result = right;
          for (int i = 0; i < 20 && result == right; ++i) {
            result = in_child(soon, [&] {
              std::atomic<int> sum{0};
              const auto add = [](void* context, std::int32_t worker) noexcept {
                static_cast<std::atomic<int>*>(context)->fetch_add(1 << (4 * worker));
              };
              for (int call = 0; call < 5; ++call) workers->run(3, add, &sum);
              return sum.load() == 0x555 ? right : wrong;
            });
          }
          ends = true;
          busy.join();
          return result;
        }) == right);
}

TEST_CASE("a child that refuses can end by exit(), which runs the runtimes' destructors") {
  for (const executor_kind kind : {executor_kind::openmp, executor_kind::tbb}) {
    if (!is_built(kind)) continue;
    CAPTURE(to_string(kind));
    CHECK(in_child(whole_case, [&] {
            const auto where = open(kind);
            work mine(*where);
            mine.plan();
            if (mine.all() != errc::ok) return wrong;
            return in_child(soon, [&]() -> int { std::exit(mine.all() == errc::failed_precondition ? right : wrong); });
          }) == right);
  }
}

TEST_CASE("an executor that was made and not used before a fork works in the child, and refuses in the child's child") {
  for (const executor_kind kind :
       {executor_kind::threads, executor_kind::openmp, executor_kind::tbb, executor_kind::serial}) {
    if (!is_built(kind)) continue;
    CAPTURE(to_string(kind));
    CHECK(in_child(whole_case, [&] {
            const auto where = open(kind);
            work mine(*where);
            mine.plan();
            return in_child(whole_case, [&] {
              if (where->health() != errc::ok) return wrong;
              mine.plan();
              if (mine.all() != errc::ok) return wrong;
              const bool has_its_own = kind == executor_kind::serial || kind == executor_kind::threads;
              const errc expected = has_its_own ? errc::ok : errc::failed_precondition;
              return in_child(soon, [&] { return mine.all() == expected ? right : wrong; });
            });
          }) == right);
  }
}

TEST_CASE("workers handed to an executor whose threads are gone run on the caller") {
  for (const executor_kind kind : {executor_kind::openmp, executor_kind::tbb}) {
    if (!is_built(kind)) continue;
    CAPTURE(to_string(kind));
    CHECK(in_child(whole_case, [&] {
            const auto workers = make_executor(kind, 3);
            std::atomic<int> sum{0};
            const auto add = [](void* context, std::int32_t worker) noexcept {
              static_cast<std::atomic<int>*>(context)->fetch_add(1 << (4 * worker));
            };
            workers->run(3, add, &sum);
            return in_child(soon, [&] {
              workers->run(3, add, &sum);
              return sum.load() == 0x222 ? right : wrong;
            });
          }) == right);
  }
}

/// Starts its threads anew in each call, and says that it can do so in a child.
class surviving_executor final : public executor {
 public:
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return workers_.concurrency(); }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    workers_.run(num_workers, function, context);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "surviving"; }
  [[nodiscard]] errc health() const noexcept override { return errc::ok; }

 private:
  thread_executor workers_{3};
};

TEST_CASE("the caller's own executor is refused in a child unless it says that it works there") {
  thread_executor plain(3);
  surviving_executor surviving;
  for (executor* own : {static_cast<executor*>(&plain), static_cast<executor*>(&surviving)}) {
    CAPTURE(own->name());
    const errc expected = own == &plain ? errc::failed_precondition : errc::ok;
    CHECK(in_child(whole_case, [&] {
            backend_options options;
            options.own_executor = own;
            // Made in the process of the executor for the one, in its child for the other.
            const auto where = make_backend({}, options);
            if (where->health() != expected) return wrong;
            return right;
          }) == right);
    backend_options options;
    options.own_executor = own;
    const auto where = make_backend({}, options);
    work mine(*where);
    mine.plan();
    REQUIRE(mine.all() == errc::ok);
    CHECK(in_child(soon, [&] {
            if (where->health() != expected || mine.all() != expected) return wrong;
            return refuses([&] { mine.plan(); }) == (expected != errc::ok) ? right : wrong;
          }) == right);
  }
}

TEST_CASE("where the system makes no more threads, workers run on those there are") {
  for (const executor_kind kind : {executor_kind::threads, executor_kind::openmp, executor_kind::tbb}) {
    if (!is_built(kind)) continue;
    CAPTURE(to_string(kind));
    for (const int possible : {0, 1, 2, 3, 6}) {
      CAPTURE(possible);
      CHECK(in_child(whole_case, [&] {
              const auto serial = open(executor_kind::serial);
              work expected(*serial);
              expected.plan();
              if (expected.append() != errc::ok || expected.attend() != errc::ok) return wrong;
              const auto where = open(kind, 8);
              work mine(*where);
              mine.plan();
              places = possible;
              for (int round = 0; round < 3; ++round) {
                if (mine.append() != errc::ok || mine.attend() != errc::ok) return wrong;
                if (mine.out() != expected.out()) return wrong;
              }
              places = 100;  // and when it makes some again
              return mine.attend() == errc::ok && mine.out() == expected.out() ? right : wrong;
            }) == right);
    }
  }
}

}  // namespace
}  // namespace bifolio::test
