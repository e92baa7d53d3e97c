// SPDX-License-Identifier: Apache-2.0
/// Attention over arrays of the caller's, and the merge of two partial results, on the device where they are.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "cache.hpp"

using namespace bifolio;

namespace bifolio_python {
namespace {

/// The backend of a device, and plans that are not in use. Plans are reused: what they hold grows once.
class device_attention {
 public:
  explicit device_attention(device where) : where_(&shared_backend(where)) {}
  [[nodiscard]] backend& where() { return *where_; }

  std::unique_ptr<attention_plan> take() {
    const std::lock_guard lock(mutex_);
    if (plans_.empty()) return std::make_unique<attention_plan>();
    std::unique_ptr<attention_plan> plan = std::move(plans_.back());
    plans_.pop_back();
    return plan;
  }
  void give_back(std::unique_ptr<attention_plan> plan) {
    const std::lock_guard lock(mutex_);
    plans_.push_back(std::move(plan));
  }

  /// The step's arrays where kernels read them. On a device they have one place, which the next call overwrites in the
  /// order of the default stream: hold `submitting` until the kernels are submitted.
  device_step_view upload(const host_step_view& host) {
    device_step_view there = as_device_view(host);
    if (where_->where().type == device_type::cpu) return there;
    const auto num_seqs = static_cast<std::size_t>(host.num_seqs);
    const std::size_t num_entries = num_seqs * static_cast<std::size_t>(host.block_table_stride);
    const std::size_t num_bytes = (2 * num_seqs + 1 + num_entries) * sizeof(std::int32_t);
    if (arrays_.num_bytes() < num_bytes) arrays_ = buffer(where_->memory(), 2 * num_bytes);
    auto* at = arrays_.as<std::int32_t>();
    const auto put = [&](const std::int32_t*& values, std::size_t count) {
      if (where_->upload(at, values, count * sizeof(std::int32_t), {}) != errc::ok) {
        refuse(errc::device_lost, "the step's arrays cannot be uploaded");
      }
      values = at;
      at += count;
    };
    put(there.query_start_loc, num_seqs + 1);
    put(there.seq_lens, num_seqs);
    put(there.block_tables, num_entries);
    return there;
  }
  std::mutex submitting;

