// SPDX-License-Identifier: Apache-2.0
#include "conformance/attention_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "reference/code_oracle.hpp"
#include "support/codes.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"
#include "support/reach.hpp"

namespace bifolio::test {
namespace {

constexpr std::int64_t guard_elements = 32;  // poison on both sides of an output, in front of q

enum stream_of_values : std::uint8_t {
  query_values = 1,
  key_values,
  value_values,
  slope_values,
  sink_values,
  bias_values
};

// Element (position, head, dim) of q, K or V before rounding to the stored dtype.
float element_of(const attention_case& c, stream_of_values stream, std::int64_t content, std::int64_t position,
                 std::int64_t head, std::int64_t dim, std::int64_t seq_len) {
  const std::uint64_t bits = hash_of(c.seed, stream, content, position, head, dim);
  const float normal = normal_from(bits);
  const float sign = (bits >> 63) != 0 ? -1.0f : 1.0f;
  const auto d = static_cast<float>(c.head_dim);
  switch (c.values) {
    case value_kind::normal:
      return normal;
    case value_kind::equal_logits:
      // The same key everywhere, so that logits are equal bit for bit and not only nearly.
      if (stream == key_values) return normal_from(hash_of(c.seed, stream, content, head, dim));
      return normal;
    case value_kind::dominant_key: {
      if (stream == query_values) return 1.0f + 0.125f * normal;
      const std::int64_t chosen =
          seq_len <= 0 ? 0 : static_cast<std::int64_t>(hash_of(c.seed, content) % static_cast<std::uint64_t>(seq_len));
      if (stream == key_values && position == chosen) return 60.0f / (d * c.used_scale());
      return stream == key_values ? 0.25f * normal / std::sqrt(d) : normal;
    }
    case value_kind::huge_logits:
      if (stream == query_values) return 1.0f;
      if (stream == key_values) {
        const float side = (hash_of(c.seed, content, position, head) & 1u) != 0 ? 80.0f : -80.0f;
        return (side + normal) / (d * c.used_scale());
      }
      return normal;
    case value_kind::denormal: {
      const dtype type = stream == query_values ? c.q_type : c.kv_type;
      return sign * smallest_subnormal(type) * std::floor(unit_from(bits) * 64.0f);
    }
    case value_kind::max_finite: {
      if (stream == query_values) return normal;
      const float most = max_finite(c.kv_type);
      // Of a small range the largest value itself. Wider ranges: as far up as sums over the length and the head stay
      // finite.
      const float room = max_finite(c.kv_type) < 0x1p20f ? 1.0f : 1.0f / (8.0f * d * static_cast<float>(seq_len + 1));
      return sign * most * room;
    }
    case value_kind::zero_points: {
      if (stream == query_values) return normal;
      const float far = stream == key_values ? 3.0f : 100.0f;
      switch (content % 5) {  // of each sequence one kind: small numbers of one must not hide behind large ones
        case 0:
          return far + 0.01f * normal;
        case 1:
          return -far + 0.01f * normal;
        case 2:
          return dim % 4 == 1 ? 0.001f * normal : std::fabs(normal);
        case 3:
          return (dim == 0 ? 40.0f : 0.05f) * normal;
        default:
          return position % 3 == 0 ? far : -std::fabs(normal);  // a range of 0, and one that ends there
      }
    }
  }
  return 0;
}

reference::attention_options options_of(const attention_case& c, const attention_contents& contents) {
  return {.num_q_heads = c.num_q_heads(),
          .num_kv_heads = c.num_kv_heads,
          .qk_head_dim = c.head_dim,
          .v_head_dim = c.out_dim(),
          .causal = c.causal,
          .window_left = c.window_left,
          .window_right = c.window_right,
          .scale = c.used_scale(),
          .soft_cap = c.soft_cap,
          .alibi_slopes = contents.alibi_slopes.empty() ? nullptr : contents.alibi_slopes.data(),
          .sinks = contents.sinks.empty() ? nullptr : contents.sinks.data()};
}

reference::dense_sequence dense_of(const batch_seq& seq, const attention_contents::sequence& contents) {
  return {.query_len = seq.query_len,
          .seq_len = seq.seq_len,
          .q = contents.q.data(),
          .k = contents.k.data(),
          .v = contents.v.data(),
          .bias = contents.bias.empty() ? nullptr : contents.bias.data(),
          .query_position = seq.query_offset()};
}

// Rows [position, head, dims] as they are read back from a cache with this code.
void store_in_code(const attention_case& c, const kv_code& code, std::int32_t dims, std::vector<float>& rows) {
  std::vector<float> scales = ordinary_scales(code, c.num_kv_heads);
  if (c.unit_scales) std::fill(scales.begin(), scales.end(), 1.0f);
  for (std::size_t first = 0, row = 0; first < rows.size(); first += static_cast<std::size_t>(dims), ++row) {
    const std::span<float> values(rows.data() + first, static_cast<std::size_t>(dims));
    const std::size_t head = row % static_cast<std::size_t>(c.num_kv_heads);
    const float scale = scales.empty() ? 1.0f : scales[scales.size() > 1 ? head : 0];
    const std::vector<float> read = oracle_decode(code, oracle_encode(code, scale, values));
    std::copy(read.begin(), read.end(), values.begin());
  }
}

bool bias_has_tokens(bias_kind kind) {
  return kind == bias_kind::full || kind == bias_kind::one_head || kind == bias_kind::masked ||
         kind == bias_kind::lowest;
}
bool bias_has_heads(bias_kind kind) {
  return kind == bias_kind::full || kind == bias_kind::one_token || kind == bias_kind::masked ||
         kind == bias_kind::lowest;
}

// Element (position of the row, head, key) of the bias, the same for all that read the same one.
float bias_element_of(const attention_case& c, std::int64_t content, std::int64_t position, std::int64_t head,
                      std::int64_t key) {
  const std::int64_t row = bias_has_tokens(c.bias) ? position : 0;
  const std::int64_t seq = bias_has_tokens(c.bias) ? content : 0;
  if (!bias_has_heads(c.bias)) head = 0;
  const std::uint64_t bits = hash_of(c.seed, bias_values, seq, row, head, key);
  const bool hidden_row = hash_of(c.seed, bias_values, seq, row, head) % 5 == 0;
  if (c.bias == bias_kind::masked && (hidden_row || bits % 3 == 0)) return -std::numeric_limits<float>::infinity();
  // Of two visible keys of a row one is left as it is: among lowest numbers alone, scores are lost in rounding.
  if (c.bias == bias_kind::lowest && key % 3 == 1) return -max_finite(c.bias_type);
  return stored_as(c.bias_type, 2.0f * normal_from(bits));
}

std::vector<dense_kv> dense_kv_of(const attention_case& c, const attention_contents& contents) {
  std::vector<dense_kv> list;
  for (std::size_t s = 0; s < c.seqs.size(); ++s) {
    const batch_seq& seq = c.seqs[s];
    // Positions that no row of the call attends to are poison like everything else that must not be read.
    std::int64_t first_needed = 0;
    if (seq.query_len == 0) {
      first_needed = seq.seq_len;
    } else if (c.window_left >= 0) {
      first_needed = std::clamp<std::int64_t>(std::int64_t{seq.query_offset()} - c.window_left, 0, seq.seq_len);
    }
    const attention_contents::sequence& held = contents.seqs[s];
    list.push_back({seq.seq_len, (c.k_code ? held.k_given : held.k).data(), (c.k_code ? held.v_given : held.v).data(),
                    first_needed});
  }
  return list;
}

// A tensor image: `front` poisoned elements, then [tokens, heads, dims] with gaps, ending at the last element of the
// last head, then `back` poisoned elements.
struct strided_shape {
  std::int64_t tokens, heads, dims, token_stride, head_stride;
  [[nodiscard]] std::int64_t elements() const {
    return tokens == 0 ? 0 : (tokens - 1) * token_stride + (heads - 1) * head_stride + dims;
  }
};

std::vector<std::byte> poisoned(dtype type, std::int64_t elements) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements) * size_of(type));
  poison(bytes, type);
  return bytes;
}

}  // namespace

