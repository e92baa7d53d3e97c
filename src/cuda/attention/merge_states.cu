// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "cuda/attention/merge_states.hpp"
#include "cuda/device/convert.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int warps = 4;

struct tensor {
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  dtype type;
};

struct merge_args {
  tensor a;
  tensor b;
  tensor out;
  const float* a_lse;  ///< [num_tokens, num_heads]
  const float* b_lse;
  float* out_lse;  ///< optional
  std::int64_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
};

/// One warp a row (token, head). The row's LSEs are in registers of every lane before any lane writes, so that the
/// outputs may be the inputs.
/// Same: all three tensors have type T and rows of whole 16-byte packs; otherwise T is ignored.
template <class T, bool Same>
__global__ void __launch_bounds__(32 * warps, 8) merge_rows(const __grid_constant__ merge_args args) {
  const int lane = threadIdx.x;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.y; row < args.num_rows;
       row += static_cast<std::int64_t>(gridDim.x) * warps) {
    const std::int64_t token = row / args.num_heads;
    const auto head = static_cast<std::int32_t>(row - token * args.num_heads);
    const auto w = attn::weights_of<device_math>(args.a_lse[row], args.b_lse[row]);
    __syncwarp();
    const auto offset = [&](const tensor& t) { return token * t.token_stride + head * t.head_stride; };
    if constexpr (Same) {
      constexpr int count = 16 / sizeof(T);
      using pack = packed<T, count>;
      const auto* const a = reinterpret_cast<const pack*>(static_cast<const T*>(args.a.data) + offset(args.a));
      const auto* const b = reinterpret_cast<const pack*>(static_cast<const T*>(args.b.data) + offset(args.b));
      auto* const out = reinterpret_cast<pack*>(static_cast<T*>(const_cast<void*>(args.out.data)) + offset(args.out));
      for (int i = lane; i < args.head_dim / count; i += 32) {
        const pack x = a[i];
        const pack y = b[i];
        pack z;
#pragma unroll
        for (int e = 0; e < count; ++e)
          z.values[e] = narrow<T>(attn::merge_value<device_math>(w, widen(x.values[e]), widen(y.values[e])));
        out[i] = z;
      }
    } else {
      for (int i = lane; i < args.head_dim; i += 32) {
        const float x = load_as_float(args.a.data, offset(args.a) + i, args.a.type);
        const float y = load_as_float(args.b.data, offset(args.b) + i, args.b.type);
        store_from_float(const_cast<void*>(args.out.data), offset(args.out) + i, args.out.type,
                         attn::merge_value<device_math>(w, x, y));
      }
    }
    if (lane == 0 && args.out_lse != nullptr) args.out_lse[row] = w.lse;
  }
}

bool whole_packs(const tensor& t, std::int32_t head_dim) noexcept {
  const auto count = static_cast<std::int64_t>(16 / size_of(t.type));
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.token_stride % count == 0 &&
         t.head_stride % count == 0 && head_dim % count == 0;
}

}  // namespace

cudaError_t launch_merge_states(const runtime_api& api, const merge_params& params, cudaStream_t stream) noexcept {
  const auto tensor_of = [](const auto& view) {
    return tensor{view.data, view.token_stride, view.head_stride, view.type};
  };
  merge_args args;
  args.a = tensor_of(params.a.out);
  args.b = tensor_of(params.b.out);
  args.out = tensor_of(params.out);
  args.a_lse = params.a.lse;
  args.b_lse = params.b.lse;
  args.out_lse = params.lse;
  args.num_heads = params.out.num_heads;
  args.head_dim = params.out.head_dim;
  args.num_rows = params.out.num_tokens * args.num_heads;
  if (args.num_rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>((args.num_rows + warps - 1) / warps, 1 << 20)));
  const dim3 block(32, warps);
  const bool same = args.a.type == args.out.type && args.b.type == args.out.type &&
                    whole_packs(args.a, args.head_dim) && whole_packs(args.b, args.head_dim) &&
                    whole_packs(args.out, args.head_dim);
  if (!same) return launch(api, merge_rows<float, false>, grid, block, 0, stream, false, args);
  return visit_tensor_dtype(args.out.type, [&](auto traits) {
    using element = typename decltype(traits)::storage;
    return launch(api, merge_rows<element, true>, grid, block, 0, stream, false, args);
  });
}

}  // namespace bifolio::inline v0_2::cuda
