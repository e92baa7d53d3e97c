// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The combine of split-KV partial results, in the order of the splits; many are combined in two levels, nodes of
/// decode_combine_fan_in splits, then the nodes. Every CTA that shares an output tile counts up the tile's semaphore
/// after its partial result is written. The one that completes the count combines all of them; or, where each CTA has
/// one split and nothing else and the plan says so, all wait for the count and combine a slice of the output each,
/// which saves all but one round of loads. No bit depends on who combines.
///
/// Such a wait is bounded, because CTAs of a grid need not be on the device at the same time: a CTA that has waited for
/// the plan's `patience` leaves its slice to the one that arrives last.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/decode/output.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::decode {

inline constexpr int combine_batch = 16;  // partial results that a thread loads at once

using tree::combination;

/// A node or the root, to which leaves or nodes are added one after another.
struct tree_state {
  float max = -INFINITY;
  float sum = 0;
  float4 out = make_float4(0, 0, 0, 0);

  __device__ __forceinline__ void add(float m, float l, const float4& o) {
    const combination both(max, m);
    max = both.max;
    sum = both.of(sum, l);
    out = both.of(out, o);
  }
};

template <class T, class Shape, class Scheduler>
class split_combine {
  using S = Shape;
  using rows_type = output_rows<T, Shape>;

 public:
  __device__ __forceinline__ split_combine(const decode_args& args, const Scheduler& scheduler, char* shared)
      : a_(args),
        scheduler_(scheduler),
        partials_(args.workspace, scheduler.workspace_partials()),
        semaphores_(args.counters),
        flag_(reinterpret_cast<int*>(shared + S::shared.flag)),
        nodes_(reinterpret_cast<node_result*>(shared + S::shared.stages)) {}

  /// Called by every CTA of the output tile after it has written its partial result. Leaves shared memory free.
  __device__ __forceinline__ void arrive(const work_tile& w, const decode_seq& s, const rows_type& rows) {
    if constexpr (Scheduler::has_fixed_tree) {
      if (scheduler_.cuts_parts()) {
        const decode_part& part = scheduler_.part_of(w);
        if (is_last(semaphores_ + part.first_cta, part.num_ctas)) {
          combine_pieces(rows, part.first_partial, part.num_partials);
        }
        return;
      }
    }
    const output_splits o = scheduler_.splits_of(w, s);
    if constexpr (!Scheduler::has_fixed_tree) {
      if (scheduler_.combines_together()) return combine_together(rows, o, scheduler_.own_split(w, o));
    }
    const int missing = scheduler_.missing_splits(s);
    if (scheduler_.combines_in_one_level(o, missing)) {
      if (is_last(semaphores_ + o.first, o.count)) {
        const auto partial = [&](int i) { return scheduler_.split_partial(o, i); };
        if (o.count <= 8) {
          combine<2, 8>(rows, o.count, -1, partial);
        } else {
          combine<1, combine_batch>(rows, o.count, -1, partial);
        }
      }
      return;
    }
    const int own = missing + scheduler_.own_split(w, o);
    const auto begin_of = [&](int node) { return max(node * decode_combine_fan_in - missing, 0); };
    const auto end_of = [&](int node) { return min((node + 1) * decode_combine_fan_in - missing, o.count); };
    const int node = own / decode_combine_fan_in;
    const int begin = begin_of(node);
    const int node_splits = end_of(node) - begin;
    if (node_splits > 1) {
      if (!is_last(semaphores_ + scheduler_.num_partials() + o.first + begin * o.step, node_splits)) return;
      combine<1, combine_batch>(rows, node_splits, node_partial(o, begin, begin + node_splits),
                                [&](int i) { return scheduler_.split_partial(o, begin + i); });
    }
    const int num_nodes = (missing + o.count + decode_combine_fan_in - 1) / decode_combine_fan_in;
    if (is_last(semaphores_ + o.first, num_nodes)) {
      combine<1, combine_batch>(rows, num_nodes, -1, [&](int i) { return node_partial(o, begin_of(i), end_of(i)); });
    }
  }

 private:
  // Of a part of an output tile's splits.
  struct node_result {
    float4 out;
    float max, sum;
  };
  // What a CTA finds that waits for the other CTAs of its output tile.
  enum : int { slice_is_own, slice_is_left, arrived_last };