std::string_view to_string(value_kind kind) noexcept {
  switch (kind) {
    case value_kind::normal:
      return "normal";
    case value_kind::equal_logits:
      return "equal_logits";
    case value_kind::dominant_key:
      return "dominant_key";
    case value_kind::huge_logits:
      return "huge_logits";
    case value_kind::denormal:
      return "denormal";
    case value_kind::max_finite:
      return "max_finite";
    case value_kind::zero_points:
      return "zero_points";
  }
  return "unknown";
}

std::string_view to_string(bias_kind kind) noexcept {
  switch (kind) {
    case bias_kind::none:
      return "none";
    case bias_kind::full:
      return "full";
    case bias_kind::one_head:
      return "one_head";
    case bias_kind::one_token:
      return "one_token";
    case bias_kind::one_row:
      return "one_row";
    case bias_kind::masked:
      return "masked";
    case bias_kind::lowest:
      return "lowest";
  }
  return "unknown";
}

std::int64_t attention_case::num_tokens() const noexcept {
  std::int64_t tokens = 0;
  for (const batch_seq& seq : seqs) tokens += seq.query_len;
  return tokens;
}

bool attention_case::has_query_positions() const noexcept {
  return std::any_of(seqs.begin(), seqs.end(), [](const batch_seq& seq) { return seq.query_position.has_value(); });
}

