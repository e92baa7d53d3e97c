// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode on the x_split layout; docs/kernels/attention_cuda_x_split.md has the picture.

#include <cstddef>
#include <cstdint>

#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/epilogue.cuh"
#include "cuda/attention/x_split/mainloop.cuh"
#include "cuda/attention/x_split/products.cuh"
#include "cuda/attention/x_split/scheduler.cuh"
#include "cuda/attention/x_split/shape.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Grid: x over sequences, KV heads and tiles of their query heads; z over splits, which take partitions round-robin
/// (v2).
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::ctas_per_sm)
    x_split_decode(const __grid_constant__ x_split_args args) {
  extern __shared__ __align__(16) unsigned char x_split_shared[];
  using rows_type = x_split::epilogue<Shape>;
  device::grid_dependency_wait();
  device::grid_dependency_launch();
  const rows_type rows(args, x_split_shared);
  if (!rows.is_decode()) return;
  const bool is_split = args.num_splits > 1;
  std::int32_t partition = rows.first_partition();
  std::int32_t end_partition = rows.end_partition();
  if (is_split) {
    end_partition = min(end_partition, args.max_partitions);
    partition = static_cast<std::int32_t>(blockIdx.z);
    for (; partition < min(rows.first_partition(), end_partition); partition += args.num_splits) {  // before the window
      rows.write_empty_partial(partition);
    }
    if (partition >= end_partition) return;
  }

  x_split::row_totals<Shape> totals = rows.nothing();
  typename rows_type::table_entry entry = {0, 0};
  if (partition < end_partition) entry = rows.load_table_entry(partition);
  rows.load_queries();
  for (int parity = 0; partition < end_partition; partition += args.num_splits, parity ^= 1) {
    rows.publish_offset(entry, parity);
    if (partition + args.num_splits < end_partition) entry = rows.load_table_entry(partition + args.num_splits);
    const x_split::key_range visible = rows.visible_part(partition);
    __syncthreads();  // queries and offsets are written; all warps are done with the previous partition
    rows.compute_logits(visible, parity);
    typename rows_type::value_batch loaded;
    rows.load_values(visible, parity, rows_type::first_value_batch(visible), loaded);
    __syncthreads();
    rows.compute_weights(visible);
    __syncthreads();
    const x_split::row_values<Shape> own = rows.compute_values(visible, parity, loaded);
    if (is_split) {
      rows.write_partial(partition, own);
    } else {
      rows.combine(totals, own);
    }
  }
  if (!is_split) rows.write_rows(totals);
}

template <class Shape>
[[nodiscard]] cudaError_t launch_x_split(const runtime_api& api, const x_split_args& args, bool dependent,
                                         cudaStream_t stream) noexcept {
  const attention_kernel_args& call = args.call;
  const std::int64_t ctas = static_cast<std::int64_t>(call.num_seqs) * call.num_kv_heads *
                            x_split_head_tiles(call.group_size, Shape::product::on_tensor_cores);
  if (ctas > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(ctas), 1, static_cast<unsigned>(args.num_splits));
  const std::size_t shared_bytes =
      Shape::make_shared_layout(call.group_size < Shape::max_heads ? call.group_size : Shape::max_heads).bytes;
  constexpr std::size_t without_opt_in = 48 << 10;
  if (shared_bytes > without_opt_in) {
    const cudaError_t status =
        api.func_set_attribute(reinterpret_cast<const void*>(x_split_decode<Shape>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  return launch(api, x_split_decode<Shape>, grid, dim3(Shape::threads), shared_bytes, stream, dependent, args);
}

template <class T, template <class> class ProductOf>
[[nodiscard]] cudaError_t launch_x_split_dims(const runtime_api& api, const x_split_args& args, bool dependent,
                                              cudaStream_t stream) noexcept {
  switch (args.call.head_dim) {
    case 64:
      return launch_x_split<x_split_shape<T, 64, ProductOf>>(api, args, dependent, stream);
    case 128:
      return launch_x_split<x_split_shape<T, 128, ProductOf>>(api, args, dependent, stream);
    case 256:
      return launch_x_split<x_split_shape<T, 256, ProductOf>>(api, args, dependent, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

/// A type's launcher: tensor cores where the call's types allow.
template <class T>
[[nodiscard]] cudaError_t launch_x_split_16_bit(const runtime_api& api, const x_split_args& args, bool dependent,
                                                cudaStream_t stream) noexcept {
  const attention_kernel_args& call = args.call;
  if (suit_tensor_cores(call.q_type, call.kv_type, call.out_type)) {
    return launch_x_split_dims<T, tensor_core_product>(api, args, dependent, stream);
  }
  return launch_x_split_dims<T, float_product>(api, args, dependent, stream);
}

}  // namespace bifolio::inline v0_2::cuda
