// SPDX-License-Identifier: Apache-2.0
#include "common/engine/validate_rotate.hpp"

#include <cmath>
#include <cstdint>

#include "common/base/footprint.hpp"
#include "common/base/refuse.hpp"
#include "common/engine/refusal.hpp"
#include "common/engine/validate_cache.hpp"

namespace bifolio::inline v0_2::validate {
namespace {

constexpr std::int32_t most_axes = 255;  // an axis is a byte

template <class Element>
errc expect_array(const char* name, const Element* array, const refusal& refuse) {
  if (array == nullptr) return refuse(errc::invalid_argument, name, " is null");
  if (reinterpret_cast<std::uintptr_t>(array) % alignof(Element) == 0) return errc::ok;
  return refuse(errc::invalid_argument, name, " is not aligned to its elements of ",
                static_cast<std::int64_t>(sizeof(Element)), " bytes");
}

/// null is allowed.
errc expect_aligned(const char* name, const float* array, const refusal& refuse) {
  return array == nullptr ? errc::ok : expect_array(name, array, refuse);
}

errc check_rotary(const rotary_params& rotary, std::int32_t head_dim, const refusal& refuse) {
  const std::int32_t dim = rotary.rotary_dim;
  if (dim < 0 || dim % 2 != 0 || dim > head_dim) {
    return refuse(errc::invalid_argument, "rotary_dim is ", dim, "; it must be even and from 0 to head_dim, ",
                  head_dim);
  }
  if (dim == 0) return errc::ok;
  if (rotary.rotary_offset < 0 || rotary.rotary_offset > head_dim - dim) {
    return refuse(errc::invalid_argument, "rotary_offset is ", rotary.rotary_offset, "; it must be from 0 to ",
                  head_dim - dim, ", head_dim less rotary_dim");
  }
  if (rotary.pairing != rope_pairing::neox && rotary.pairing != rope_pairing::gptj) {
    return refuse(errc::invalid_argument, "pairing is number ", static_cast<std::int32_t>(rotary.pairing),
                  "; it must be neox (0) or gptj (1)");
  }
  if (rotary.num_axes < 1 || rotary.num_axes > most_axes) {
    return refuse(errc::invalid_argument, "num_axes is ", rotary.num_axes, "; it must be from 1 to ", most_axes);
  }
  constexpr std::int64_t most_positions = std::int64_t{1} << 31;
  if (rotary.num_positions < 1 || rotary.num_positions > most_positions) {
    return refuse(errc::invalid_argument, "num_positions is ", rotary.num_positions, "; it must be from 1 to ",
                  most_positions);
  }
  errc code = expect_array("cos_sin", rotary.cos_sin, refuse);
  if (code == errc::ok) code = expect_array("positions", rotary.positions, refuse);
  return code;
}

/// Data pointer and strides of one of the two tensors of queries, which have rows.
errc check_queries(footprint& out, const const_tensor_view& rows, const char* name, bool written,
                   const refusal& refuse) {
  if (!is_tensor_dtype(rows.type)) return refuse_dtype(name, rows.type, tensor_dtype_names, refuse);
  if (rows.data == nullptr) return refuse(errc::invalid_argument, "the data pointer of ", name, " is null");
  if (reinterpret_cast<std::uintptr_t>(rows.data) % size_of(rows.type) != 0) {
    return refuse(errc::invalid_argument, "the data pointer of ", name, " is not aligned to its elements of ",
                  static_cast<std::int64_t>(size_of(rows.type)), " bytes");
  }
  if (make_footprint(out, rows, written)) return errc::ok;
  return refuse(
      errc::invalid_argument, "the strides of ", name, ", ", rows.token_stride, " (token) and ", rows.head_stride,
      " (head), ",
      written ? "let its rows overlap, are below 1 or reach past 2^62 bytes" : "are negative or reach past 2^62 bytes");
}

bool in_place(const rotate_append_params& params) noexcept {
  const tensor_view& out = params.q_out;
  return params.q.data == out.data && params.q.type == out.type && params.q.token_stride == out.token_stride &&
         params.q.head_stride == out.head_stride;
}

/// Queries against everything else that is written, and what they write against everything that is read. The rows of
/// k and v and the cache have been checked.
errc check_overlap(const rotate_append_params& params, const footprint& q, const footprint& q_out,
                   const refusal& refuse) {
  const kv_cache_view& kv = params.append.kv;
  const auto collide = [&](const char* name) {
    return refuse(errc::invalid_argument, name, " overlap; rows of queries share memory with nothing, but that q_out ",
                  "may be q itself with equal dtype and strides");
  };
  if (!in_place(params) && !apart(q, q_out)) return collide("q and q_out");
  footprint other;
  if (make_footprint(other, params.append.k, false) && !apart(q_out, other)) return collide("q_out and k");
  if (!kv.layout.v_in_k && make_footprint(other, params.append.v, false) && !apart(q_out, other)) {
    return collide("q_out and v");
  }
  if (kv.num_blocks == 0) return errc::ok;
  (void)make_footprint(other, kv.k, kv.layout, kv.layout.k, kv.num_blocks);
  if (!apart(q, other) || !apart(q_out, other)) return collide("queries and the K plane of the cache");
  if (kv.layout.v_in_k) return errc::ok;
  (void)make_footprint(other, kv.v, kv.layout, kv.layout.v, kv.num_blocks);
  return apart(q, other) && apart(q_out, other) ? errc::ok : collide("queries and the V plane of the cache");
}

/// All but `params.append`, which has been checked.
errc check_rest(const rotate_append_params& params, const refusal& refuse) {
  const append_params& stored = params.append;
  const std::int32_t head_dim = stored.kv.layout.k.head_dim;
  if (head_dim > largest_rotated_head_dim) {
    return refuse(errc::unsupported, "head_dim of K is ", head_dim, "; rotate_append takes heads of up to ",
                  largest_rotated_head_dim, " dims");
  }
  const const_tensor_view& q = params.q;
  const tensor_view& out = params.q_out;
  if (q.num_heads < 0) {
    return refuse(errc::invalid_argument, "num_heads of q is ", q.num_heads, "; it must not be negative");
  }
  const bool has_queries = q.num_heads > 0;
  if (has_queries) {
    if (q.num_tokens != stored.k.num_tokens || q.head_dim != head_dim) {
      return refuse(errc::invalid_argument, "q has ", q.num_tokens, " tokens and a head_dim of ", q.head_dim,
                    "; k has ", stored.k.num_tokens, " and ", head_dim);
    }
    if (out.num_tokens != q.num_tokens || out.num_heads != q.num_heads || out.head_dim != q.head_dim) {
      return refuse(errc::invalid_argument, "q_out has the shape [", out.num_tokens, ", ", out.num_heads, ", ",
                    out.head_dim, "]; that of q is [", q.num_tokens, ", ", q.num_heads, ", ", q.head_dim, "]");
    }
    if (is_tensor_dtype(q.type) && q.type != stored.k.type) {
      return refuse(errc::invalid_argument, "the dtype of q is ", to_string(q.type), "; that of k is ",
                    to_string(stored.k.type));
    }
  }
  if (!std::isfinite(params.norm.epsilon) || params.norm.epsilon < 0) {
    return refuse(errc::invalid_argument, "epsilon is ", params.norm.epsilon, "; it must be finite and not negative");
  }
  if (stored.k.num_tokens == 0) return errc::ok;

  errc code = check_rotary(params.rotary, head_dim, refuse);
  if (code == errc::ok) code = expect_aligned("the norm's q_weight", params.norm.q_weight, refuse);
  if (code == errc::ok) code = expect_aligned("the norm's k_weight", params.norm.k_weight, refuse);
  if (code != errc::ok || !has_queries) return code;
  footprint q_memory;
  footprint out_memory;
  code = check_queries(q_memory, q, "q", false, refuse);
  if (code == errc::ok) code = check_queries(out_memory, as_const(out), "q_out", true, refuse);
  return code == errc::ok ? check_overlap(params, q_memory, out_memory, refuse) : code;
}

}  // namespace

errc rotate_append(const rotate_append_params& params, std::string* sentence) {
  const errc code = append_on_device(params.append, sentence);
  return code == errc::ok ? check_rest(params, refusal(sentence)) : code;
}

errc rotate_append_arrays(const rotate_append_params& params, std::string* sentence) {
  if (const errc code = append(params.append, sentence); code != errc::ok) return code;
  const refusal refuse(sentence);
  const rotary_params& rotary = params.rotary;
  if (rotary.rotary_dim == 0 || params.append.k.num_tokens == 0) return errc::ok;
  const std::int64_t num_entries = rotary.num_axes * params.append.k.num_tokens;
  for (std::int64_t i = 0; i < num_entries; ++i) {
    if (rotary.positions[i] >= 0 && rotary.positions[i] < rotary.num_positions) continue;
    return refuse(errc::out_of_range, "positions[", i, "] is ", rotary.positions[i], "; the table has ",
                  rotary.num_positions, " rows");
  }
  for (std::int32_t i = 0; rotary.axis_of_pair != nullptr && i < rotary.rotary_dim / 2; ++i) {
    if (rotary.axis_of_pair[i] < rotary.num_axes) continue;
    return refuse(errc::out_of_range, "axis_of_pair[", i, "] is ", std::int32_t{rotary.axis_of_pair[i]},
                  "; it must be below num_axes, ", rotary.num_axes);
  }
  return errc::ok;
}

}  // namespace bifolio::inline v0_2::validate