float attention_case::used_scale() const noexcept {
  if (scale != 0) return scale;
  const float usual = 1.0f / std::sqrt(static_cast<float>(head_dim));
  if (values != value_kind::max_finite) return usual;
  // Brings the logits of the largest keys back to the order of one.
  return max_finite(kv_type) < 0x1p20f ? usual * 0x1p-15f : usual * 0x1p-115f;
}

std::string settings_of(const attention_case& c) {
  std::ostringstream text;
  text << c.what << ": q " << to_string(c.q_type) << ", kv " << to_string(c.kv_type) << ", out "
       << to_string(c.out_type) << ", " << to_string(c.layout) << ", " << c.num_q_heads() << "/" << c.num_kv_heads
       << " heads, head_dim " << c.head_dim;
  if (c.k_code) text << ", codes " << to_string(*c.k_code) << " and " << to_string(*c.v_code);
  if (c.unit_scales) text << " of scale 1";
  if (c.out_dim() != c.head_dim || c.v_in_k) text << " of v " << c.out_dim() << (c.v_in_k ? " in k" : "");
  text << ", block_size " << c.block_size << (c.causal ? ", causal" : ", not causal");
  if (c.window_left >= 0) text << ", window_left " << c.window_left;
  if (c.window_right >= 0) text << ", window_right " << c.window_right;
  if (c.scale != 0) text << ", scale " << c.scale;
  if (c.soft_cap != 0) text << ", soft_cap " << c.soft_cap;
  if (c.alibi) text << ", alibi";
  if (c.alibi && c.alibi_factor != 1) text << " times " << c.alibi_factor;
  if (c.sinks) text << ", sinks";
  if (c.bias != bias_kind::none) text << ", bias " << to_string(c.bias) << " " << to_string(c.bias_type);
  if (!c.lse) text << ", no lse";
  if (c.deterministic) text << ", deterministic";
  if (c.aligned) text << ", aligned";
  text << ", " << to_string(c.values) << " values, query_len/seq_len";
  for (const batch_seq& seq : c.seqs) {
    text << " " << seq.query_len << "/" << seq.seq_len;
    if (seq.first_position != 0) text << " keys from " << seq.first_position;
    if (seq.query_position) text << " queries from " << *seq.query_position;
  }
  text << ", case seed " << c.seed;
  return text.str();
}

attention_case with_codes(attention_case c, const kv_code& k, const kv_code& v) {
  c.kv_type = dtype::f32;
  c.k_code = k;
  c.v_code = c.v_in_k ? k : v;
  if (c.values == value_kind::denormal || c.values == value_kind::max_finite) c.values = value_kind::normal;
  return c;
}

std::string describe(const attention_case& c) { return settings_of(c) + ", " + seed_note(); }

