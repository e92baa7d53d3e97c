// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/copy_audit.hpp>
#include <bifolio/error.hpp>
#include <bifolio/rotate_append.hpp>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "common/base/checked.hpp"
#include "common/base/hash.hpp"
#include "common/base/kv_code.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/engine/upload_ring.hpp"
#include "common/engine/validate_cache.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// Where each array of a step is in the one buffer that is transferred; every array starts on its own line.
struct step_offsets {
  std::size_t query_start_loc = 0;
  std::size_t seq_lens = 0;
  std::size_t block_tables = 0;
  std::size_t slot_mapping = 0;
  std::size_t query_positions = 0;
  std::size_t num_bytes = 0;

  explicit step_offsets(const step_batch& batch) noexcept
      : step_offsets(batch.query_start_loc.size(), batch.seq_lens.size(), batch.block_tables.size(),
                     batch.slot_mapping.size(), batch.query_positions.size()) {}
  step_offsets(std::size_t num_starts, std::size_t num_seqs, std::size_t num_table_entries, std::size_t num_slots,
               std::size_t num_positions) noexcept {
    query_start_loc = add<std::int32_t>(num_starts);
    seq_lens = add<std::int32_t>(num_seqs);
    block_tables = add<std::int32_t>(num_table_entries);
    slot_mapping = add<std::int64_t>(num_slots);
    query_positions = add<std::int32_t>(num_positions);
  }

 private:
  template <class T>
  std::size_t add(std::size_t num_elements) noexcept {
    constexpr std::size_t line = 64;
    const std::size_t at = num_bytes;
    num_bytes += (num_elements * sizeof(T) + line - 1) / line * line;
    return at;
  }
};

template <class T>
void put(std::byte* buffer_start, std::size_t offset, const std::vector<T>& array) noexcept {
  if (!array.empty()) std::memcpy(buffer_start + offset, array.data(), array.size() * sizeof(T));
}

void require(bool holds, const char* name, std::int64_t value, const char* allowed) {
  if (!holds) {
    detail::refuse(errc::invalid_argument, name, " is ", value, "; it must be ", allowed);
  }
}

/// The numbers and codes, and that each plane of a layer in this layout stays within its num_blocks blocks.
void require_layout(const kv_layout& layout, std::int64_t num_blocks) {
  for (const kv_plane* plane : {&layout.k, &layout.v}) {
    if (is_dtype(plane->code.type)) continue;
    detail::refuse(errc::invalid_argument, "layout.", plane == &layout.k ? "k" : "v", ".code.type is ",
                   static_cast<std::int64_t>(plane->code.type), "; it must be one of ", dtype_names);
  }
  require(layout.num_kv_heads >= 1, "layout.num_kv_heads", layout.num_kv_heads, "at least 1");
  require(layout.k.head_dim >= 1, "layout.k.head_dim", layout.k.head_dim, "at least 1");
  require(layout.v.head_dim >= 1, "layout.v.head_dim", layout.v.head_dim, "at least 1");
  require(layout.block_size >= 1, "layout.block_size", layout.block_size, "at least 1");
  const bool is_strided = layout.kind == layout_kind::strided;
  // Refuses codes and sizes that no layout can have: block_bytes, which multiplies without a check, is good from here.
  const kv_layout named =
      make_layout(is_strided ? layout_kind::hnd : layout.kind, layout.k.code, layout.v.code, layout.num_kv_heads,
                  layout.k.head_dim, layout.v.head_dim, layout.block_size, layout.v_in_k);
  if (!is_strided && layout != named) {
    detail::refuse(errc::invalid_argument, "the strides of a layout of kind ", to_string(layout.kind),
                   " are not those of make_layout; other strides are of kind strided");
  }
  if (!is_strided) return;
  if (layout.v_in_k && (layout.v.strides != layout.k.strides || layout.v.tail != layout.k.tail)) {
    detail::refuse(errc::invalid_argument,
                   "a strided layout whose V is part of K has strides of V that are not those "
                   "of K; they must be equal");
  }
  for (const kv_plane* plane : {&layout.k, &layout.v}) {
    if (plane == &layout.v && layout.v_in_k) break;
    const std::int64_t plane_bytes =
        detail::bounded_product("the size of a plane in bytes (num_blocks * bytes per block)", validate::max_span_bytes,
                                num_blocks, layout.block_bytes(*plane));
    const std::int64_t elements = plane_bytes / static_cast<std::int64_t>(size_of(plane->code.type));
    const std::int64_t span = validate::plane_span(layout, *plane, num_blocks);
    if (span < 0 || span > elements) {
      detail::refuse(
          errc::invalid_argument, "a strided layout ",
          [&](std::string& sentence) {
            sentence += span < 0 ? "whose strides do not nest (see kv_layout.hpp)"
                                 : "that reaches " + std::to_string(span) + " elements into a plane";
          },
          "; an engine's layers hold ", elements, " elements in its ", plane == &layout.k ? "K" : "V", " plane");
    }
  }
}

