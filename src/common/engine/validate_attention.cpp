// SPDX-License-Identifier: Apache-2.0
#include "common/engine/validate_attention.hpp"

#include <cmath>

#include "common/base/checked.hpp"
#include "common/base/footprint.hpp"
#include "common/base/refuse.hpp"
#include "common/engine/refusal.hpp"
#include "common/engine/validate_cache.hpp"

namespace bifolio::inline v0_2::validate {
namespace {

// No address space holds more elements; products below stay far from wrapping.
constexpr std::int64_t max_elements = std::int64_t{1} << 60;

bool aligned(const void* pointer, dtype type) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer) % size_of(type) == 0;
}

// (count − 1) · stride + …, all ≥ 0; −1 when it leaves the 60 bits.
std::int64_t extent(std::int64_t so_far, std::int64_t count, std::int64_t stride) noexcept {
  if (so_far < 0 || count < 1) return so_far;
  const auto product = detail::checked_mul(count - 1, stride);
  if (!product || *product > max_elements) return -1;
  const std::int64_t sum = so_far + *product;
  return sum > max_elements ? -1 : sum;
}

bool rows_overlap(const const_tensor_view& t) noexcept {
  const bool many_tokens = t.num_tokens > 1;
  const bool many_heads = t.num_heads > 1;
  if (!many_tokens && !many_heads) return false;
  if (!many_heads) return t.token_stride < t.head_dim;
  if (!many_tokens) return t.head_stride < t.head_dim;
  const bool heads_inside =
      t.head_stride >= t.head_dim && t.token_stride >= extent(t.head_dim, t.num_heads, t.head_stride);
  const bool tokens_inside =
      t.token_stride >= t.head_dim && t.head_stride >= extent(t.head_dim, t.num_tokens, t.token_stride);
  return !heads_inside && !tokens_inside;
}

template <class Value>
errc expect_equal(const char* name, Value received, Value planned, const refusal& refuse) {
  if (received == planned) return errc::ok;
  return refuse(errc::invalid_argument, name, " is ", std::int64_t{received}, "; the plan was made for ",
                std::int64_t{planned});
}

errc expect_type(const char* name, dtype received, dtype planned, const refusal& refuse) {
  if (received == planned) return errc::ok;
  return refuse(errc::invalid_argument, "the dtype of ", name, " is ", to_string(received), "; the plan was made for ",
                to_string(planned));
}

errc expect_code(const char* name, const kv_code& received, const kv_code& planned, const refusal& refuse) {
  if (received.type != planned.type) return expect_type(name, received.type, planned.type, refuse);
  if (received == planned) return errc::ok;
  return refuse(
      errc::invalid_argument, "the code of ", name, " is ", [&](std::string& text) { text += to_string(received); },
      "; the plan was made for ", [&](std::string& text) { text += to_string(planned); });
}

errc expect_aligned(const char* name, const float* array, const refusal& refuse) {
  if (aligned(array, dtype::f32)) return errc::ok;
  return refuse(errc::invalid_argument, name, " is not aligned to its elements of 4 bytes");
}

errc expect_array(const char* name, const std::int32_t* array, const refusal& refuse) {
  if (array == nullptr) return refuse(errc::invalid_argument, name, " of the batch is null");
  if (reinterpret_cast<std::uintptr_t>(array) % alignof(std::int32_t) == 0) return errc::ok;
  return refuse(errc::invalid_argument, name, " of the batch is not aligned to its elements of 4 bytes");
}