attention_contents::attention_contents(const attention_case& c) {
  const std::int64_t heads = c.num_q_heads();
  for (std::size_t s = 0; s < c.seqs.size(); ++s) {
    const batch_seq& shape = c.seqs[s];
    const std::int64_t content = shape.content >= 0 ? shape.content : static_cast<std::int64_t>(s);
    const std::int64_t query_position = std::int64_t{shape.first_position} + shape.query_offset();
    sequence seq;
    seq.q.reserve(static_cast<std::size_t>(shape.query_len * heads * c.head_dim));
    for (std::int64_t t = 0; t < shape.query_len; ++t) {
      const std::int64_t position = query_position + t;
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < c.head_dim; ++i) {
          seq.q.push_back(stored_as(c.q_type, element_of(c, query_values, content, position, h, i, shape.seq_len)));
        }
      }
    }
    for (std::int64_t n = 0; n < shape.seq_len; ++n) {
      const std::int64_t j = shape.first_position + n;
      for (std::int64_t h = 0; h < c.num_kv_heads; ++h) {
        const stream_of_values values = c.v_in_k ? key_values : value_values;
        for (std::int64_t i = 0; i < c.head_dim; ++i) {
          seq.k.push_back(stored_as(c.kv_type, element_of(c, key_values, content, j, h, i, shape.seq_len)));
        }
        for (std::int64_t i = 0; i < c.out_dim(); ++i) {
          seq.v.push_back(stored_as(c.kv_type, element_of(c, values, content, j, h, i, shape.seq_len)));
        }
      }
    }
    if (c.k_code) {
      seq.k_given = seq.k;
      seq.v_given = seq.v;
      store_in_code(c, *c.k_code, c.head_dim, seq.k);
      if (!c.v_in_k) store_in_code(c, *c.v_code, c.out_dim(), seq.v);
      if (c.v_in_k) {  // V is the first dims of what K is read as
        seq.v_given = seq.k_given;
        const auto dims = static_cast<std::size_t>(c.head_dim);
        const auto v_dims = static_cast<std::size_t>(c.out_dim());
        for (std::size_t i = 0; i < seq.v.size(); ++i) seq.v[i] = seq.k[i / v_dims * dims + i % v_dims];
      }
    }
    if (c.bias != bias_kind::none) {
      for (std::int64_t t = 0; t < shape.query_len; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t j = 0; j < shape.seq_len; ++j) {
            seq.bias.push_back(bias_element_of(c, content, query_position + t, h, shape.first_position + j));
          }
        }
      }
    }
    seqs.push_back(std::move(seq));
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    // Slopes like those of the ALiBi paper, 2^(−8(h+1)/heads), none of them equal; sinks around the logits.
    if (c.alibi) {
      alibi_slopes.push_back(c.alibi_factor * std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(heads)));
    }
    if (c.sinks) sinks.push_back(2.0f * normal_from(hash_of(c.seed, sink_values, h)));
  }
}

bool is_for_lack_of_a_kernel(const error& refused) {
  const std::string_view why = refused.what();
  return why.find("compute capability") != std::string_view::npos || why.find("not compiled") != std::string_view::npos;
}

