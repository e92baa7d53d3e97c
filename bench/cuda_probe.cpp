// SPDX-License-Identifier: Apache-2.0
#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>

#include "cuda_timing.hpp"
#include "probe.hpp"

namespace bifolio::bench {

void run_cuda_probe(std::int32_t device_index, std::int64_t mebibytes, report& out) {
  const auto opened = make_backend({device_type::cuda, device_index});
  out.fact("backend", opened->description());
  graph_timer timer(device_index);
  const memory_speeds speeds = measure_memory(timer, static_cast<std::size_t>(mebibytes) << 20, 0.2);
  out.add({{"device", to_string(opened->where())},
           {"mib", mebibytes},
           {"read_gb_s", speeds.read},
           {"set_gb_s", speeds.set},
           {"copy_gb_s", speeds.copy}});
}

}  // namespace bifolio::bench
