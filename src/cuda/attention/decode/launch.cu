// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::cuda {

const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept {
  const auto one_of = [head_dim](const decode_entry& d64, const decode_entry& d128, const decode_entry& d256) {
    return head_dim == 64 ? &d64 : head_dim == 128 ? &d128 : head_dim == 256 ? &d256 : nullptr;
  };
  switch (type) {
    case dtype::f32:
      return nullptr;
    case dtype::f16:
      return one_of(decode_f16_64, decode_f16_128, decode_f16_256);
    case dtype::bf16:
      return one_of(decode_bf16_64, decode_bf16_128, decode_bf16_256);
  }
  return nullptr;
}

bool decode_serves(const attention_kernel_args& args) noexcept {
  return args.bias == nullptr && args.k_strides == args.v_strides && has_aligned_rows(args);
}

cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args, const decode_entry& entry,
                          const std::int32_t* words, std::int32_t grid, bool dependent, cudaStream_t stream) noexcept {
  decode_args d = {};
  d.q = args.q;
  d.out = args.out;
  d.lse = args.lse;
  d.k = args.k;
  d.v = args.v;
  d.block_tables = args.block_tables;
  d.metadata = words;
  d.workspace = args.workspace;
  d.semaphores = args.counters;
  d.alibi_slopes = args.alibi_slopes;
  d.sinks = args.sinks;
  d.q_token_stride = args.q_token_stride;
  d.q_head_stride = args.q_head_stride;
  d.out_token_stride = args.out_token_stride;
  d.out_head_stride = args.out_head_stride;
  d.block_stride = args.k_strides.block;
  d.head_stride = args.k_strides.head;
  d.token_stride = args.k_strides.token;
  d.block_table_stride = args.block_table_stride;
  d.num_blocks = args.num_blocks;
  d.num_q_heads = args.num_q_heads;
  d.num_kv_heads = args.num_kv_heads;
  d.group_size = args.group_size;
  d.block_size = args.block_size;
  d.window_left = clamped_window(args.window_left);
  d.window_right = args.causal ? -1 : clamped_window(args.window_right);
  d.causal = args.causal;
  d.scale = args.scale;
  d.soft_cap = args.soft_cap;
  const auto kernel = has_options(args) ? entry.masked : entry.plain;
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch(api, kernel, dim3(static_cast<unsigned>(grid)), dim3(static_cast<unsigned>(entry.threads)),
                static_cast<std::size_t>(entry.shared_bytes), stream, dependent, d);
}

}  // namespace bifolio::cuda
