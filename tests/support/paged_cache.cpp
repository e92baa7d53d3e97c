// SPDX-License-Identifier: Apache-2.0
#include "support/paged_cache.hpp"

#include <algorithm>
#include <numeric>

#include "reference/code_oracle.hpp"
#include "support/codes.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

constexpr std::int64_t guard_elements = 64;  // poison in front of the pool

layout_kind named_kind(arrangement how) {
  switch (how) {
    case arrangement::nhd:
      return layout_kind::nhd;
    case arrangement::x_split:
      return layout_kind::x_split;
    default:
      return layout_kind::hnd;
  }
}

// The smallest way to cut a head into more than one chunk; the whole head when its size is prime.
std::int32_t smallest_chunk(std::int32_t head_dim) {
  for (std::int32_t chunk = 2; chunk * chunk <= head_dim; ++chunk) {
    if (head_dim % chunk == 0) return chunk;
  }
  return head_dim;
}

// One head of one token, chunk by chunk.
void store_row(std::byte* plane, dtype type, const kv_strides& strides, block_id block, std::int32_t head,
               std::int32_t token, std::span<const float> values) {
  const auto dims = static_cast<std::int32_t>(values.size());
  for (std::int32_t first = 0; first < dims; first += strides.chunk) {
    store_elements(plane, type, strides.offset(block, head, token, first), strides.dim, values.data() + first,
                   std::min(strides.chunk, dims - first));
  }
}

}  // namespace

std::string_view to_string(arrangement value) noexcept {
  switch (value) {
    case arrangement::hnd:
      return "hnd";
    case arrangement::nhd:
      return "nhd";
    case arrangement::x_split:
      return "x_split";
    case arrangement::block_major:
      return "block_major";
    case arrangement::padded:
      return "padded";
    case arrangement::scattered:
      return "scattered";
  }
  return "unknown";
}

arranged_layout arrange(arrangement how, const cache_shape& shape, std::int64_t num_blocks) {
  const kv_code code{shape.type};
  const kv_layout named = make_layout(named_kind(how), code, code, shape.num_kv_heads, shape.qk_head_dim,
                                      shape.v_head_dim, shape.block_size, shape.v_in_k);
  const std::int64_t k_block = named.block_elements(named.k);
  const std::int64_t v_block = shape.v_in_k ? 0 : named.block_elements(named.v);
  if (how == arrangement::hnd || how == arrangement::nhd || how == arrangement::x_split) {
    return {named, 0, shape.v_in_k ? 0 : num_blocks * k_block, num_blocks * (k_block + v_block)};
  }
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t tokens = shape.block_size;
  arranged_layout result{named, 0, 0, 0};
  result.layout.kind = layout_kind::strided;
  kv_strides& k = result.layout.k.strides;
  kv_strides& v = result.layout.v.strides;
  switch (how) {
    case arrangement::block_major:
      k.block = v.block = 3 * (k_block + v_block) + 5;
      result.k_start = k_block + v_block;  // the second of three layers
      result.v_start = result.k_start + k_block;
      result.elements = num_blocks * k.block;
      break;
    case arrangement::padded:
      k.head = shape.qk_head_dim + 3;
      k.token = heads * k.head + 1;
      k.block = tokens * k.token + 7;
      v.token = shape.v_head_dim + 1;
      v.head = tokens * v.token + 2;
      v.block = heads * v.head + 3;
      result.v_start = num_blocks * k.block;
      result.elements = num_blocks * (k.block + v.block);
      break;
    default:  // scattered
      k.chunk = smallest_chunk(shape.qk_head_dim);
      k.dim = 2;
      k.chunk_stride = 2 * k.chunk + 1;
      k.token = shape.qk_head_dim / k.chunk * k.chunk_stride;
      k.head = tokens * k.token;
      k.block = heads * k.head;
      v.chunk = shape.v_head_dim;
      v.dim = tokens + 1;
      v.chunk_stride = shape.v_head_dim * v.dim;
      v.token = 1;
      v.head = shape.v_head_dim * v.dim;
      v.block = heads * v.head + 1;
      result.v_start = num_blocks * k.block;
      result.elements = num_blocks * (k.block + v.block);
      break;
  }
  if (shape.v_in_k) {
    v = k;
    result.v_start = result.k_start;
    result.elements = num_blocks * k.block;
  }
  return result;
}