attention_call::attention_call(const tested_backend& tested, const attention_case& c,
                               const attention_contents& contents, const attention_placement& placement)
    : tested_(tested),
      out_type_(c.out_type),
      has_lse_(c.lse),
      cache_(tested.get(), c.layout,
             {c.kv_type, c.num_kv_heads, c.head_dim, c.out_dim(), c.block_size, c.v_in_k, c.k_code, c.v_code,
              c.unit_scales},
             dense_kv_of(c, contents), placement.cache) {
  backend& where = tested.get();
  const std::int64_t tokens = c.num_tokens();
  const std::int32_t heads = c.num_q_heads();

  starts_.push_back(0);
  for (const batch_seq& seq : c.seqs) {
    starts_.push_back(starts_.back() + seq.query_len);
    lens_.push_back(seq.seq_len);
    if (c.has_query_positions()) query_positions_.push_back(seq.query_offset());
  }
  host_batch = {static_cast<std::int32_t>(c.seqs.size()),
                tokens,
                starts_.data(),
                lens_.data(),
                cache_.tables().data(),
                cache_.table_stride(),
                nullptr,
                c.has_query_positions() ? query_positions_.data() : nullptr};
  num_blocks = cache_.view().num_blocks;
  spec = {.num_q_heads = heads,
          .num_kv_heads = c.num_kv_heads,
          .qk_head_dim = c.head_dim,
          .v_head_dim = c.out_dim(),
          .block_size = c.block_size,
          .q_type = c.q_type,
          .k_code = c.k_code.value_or(kv_code{c.kv_type}),
          .v_code = c.v_code.value_or(kv_code{c.kv_type}),
          .v_in_k = c.v_in_k,
          .out_type = c.out_type,
          .causal = c.causal,
          .window_left = c.window_left,
          .window_right = c.window_right,
          .deterministic = c.deterministic};

  starts_on_device_ = device_bytes(where, bytes_of(starts_), alignof(std::int32_t));
  lens_on_device_ = device_bytes(where, bytes_of(lens_), alignof(std::int32_t));
  positions_on_device_ = device_bytes(where, bytes_of(query_positions_), alignof(std::int32_t));
  tables_on_device_ = device_bytes(where, bytes_of(cache_.tables()), alignof(std::int32_t));
  slopes_ = device_bytes(where, bytes_of(contents.alibi_slopes), alignof(float));
  sinks_ = device_bytes(where, bytes_of(contents.sinks), alignof(float));

  const std::int64_t q_head = c.head_dim + placement.q_head_gap;
  const strided_shape q_shape{tokens, heads, c.head_dim, heads * q_head + placement.q_token_gap, q_head};
  std::vector<std::byte> image = poisoned(c.q_type, guard_elements + q_shape.elements());
  std::int64_t token = 0;
  for (const attention_contents::sequence& seq : contents.seqs) {
    const float* from = seq.q.data();
    for (std::size_t left = seq.q.size(); left > 0; ++token) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < c.head_dim; ++i, --left) {
          store_element(image.data(), c.q_type,
                        guard_elements + token * q_shape.token_stride + h * q_shape.head_stride + i, *from++);
        }
      }
    }
  }
  q_ = device_bytes(where, std::move(image), size_of(c.q_type));

  if (c.bias != bias_kind::none) place_bias(c, contents, placement);

  const std::int64_t out_head = c.out_dim() + placement.out_head_gap;
  const strided_shape out_shape{tokens, heads, c.out_dim(), heads * out_head + placement.out_token_gap, out_head};
  out_ = device_bytes(where, poisoned(c.out_type, 2 * guard_elements + out_shape.elements()), size_of(c.out_type));
  lse_ = device_bytes(where, poisoned(dtype::f32, 2 * guard_elements + tokens * heads), sizeof(float));

  const auto after_guard = [](device_bytes& bytes, dtype type) {
    return bytes.data() + guard_elements * static_cast<std::int64_t>(size_of(type));
  };
  params.q = {after_guard(q_, c.q_type), c.q_type,           tokens, heads, c.head_dim,
              q_shape.token_stride,      q_shape.head_stride};
  params.out = {after_guard(out_, c.out_type), c.out_type,           tokens, heads, c.out_dim(),
                out_shape.token_stride,        out_shape.head_stride};
  if (c.lse) params.lse = reinterpret_cast<float*>(after_guard(lse_, dtype::f32));
  params.kv = cache_.view();
  params.batch = as_device_view(host_batch);
  params.batch.query_start_loc = reinterpret_cast<const std::int32_t*>(starts_on_device_.data());
  params.batch.seq_lens = reinterpret_cast<const std::int32_t*>(lens_on_device_.data());
  if (c.has_query_positions()) {
    params.batch.query_positions = reinterpret_cast<const std::int32_t*>(positions_on_device_.data());
  }
  params.batch.block_tables = reinterpret_cast<const std::int32_t*>(tables_on_device_.data());
  params.scale = c.used_scale();
  params.soft_cap = c.soft_cap;
  if (c.alibi) params.alibi_slopes = reinterpret_cast<const float*>(slopes_.data());
  if (c.sinks) params.sinks = reinterpret_cast<const float*>(sinks_.data());
}

errc attention_call::run() {
  const errc code = tested_.get().attention(planned, params);
  if (code == errc::ok) record_attention(tested_.get(), planned, params);
  return code;
}