// Shape, dtype, strides and pointer of one tensor; `written`: its rows must not overlap.
errc check_tensor(const const_tensor_view& tensor, std::string_view name, bool written, const refusal& refuse) {
  if (!is_tensor_dtype(tensor.type)) return refuse_dtype(name, tensor.type, tensor_dtype_names, refuse);
  if (tensor.num_tokens < 0 || tensor.num_heads < 0 || tensor.head_dim < 0) {
    return refuse(errc::invalid_argument, name, " has the shape [", tensor.num_tokens, ", ", tensor.num_heads, ", ",
                  tensor.head_dim, "]; no extent may be negative");
  }
  if (tensor.token_stride < 0 || tensor.head_stride < 0) {
    return refuse(errc::invalid_argument, "the strides of ", name, " are ", tensor.token_stride, " (token) and ",
                  tensor.head_stride, " (head); neither may be negative");
  }
  if (tensor.num_tokens == 0 || tensor.num_heads == 0 || tensor.head_dim == 0) return errc::ok;
  if (extent(extent(tensor.head_dim, tensor.num_tokens, tensor.token_stride), tensor.num_heads, tensor.head_stride) <
      0) {
    return refuse(errc::invalid_argument, "the strides of ", name, " reach past 2^60 elements");
  }
  if (tensor.data == nullptr) return refuse(errc::invalid_argument, "the data pointer of ", name, " is null");
  if (!aligned(tensor.data, tensor.type)) {
    return refuse(errc::invalid_argument, "the data pointer of ", name, " is not aligned to its elements of ",
                  static_cast<std::int64_t>(size_of(tensor.type)), " bytes");
  }
  if (written && rows_overlap(tensor)) {
    return refuse(errc::invalid_argument, "the strides of ", name, ", ", tensor.token_stride, " (token) and ",
                  tensor.head_stride, " (head), let its rows of ", tensor.head_dim, " elements overlap");
  }
  return errc::ok;
}

// The bias as a tensor of rows of keys, with an extent of 1 where the plan has more.
const_tensor_view rows_of(const attention_bias_view& bias) noexcept {
  return {bias.data, bias.type, bias.num_tokens, bias.num_heads, bias.num_keys, bias.token_stride, bias.head_stride};
}

errc check_bias_extent(const char* name, std::int64_t extent, std::int64_t planned, std::int64_t stride,
                       const refusal& refuse) {
  if (extent != planned && extent != 1) {
    return refuse(errc::invalid_argument, "num_", name, "s of bias is ", extent, "; it must be ", planned,
                  ", as planned, or 1");
  }
  if (extent > 1 && stride < 1) {
    return refuse(errc::invalid_argument, "the ", name, " stride of bias is ", stride, " for ", extent, " ", name,
                  "s; it must be at least 1, and num_", name, "s 1 where all share a row");
  }
  return errc::ok;
}

errc check_bias(const attention_bias_view& bias, const attention_plan& plan, const refusal& refuse) {
  if (bias.data == nullptr) return errc::ok;
  errc code = check_bias_extent("token", bias.num_tokens, plan.num_tokens, bias.token_stride, refuse);
  if (code == errc::ok) {
    code = check_bias_extent("head", bias.num_heads, plan.spec.num_q_heads, bias.head_stride, refuse);
  }
  if (code != errc::ok) return code;
  if (bias.num_keys < plan.max_seq_len) {
    return refuse(errc::out_of_range, "num_keys of bias is ", bias.num_keys, "; the plan's longest sequence holds ",
                  plan.max_seq_len);
  }
  const_tensor_view rows = rows_of(bias);
  if (rows.num_tokens == 1) rows.token_stride = 0;
  if (rows.num_heads == 1) rows.head_stride = 0;
  return check_tensor(rows, "bias", false, refuse);
}