paged_cache::paged_cache(backend& where, arrangement how, const cache_shape& shape, const std::vector<dense_kv>& seqs,
                         const cache_placement& placement) {
  const std::int32_t block_size = shape.block_size;
  const dtype type = shape.type;
  std::int64_t num_blocks = placement.spare_blocks;
  std::int64_t longest = 0;
  for (const dense_kv& seq : seqs) {
    num_blocks += blocks_for(seq.seq_len, block_size);
    longest = std::max(longest, blocks_for(seq.seq_len, block_size));
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_blocks));
  std::iota(order.begin(), order.end(), 0);
  random_source random(hash_of(placement.order, 0x0b10c5));
  random.shuffle(order);
  // Ids past the pool may be taken as its last block: that one holds nothing where there are spare blocks.
  if (placement.spare_blocks > 0) std::iter_swap(std::max_element(order.begin(), order.end()), order.end() - 1);

  const bool is_coded = shape.k_code.has_value();
  std::vector<std::byte> image;
  std::int64_t k_start = 0;  // bytes
  std::int64_t v_start = 0;
  if (is_coded) {
    place_codes(how, shape, num_blocks, image, k_start, v_start);
  } else {
    const arranged_layout arranged = arrange(how, shape, num_blocks);
    view_.layout = arranged.layout;
    const auto element = static_cast<std::int64_t>(size_of(type));
    image.resize(static_cast<std::size_t>((guard_elements + arranged.elements) * element));
    poison(image, type);
    k_start = (guard_elements + arranged.k_start) * element;
    v_start = (guard_elements + arranged.v_start) * element;
  }
  const kv_layout& layout = view_.layout;
  std::byte* k_plane = image.data() + k_start;
  std::byte* v_plane = image.data() + v_start;
  const kv_cache_view host_view{k_plane, v_plane, num_blocks, layout, k_scales_.data(), v_scales_.data()};

  table_stride_ = longest + placement.table_padding;
  tables_.assign(seqs.size() * static_cast<std::size_t>(table_stride_), padding_entry);
  std::size_t next = 0;
  for (std::size_t s = 0; s < seqs.size(); ++s) {
    std::int32_t* row = tables_.data() + s * static_cast<std::size_t>(table_stride_);
    const std::int64_t first_needed = seqs[s].first_needed;
    for (std::int64_t b = first_needed / block_size; b < blocks_for(seqs[s].seq_len, block_size); ++b) {
      row[b] = order[next++];
    }
    for (std::int64_t j = first_needed; j < seqs[s].seq_len; ++j) {
      const block_id block{row[j / block_size]};
      const auto token = static_cast<std::int32_t>(j % block_size);
      const auto store = [&](std::byte* start, const kv_plane& plane, const float* from) {
        const float* of_token = from + j * shape.num_kv_heads * plane.head_dim;
        for (std::int32_t h = 0; h < shape.num_kv_heads; ++h, of_token += plane.head_dim) {
          if (is_coded) {
            const oracle_plane coded = oracle_plane::of(host_view, start == k_plane);
            const std::span<const float> values(of_token, static_cast<std::size_t>(plane.head_dim));
            coded.write(block, h, token, oracle_encode(plane.code, coded.static_scale(h), values));
            continue;
          }
          store_row(start, type, plane.strides, block, h, token, {of_token, static_cast<std::size_t>(plane.head_dim)});
        }
      };
      store(k_plane, layout.k, seqs[s].k);
      if (!shape.v_in_k) store(v_plane, layout.v, seqs[s].v);
    }
  }
  const std::size_t alignment = is_coded ? sizeof(float) : size_of(type);
  bytes_ = device_bytes(where, std::move(image), alignment);
  device_k_scales_ = device_bytes(where, bytes_of(k_scales_), sizeof(float));
  device_v_scales_ = device_bytes(where, bytes_of(v_scales_), sizeof(float));
  view_.k = bytes_.data() + k_start;
  view_.v = shape.v_in_k ? nullptr : bytes_.data() + v_start;  // where V is part of K it is not looked at
  view_.num_blocks = num_blocks;
  view_.k_scales = reinterpret_cast<const float*>(device_k_scales_.data());
  view_.v_scales = reinterpret_cast<const float*>(device_v_scales_.data());
}

void paged_cache::place_codes(arrangement how, const cache_shape& shape, std::int64_t num_blocks,
                              std::vector<std::byte>& image, std::int64_t& k_start, std::int64_t& v_start) {
  const code_order order = how == arrangement::hnd       ? code_order::hnd
                           : how == arrangement::nhd     ? code_order::nhd
                           : how == arrangement::x_split ? code_order::x_split
                                                         : code_order::padded;
  view_.layout = coded_layout(order, {*shape.k_code, *shape.v_code, shape.num_kv_heads, shape.qk_head_dim,
                                      shape.v_head_dim, shape.block_size, shape.v_in_k});
  for (const bool is_k : {true, false}) {
    std::vector<float>& scales = is_k ? k_scales_ : v_scales_;
    scales = ordinary_scales(is_k ? *shape.k_code : *shape.v_code, shape.num_kv_heads);
    if (shape.unit_scales) std::fill(scales.begin(), scales.end(), 1.0f);
  }
  const auto plane_bytes = [&](const kv_plane& plane) {
    const std::int64_t bytes = num_blocks * plane.strides.block * static_cast<std::int64_t>(size_of(plane.code.type));
    return (bytes + 3) / 4 * 4;
  };
  k_start = guard_elements;
  v_start = k_start + plane_bytes(view_.layout.k);
  // Bytes of ones: NaN in scales and in every floating type, and of integers a code like others.
  image.assign(static_cast<std::size_t>(v_start + (shape.v_in_k ? 0 : plane_bytes(view_.layout.v))), std::byte{0xff});
}

}  // namespace bifolio::test