 private:
  backend* where_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<attention_plan>> plans_;
  buffer arrays_;
};

device_attention& attention_on(device where) {
  static auto& all = *new std::map<std::pair<device_type, std::int32_t>, std::unique_ptr<device_attention>>;
  std::unique_ptr<device_attention>& one = all[{where.type, where.index}];  // under the GIL
  if (!one) one = std::make_unique<device_attention>(where);
  return *one;
}

kv_strides strides_of(const array_ref& array, layout_kind kind) {
  const bool tokens_first = kind == layout_kind::nhd;
  kv_strides strides;
  strides.block = array.stride(0);
  strides.token = array.stride(tokens_first ? 1 : 2);
  strides.head = array.stride(tokens_first ? 2 : 1);
  strides.dim = array.stride(3);
  strides.chunk = static_cast<std::int32_t>(array.shape(3));
  return strides;
}

/// A layer that lies in two arrays of the caller's.
kv_cache_view view_of(const array_ref& k, const array_ref& v, const std::string& order, device where) {
  const layout_kind kind = parse_layout(order);
  if (kind != layout_kind::hnd && kind != layout_kind::nhd) {
    refuse(errc::unsupported, "layout is '" + order + "'; it must be hnd or nhd");
  }
  const bool tokens_first = kind == layout_kind::nhd;
  const char* const axes =
      tokens_first ? "[blocks, block_size, kv_heads, head_dim]" : "[blocks, kv_heads, block_size, head_dim]";
  for (const array_ref* array : {&k, &v}) {
    array->require_ndim(4, axes);
    array->require_on(where);
    array->require_dense_last_axis();
  }
  for (const std::int32_t axis : {0, 1, 2}) {
    if (k.shape(axis) == v.shape(axis)) continue;
    refuse(errc::invalid_argument, "k_cache and v_cache differ in axis " + std::to_string(axis) + ": " +
                                       std::to_string(k.shape(axis)) + " and " + std::to_string(v.shape(axis)));
  }
  kv_cache_view view;
  view.k = k.data();
  view.v = v.data();
  view.num_blocks = k.shape(0);
  view.layout =
      make_layout(kind, kv_code{k.element()}, kv_code{v.element()},
                  static_cast<std::int32_t>(k.shape(tokens_first ? 2 : 1)), static_cast<std::int32_t>(k.shape(3)),
                  static_cast<std::int32_t>(v.shape(3)), static_cast<std::int32_t>(k.shape(tokens_first ? 1 : 2)));
  kv_strides k_strides = strides_of(k, kind), v_strides = strides_of(v, kind);
  k_strides.chunk_stride = view.layout.k.strides.chunk_stride;
  v_strides.chunk_stride = view.layout.v.strides.chunk_stride;
  if (k_strides != view.layout.k.strides || v_strides != view.layout.v.strides) {
    view.layout.kind = layout_kind::strided;
    view.layout.k.strides = k_strides;
    view.layout.v.strides = v_strides;
  }
  return view;
}

nb::typed<nb::tuple, nb::any, nb::any> attention(nb::handle q, nb::handle k_cache, nb::handle v_cache,
                                                 nb::handle block_tables, nb::handle seq_lens,
                                                 nb::handle query_start_loc, const std::string& layout, bool causal,
                                                 std::int32_t window_left, std::int32_t window_right,
                                                 std::optional<float> scale, float soft_cap, nb::handle slopes,
                                                 nb::handle sinks, nb::handle out) {
  const array_ref array_q(q, "q"), array_k(k_cache, "k_cache"), array_v(v_cache, "v_cache");
  const device place = array_q.where();
  device_attention& there = attention_on(place);
  backend& where = there.where();
  attention_params params;
  params.q = to_rows(array_q, place);
  params.kv = view_of(array_k, array_v, layout, place);
  const integers tables = to_integers(block_tables, "block_tables", 2, where);
  const integers lens = to_integers(seq_lens, "seq_lens", 1, where);
  const integers starts = to_integers(query_start_loc, "query_start_loc", 1, where);
  const auto num_seqs = static_cast<std::int32_t>(lens.num_columns);
  if (tables.num_rows != num_seqs || starts.num_columns != num_seqs + 1) {
    refuse(errc::invalid_argument, "block_tables has " + std::to_string(tables.num_rows) +
                                       " rows and query_start_loc " + std::to_string(starts.num_columns) +
                                       " entries for the " + std::to_string(num_seqs) +
                                       " sequences of seq_lens; it must be " + std::to_string(num_seqs) + " and " +
                                       std::to_string(num_seqs + 1));
  }
  const std::array<std::int64_t, 3> shape{params.q.num_tokens, params.q.num_heads, params.kv.layout.v.head_dim};
  const std::array<std::int64_t, 2> lse_shape{shape[0], shape[1]};
  array_out written(out, "out", q, array_q, shape), lse(nb::none(), "lse", q, array_q, lse_shape, true);
  params.out = to_rows(written.array(), place);
  params.lse = to_lse(lse.array(), params.q.num_tokens, params.q.num_heads, place);
  params.scale = scale;
  params.soft_cap = soft_cap;
  params.alibi_slopes = to_head_values(slopes, "alibi_slopes", params.q.num_heads, place);
  params.sinks = to_head_values(sinks, "sinks", params.q.num_heads, place);
  const host_step_view batch{.num_seqs = num_seqs,
                             .num_tokens = starts.values.back(),
                             .query_start_loc = starts.values.data(),
                             .seq_lens = lens.values.data(),
                             .block_tables = tables.values.data(),
                             .block_table_stride = tables.num_columns};
  const attention_spec spec{.num_q_heads = params.q.num_heads,
                            .num_kv_heads = params.kv.layout.num_kv_heads,
                            .qk_head_dim = params.kv.layout.k.head_dim,
                            .v_head_dim = params.kv.layout.v.head_dim,
                            .block_size = params.kv.layout.block_size,
                            .q_type = params.q.type,
                            .k_code = params.kv.layout.k.code,
                            .v_code = params.kv.layout.v.code,
                            .out_type = params.out.type,
                            .causal = causal,
                            .window_left = window_left,
                            .window_right = window_right};
  {
    const nb::gil_scoped_release unlocked;
    std::unique_ptr<attention_plan> plan = there.take();
    where.plan_attention(*plan, spec, batch, params.kv.num_blocks);
    // The CPU's calls are done when they return, and run side by side.
    std::unique_lock lock(there.submitting, std::defer_lock);
    if (place.type != device_type::cpu) lock.lock();
    params.batch = there.upload(batch);
    if (const errc code = where.attention(*plan, params); code != errc::ok) {
      if (const auto problem = find_problem(*plan, params)) throw *problem;
      refuse(code, "attention: " + std::string(to_string(code)));
    }
    there.give_back(std::move(plan));
  }
  return nb::make_tuple(written.finish(), lse.finish());
}

nb::typed<nb::tuple, nb::any, nb::any> merge(nb::handle out1, nb::handle lse1, nb::handle out2, nb::handle lse2) {
  const array_ref a(out1, "out1"), b(out2, "out2"), lse_a(lse1, "lse1"), lse_b(lse2, "lse2");
  const device place = a.where();
  backend& where = attention_on(place).where();
  merge_params params;
  params.a.out = to_rows(a, place);
  params.b.out = to_rows(b, place);
  const std::int64_t num_tokens = params.a.out.num_tokens;
  const std::int32_t num_heads = params.a.out.num_heads;
  params.a.lse = to_lse(lse_a, num_tokens, num_heads, place);
  params.b.lse = to_lse(lse_b, num_tokens, num_heads, place);
  const std::array<std::int64_t, 3> shape{num_tokens, num_heads, params.a.out.head_dim};
  const std::array<std::int64_t, 2> lse_shape{num_tokens, num_heads};
  array_out out(nb::none(), "out", out1, a, shape), lse(nb::none(), "lse", lse1, lse_a, lse_shape);
  params.out = to_rows(out.array(), place);
  params.lse = to_lse(lse.array(), num_tokens, num_heads, place);
  {
    const nb::gil_scoped_release unlocked;
    if (const errc code = where.merge_states(params); code != errc::ok) {
      if (const auto problem = find_problem(params)) throw *problem;
      refuse(code, "merge: " + std::string(to_string(code)));
    }
  }
  return nb::make_tuple(out.finish(), lse.finish());
}

}  // namespace

void define_attention(nb::module_& module) {
  module.def("attention", &attention, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("block_tables"),
             nb::arg("seq_lens"), nb::arg("query_start_loc"), nb::arg("layout"), nb::arg("causal"),
             nb::arg("window_left"), nb::arg("window_right"), nb::arg("scale").none(), nb::arg("soft_cap"),
             nb::arg("alibi_slopes").none(), nb::arg("sinks").none(), nb::arg("out").none());
  module.def("merge", &merge, nb::arg("out1"), nb::arg("lse1"), nb::arg("out2"), nb::arg("lse2"));
}

}  // namespace bifolio_python