/// What V may need before it to start on a line of its own.
std::int64_t v_padding(const kv_layout& layout) noexcept {
  const bool has_tails = layout.k.code.tail_floats() > 0 || layout.v.code.tail_floats() > 0;
  const bool alike = size_of(layout.k.code.type) == size_of(layout.v.code.type);
  return layout.v_in_k || (alike && !has_tails) ? 0 : 127;
}

/// Where the V plane of a layer starts; 0 where V is part of K, and both pointers are those of K.
std::int64_t v_start_of(const cache_engine_config& config) noexcept {
  if (config.layout.v_in_k) return 0;
  const std::int64_t k_bytes = config.num_blocks * config.layout.block_bytes(config.layout.k);
  return v_padding(config.layout) == 0 ? k_bytes : (k_bytes + 127) / 128 * 128;
}

/// Bytes of one layer. Throws like the constructor of cache_engine.
std::int64_t layer_bytes(const cache_engine_config& config) {
  require(config.num_layers >= 1, "num_layers", config.num_layers, "at least 1");
  require(config.num_blocks >= 1 && config.num_blocks <= validate::max_num_blocks, "num_blocks", config.num_blocks,
          "1 to 2147480000, the number of block ids");
  require_layout(config.layout, config.num_blocks);
  (void)detail::bounded_product("the size of the cache in bytes (num_layers * num_blocks * bytes per block)",
                                validate::max_span_bytes, config.num_layers, config.num_blocks,
                                config.layout.block_bytes());
  if (config.layout.v_in_k) return config.num_blocks * config.layout.block_bytes();
  return v_start_of(config) + config.num_blocks * config.layout.block_bytes(config.layout.v);
}

/// Static scales of one layer in one plane.
std::int64_t scales_per_layer(const kv_layout& layout, const kv_code& code) noexcept {
  if (!code.has_static_scales()) return 0;
  return code.granularity == scale_granularity::head ? layout.num_kv_heads : 1;
}

/// The same where V is part of K, whose scales it shares.
std::int64_t v_scales_per_layer(const kv_layout& layout) noexcept {
  return layout.v_in_k ? 0 : scales_per_layer(layout, layout.v.code);
}

void require_scales(const char* name, const std::vector<float>& scales, std::int32_t num_layers,
                    std::int64_t per_layer) {
  const std::int64_t expected = num_layers * per_layer;  // below 2^62: heads are bounded by a block's bytes
  if (static_cast<std::int64_t>(scales.size()) != expected) {
    detail::refuse(errc::invalid_argument, name, " holds ", scales.size(), " numbers; it must hold ", expected, ": ",
                   per_layer, " for each of ", num_layers, " layers");
  }
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] >= least_scale && scales[i] <= largest_scale) continue;
    char text[32];
    (void)std::snprintf(text, sizeof text, "%g", static_cast<double>(scales[i]));
    detail::refuse(errc::invalid_argument, name, "[", i, "] is ", static_cast<const char*>(text),
                   "; a scale must be finite and from 2^-100 to 2^100");
  }
}

}  // namespace

std::int64_t num_blocks_for_memory(std::int64_t memory_bytes, const kv_layout& layout, std::int32_t num_layers) {
  require(memory_bytes >= 0, "memory_bytes", memory_bytes, "at least 0");
  require(num_layers >= 1, "num_layers", num_layers, "at least 1");
  require_layout(layout, 1);
  const std::int64_t bytes = detail::bounded_product("the size of a block over all layers in bytes",
                                                     validate::max_span_bytes, layout.block_bytes(), num_layers);
  const std::int64_t padding = std::int64_t{num_layers} * v_padding(layout);
  return std::min(std::max<std::int64_t>(memory_bytes - padding, 0) / bytes, validate::max_num_blocks);
}