// What is written, `out` and `lse`, against everything else whose extent is known. All of it has been checked.
errc check_overlap(const attention_params& params, const refusal& refuse) {
  struct part {
    const char* name = nullptr;
    footprint memory;
  };
  part parts[6];
  int num_parts = 0;
  const auto add_rows = [&](const char* name, const const_tensor_view& rows) {
    part& p = parts[num_parts++];
    p.name = name;
    (void)make_footprint(p.memory, rows, false);
  };
  const auto add_plane = [&](const char* name, const void* data, const kv_plane& plane) {
    part& p = parts[num_parts++];
    p.name = name;
    (void)make_footprint(p.memory, data, params.kv.layout, plane, params.kv.num_blocks);
  };
  add_rows("out", as_const(params.out));
  if (params.lse != nullptr) {
    const std::int64_t rows = params.out.num_tokens * params.out.num_heads;
    parts[num_parts++] = {"lse", flat_footprint(params.lse, rows * std::int64_t{sizeof(float)})};
  }
  const int num_written = num_parts;
  add_rows("q", params.q);
  if (params.kv.num_blocks > 0) {
    add_plane("kv.k", params.kv.k, params.kv.layout.k);
    if (!params.kv.layout.v_in_k) add_plane("kv.v", params.kv.v, params.kv.layout.v);
  }
  if (params.bias.data != nullptr && params.bias.num_keys > 0) add_rows("bias", rows_of(params.bias));
  for (int written = 0; written < num_written; ++written) {
    for (int other = written + 1; other < num_parts; ++other) {
      const part& a = parts[written];
      const part& b = parts[other];
      if (apart(a.memory, b.memory)) continue;
      return refuse(errc::invalid_argument, a.name, " and ", b.name, " overlap; ", a.name, " is written");
    }
  }
  return errc::ok;
}

}  // namespace

errc attention(const attention_plan& plan, const attention_params& params, std::string* sentence) {
  const refusal refuse(sentence);
  if (plan.state == nullptr) {
    return refuse(errc::failed_precondition, "the plan was never planned: call plan_attention first");
  }
  const attention_spec& spec = plan.spec;
  errc code = expect_equal("num_seqs of the batch", params.batch.num_seqs, plan.num_seqs, refuse);
  if (code == errc::ok)
    code = expect_equal("num_tokens of the batch", params.batch.num_tokens, plan.num_tokens, refuse);
  if (code != errc::ok) return code;
  if (params.scale && !std::isfinite(*params.scale)) {
    return refuse(errc::invalid_argument, "scale is ", *params.scale, "; it must be finite");
  }
  if (!std::isfinite(params.soft_cap) || params.soft_cap < 0) {
    return refuse(errc::invalid_argument, "soft_cap is ", params.soft_cap,
                  "; it must be 0 (none), or finite and above 0");
  }
  if (plan.num_tokens == 0) return errc::ok;

  code = expect_type("q", params.q.type, spec.q_type, refuse);
  if (code == errc::ok) code = expect_type("out", params.out.type, spec.out_type, refuse);
  if (code == errc::ok) code = expect_code("k", params.kv.layout.k.code, spec.k_code, refuse);
  if (code == errc::ok) code = expect_code("v", params.kv.layout.v.code, spec.v_code, refuse);
  if (code == errc::ok) code = expect_equal("num_tokens of q", params.q.num_tokens, plan.num_tokens, refuse);
  if (code == errc::ok) code = expect_equal("num_tokens of out", params.out.num_tokens, plan.num_tokens, refuse);
  if (code == errc::ok) code = expect_equal("num_heads of q", params.q.num_heads, spec.num_q_heads, refuse);
  if (code == errc::ok) code = expect_equal("num_heads of out", params.out.num_heads, spec.num_q_heads, refuse);
  if (code == errc::ok) code = expect_equal("head_dim of q", params.q.head_dim, spec.qk_head_dim, refuse);
  if (code == errc::ok) code = expect_equal("head_dim of out", params.out.head_dim, spec.v_head_dim, refuse);
  if (code == errc::ok)
    code = expect_equal("num_kv_heads of kv", params.kv.layout.num_kv_heads, spec.num_kv_heads, refuse);
  if (code == errc::ok) code = expect_equal("head_dim of k", params.kv.layout.k.head_dim, spec.qk_head_dim, refuse);
  if (code == errc::ok) code = expect_equal("head_dim of v", params.kv.layout.v.head_dim, spec.v_head_dim, refuse);
  if (code == errc::ok && params.kv.layout.v_in_k != spec.v_in_k) {
    return refuse(errc::invalid_argument, "v_in_k of kv is ", params.kv.layout.v_in_k ? "true" : "false",
                  "; the plan was made for the other");
  }
  if (code == errc::ok) code = expect_equal("block_size of kv", params.kv.layout.block_size, spec.block_size, refuse);
  if (code == errc::ok) code = check_tensor(params.q, "q", false, refuse);
  if (code == errc::ok) code = check_tensor(as_const(params.out), "out", true, refuse);
  if (code != errc::ok) return code;
  code = check_readable(params.kv, "kv", refuse);
  if (code != errc::ok) return code;
  code = check_bias(params.bias, plan, refuse);
  if (code == errc::ok) code = expect_aligned("lse", params.lse, refuse);
  if (code == errc::ok) code = check_overlap(params, refuse);
  if (code == errc::ok) code = expect_aligned("alibi_slopes", params.alibi_slopes, refuse);
  if (code == errc::ok) code = expect_aligned("sinks", params.sinks, refuse);
  if (code == errc::ok) code = expect_array("query_start_loc", params.batch.query_start_loc, refuse);
  if (code == errc::ok) code = expect_array("seq_lens", params.batch.seq_lens, refuse);
  if (code == errc::ok && plan.has_query_positions) {
    code = expect_array("query_positions", params.batch.query_positions, refuse);
  }
  if (code == errc::ok && !plan.has_query_positions && params.batch.query_positions != nullptr) {
    return refuse(errc::invalid_argument, "query_positions of the batch are given; the plan was made without them");
  }
  if (code == errc::ok && plan.num_blocks > 0) code = expect_array("block_tables", params.batch.block_tables, refuse);
  if (code != errc::ok) return code;
  if (params.batch.block_table_stride < 0) {
    return refuse(errc::invalid_argument, "block_table_stride is ", params.batch.block_table_stride,
                  "; it must not be negative");
  }
  if (params.batch.block_table_stride < plan.num_table_entries) {
    return refuse(errc::out_of_range, "block_table_stride is ", params.batch.block_table_stride,
                  "; the plan was made for sequences of up to ", plan.num_table_entries, " blocks");
  }
  if (params.kv.num_blocks < plan.num_blocks) {
    return refuse(errc::out_of_range, "kv holds ", params.kv.num_blocks, " blocks; the plan was made for ",
                  plan.num_blocks);
  }
  return errc::ok;
}

