// SPDX-License-Identifier: Apache-2.0
// The library's own threads: each worker once, whoever calls and from where; short calls on a machine that is busy with
// other things; and how many of them there are by affinity and control groups.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/usable_cpus.hpp"
#include "support/busy_processes.hpp"
#include "support/skip.hpp"

namespace bifolio::test {
namespace {

/// Counts how often each worker ran.
class tally {
 public:
  explicit tally(std::int32_t num_workers) : counts_(static_cast<std::size_t>(num_workers)) {}
  void run_on(executor& workers) {
    const auto count = [](void* context, std::int32_t worker) noexcept {
      static_cast<tally*>(context)->counts_[static_cast<std::size_t>(worker)].fetch_add(1, std::memory_order_relaxed);
    };
    workers.run(static_cast<std::int32_t>(counts_.size()), count, this);
    ++runs_;
  }
  [[nodiscard]] bool is_right() const {
    return std::all_of(counts_.begin(), counts_.end(), [&](const auto& count) { return count.load() == runs_; });
  }

 private:
  std::vector<std::atomic<std::int32_t>> counts_;
  std::int32_t runs_ = 0;
};

TEST_CASE("every worker runs exactly once in every call, for all numbers of threads and workers") {
  for (const std::int32_t threads : {1, 2, 3, 5, 64, 65, 130}) {
    const auto workers = make_executor(executor_kind::threads, threads);
    REQUIRE(workers->concurrency() == threads);
    for (std::int32_t count : {1, 2, 3, 4, 63, 64, 65, 129, 130}) {
      if (count > threads) continue;
      CAPTURE(threads);
      CAPTURE(count);
      tally seen(count);
      for (int call = 0; call < 20; ++call) seen.run_on(*workers);
      CHECK(seen.is_right());
    }
  }
}

TEST_CASE("executors read back from their names") {
  for (const executor_kind kind :
       {executor_kind::threads, executor_kind::serial, executor_kind::openmp, executor_kind::tbb}) {
    CHECK(parse_executor(to_string(kind)) == kind);
  }
}

TEST_CASE("two workers run on two threads, where the system gives a second one") {
  const auto workers = make_executor(executor_kind::threads, 2);
  std::array<std::thread::id, 2> where;
  const auto note = [](void* context, std::int32_t worker) noexcept {
    (*static_cast<std::array<std::thread::id, 2>*>(context))[static_cast<std::size_t>(worker)] =
        std::this_thread::get_id();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // so that the other one has the time to take its worker
  };
  bool apart = false;
  for (int n = 0; n < 400 && !apart; ++n) {
    workers->run(2, note, &where);
    apart = where[0] != where[1];
  }
  CHECK(apart);
}

TEST_CASE("an executor of the caller's that has no workers is refused") {
  class idle final : public executor {
   public:
    [[nodiscard]] std::int32_t concurrency() const noexcept override { return 0; }
    void run(std::int32_t, worker_function, void*) noexcept override {}
    [[nodiscard]] std::string_view name() const noexcept override { return "idle"; }
  } none;
  std::string sentence;
  try {
    (void)make_backend({}, {.own_executor = &none});
  } catch (const error& refused) {
    CHECK(refused.code() == errc::invalid_argument);
    sentence = refused.what();
  }
  CHECK(sentence.find("concurrency() is 0; it must be at least 1") != std::string::npos);
}

TEST_CASE("calls from several threads at once, and calls within a worker, each run their own workers") {
  const auto workers = make_executor(executor_kind::threads, 4);
  std::vector<tally> seen;
  for (std::int32_t i = 0; i < 9; ++i) seen.emplace_back(4);
  std::vector<std::thread> callers;
  for (tally& mine : seen) {
    callers.emplace_back([&] {
      for (int call = 0; call < 200; ++call) mine.run_on(*workers);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const tally& mine : seen) CHECK(mine.is_right());

  struct nested {
    executor& workers;
    std::atomic<int> right{0};
  } outer{*workers, {}};
  workers->run(
      4,
      [](void* context, std::int32_t) noexcept {
        auto& mine = *static_cast<nested*>(context);
        tally inner(3);
        inner.run_on(mine.workers);
        if (inner.is_right()) mine.right.fetch_add(1);
      },
      &outer);
  CHECK(outer.right.load() == 4);
}

TEST_CASE("what a worker writes is there when the call returns, after pauses in which the threads fell asleep") {
  const auto workers = make_executor(executor_kind::threads, 3);
  for (int call = 0; call < 30; ++call) {
    std::vector<std::int32_t> written(3, -1);  // plain memory: a race detector sees whether the call orders it
    workers->run(
        3,
        [](void* context, std::int32_t worker) noexcept {
          (*static_cast<std::vector<std::int32_t>*>(context))[static_cast<std::size_t>(worker)] = worker;
        },
        &written);
    CHECK(written == std::vector<std::int32_t>{0, 1, 2});
    std::this_thread::sleep_for(std::chrono::milliseconds(call % 3));
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

struct loop {
  std::atomic<std::int32_t> items{0};
  static constexpr std::int32_t num_items = 12;
  static void work(void* context, std::int32_t) noexcept {
    auto& mine = *static_cast<loop*>(context);
    while (mine.items.fetch_add(1) < num_items) {
      volatile std::uint32_t turns = 0;
      while (turns < 20'000) turns = turns + 1;
    }
  }
};

double median_call(executor& workers) {
  std::vector<double> seconds;
  for (int call = 0; call < 120; ++call) {
    loop all;
    const auto begin = std::chrono::steady_clock::now();
    workers.run(workers.concurrency(), &loop::work, &all);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + 60, seconds.end());
  return seconds[60];
}

TEST_CASE("on a machine that is busy with other programs most calls take no longer than on the caller's thread alone") {
  // A runtime whose workers wait for one another by spinning takes 100 times as long here: a call then lasts until each
  // of its threads has had a turn among the others.
  const std::int32_t cpus = cpu::num_allowed_cpus();
  if (cpus < 2 || cpus > 32) return skip("wants 2 to 32 processors");
  const auto threads = make_executor(executor_kind::threads, std::min(cpus, 4));
  const auto serial = make_executor(executor_kind::serial);
  (void)median_call(*threads);
  const busy_processes others(8 * cpus);
  if (others.size() < 8 * cpus) return skip("no room for other processes");
  const double alone = median_call(*serial);
  const double shared = median_call(*threads);
  CAPTURE(alone);
  CAPTURE(shared);
  CHECK(shared < 4 * alone);
}

#endif

/// A folder with files as /proc and /sys have them.
class fake_root {
 public:
  fake_root() {
    std::string name = (std::filesystem::temp_directory_path() / "bifolio_cgroup_XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~fake_root() { std::filesystem::remove_all(path_); }
  fake_root(const fake_root&) = delete;
  fake_root& operator=(const fake_root&) = delete;
  fake_root& write(const std::string& file, const std::string& text) {
    const std::filesystem::path at = path_ + file;
    std::filesystem::create_directories(at.parent_path());
    std::ofstream(at) << text;
    return *this;
  }
  [[nodiscard]] double cpus() const { return cpu::cgroup_cpus(path_); }

 private:
  std::string path_;
};

constexpr const char* v2_mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* v1_mounts =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n";

TEST_CASE("the quota of a control group is read from version 2, at any level") {
  fake_root root;
  root.write("/proc/self/mountinfo", v2_mount).write("/proc/self/cgroup", "0::/system/service\n");
  CHECK(std::isinf(root.cpus()));
  root.write("/sys/fs/cgroup/system/service/cpu.max", "max 100000\n");
  CHECK(std::isinf(root.cpus()));
  root.write("/sys/fs/cgroup/system/service/cpu.max", "150000 100000\n");
  CHECK(root.cpus() == doctest::Approx(1.5));
  root.write("/sys/fs/cgroup/system/cpu.max", "50000 100000\n");
  CHECK(root.cpus() == doctest::Approx(0.5));
}

TEST_CASE("the quota of a container that sees its own group at the mount point is found") {
  fake_root root;
  root.write("/proc/self/mountinfo", v2_mount)
      .write("/proc/self/cgroup", "0::/../../kubepods/pod1\n")
      .write("/sys/fs/cgroup/cpu.max", "800000 100000\n");
  CHECK(root.cpus() == doctest::Approx(8));
}

TEST_CASE("the quota of a control group is read from version 1, whose folder a container has mounted") {
  fake_root root;
  root.write("/proc/self/mountinfo", v1_mounts)
      .write("/proc/self/cgroup", "9:cpuset:/other\n7:cpu,cpuacct:/docker/abc\n0::/\n")
      .write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
      .write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  CHECK(std::isinf(root.cpus()));
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
  CHECK(root.cpus() == doctest::Approx(2.5));
}

TEST_CASE("files that say nothing sensible set no quota") {
  fake_root root;
  CHECK(std::isinf(root.cpus()));
  root.write("/proc/self/mountinfo", v2_mount).write("/proc/self/cgroup", "nonsense\n0::/\n");
  for (const char* text : {"", "max", "100000", "0 100000", "-5 100000", "100000 0", "a b"}) {
    CAPTURE(text);
    root.write("/sys/fs/cgroup/cpu.max", text);
    CHECK(std::isinf(root.cpus()));
  }
}

TEST_CASE("an executor of no stated size has as many workers as processors may be used") {
  CHECK(cpu::num_usable_cpus() >= 1);
  CHECK(cpu::num_usable_cpus() <= cpu::num_allowed_cpus());
  CHECK(make_executor(executor_kind::threads)->concurrency() == cpu::num_usable_cpus());
}

}  // namespace
}  // namespace bifolio::test