cache_engine::cache_engine(backend& where, const cache_engine_config& config, memory_resource* memory)
    : backend_(&where), config_(config) {
  require(config.num_staging_slots >= 1 && config.num_staging_slots <= 64, "num_staging_slots",
          config.num_staging_slots, "1 to 64");
  const std::int64_t num_bytes = layer_bytes(config);
  memory_resource& source = memory == nullptr ? where.memory() : *memory;
  if (source.where() != where.where()) {
    detail::refuse(errc::invalid_argument, "the memory resource is of device ", to_string(source.where()),
                   "; the backend's kernels read memory of ", to_string(where.where()));
  }
  const kv_layout& layout = config.layout;
  const std::int64_t k_scales = scales_per_layer(layout, layout.k.code);
  const std::int64_t v_scales = v_scales_per_layer(layout);
  require_scales("k_scales", config.k_scales, config.num_layers, k_scales);
  require_scales("v_scales", config.v_scales, config.num_layers, v_scales);
  const std::int64_t v_start = v_start_of(config);
  const auto num_layers = static_cast<std::size_t>(config.num_layers);
  if (k_scales + v_scales > 0) upload_scales(source);
  const float* const first_k = k_scales > 0 ? scales_.as<float>() : nullptr;
  const float* const first_v = v_scales > 0 ? scales_.as<float>() + config.k_scales.size() : nullptr;
  detail::translate_bad_alloc("cache_engine", [&] {
    storage_.reserve(num_layers);
    layers_.reserve(num_layers);
    for (std::size_t i = 0; i < num_layers; ++i) {
      storage_.emplace_back(source, static_cast<std::size_t>(num_bytes));
      auto* const k = storage_.back().as<std::byte>();
      const auto layer = static_cast<std::int64_t>(i);
      layers_.push_back({k, k + v_start, config.num_blocks, layout,
                         first_k == nullptr ? nullptr : first_k + layer * k_scales,
                         first_v == nullptr ? nullptr : first_v + layer * v_scales});
    }
  });
  if (!config.zero_fill) return;
  errc code = errc::ok;
  for (std::size_t i = 0; i < num_layers && code == errc::ok; ++i) {
    code = where.clear(storage_[i].as<std::byte>(), static_cast<std::size_t>(num_bytes), {});
  }
  if (code == errc::ok) code = where.synchronize({});
  if (code != errc::ok) detail::refuse(code, "the layers could not be filled with zeros: ", to_string(code));
}

void cache_engine::upload_scales(memory_resource& source) {
  const std::size_t num_k = config_.k_scales.size();
  const std::size_t num_v = config_.v_scales.size();
  scales_ = buffer(source, (num_k + num_v) * sizeof(float));
  auto* const to = scales_.as<float>();
  const auto copy = [&](float* dst, const std::vector<float>& from) {
    if (from.empty()) return;
    const errc code = backend_->upload(dst, from.data(), from.size() * sizeof(float), {});
    if (code != errc::ok) detail::refuse(code, "the static scales could not be copied to the device");
  };
  copy(to, config_.k_scales);
  copy(to + num_k, config_.v_scales);
  if (const errc code = backend_->synchronize({}); code != errc::ok) {
    detail::refuse(code, "the static scales could not be copied to the device");
  }
}

std::uint64_t cache_engine::fingerprint() const noexcept {
  detail::digest_builder digest;
  const auto add = [&](std::int64_t value) { digest.add(static_cast<std::uint64_t>(value)); };
  const kv_layout& layout = config_.layout;
  add(config_.num_layers);
  add(layout.num_kv_heads);
  add(layout.block_size);
  add(layout.v_in_k ? 1 : 0);
  for (const kv_plane* plane : {&layout.k, &layout.v}) {
    add(static_cast<std::int64_t>(plane->code.type));
    add(static_cast<std::int64_t>(plane->code.granularity));
    add(plane->head_dim);
    for (const std::int64_t stride :
         {plane->strides.head, plane->strides.token, plane->strides.dim, plane->strides.chunk_stride,
          std::int64_t{plane->strides.chunk}, plane->tail.offset, plane->tail.head, plane->tail.token}) {
      add(stride);
    }
  }
  for (const std::vector<float>* scales : {&config_.k_scales, &config_.v_scales}) {
    add(static_cast<std::int64_t>(scales->size()));
    for (const float scale : *scales) add(std::bit_cast<std::int32_t>(scale));
  }
  return digest.value();
}

