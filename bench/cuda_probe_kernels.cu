// SPDX-License-Identifier: Apache-2.0
// Kernels that only read: what they load is combined and written only in a case that never is.
#include <cstdint>

#include "cuda_timing.hpp"

namespace bifolio::bench {
namespace {

constexpr int threads = 256;
constexpr int loads = 8;  // 16-byte loads under way per thread

__device__ __forceinline__ void keep(const uint4& all, void* sink) {
  if (all.x == 0x9e3779b9u && all.y == 0x7f4a7c15u && all.z == 0xbf58476du && all.w == 0x1ce4e5b9u) {
    *static_cast<uint4*>(sink) = all;
  }
}
__device__ __forceinline__ void combine(uint4& all, const uint4& value) {
  all.x ^= value.x;
  all.y ^= value.y;
  all.z ^= value.z;
  all.w ^= value.w;
}

__global__ void __launch_bounds__(threads, 8) read_all(const uint4* data, std::int64_t count, void* sink) {
  uint4 all = {};
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads * loads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads * loads + threadIdx.x; at < count;
       at += step) {
    uint4 held[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) held[i] = at + i * threads < count ? data[at + i * threads] : uint4{};
#pragma unroll
    for (int i = 0; i < loads; ++i) combine(all, held[i]);
  }
  keep(all, sink);
}

/// One chunk per warp at a time; the next chunk's address is loaded while the current one is read.
__global__ void __launch_bounds__(threads, 8)
    gather_all(const gather_chunk* chunks, std::int64_t num_chunks, void* sink) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (threads / 32);
  uint4 all = {};
  std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
  gather_chunk next = at < num_chunks ? chunks[at] : gather_chunk{};
  for (; at < num_chunks; at += step) {
    const gather_chunk chunk = next;
    if (at + step < num_chunks) next = chunks[at + step];
    const auto* const data = static_cast<const uint4*>(chunk.data);
    uint4 held[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) held[i] = lane + 32 * i < chunk.num_loads ? data[lane + 32 * i] : uint4{};
#pragma unroll
    for (int i = 0; i < loads; ++i) combine(all, held[i]);
  }
  keep(all, sink);
}
static_assert(gather_chunk_bytes == 32 * 16 * loads);

/// Keeps every SM busy for about 1.5 us.
__global__ void __launch_bounds__(1024, 2) fill_device() {
  const long long start = clock64();
  while (clock64() - start < 2600) {
  }
}

/// Of the current device; 0 when CUDA cannot say, and then the launch fails.
unsigned num_sms() {
  int device = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return static_cast<unsigned>(count);
}

}  // namespace

int launch_read(const void* data, std::size_t num_bytes, void* sink, void* stream) {
  read_all<<<num_sms() * 8, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), static_cast<std::int64_t>(num_bytes / 16), sink);
  return cudaGetLastError();
}

int launch_filler(void* stream) {
  fill_device<<<num_sms() * 2, 1024, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

int launch_gather(const gather_work& work, std::int32_t set, void* sink, void* stream) {
  gather_all<<<num_sms() * 8, threads, 0, static_cast<cudaStream_t>(stream)>>>(work.chunks + set * work.chunks_per_set,
                                                                               work.chunks_per_set, sink);
  return cudaGetLastError();
}

}  // namespace bifolio::bench