void attention_call::place_bias(const attention_case& c, const attention_contents& contents,
                                const attention_placement& placement) {
  std::int32_t longest = 0;
  for (const batch_seq& seq : c.seqs) longest = std::max(longest, seq.seq_len);
  attention_bias_view& bias = params.bias;
  bias.type = c.bias_type;
  bias.num_tokens = bias_has_tokens(c.bias) ? c.num_tokens() : 1;
  bias.num_heads = bias_has_heads(c.bias) ? c.num_q_heads() : 1;
  bias.num_keys = longest + placement.bias_key_gap;
  bias.head_stride = std::max<std::int64_t>(1, bias.num_keys + placement.bias_head_gap);
  bias.token_stride = bias.num_heads * bias.head_stride + placement.bias_token_gap;
  const strided_shape shape{bias.num_tokens, bias.num_heads, bias.num_keys, bias.token_stride, bias.head_stride};
  std::vector<std::byte> image = poisoned(c.bias_type, guard_elements + shape.elements());
  // What no row attends to stays poison.
  const reference::attention_options options = options_of(c, contents);
  std::int64_t first_token = 0;
  for (std::size_t s = 0; s < c.seqs.size(); first_token += c.seqs[s++].query_len) {
    const batch_seq& seq = c.seqs[s];
    const float* from = contents.seqs[s].bias.data();
    for (std::int64_t t = 0; t < seq.query_len; ++t) {
      for (std::int64_t h = 0; h < c.num_q_heads(); ++h) {
        for (std::int64_t j = 0; j < seq.seq_len; ++j, ++from) {
          if (!reference::is_visible(options, seq.query_offset() + t, j, seq.seq_len)) continue;
          const std::int64_t row = (bias.num_tokens > 1 ? (first_token + t) * bias.token_stride : 0) +
                                   (bias.num_heads > 1 ? h * bias.head_stride : 0);
          store_element(image.data(), c.bias_type, guard_elements + row + j, *from);
        }
      }
    }
  }
  bias_ = device_bytes(tested_.get(), std::move(image), size_of(c.bias_type));
  bias.data = bias_.data() + guard_elements * static_cast<std::int64_t>(size_of(c.bias_type));
}

bool attention_call::inputs_unchanged() const {
  return q_.unchanged() && starts_on_device_.unchanged() && lens_on_device_.unchanged() &&
         positions_on_device_.unchanged() && tables_on_device_.unchanged() && slopes_.unchanged() &&
         sinks_.unchanged() && bias_.unchanged() && cache_.unchanged();
}

bool attention_call::untouched() const { return inputs_unchanged() && out_.unchanged() && lse_.unchanged(); }

void attention_call::reset_outputs() {
  out_.refill();
  lse_.refill();
}

attention_output attention_call::read(std::string& problem) {
  require_ok(tested_.get().synchronize({}), "synchronize");
  std::ostringstream text;
  attention_output result;
  const tensor_view& view = params.out;
  const std::vector<std::byte> bytes = out_.read();
  const auto num_elements = static_cast<std::int64_t>(bytes.size() / size_of(out_type_));
  std::vector<bool> is_output(static_cast<std::size_t>(num_elements), false);
  std::int64_t unwritten = 0;
  for (std::int64_t t = 0; t < view.num_tokens; ++t) {
    for (std::int64_t h = 0; h < view.num_heads; ++h) {
      for (std::int64_t i = 0; i < view.head_dim; ++i) {
        const std::int64_t at = guard_elements + t * view.token_stride + h * view.head_stride + i;
        is_output[static_cast<std::size_t>(at)] = true;
        result.out.push_back(load_element(bytes.data(), out_type_, at));
        if (is_poison(bytes.data(), out_type_, at) && unwritten++ == 0) {
          text << "output is poison (not written, or computed from what must not be read) at token " << t << ", head "
               << h << ", dim " << i << "; ";
        }
      }
    }
  }
  for (std::int64_t at = 0; at < num_elements; ++at) {
    if (is_output[static_cast<std::size_t>(at)] || is_poison(bytes.data(), out_type_, at)) continue;
    text << "written beside the output, " << at - guard_elements << " elements from its start; ";
    break;
  }
  const std::vector<std::byte> lse_bytes = lse_.read();
  const std::int64_t rows = view.num_tokens * view.num_heads;
  for (std::int64_t at = 0; at < rows + 2 * guard_elements; ++at) {
    const bool inside = has_lse_ && at >= guard_elements && at < guard_elements + rows;
    if (inside) result.lse.push_back(load_element(lse_bytes.data(), dtype::f32, at));
    if (inside == is_poison(lse_bytes.data(), dtype::f32, at)) {
      text << (inside ? "LSE is poison at row " : "written beside the LSE at row ") << at - guard_elements << "; ";
      break;
    }
  }
  if (!inputs_unchanged()) text << "an input or the cache was written to; ";
  problem = text.str();
  return result;
}

attention_output run_planned(const tested_backend& tested, attention_call& call) {
  if (const errc code = call.run(); code != errc::ok) {
    const std::optional<error> why = find_problem(call.planned, call.params);
    throw std::runtime_error(tested.name + " refused with " + std::string(to_string(code)) + " (" +
                             (why ? why->what() : "find_problem has nothing to say") + ")");
  }
  std::string problem;
  attention_output output = call.read(problem);
  if (!problem.empty()) throw std::runtime_error(tested.name + ": " + problem);
  return output;
}