std::optional<error> cache_engine::find_difference(const cache_engine& other) const {
  const auto refusal = [](const auto&... parts) {
    return std::optional<error>(detail::make_error(errc::failed_precondition, parts...));
  };
  const auto number = [&](const char* name, std::int64_t mine, std::int64_t theirs) -> std::optional<error> {
    if (mine == theirs) return std::nullopt;
    return refusal("the engines differ in ", name, ": ", mine, " and ", theirs);
  };
  const kv_layout& a = config_.layout;
  const kv_layout& b = other.config_.layout;
  std::optional<error> problem = number("num_layers", config_.num_layers, other.config_.num_layers);
  if (!problem) problem = number("num_kv_heads", a.num_kv_heads, b.num_kv_heads);
  if (!problem) problem = number("block_size", a.block_size, b.block_size);
  if (!problem) problem = number("v_in_k", a.v_in_k ? 1 : 0, b.v_in_k ? 1 : 0);
  if (!problem) problem = number("the head_dim of K", a.k.head_dim, b.k.head_dim);
  if (!problem) problem = number("the head_dim of V", a.v.head_dim, b.v.head_dim);
  if (problem) return problem;
  for (const bool is_k : {true, false}) {
    const kv_code& mine = is_k ? a.k.code : a.v.code;
    const kv_code& theirs = is_k ? b.k.code : b.v.code;
    if (mine == theirs) continue;
    return refusal(
        "the engines differ in the code of ", is_k ? "K" : "V", ": ",
        [&](std::string& text) { text += to_string(mine); }, " and ",
        [&](std::string& text) { text += to_string(theirs); });
  }
  if (a != b) return refusal("the engines differ in layout: ", to_string(a.kind), " and ", to_string(b.kind));
  for (const bool is_k : {true, false}) {
    const std::vector<float>& mine = is_k ? config_.k_scales : config_.v_scales;
    const std::vector<float>& theirs = is_k ? other.config_.k_scales : other.config_.v_scales;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (mine[i] == theirs[i]) continue;
      char text[64];
      (void)std::snprintf(text, sizeof text, "%.9g and %.9g", static_cast<double>(mine[i]),
                          static_cast<double>(theirs[i]));
      return refusal("the engines differ in ", is_k ? "k" : "v", "_scales[", i, "]: ", static_cast<const char*>(text));
    }
  }
  return std::nullopt;
}

std::size_t cache_engine::num_bytes() const noexcept {
  std::size_t sum = scales_.num_bytes();
  for (const buffer& layer : storage_) sum += layer.num_bytes();
  return sum;
}

cache_engine::~cache_engine() = default;
cache_engine::cache_engine(cache_engine&&) noexcept = default;
cache_engine& cache_engine::operator=(cache_engine&&) noexcept = default;

detail::upload_ring& cache_engine::uploads() {
  if (uploads_ == nullptr) {
    uploads_ = detail::translate_bad_alloc(
        "cache_engine", [&] { return std::make_unique<detail::upload_ring>(*backend_, config_.num_staging_slots); });
  }
  return *uploads_;
}

void cache_engine::reserve_upload(std::int32_t max_num_seqs, std::int64_t max_num_tokens,
                                  std::int64_t max_block_table_stride, stream_ref stream) {
  require(max_num_seqs >= 0, "max_num_seqs", max_num_seqs, "at least 0");
  require(max_num_tokens >= 0, "max_num_tokens", max_num_tokens, "at least 0");
  require(max_block_table_stride >= 0, "max_block_table_stride", max_block_table_stride, "at least 0");
  constexpr std::int64_t most = validate::max_span_bytes / 16;
  const std::int64_t num_table_entries =
      detail::bounded_product("the number of block table entries (max_num_seqs * max_block_table_stride)", most,
                              max_num_seqs, max_block_table_stride);
  require(max_num_tokens <= most, "max_num_tokens", max_num_tokens, "at most 2^58");
  if (backend_->where().type == device_type::cpu) return;
  const step_offsets at(static_cast<std::size_t>(max_num_seqs) + 1, static_cast<std::size_t>(max_num_seqs),
                        static_cast<std::size_t>(num_table_entries), static_cast<std::size_t>(max_num_tokens),
                        static_cast<std::size_t>(max_num_seqs));
  uploads().reserve(at.num_bytes, stream);
}

