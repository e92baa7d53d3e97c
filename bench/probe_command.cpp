// SPDX-License-Identifier: Apache-2.0
// bifolio_bench probe: the two limits that the other subcommands are measured against.
#include <bifolio/buffer.hpp>
#include <bifolio/device.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "checks.hpp"
#include "commands.hpp"
#include "machine.hpp"
#include "probe.hpp"

namespace bifolio::bench {
namespace {

struct probe_options {
  std::string device = "cpu";
  std::vector<std::int32_t> threads;
  std::string executor = "threads";
  double seconds = 1.0;
  std::int64_t mebibytes = 0;  // 0: as much as shows the memory
};

void run_probe(const probe_options& options, report& out) {
  require_min_time(options.seconds);
  if (options.mebibytes != 0) require_range("--mib", options.mebibytes, 64, 1 << 20);
  if (const device where = parse_device(options.device); where.type == device_type::cuda) {
    run_cuda_probe(where.index, options.mebibytes != 0 ? options.mebibytes : 512, out);
    return;
  }
  std::vector<std::int32_t> threads = options.threads;
  if (threads.empty()) {
    const auto all = static_cast<std::int32_t>(std::max(1u, std::thread::hardware_concurrency()));
    for (std::int32_t n = 1; n < all; n *= 2) threads.push_back(n);
    threads.push_back(all);
  }
  const std::int64_t bytes =
      options.mebibytes != 0 ? options.mebibytes << 20 : bytes_beyond_cache(std::int64_t{512} << 20);
  buffer memory(default_host_memory(), static_cast<std::size_t>(bytes));
  std::memset(memory.data(), 1, memory.num_bytes());
  for (const std::int32_t count : threads) {
    const auto workers = make_executor(count == 1 ? executor_kind::serial : parse_executor(options.executor), count);
    read_probe reads(*workers, memory.data(), memory.num_bytes());
    out.add({{"threads", std::int64_t{workers->concurrency()}},
             {"executor", std::string(workers->name())},
             {"read_gb_s", reads.gb_per_second(options.seconds)},
             {"fma_vectors", std::string(fma_vectors())},
             {"f32_gflop_s", fma_gflop_per_second(*workers, options.seconds)}});
  }
}

}  // namespace

void add_probe_command(CLI::App& program, command& run) {
  auto options = std::make_shared<probe_options>();
  CLI::App* sub = program.add_subcommand(
      "probe", "Sequential memory reads and float32 FMA peak, by thread count; on CUDA reads, writes and copies");
  sub->add_option("--device", options->device, "cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--threads", options->threads, "Thread counts, e.g. 1,2 (default: 1, 2, 4 … all)")->delimiter(',');
  sub->add_option("--executor", options->executor, "threads, openmp, tbb or serial")->capture_default_str();
  sub->add_option("--min-time", options->seconds, "Seconds per measurement")->capture_default_str();
  sub->add_option("--mib", options->mebibytes,
                  "Size of the buffer that is read (default: 512, and more on a CPU whose caches hold that)");
  sub->callback([options, &run] { run = [options](report& out) { run_probe(*options, out); }; });
}

}  // namespace bifolio::bench