  // The semaphore counts the arrivals of the CTAs and then their departures, and is zero again after the last. A CTA
  // that leaves before sets its own word of the second range. It takes that back where all have arrived meanwhile, if
  // the last to arrive has not taken it first, who then combines the slice and departs for the CTA as well. All changes
  // of that word are exchanges, so that either the one who leaves sees all arrivals or the last to arrive the word.
  __device__ void combine_together(const rows_type& rows, const output_splits& o, int own) {
    std::uint32_t* const semaphore = semaphores_ + o.first;
    std::uint32_t* const left = semaphores_ + scheduler_.num_partials() + o.first;
    const auto count = static_cast<std::uint32_t>(o.count);
    const auto depart = [&] {
      if (threadIdx.x == 0) device::atomic_increment(semaphore, 2 * count - 1);
    };
    __syncthreads();
    if (threadIdx.x == 0) {
      int found = slice_is_own;
      if (device::atomic_increment_acq_rel(semaphore, 2 * count - 1) == count - 1) {
        found = arrived_last;
      } else if (!all_arrive(semaphore, count)) {
        static_cast<void>(device::atomic_exchange_acq_rel(left + own, 1));
        if (device::load_acquire(semaphore) < count || device::atomic_exchange_acq_rel(left + own, 0) == 0) {
          found = slice_is_left;
        }
      }
      *flag_ = found;
    }
    __syncthreads();
    const int found = *flag_;
    if (found == slice_is_left) return;
    const auto take = [&](std::uint32_t slice) {
      return slice < count ? device::atomic_exchange_acq_rel(left + slice, 0) : 0;
    };
    std::uint32_t is_left = found == arrived_last ? take(threadIdx.x) : 0;
    // The own slice, then those that were left.
    std::uint32_t next = 0;
    for (int slice = own;;) {
      combine_slice(rows, o, slice);
      depart();
      if (found != arrived_last) return;
      bool found_one = false;
      while (!found_one && next < count) {
        const std::uint32_t thread = next % S::threads;
        if (thread == 0) {
          if (next > 0) is_left = take(next + threadIdx.x);
          if (!__syncthreads_or(is_left != 0)) {
            next += S::threads;
            continue;
          }
        }
        slice = static_cast<int>(next++);
        found_one = __syncthreads_or(threadIdx.x == thread && is_left != 0) != 0;
      }
      if (!found_one) return;
    }
  }

  [[nodiscard]] __device__ bool all_arrive(const std::uint32_t* semaphore, std::uint32_t count) const {
    const std::int64_t begin = clock64();
    do {
      if (device::load_relaxed(semaphore) >= count) return device::load_acquire(semaphore) >= count;
    } while (clock64() - begin < scheduler_.patience());
    return false;
  }

