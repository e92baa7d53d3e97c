// SPDX-License-Identifier: Apache-2.0
// A build without CUDA refuses --device cuda in the words of make_backend.
#include <bifolio/backend.hpp>

#include "attention_setting.hpp"
#include "cache_ops_setting.hpp"
#include "probe.hpp"

namespace bifolio::bench {

void run_cuda_attention(const measuring_options& options, const std::vector<setting>&, report&) {
  (void)make_backend(parse_device(options.device));
}
void run_cuda_cache_ops(const cache_ops_options& options, report&) { (void)make_backend(parse_device(options.device)); }
void run_cuda_probe(std::int32_t device_index, std::int64_t, report&) {
  (void)make_backend({device_type::cuda, device_index});
}

}  // namespace bifolio::bench