errc merge(const merge_params& params, std::string* sentence) {
  const refusal refuse(sentence);
  const auto same_shape = [](const const_tensor_view& a, const const_tensor_view& b) {
    return a.num_tokens == b.num_tokens && a.num_heads == b.num_heads && a.head_dim == b.head_dim;
  };
  const const_tensor_view out = as_const(params.out);
  errc code = check_tensor(params.a.out, "a.out", false, refuse);
  if (code == errc::ok) code = check_tensor(params.b.out, "b.out", false, refuse);
  if (code == errc::ok) code = check_tensor(out, "out", true, refuse);
  if (code != errc::ok) return code;
  if (!same_shape(params.a.out, out) || !same_shape(params.b.out, out)) {
    return refuse(errc::invalid_argument, "a.out, b.out and out differ in shape; out is [", out.num_tokens, ", ",
                  out.num_heads, ", ", out.head_dim, "]");
  }
  if (out.num_tokens == 0 || out.num_heads == 0) return errc::ok;
  if (params.a.lse == nullptr || params.b.lse == nullptr) {
    return refuse(errc::invalid_argument, "the lse of ", params.a.lse == nullptr ? "a" : "b", " is null");
  }
  for (const float* lse : {params.a.lse, params.b.lse, static_cast<const float*>(params.lse)}) {
    if (!aligned(lse, dtype::f32)) {
      return refuse(errc::invalid_argument, "an lse is not aligned to its elements of 4 bytes");
    }
  }
  for (const const_tensor_view* in : {&params.a.out, &params.b.out}) {
    if (in->data != out.data || out.data == nullptr) continue;
    if (in->type != out.type || in->token_stride != out.token_stride || in->head_stride != out.head_stride) {
      return refuse(errc::invalid_argument,
                    "out is one of the inputs but differs from it in dtype or strides; in place needs both equal");
    }
  }
  return errc::ok;
}

}  // namespace bifolio::inline v0_2::validate