  // Combines the partial results of an output tile for one of as many slices of its rows and columns as it has splits.
  // A thread has four columns of a node, or of all splits where there are few; the nodes meet in the stage that the
  // last tile left free.
  __device__ void combine_slice(const rows_type& rows, const output_splits& o, int slice) {
    constexpr int quads = S::head_dim / 4;
    const bool in_nodes = !scheduler_.combines_in_one_level(o, 0);
    const int num_nodes = in_nodes ? (o.count + decode_combine_fan_in - 1) / decode_combine_fan_in : 1;
    const int splits_per_node = in_nodes ? decode_combine_fan_in : o.count;
    const int num_tasks = rows.num_rows() * quads;
    const int first_task = num_tasks * slice / o.count;
    const int own_tasks = num_tasks * (slice + 1) / o.count - first_task;
    for (int item = static_cast<int>(threadIdx.x); item < own_tasks * num_nodes; item += S::threads) {
      const int node = item / own_tasks;
      const int task = first_task + item - node * own_tasks;
      const int row = task / quads;
      const int column = task % quads * 4;
      if (column >= S::row_dims(a_)) continue;
      const int begin = node * splits_per_node;
      const int splits = min(splits_per_node, o.count - begin);
      float m = -INFINITY;
      float l = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int base = 0; base < splits; base += combine_batch) {
        float2 part[combine_batch];
        float4 out[combine_batch];
#pragma unroll
        for (int i = 0; i < combine_batch; ++i) {  // all loads of a batch are issued before the first is used
          part[i] = make_float2(-INFINITY, 0);
          out[i] = make_float4(0, 0, 0, 0);
          if (base + i < splits) {
            const std::int64_t at =
                static_cast<std::int64_t>(scheduler_.split_partial(o, begin + base + i)) * decode_tile_rows + row;
            part[i] = __ldcg(partials_.sums + at);
            out[i] = __ldcg(reinterpret_cast<const float4*>(partials_.out + at * S::head_dim + column));
          }
        }
        combine_loaded<combine_batch>(part, out, m, l, sum);
      }
      if (in_nodes) {
        nodes_[item] = {sum, m, l};
      } else {
        write(rows, -1, row, column, m, l, sum);
      }
    }
    if (!in_nodes) return;
    __syncthreads();
    for (int own_task = static_cast<int>(threadIdx.x); own_task < own_tasks; own_task += S::threads) {
      const int row = (first_task + own_task) / quads;
      const int column = (first_task + own_task) % quads * 4;
      if (column >= S::row_dims(a_)) continue;
      float m = -INFINITY;
      float l = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int base = 0; base < num_nodes; base += combine_batch) {
        float2 part[combine_batch];
        float4 out[combine_batch];
#pragma unroll
        for (int i = 0; i < combine_batch; ++i) {
          const node_result& node = nodes_[min(base + i, num_nodes - 1) * own_tasks + own_task];
          const bool is_one = base + i < num_nodes;
          part[i] = is_one ? make_float2(node.max, node.sum) : make_float2(-INFINITY, 0);
          out[i] = is_one ? node.out : make_float4(0, 0, 0, 0);
        }
        combine_loaded<combine_batch>(part, out, m, l, sum);
      }
      write(rows, -1, row, column, m, l, sum);
    }
    __syncthreads();  // another slice may follow
  }

  // Counts this CTA's arrival after all that its threads have written. True in the CTA that completes `expected`, whose
  // threads then see what the others wrote.
  __device__ bool is_last(std::uint32_t* semaphore, int expected) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool last = device::atomic_add_acq_rel(semaphore, 1u) == static_cast<std::uint32_t>(expected - 1);
      if (last) *semaphore = 0;
      *flag_ = last;
    }
    __syncthreads();
    return *flag_ != 0;
  }

  // The result of splits begin … end − 1: a partial result of its own, unless that is one split.
  [[nodiscard]] __device__ __forceinline__ int node_partial(const output_splits& o, int begin, int end) const {
    if (begin + 1 == end) return scheduler_.split_partial(o, begin);
    return scheduler_.node_partials() + o.first + begin * o.step;
  }

  // Combines `count` partial results in order of index, into the partial result `to` or, if that is negative, into the
  // output. A thread has `Tasks` × `Batch` loads in flight; no bit depends on that.
  template <int Tasks, int Batch, class PartialOf>
  __device__ void combine(const rows_type& rows, int count, int to, const PartialOf& partial_of) {
    constexpr int quads = S::head_dim / 4;
    const int num_tasks = rows.num_rows() * quads;
    for (int first = static_cast<int>(threadIdx.x); first < num_tasks; first += Tasks * S::threads) {
      float m[Tasks];
      float l[Tasks];
      float4 sum[Tasks];
#pragma unroll
      for (int t = 0; t < Tasks; ++t) {
        m[t] = -INFINITY;
        l[t] = 0;
        sum[t] = make_float4(0, 0, 0, 0);
      }
      for (int base = 0; base < count; base += Batch) {
        float2 part[Tasks][Batch];
        float4 o[Tasks][Batch];
#pragma unroll
        for (int i = 0; i < Batch; ++i) {  // all loads of a batch are issued before the first is used
#pragma unroll
          for (int t = 0; t < Tasks; ++t) {
            const int task = first + t * S::threads;
            part[t][i] = make_float2(-INFINITY, 0);
            o[t][i] = make_float4(0, 0, 0, 0);
            if (base + i < count && task < num_tasks && task % quads * 4 < S::row_dims(a_)) {
              const std::int64_t at = static_cast<std::int64_t>(partial_of(base + i)) * decode_tile_rows + task / quads;
              part[t][i] = __ldcg(partials_.sums + at);
              o[t][i] = __ldcg(reinterpret_cast<const float4*>(partials_.out + at * S::head_dim + task % quads * 4));
            }
          }
        }
#pragma unroll
        for (int t = 0; t < Tasks; ++t) combine_loaded<Batch>(part[t], o[t], m[t], l[t], sum[t]);
      }
#pragma unroll
      for (int t = 0; t < Tasks; ++t) {
        const int task = first + t * S::threads;
        if (task < num_tasks && task % quads * 4 < S::row_dims(a_))
          write(rows, to, task / quads, task % quads * 4, m[t], l[t], sum[t]);
      }
    }
  }

  // Combines the pieces of an output tile in their order: those of a node, then the nodes.
  __device__ void combine_pieces(const rows_type& rows, int first_partial, int count) {
    constexpr int quads = S::head_dim / 4;
    for (int task = static_cast<int>(threadIdx.x); task < rows.num_rows() * quads; task += S::threads) {
      const int row = task / quads;
      const int column = task % quads * 4;
      if (column >= S::row_dims(a_)) continue;
      tree_state node;
      tree_state root;
      int current = -1;
      for (int base = 0; base < count; base += combine_batch) {
        float2 part[combine_batch];
        float4 o[combine_batch];
        int nodes[combine_batch];
#pragma unroll
        for (int i = 0; i < combine_batch; ++i) {  // all loads of a batch are issued before the first is used
          part[i] = make_float2(-INFINITY, 0);
          o[i] = make_float4(0, 0, 0, 0);
          nodes[i] = 0;
          if (base + i < count) {
            const std::int64_t partial = first_partial + base + i;
            part[i] = __ldcg(partials_.sums + partial * decode_tile_rows + row);
            o[i] = __ldcg(reinterpret_cast<const float4*>(partials_.row(partial, row) + column));
            nodes[i] = __ldcg(partials_.nodes + partial);
          }
        }
#pragma unroll
        for (int i = 0; i < combine_batch; ++i) {
          if (base + i >= count) break;
          if (nodes[i] != current && current >= 0) {
            root.add(node.max, node.sum, node.out);
            node = tree_state();
          }
          current = nodes[i];
          node.add(part[i].x, part[i].y, o[i]);
        }
      }
      root.add(node.max, node.sum, node.out);
      write(rows, -1, row, column, root.max, root.sum, root.out);
    }
  }

  // m, l, sum ← that and the partial results.
  template <int Batch>
  __device__ __forceinline__ void combine_loaded(const float2 (&part)[Batch], const float4 (&o)[Batch], float& m,
                                                 float& l, float4& sum) {
    if constexpr (Scheduler::has_fixed_tree) {
      // One after another, like a CTA that processes several leaves itself.
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const combination both(m, part[i].x);
        m = both.max;
        l = both.of(l, part[i].y);
        sum = both.of(sum, o[i]);
      }
    } else {
      float top = m;
#pragma unroll
      for (int i = 0; i < Batch; ++i) top = fmaxf(top, part[i].x);
      // Results without a maximum are 0, or NaN where every score is: they are added all the same.
      const float base = top == -INFINITY ? 0.0f : top;
      const float keep = device::exp2_fast(m - base);
      m = top;
      l *= keep;
      sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const float weight = device::exp2_fast(part[i].x - base);
        l += part[i].y * weight;
        sum.x += o[i].x * weight;
        sum.y += o[i].y * weight;
        sum.z += o[i].z * weight;
        sum.w += o[i].w * weight;
      }
    }
  }

  __device__ __forceinline__ void write(const rows_type& rows, int to, int row, int column, float m, float l,
                                        const float4& sum) {
    if (to >= 0) {
      const std::int64_t at = static_cast<std::int64_t>(to) * decode_tile_rows + row;
      __stcg(reinterpret_cast<float4*>(partials_.out + at * S::head_dim + column), sum);
      if (column == 0) __stcg(partials_.sums + at, make_float2(m, l));
      return;
    }
    const typename rows_type::row_place place = rows.place_of(row);
    rows.store(place, column, sum, rows.finish(place, m, l, column == 0));
  }

  const decode_args& a_;
  const Scheduler& scheduler_;
  partial_results<Shape> partials_;
  std::uint32_t* semaphores_;
  int* flag_;
  node_result* nodes_;
};

}  // namespace bifolio::inline v0_2::cuda::decode
