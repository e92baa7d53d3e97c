// SPDX-License-Identifier: Apache-2.0
#include "cpu/executors.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

class serial_executor final : public executor {
 public:
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return 1; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "serial"; }
  [[nodiscard]] errc health() const noexcept override { return errc::ok; }
};

}  // namespace

std::unique_ptr<executor> make_serial_executor() { return std::make_unique<serial_executor>(); }

}  // namespace bifolio::inline v0_2::cpu