attention_output run_attention(const tested_backend& tested, const attention_case& c,
                               const attention_contents& contents, const attention_placement& placement) {
  attention_call call(tested, c, contents, placement);
  call.plan();
  try {
    return run_planned(tested, call);
  } catch (const std::runtime_error& failure) {
    throw std::runtime_error(std::string(failure.what()) + ": " + describe(c));
  }
}

attention_expectation::attention_expectation(const attention_case& c, const attention_contents& contents)
    : case_(c), contents_(contents), options_(options_of(c, contents)) {
  for (std::size_t s = 0; s < c.seqs.size(); ++s) {
    expected_.push_back(reference::attend(options_, dense_of(c.seqs[s], contents.seqs[s])));
    scalar_.push_back(reference::attend_in_float32(options_, dense_of(c.seqs[s], contents.seqs[s])));
  }
}

void attention_expectation::expect(const attention_output& other) {
  std::size_t element = 0;
  std::size_t row = 0;
  for (reference::attention_reference& seq : expected_) {
    for (double& out : seq.out) out = static_cast<double>(other.out[element++]);
    if (other.lse.empty()) continue;
    for (double& lse : seq.lse) lse = static_cast<double>(other.lse[row++]);
  }
}

reference::accuracy_judge attention_expectation::judge(const attention_output& got, const arithmetic& numbers,
                                                       std::size_t first, std::size_t last, double other_nmse) const {
  const bool statistical =
      case_.statistical && case_.values == value_kind::normal && (!case_.alibi || case_.alibi_factor == 1);
  reference::accuracy_judge result({numbers, case_.kv_type, case_.out_type, statistical, other_nmse});
  std::size_t row = 0;
  for (std::size_t s = 0; s < last; ++s) {
    if (s >= first) {
      result.add(options_, dense_of(case_.seqs[s], contents_.seqs[s]), expected_[s], scalar_[s],
                 got.out.data() + row * static_cast<std::size_t>(case_.out_dim()),
                 case_.lse ? got.lse.data() + row : nullptr);
    }
    row += expected_[s].lse.size();
  }
  return result;
}

std::string attention_expectation::problem_of(const attention_output& got, const arithmetic& numbers,
                                              double other_nmse) const {
  return judge(got, numbers, 0, case_.seqs.size(), other_nmse).problem();
}

attention_placement placement_in_turn(const attention_case& c, std::size_t turn) {
  if (turn % 2 == 0) return {{c.seed, 0, 0}, 0, 0, 0, 0, 0, 0, 0};
  if (c.aligned) return {{c.seed, 3, 2}, 16, 8, 8, 24, 3, 1, 2};
  attention_placement with_gaps;
  with_gaps.cache.order = c.seed;
  return with_gaps;
}

namespace {

// What is stored counts as float32 in a case with codes. It reaches the tensor cores as float16, and probabilities with
// it; records beside bfloat16 do as that. A plane of 16 bits beside codes is multiplied in its own type.
arithmetic on_device(const tested_backend& tested, const attention_case& c) {
  const auto is_multiplied = [](const kv_code& code) { return size_of(code.type) == 1; };
  const bool is_record = c.k_code->is_record();
  const bool has_wide_keys = c.k_code->type == c.q_type;
  const bool has_wide_values = c.v_code->type == dtype::f16 || c.v_code->type == c.out_type;
  const bool k_is_coded = is_multiplied(*c.k_code);
  const bool v_is_coded = is_multiplied(*c.v_code);
  // Prefill takes the others, in float16.
  const bool is_prefill_alone = size_of(c.k_code->type) + size_of(c.v_code->type) == 3 &&
                                !(v_is_coded ? has_wide_keys : has_wide_values) && c.head_dim <= 128;
  const bool on_tensor_cores =
      ((v_is_coded && (k_is_coded || has_wide_keys)) || (k_is_coded && has_wide_values) || is_prefill_alone) &&
      c.q_type == c.out_type &&
      (is_record ? c.q_type == dtype::bf16 : c.q_type != dtype::f32 && c.head_dim % 16 == 0 && c.head_dim <= 256);
  if (!on_tensor_cores) return tested.numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim);
  const auto type = static_cast<std::size_t>(is_record                        ? dtype::bf16
                                             : v_is_coded || is_prefill_alone ? dtype::f16
                                                                              : c.v_code->type);
  const auto counted = static_cast<std::size_t>(c.kv_type);
  arithmetic numbers = tested.numbers;
  numbers.unit_accumulate[counted] = numbers.unit_accumulate[type];
  numbers.unit_probability[counted] = numbers.unit_probability[type];
  numbers.tiny_probability[counted] = numbers.tiny_probability[type];
  // A code less its token's origin, times the scale, may be twice the value, and differs from it by roundings of 255.
  if (c.v_code->type == dtype::u8) numbers.unit_probability[counted] = 0x1p-10 + 0x1p-14;
  if (c.k_code->type == dtype::u8) numbers.range_roundoff = 0x1p-23;
  // Rows of bfloat16 become float16 over powers of two, which are scales of their tokens.
  if (c.k_code->type == dtype::bf16) numbers.range_roundoff = 0x1p-38;
  if (c.v_code->type == dtype::bf16) numbers.row_roundoff = 0x1p-24;
  // Of up to 16 rows a sequence records are multiplied in float16 too, V's scales in the probabilities.
  std::int32_t most_rows = 0;
  for (const batch_seq& seq : c.seqs) most_rows = std::max(most_rows, seq.query_len * c.num_q_heads());
  if (is_record && most_rows <= 16) {
    numbers.tiny_probability[counted] = numbers.tiny_probability[static_cast<std::size_t>(dtype::f16)];
  }
  return numbers;
}

}  // namespace

