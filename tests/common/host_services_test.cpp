// SPDX-License-Identifier: Apache-2.0
// What the host has to give, and what the library has to say: memory budgets and the log.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>
#include <bifolio/log.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/base/host_memory.hpp"
#include "common/base/log.hpp"

namespace {

using namespace bifolio;

constexpr std::int64_t gib = std::int64_t{1} << 30;

/// Files of a pretended Linux, gone at the end.
class pretended_linux {
 public:
  using contents = std::map<std::string, std::string>;
  explicit pretended_linux(const contents& files) {
    root_ = std::filesystem::path(BIFOLIO_TEST_SCRATCH_DIR) / "pretended_linux";
    std::filesystem::remove_all(root_);
    for (const auto& [path, text] : files) {
      const std::filesystem::path file = root_.string() + path;
      std::filesystem::create_directories(file.parent_path());
      std::ofstream(file) << text;
    }
  }
  ~pretended_linux() { std::filesystem::remove_all(root_); }
  [[nodiscard]] memory_amount amount() const { return detail::linux_memory_amount(root_.string()); }

 private:
  std::filesystem::path root_;
};

const char* const meminfo = "MemTotal:       16777216 kB\nMemFree: 1000 kB\nMemAvailable:   8388608 kB\n";  // 16, 8 GiB

TEST_CASE("without control groups the machine's available memory counts") {
  CHECK(pretended_linux(pretended_linux::contents{{"/proc/meminfo", meminfo}}).amount() ==
        memory_amount{16 * gib, 8 * gib});
  CHECK(pretended_linux(pretended_linux::contents{{"/proc/meminfo", meminfo}, {"/proc/self/cgroup", "0::/user\n"}})
            .amount() == memory_amount{16 * gib, 8 * gib});
  CHECK(pretended_linux(pretended_linux::contents{}).amount() == memory_amount{});
  CHECK(pretended_linux(pretended_linux::contents{{"/proc/meminfo", "MemTotal: many\n"}}).amount() == memory_amount{});
}

TEST_CASE("the narrowest of the control groups around the process counts, page cache as free") {
  std::map<std::string, std::string> files{{"/proc/meminfo", meminfo},
                                           {"/proc/self/cgroup", "0::/pod/container\n"},
                                           {"/sys/fs/cgroup/memory.max", "max\n"},
                                           {"/sys/fs/cgroup/pod/memory.max", std::to_string(4 * gib)},
                                           {"/sys/fs/cgroup/pod/memory.current", std::to_string(3 * gib)},
                                           {"/sys/fs/cgroup/pod/container/memory.max", "max\n"},
                                           {"/sys/fs/cgroup/pod/container/memory.current", "12345\n"}};
  CHECK(pretended_linux(files).amount() == memory_amount{4 * gib, gib});
  files["/sys/fs/cgroup/pod/memory.stat"] = "anon 1\ninactive_file " + std::to_string(2 * gib) + "\n";
  CHECK(pretended_linux(files).amount() == memory_amount{4 * gib, 3 * gib});
  files["/sys/fs/cgroup/pod/container/memory.max"] = std::to_string(gib);
  files["/sys/fs/cgroup/pod/container/memory.current"] = std::to_string(2 * gib);  // over its limit
  CHECK(pretended_linux(files).amount() == memory_amount{gib, 0});
}

TEST_CASE("in a container the path of the control group may be the host's; its root counts") {
  CHECK(pretended_linux(pretended_linux::contents{{"/proc/meminfo", meminfo},
                                                  {"/proc/self/cgroup", "0::/system.slice/of/the/host\n"},
                                                  {"/sys/fs/cgroup/memory.max", std::to_string(2 * gib)},
                                                  {"/sys/fs/cgroup/memory.current", std::to_string(gib / 2)}})
            .amount() == memory_amount{2 * gib, 3 * gib / 2});
}

TEST_CASE("the memory controller of version 1 counts, its no-limit does not") {
  std::map<std::string, std::string> files{
      {"/proc/meminfo", meminfo},
      {"/proc/self/cgroup", "9:name=systemd:/\n4:memory:/a\n0::/\n"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
      {"/sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(5 * gib)},
      {"/sys/fs/cgroup/memory/a/memory.limit_in_bytes", std::to_string(6 * gib)},
      {"/sys/fs/cgroup/memory/a/memory.usage_in_bytes", std::to_string(5 * gib)},
      {"/sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(gib) + "\n"}};
  CHECK(pretended_linux(files).amount() == memory_amount{6 * gib, 2 * gib});
}

TEST_CASE("a budget is what is free less the larger reserve") {
  const auto where = make_backend();
  const memory_amount amount = where->amount_of_memory();
  REQUIRE(amount.total_bytes > 0);
  CHECK(amount.free_bytes <= amount.total_bytes);
  CHECK(memory_budget(*where, {.fraction = 1}) == 0);
  CHECK(memory_budget(*where, {.fraction = 0, .bytes = INT64_MAX}) == 0);
  // Other programs take and give while this runs.
  const std::int64_t all = memory_budget(*where, {.fraction = 0});
  const std::int64_t most = memory_budget(*where, {.fraction = 0.25});
  CHECK(all > 0);
  CHECK(most <= all);
  for (const double fraction : {-0.01, 1.01, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_AS((void)memory_budget(*where, {.fraction = fraction}), error);
  }
  CHECK_THROWS_AS((void)memory_budget(*where, {.bytes = -1}), error);
}

struct heard {
  std::vector<std::pair<log_level, std::string>> messages;
  static void hear(void* user, log_level level, const char* message) {
    static_cast<heard*>(user)->messages.emplace_back(level, message);
  }
};

TEST_CASE("the log is silent until somebody listens, and after") {
  CHECK(!detail::is_logging());
  detail::log(log_level::error, "nobody hears this");
  heard first, second;
  set_log(&heard::hear, &first);
  const auto where = make_backend();
  detail::log(log_level::warning, "one");
  set_log(&heard::hear, &second);
  detail::log(log_level::info, "two");
  set_log(nullptr);
  detail::log(log_level::info, "three");
  REQUIRE(first.messages.size() == 2);
  CHECK(first.messages[0].first == log_level::info);
  CHECK(first.messages[0].second == "opened " + where->description());
  CHECK(first.messages[1] == std::pair{log_level::warning, std::string("one")});
  REQUIRE(second.messages.size() == 1);
  CHECK(second.messages[0] == std::pair{log_level::info, std::string("two")});
}

TEST_CASE("messages of several threads come one at a time") {
  heard all;
  set_log(&heard::hear, &all);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 250; ++i) detail::log(log_level::info, "again");
    });
  }
  for (std::thread& each : threads) each.join();
  set_log(nullptr);
  CHECK(all.messages.size() == 1000);
}

}  // namespace