device_step_view cache_engine::upload(const step_batch& batch, stream_ref stream) {
  if (batch.num_blocks > config_.num_blocks || (batch.block_size != config_.layout.block_size && batch.block_size != 0))
      [[unlikely]] {
    detail::refuse(errc::invalid_argument, "the batch is of a manager with ", batch.num_blocks, " blocks of ",
                   batch.block_size, " tokens; the engine has ", config_.num_blocks, " of ", config_.layout.block_size);
  }
  if (backend_->where().type == device_type::cpu) return as_device_view(batch.view());

  const step_offsets at(batch);
  detail::upload_ring& ring = uploads();
  std::byte* const host = ring.open(at.num_bytes, stream);
  put(host, at.query_start_loc, batch.query_start_loc);
  put(host, at.seq_lens, batch.seq_lens);
  put(host, at.block_tables, batch.block_tables);
  put(host, at.slot_mapping, batch.slot_mapping);
  put(host, at.query_positions, batch.query_positions);
  const std::byte* const base = ring.send(at.num_bytes, stream);

  device_step_view view = as_device_view(batch.view());
  view.query_start_loc = reinterpret_cast<const std::int32_t*>(base + at.query_start_loc);
  view.seq_lens = reinterpret_cast<const std::int32_t*>(base + at.seq_lens);
  view.block_tables = reinterpret_cast<const std::int32_t*>(base + at.block_tables);
  view.slot_mapping = reinterpret_cast<const std::int64_t*>(base + at.slot_mapping);
  if (view.query_positions != nullptr) {
    view.query_positions = reinterpret_cast<const std::int32_t*>(base + at.query_positions);
  }
  return view;
}

errc cache_engine::append(std::int32_t layer, const const_tensor_view& k, const const_tensor_view& v,
                          const std::int64_t* slot_mapping, stream_ref stream) noexcept {
  const auto index = static_cast<std::size_t>(layer);
  if (layer < 0 || index >= layers_.size()) return errc::out_of_range;
  return backend_->append({layers_[index], k, v, slot_mapping}, stream);
}

errc cache_engine::rotate_append(std::int32_t layer, const rotate_append_params& params, stream_ref stream) noexcept {
  const auto index = static_cast<std::size_t>(layer);
  if (layer < 0 || index >= layers_.size()) return errc::out_of_range;
  rotate_append_params whole = params;
  whole.append.kv = layers_[index];
  return backend_->rotate_append(whole, stream);
}

errc cache_engine::copy_blocks(std::span<const block_copy> copies, stream_ref stream) noexcept {
  const errc code = backend_->copy_blocks(layers_, copies, stream);
  if (config_.audit != nullptr && code == errc::ok) [[unlikely]]
    config_.audit->carried_out(copy_kind::on_write, config_.audit_group, copies);
  return code;
}

errc cache_engine::swap_blocks_to(cache_engine& other, std::span<const block_copy> copies, stream_ref stream) noexcept {
  if (config_.layout != other.config_.layout || layers_.size() != other.layers_.size() ||
      config_.k_scales != other.config_.k_scales || config_.v_scales != other.config_.v_scales) {
    return errc::failed_precondition;
  }
  backend& mover = backend_->where().type == device_type::cpu ? *other.backend_ : *backend_;
  const errc code = mover.swap_blocks(layers_, other.layers_, copies, stream);
  const auto carried_out = [&](const cache_engine& on_device, copy_kind kind) {
    if (on_device.config_.audit == nullptr || code != errc::ok) [[likely]]
      return;
    on_device.config_.audit->carried_out(kind, on_device.config_.audit_group, copies);
  };
  carried_out(*this, copy_kind::swap_out);
  carried_out(other, copy_kind::swap_in);
  return code;
}

errc cache_engine::convert_blocks_to(cache_engine& other, std::span<const block_copy> copies,
                                     stream_ref stream) noexcept {
  if (backend_->where() != other.backend_->where() || layers_.size() != other.layers_.size() ||
      !validate::same_shape(config_.layout, other.config_.layout)) {
    return errc::failed_precondition;
  }
  // Layers are alike and each is an allocation of its own: what the first one accepts, all accept.
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (const errc code = backend_->convert_blocks(layers_[i], other.layers_[i], copies, stream); code != errc::ok) {
      return code;
    }
  }
  return errc::ok;
}

}  // namespace bifolio::inline v0_2