arithmetic numbers_for(const tested_backend& tested, const attention_case& c) {
  if (c.k_code && !tested.is_host) return on_device(tested, c);
  if (c.k_code || c.v_code) return tested.numbers_for_codes(c.q_type, c.out_type);
  // Multi-head latent attention has tensor-core kernels of its own.
  if (!tested.is_host && c.v_in_k && c.num_kv_heads == 1 && c.head_dim == 576 && c.out_dim() == 512) {
    constexpr std::int32_t usual_dims = 128;
    return tested.numbers_for(c.q_type, c.kv_type, c.out_type, usual_dims);
  }
  return tested.numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim);
}

std::string check_attention(const attention_case& c, std::size_t turn) {
  return check_attention(c, one_per_family(turn), turn);
}

std::string check_attention(const attention_case& c, const std::vector<const tested_backend*>& backends,
                            std::size_t turn) {
  const attention_contents contents(c);
  const attention_expectation expectation(c, contents);
  const attention_placement placement = placement_in_turn(c, turn);
  std::string text;
  for (const tested_backend* tested : backends) {
    try {
      const attention_output got = run_attention(*tested, c, contents, placement);
      const std::string problem = expectation.problem_of(got, numbers_for(*tested, c));
      if (!problem.empty()) text += tested->name + ": " + problem + " [" + describe(c) + "]\n";
    } catch (const std::exception& failure) {
      text += std::string(failure.what()) + " [" + describe(c) + "]\n";
    }
  }
  return text;
}

attention_output rows_of(const attention_case& c, const attention_output& output, std::size_t s) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < s; ++i) first += c.seqs[i].query_len;
  const std::int64_t count = c.seqs[s].query_len;
  const std::int64_t heads = c.num_q_heads();
  const auto slice = [](const std::vector<float>& from, std::int64_t at, std::int64_t length) {
    return std::vector<float>(from.begin() + at, from.begin() + at + length);
  };
  attention_output part;
  part.out = slice(output.out, first * heads * c.out_dim(), count * heads * c.out_dim());
  if (c.lse) part.lse = slice(output.lse, first * heads, count * heads);
  return part;
}

void append(attention_output& to, const attention_output& from) {
  to.out.insert(to.out.end(), from.out.begin(), from.out.end());
  to.lse.insert(to.lse.end(), from.lse.begin(), from.lse.end());
}

std::string bit_difference(const attention_output& a, const attention_output& b) {
  if (a.out.size() != b.out.size() || a.lse.size() != b.lse.size()) return "the sizes differ";
  const auto first_difference = [](const std::vector<float>& x, const std::vector<float>& y, const char* name) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::memcmp(&x[i], &y[i], sizeof(float)) != 0) {
        std::ostringstream text;
        text.precision(9);
        text << name << " differs first at element " << i << ": " << x[i] << " against " << y[i] << "; ";
        return text.str();
      }
    }
    return std::string();
  };
  return first_difference(a.out, b.out, "output") + first_difference(a.lse, b.lse, "LSE");
}

}  // namespace bifolio::test
