// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/implementations.hpp"

#include <algorithm>

#include "common/base/kv_code.hpp"
#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/general/launch.hpp"
#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/launch.hpp"
#include "cuda/host/assignment.hpp"
#if BIFOLIO_CUDA_SM90
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#endif

namespace bifolio::inline v0_2::cuda {
namespace {

/// "cuda <kernel> <type> d<head_dim>": how names of kernels made for one head_dim begin.
std::string shape_name(const char* kernel, std::string_view type, std::int32_t head_dim) {
  return std::string("cuda ") + kernel + " " + std::string(type) + " d" + std::to_string(head_dim);
}
/// In the place of a type: any codes, but for records; and records.
constexpr std::string_view coded = "coded";
constexpr std::string_view coded_values = "coded-v";
constexpr std::string_view coded_keys = "coded-k";
constexpr std::string_view record = "record";
/// In the place of what a kernel of codes computes, with scales per token: a positive scale, or the logits transform as
/// well; the same with zero points.
constexpr std::string_view token_scales = "token";
constexpr std::string_view token_transform = "token transform";
constexpr std::string_view token_zeros = "token zeros";
constexpr std::string_view token_zeros_transform = "token zeros transform";

/// What all implementations but the general one require of a step.
bool has_usual_shape(const plan_input& step, std::string* why) noexcept {
  const attention_spec& spec = step.spec;
  if (spec.v_in_k) return detail::declines(why, "V is part of K; it takes planes of their own");
  if (spec.qk_head_dim != spec.v_head_dim) {
    return detail::declines(why, "qk_head_dim is ", spec.qk_head_dim, " and v_head_dim ", spec.v_head_dim,
                            "; it takes one head_dim for both");
  }
  if (step.has_query_positions) return detail::declines(why, "the batch has query_positions");
  return true;
}

/// The same, and no codes.
bool is_plain_step(const plan_input& step, std::string* why) noexcept {
  if (!has_usual_shape(step, why)) return false;
  const attention_spec& spec = step.spec;
  if (spec.k_code != spec.v_code) return detail::declines(why, "the codes of K and V differ");
  if (!detail::is_plain(spec.k_code)) {
    return detail::declines(
        why, "K and V are stored as ", [&](std::string& text) { text += to_string(spec.k_code); },
        "; it takes them unscaled, as ", tensor_dtype_names);
  }
  return true;
}

bool has_codes(const attention_spec& spec) noexcept {
  return !detail::is_plain(spec.k_code) || !detail::is_plain(spec.v_code);
}

/// What they require of q and out beside codes: one 16-bit type.
bool suits_codes(const attention_spec& spec, std::string* why) noexcept {
  if (suit_tensor_cores(spec.q_type, spec.q_type, spec.out_type)) return true;
  return detail::declines(why, "the dtypes of q and out are ", to_string(spec.q_type), " and ",
                          to_string(spec.out_type), "; beside codes it takes f16 or bf16 for both");
}

/// What the tensor-core kernels of codes require of a step: K and V of 8 bits, or one of them of 16; q and out of one
/// 16-bit type.
bool is_coded_step(const plan_input& step, std::string* why) noexcept {
  if (!has_usual_shape(step, why)) return false;
  const attention_spec& spec = step.spec;
  const std::size_t bytes = size_of(spec.k_code.type) + size_of(spec.v_code.type);
  if (bytes != 2 && bytes != 3) {
    return detail::declines(
        why, "K is stored as ", [&](std::string& text) { text += to_string(spec.k_code); }, " and V as ",
        [&](std::string& text) { text += to_string(spec.v_code); },
        "; it takes types of 8 bits for both, or one of 16 bits beside codes");
  }
  return suits_codes(spec, why);
}

/// The same of V alone, beside K in the type of q and out.
bool is_coded_beside_keys(const attention_spec& spec) noexcept {
  return detail::is_plain(spec.k_code) && size_of(spec.v_code.type) == 1 && spec.k_code.type == spec.q_type &&
         suit_tensor_cores(spec.q_type, spec.q_type, spec.out_type);
}

/// Codes of K alone, beside V in a 16-bit type.
bool is_coded_beside_values(const attention_spec& spec) noexcept {
  return size_of(spec.k_code.type) == 1 && size_of(spec.v_code.type) == 2;
}

/// What decode requires of q, out and V beside such codes. Probabilities are rounded to V's type: in bf16 they would be
/// coarser than an output of f16.
bool suits_codes_beside_values(const attention_spec& spec, std::string* why) noexcept {
  if (!suits_codes(spec, why)) return false;
  if (spec.v_code.type == dtype::f16 || spec.v_code.type == spec.out_type) return true;
  return detail::declines(why, "the dtypes of V and out are ", to_string(spec.v_code.type), " and ",
                          to_string(spec.out_type),
                          "; beside codes of K it takes V in f16 or in the dtype of q and out");
}

/// Lengths that fit into the positions of tensor-core kernels.
bool has_usual_lengths(const plan_input& step, std::string* why) noexcept {
  if (step.max_seq_len < longest_window && step.max_query_len < longest_window) return true;
  return detail::declines(why, "the longest sequence has ", step.max_seq_len, " tokens, of which ", step.max_query_len,
                          " are new; it takes less than ", longest_window);
}

/// What the tensor-core kernels require of a step. `with_f32`: they multiply float32 as well.
bool step_suits_tensor_cores(const plan_input& step, bool with_f32, std::string* why) noexcept {
  if (!is_plain_step(step, why)) return false;
  const attention_spec& spec = step.spec;
  const bool all_f32 = spec.q_type == dtype::f32 && spec.k_code.type == dtype::f32 && spec.out_type == dtype::f32;
  if (!suit_tensor_cores(spec.q_type, spec.k_code.type, spec.out_type) && !(with_f32 && all_f32)) {
    return detail::declines(why, "the dtypes of q, kv and out are ", to_string(spec.q_type), ", ",
                            to_string(spec.k_code.type), " and ", to_string(spec.out_type), "; it takes one ",
                            with_f32 ? "" : "16-bit ", "dtype for all");
  }
  return has_usual_lengths(step, why);
}

bool declines_shared_bytes(const plan_input& step, int shared_bytes, std::string* why) noexcept {
  return detail::declines(why, "a CTA has ", step.device.max_shared_bytes_per_block,
                          " bytes of shared memory at most on this device; it takes ", shared_bytes);
}

// prefill

#if BIFOLIO_CUDA_SM90
/// Whether prefill and decode give a row the same bits in deterministic plans.
bool sums_like_decode(const attention_spec& spec) noexcept {
  // Their shapes may pad a head_dim differently: products of zeros change no sum.
  return !has_codes(spec) && prefill_has_tree(prefill_tiling_of(spec).dims) &&
         decode_padded_dim(spec.k_code.type, spec.qk_head_dim) != 0 &&
         decode_splits_dims(static_cast<int>(size_of(spec.k_code.type)));
}

/// What the kernels of wgmma and TMA require of the machine.
bool runs_on_hopper(const plan_input& step, std::string* why) noexcept {
  if (step.device.compute_capability != 90) {
    return detail::declines(why, "the device has compute capability ", step.device.compute_capability / 10, ".",
                            step.device.compute_capability % 10, "; it takes 9.0");
  }
  if (step.device.encode_tensor_map == nullptr) {
    return detail::declines(why, "the driver has no cuTensorMapEncodeTiled");
  }
  return true;
}

prefill_kind prefill_kind_of(const attention_spec& spec) noexcept {
  if (!has_codes(spec)) return prefill_kind_without_codes(spec.q_type, spec.qk_head_dim, spec.deterministic);
  return coded_prefill_kind(std::max(spec.k_code.tail_floats(), spec.v_code.tail_floats()),
                            size_of(spec.k_code.type) != size_of(spec.v_code.type));
}

bool prefill_accepts(const plan_input& step, std::string* why) noexcept {
  const attention_spec& spec = step.spec;
  if (!runs_on_hopper(step, why)) return false;
  const bool is_coded = has_codes(spec);
  if (is_coded ? !is_coded_step(step, why) || !has_usual_lengths(step, why)
               : !step_suits_tensor_cores(step, true, why)) {
    return false;
  }
  const prefill_entry* const entry = find_prefill_entry(spec.k_code.type, spec.v_code.type, spec.qk_head_dim);
  if (entry == nullptr) {
    return detail::declines(why, "head_dim is ", spec.qk_head_dim, "; it takes multiples of ",
                            !is_coded ? spec.q_type == dtype::f32 ? "4 up to 128" : "8 up to 512"
                            : size_of(spec.k_code.type) == size_of(spec.v_code.type) ? "16 up to 256"
                                                                                     : "16 up to 128");
  }
  // So that a row's bits do not depend on how a prompt is cut into chunks. Where decode has no kernel, prefill computes
  // all rows, but for codes: where their keys are cut depends on the step.
  const bool is_alone = !is_coded && find_decode_entry(spec.k_code.type, spec.qk_head_dim) == nullptr;
  if (spec.deterministic && !is_alone && !sums_like_decode(spec)) {
    return detail::declines(why, "the plan is deterministic, and prefill has not decode's bits for ", spec.qk_head_dim,
                            " dims of ", to_string(spec.q_type));
  }
  const int shared_bytes = entry->choose(prefill_kind_of(spec), false).shared_bytes;
  if (static_cast<std::size_t>(shared_bytes) > step.device.max_shared_bytes_per_block) {
    return declines_shared_bytes(step, shared_bytes, why);
  }
  return true;
}

bool takes_prefill_call(const attention_kernel_args& args, std::string* why) noexcept {
  return prefill_accepts_call(args, why);
}

cudaError_t launch_prefill_part(const launch_context& context, const attention_kernel_args& args) noexcept {
  return launch_prefill(context.api, args, context.plans.prefill, context.metadata.prefill, context.device,
                        context.stream);
}

std::string prefill_name(dtype type, std::int32_t tile_dims, std::string_view loading, std::string_view variant) {
  return shape_name("prefill", to_string(type), tile_dims) + " " + std::string(loading) + " " + std::string(variant);
}

std::string_view prefill_variant_of(const attention_kernel_args& args) noexcept {
  const bool transforms = prefill_transforms(args);
  switch (prefill_kind_of(args)) {
    case prefill_kind::plain:
    case prefill_kind::coded:
      return transforms ? "transform" : "plain";
    case prefill_kind::tree:
      return "deterministic";
    case prefill_kind::parts:
      return transforms ? "deterministic transform" : "deterministic";
    case prefill_kind::coded_by_token:
      return transforms ? token_transform : token_scales;
    case prefill_kind::coded_by_zero:
      return transforms ? token_zeros_transform : token_zeros;
  }
  return {};
}

std::string prefill_name_of(const step_plans&, const attention_kernel_args& args) {
  const std::string_view loading = args.is_coded ? coded : prefill_loading(args).by_copy ? "copy" : "tma";
  const std::string_view variant = prefill_variant_of(args);
  return prefill_name(args.q_type, prefill_tiling_of(args.q_type, args.head_dim, args.deterministic).dims, loading,
                      variant);
}

void append_prefill_names(const device_numbers& device, std::vector<std::string>& names) {
  if (device.compute_capability != 90 || device.encode_tensor_map == nullptr) return;
  for (const dtype type : tensor_dtypes) {
    for (const std::int32_t tile_dims : prefill_all_tile_dims) {
      const prefill_entry* const entry = find_prefill_entry(type, tile_dims);
      if (entry == nullptr || prefill_tiling_of(type, tile_dims, false).dims != tile_dims) continue;
      for (const std::string_view loading : {std::string_view("tma"), std::string_view("copy"), coded}) {
        if ((loading == "tma" && (tile_dims % 64 != 0 || type == dtype::f32)) ||
            (loading == coded && (type == dtype::f32 || find_prefill_entry(dtype::e4m3, tile_dims) == nullptr))) {
          continue;
        }
        for (const std::string_view variant :
             {std::string_view("plain"), std::string_view("transform"), std::string_view("deterministic"),
              std::string_view("deterministic transform"), token_scales, token_transform, token_zeros,
              token_zeros_transform}) {
          if (variant == "deterministic" && (entry->deterministic.kernel == nullptr || loading == coded)) continue;
          if (variant == "deterministic transform" &&
              (entry->deterministic_transform.kernel == nullptr || loading == coded)) {
            continue;
          }
          if (variant.starts_with(token_scales) && loading != coded) continue;
          names.push_back(prefill_name(type, tile_dims, loading, variant));
        }
      }
    }
  }
}
#else
constexpr const char* not_compiled_for_hopper = "it was not compiled; BIFOLIO_CUDA_ARCHITECTURES has no 90";

bool prefill_accepts(const plan_input&, std::string* why) noexcept {
  return detail::declines(why, not_compiled_for_hopper);
}
bool takes_prefill_call(const attention_kernel_args&, std::string* why) noexcept {
  return detail::declines(why, "it was not compiled");
}
cudaError_t launch_prefill_part(const launch_context&, const attention_kernel_args&) noexcept {
  return cudaErrorNotSupported;
}
std::string prefill_name_of(const step_plans&, const attention_kernel_args&) { return {}; }
void append_prefill_names(const device_numbers&, std::vector<std::string>&) {}
#endif

// decode

bool decode_accepts(const plan_input& step, std::string* why) noexcept {
  const attention_spec& spec = step.spec;
  const bool is_coded = has_codes(spec);
  const bool has_wide_keys = is_coded_beside_keys(spec);
  const bool has_wide_values = is_coded_beside_values(spec);
  if (is_coded && !has_wide_keys && size_of(spec.k_code.type) == 2 && size_of(spec.v_code.type) == 1) {
    return detail::declines(why, "the dtypes of q, K and out are ", to_string(spec.q_type), ", ",
                            to_string(spec.k_code.type), " and ", to_string(spec.out_type),
                            "; beside codes of V it takes one 16-bit dtype for all");
  }
  const bool suits = has_wide_values ? has_usual_shape(step, why) && suits_codes_beside_values(spec, why)
                     : has_wide_keys ? has_usual_shape(step, why)
                     : is_coded      ? is_coded_step(step, why)
                                     : step_suits_tensor_cores(step, true, why);
  if (!suits || !has_usual_lengths(step, why)) return false;
  const decode_entry* const entry = find_decode_entry(spec.k_code.type, spec.v_code.type, spec.qk_head_dim);
  if (entry == nullptr) {
    return detail::declines(why, "head_dim is ", spec.qk_head_dim, "; it takes multiples of ",
                            is_coded                         ? "16 up to 256"
                            : spec.k_code.type == dtype::f32 ? "4 up to 128"
                                                             : "8 up to 256");
  }
  if (static_cast<std::size_t>(entry->shared_bytes) > step.device.max_shared_bytes_per_block) {
    return declines_shared_bytes(step, entry->shared_bytes, why);
  }
  return true;
}

bool takes_decode_call(const attention_kernel_args& args, std::string* why) noexcept {
#if BIFOLIO_CUDA_SM90
  // What prefill declines must not have decode's bits in one step and general's in another.
  if (args.deterministic && !args.is_coded && !prefill_accepts_call(args, why)) return false;
#endif
  return suits_tensor_cores(args, why, args.is_coded);  // tails of blocks may differ in length
}

cudaError_t launch_decode_part(const launch_context& context, const attention_kernel_args& args) noexcept {
  return launch_decode(context.api, args, context.plans.decode, context.metadata.decode, context.device,
                       context.stream);
}

std::string decode_name(dtype k_type, dtype v_type, std::int32_t head_dim, bool padded, bool few_rows,
                        bool deterministic) {
  const bool k_is_coded = !is_tensor_dtype(k_type);
  const bool v_is_coded = !is_tensor_dtype(v_type);
  const std::string_view type = k_is_coded && v_is_coded ? coded
                                : k_is_coded             ? coded_keys
                                : v_is_coded             ? coded_values
                                                         : to_string(k_type);
  return shape_name("decode", type, head_dim) + (padded ? " padded" : "") + (few_rows ? " few rows" : "") +
         (deterministic ? " deterministic" : "");
}

std::string decode_name_of(const step_plans& plans, const attention_kernel_args& args) {
  const dtype v_type = args.is_coded ? args.v_type : args.kv_type;
  const decode_entry& entry = *find_decode_entry(args.kv_type, v_type, args.head_dim);
  return decode_name(args.kv_type, v_type, entry.head_dim, entry.padded, plans.decode.few_rows,
                     plans.input.spec.deterministic);
}

void append_decode_names(const device_numbers& device, std::vector<std::string>& names) {
  // One code for all, and one of V or of K beside the other of 16 bits.
  constexpr dtype types[][2] = {{dtype::f32, dtype::f32},   {dtype::f16, dtype::f16},   {dtype::bf16, dtype::bf16},
                                {dtype::e4m3, dtype::e4m3}, {dtype::bf16, dtype::e4m3}, {dtype::e4m3, dtype::bf16}};
  for (const auto& [k_type, v_type] : types) {
    const decode_entry* last = nullptr;
    for (std::int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      const decode_entry* const entry = find_decode_entry(k_type, v_type, head_dim);
      // Head_dims of one shape follow one another.
      if (entry == nullptr || entry == last ||
          static_cast<std::size_t>(entry->shared_bytes) > device.max_shared_bytes_per_block) {
        continue;
      }
      last = entry;
      for (const bool deterministic : {false, true}) {
        names.push_back(decode_name(k_type, v_type, entry->head_dim, entry->padded, false, deterministic));
        if (entry->few_rows[deterministic ? 1 : 0] == nullptr) continue;
        names.push_back(decode_name(k_type, v_type, entry->head_dim, entry->padded, true, deterministic));
      }
    }
  }
}

// latent

#if BIFOLIO_CUDA_SM90
bool latent_accepts(const plan_input& step, std::string* why) noexcept {
  const attention_spec& spec = step.spec;
  if (!spec.v_in_k) return detail::declines(why, "V is no part of K");
  if (!runs_on_hopper(step, why)) return false;
  if (spec.qk_head_dim != latent_qk_dims || spec.v_head_dim != latent_v_dims) {
    return detail::declines(why, "qk_head_dim is ", spec.qk_head_dim, " and v_head_dim ", spec.v_head_dim,
                            "; it takes ", latent_qk_dims, " and ", latent_v_dims);
  }
  if (spec.num_kv_heads != 1) return detail::declines(why, "there are ", spec.num_kv_heads, " KV heads; it takes 1");
  if (latent_packed_heads(spec.num_q_heads) == 0) {
    return detail::declines(why, "there are ", spec.num_q_heads,
                            " query heads; it takes numbers that divide into up to ", latent_max_head_tiles, " times ",
                            latent_tile_rows);
  }
  if (step.has_query_positions) return detail::declines(why, "the batch has query_positions");
  const latent_entry* const entry = find_latent_entry(spec.k_code, spec.q_type);
  if (entry == nullptr || spec.out_type != spec.q_type) {
    return detail::declines(
        why, "the dtypes of q and out are ", to_string(spec.q_type), " and ", to_string(spec.out_type),
        ", K is stored as ", [&](std::string& text) { text += to_string(spec.k_code); },
        "; it takes one 16-bit dtype for all, or bf16 with records");
  }
  if (spec.deterministic) {
    return detail::declines(why, "the plan is deterministic; where its keys are cut depends on the step");
  }
  const int shared_bytes = std::max(entry->many_rows.shared_bytes, entry->few_rows.shared_bytes);
  if (static_cast<std::size_t>(shared_bytes) > step.device.max_shared_bytes_per_block) {
    return declines_shared_bytes(step, shared_bytes, why);
  }
  return has_usual_lengths(step, why);
}

bool takes_latent_call(const attention_kernel_args& args, std::string* why) noexcept {
  return latent_accepts_call(args, why);
}

cudaError_t launch_latent_part(const launch_context& context, const attention_kernel_args& args) noexcept {
  return launch_latent(context.api, args, context.plans.latent, context.metadata.latent, context.device,
                       context.stream);
}

std::string latent_name(std::string_view type, bool few_rows, std::string_view loading) {
  return shape_name("latent", type, latent_qk_dims) + " rows " +
         std::to_string(few_rows ? latent_few_rows : latent_tile_rows) + std::string(loading);
}

std::string latent_name_of(const step_plans& plans, const attention_kernel_args& args) {
  if (args.is_record) return latent_name(record, plans.latent.few_rows, "");
  return latent_name(to_string(args.q_type), plans.latent.few_rows, latent_loading(args).by_copy ? " copy" : " tma");
}

void append_latent_names(const device_numbers& device, std::vector<std::string>& names) {
  if (device.compute_capability != 90 || device.encode_tensor_map == nullptr) return;
  for (const bool few_rows : {false, true}) {
    names.push_back(latent_name(record, few_rows, ""));
    for (const dtype type : tensor_dtypes) {
      if (find_latent_entry({type}, type) == nullptr) continue;
      for (const std::string_view loading : {" copy", " tma"}) {
        names.push_back(latent_name(to_string(type), few_rows, loading));
      }
    }
  }
}
#else
bool latent_accepts(const plan_input&, std::string* why) noexcept {
  return detail::declines(why, not_compiled_for_hopper);
}
bool takes_latent_call(const attention_kernel_args&, std::string* why) noexcept {
  return detail::declines(why, "it was not compiled");
}
cudaError_t launch_latent_part(const launch_context&, const attention_kernel_args&) noexcept {
  return cudaErrorNotSupported;
}
std::string latent_name_of(const step_plans&, const attention_kernel_args&) { return {}; }
void append_latent_names(const device_numbers&, std::vector<std::string>&) {}
#endif

// x_split

bool x_split_accepts(const plan_input& step, std::string* why) noexcept {
  if (!is_plain_step(step, why)) return false;
  const attention_spec& spec = step.spec;
  if (spec.qk_head_dim != 64 && spec.qk_head_dim != 128 && spec.qk_head_dim != 256) {
    return detail::declines(why, "head_dim is ", spec.qk_head_dim, "; it takes 64, 128 and 256");
  }
  const auto tokens_per_chunk = static_cast<std::int32_t>(16 / size_of(spec.k_code.type));
  if (spec.block_size % tokens_per_chunk != 0) {
    return detail::declines(why, "block_size is ", spec.block_size, "; for ", to_string(spec.k_code.type),
                            " it takes multiples of ", tokens_per_chunk);
  }
  if (spec.deterministic) return detail::declines(why, "a deterministic plan gives all tokens to one implementation");
  return true;
}

bool takes_x_split_call(const attention_kernel_args& args, std::string* why) noexcept {
  return x_split_accepts_call(args, why);
}

cudaError_t launch_x_split_part(const launch_context& context, const attention_kernel_args& args) noexcept {
  return launch_x_split(context.api, args, context.plans.x_split, context.device, context.stream);
}

std::string x_split_name(dtype type, std::int32_t head_dim, bool partitioned) {
  return shape_name("x_split", to_string(type), head_dim) + (partitioned ? " v2" : " v1");
}

std::string x_split_name_of(const step_plans& plans, const attention_kernel_args& args) {
  return x_split_name(args.kv_type, args.head_dim, plans.x_split.num_splits > 1);
}

void append_x_split_names(const device_numbers&, std::vector<std::string>& names) {
  for (const dtype type : tensor_dtypes) {
    for (const std::int32_t head_dim : {64, 128, 256}) {
      for (const bool partitioned : {false, true}) names.push_back(x_split_name(type, head_dim, partitioned));
    }
  }
}

// general

bool general_accepts(const plan_input&, std::string*) noexcept { return true; }
bool takes_general_call(const attention_kernel_args&, std::string*) noexcept { return true; }

cudaError_t launch_general_part(const launch_context& context, const attention_kernel_args& args) noexcept {
  return launch_general(context.api, args, context.plans.general, context.metadata.general, context.device,
                        context.stream);
}

std::string general_name(std::string_view type, std::int32_t rows) {
  return "cuda general " + std::string(type) + " rows " + std::to_string(rows);
}

std::string general_name_of(const step_plans& plans, const attention_kernel_args& args) {
  const std::string_view type = args.is_record ? record : args.is_coded ? coded : to_string(args.kv_type);
  return general_name(type, plans.general.rows_per_tile);
}

void append_general_names(const device_numbers&, std::vector<std::string>& names) {
  for (const std::int32_t rows : {few_rows, many_rows}) {
    for (const dtype type : tensor_dtypes) names.push_back(general_name(to_string(type), rows));
    for (const std::string_view type : {coded, record}) names.push_back(general_name(type, rows));
  }
}

// The list

constexpr implementation list[num_implementations] = {
    {"prefill", implementation_id::prefill, prefill_accepts, takes_prefill_call, launch_prefill_part, prefill_name_of,
     append_prefill_names},
    {"decode", implementation_id::decode, decode_accepts, takes_decode_call, launch_decode_part, decode_name_of,
     append_decode_names},
    {"latent", implementation_id::latent, latent_accepts, takes_latent_call, launch_latent_part, latent_name_of,
     append_latent_names},
    {"x_split", implementation_id::x_split, x_split_accepts, takes_x_split_call, launch_x_split_part, x_split_name_of,
     append_x_split_names},
    {"general", implementation_id::general, general_accepts, takes_general_call, launch_general_part, general_name_of,
     append_general_names},
};

const implementation& entry_of(implementation_id id) noexcept { return list[static_cast<std::size_t>(id)]; }

/// Assigns the sequences to prefill and decode. False: they do not cover the step.
bool assign_to_tensor_cores(const plan_input& step, bool with_prefill, bool with_decode, step_plans& plans) {
  plans.prefill.seqs.clear();
  plans.decode.num_seqs = 0;
  if (!with_prefill && !with_decode) return false;
  decode_planner decode(step, decode_grid(step.spec, step.device), plans.decode);
  std::vector<std::int32_t>& of_prefill = plans.prefill.seqs;
  if (with_prefill && with_decode) choose_prefill_seqs(step, plans.query_lens, of_prefill);
  std::size_t next = 0;
  for (std::int32_t seq = 0; seq < step.num_seqs; ++seq) {
    if (plans.query_lens[static_cast<std::size_t>(seq)] == 0) continue;
    if (!with_decode) {
      of_prefill.push_back(seq);
    } else if (next < of_prefill.size() && of_prefill[next] == seq) {
      ++next;
    } else {
      decode.add(seq);
    }
  }
  if (!decode.finish()) return false;
  if (!plans.prefill.empty()) plan_prefill(step, plans.prefill);
  return true;
}

/// Gives all sequences to the latent kernel.
void assign_to_latent(const plan_input& step, step_plans& plans) {
  plans.latent.seqs.clear();
  for (std::int32_t seq = 0; seq < step.num_seqs; ++seq) {
    if (plans.query_lens[static_cast<std::size_t>(seq)] > 0) plans.latent.seqs.push_back(seq);
  }
  if (!plans.latent.empty()) plan_latent(step, plans.latent);
}

std::string sequences(std::int64_t count, std::size_t of) {
  return std::to_string(count) + " of " + std::to_string(of) + (of == 1 ? " sequence" : " sequences");
}

}  // namespace

std::span<const implementation> implementations() noexcept { return list; }

std::int32_t decode_grid(const attention_spec& spec, const device_numbers& device) noexcept {
  const decode_entry* const entry = find_decode_entry(spec.k_code.type, spec.v_code.type, spec.qk_head_dim);
  return entry == nullptr ? 0 : device.num_sms * entry->ctas_per_sm;
}

void plan_step(const plan_input& input, const detail::forced_implementation& forced, const planning_history& history,
               step_plans& plans) {
  const implementation* const only =
      forced.name.empty() ? nullptr : &detail::forced_entry(implementations(), input, forced);
  const auto may_serve = [&](implementation_id id) {
    return only == nullptr ? entry_of(id).accepts(input, nullptr) : only->id == id;
  };
  plans.input = input;
  plans.input.query_start_loc = nullptr;
  plans.input.seq_lens = nullptr;
  plans.input.query_positions = nullptr;
  plans.input.spec.implementation = only == nullptr ? std::string_view() : only->name;
  plans.forced = only != nullptr;
  plans.query_lens.resize(static_cast<std::size_t>(input.num_seqs));
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    plans.query_lens[static_cast<std::size_t>(seq)] = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
  }

  const bool with_prefill = may_serve(implementation_id::prefill);
  const bool with_decode = may_serve(implementation_id::decode);
  plans.assigned = {};
  plans.prefill.combines = history.prefill_combines;
  plans.latent.combines = history.latent_combines;
  plans.latent.seqs.clear();
  const bool with_latent = may_serve(implementation_id::latent);
  const bool covered = with_latent || assign_to_tensor_cores(input, with_prefill, with_decode, plans);
  if (with_latent) {
    plans.prefill.seqs.clear();
    plans.decode.num_seqs = 0;
    assign_to_latent(input, plans);
    if (!plans.latent.empty()) plans.assigned.add(implementation_id::latent);
  } else if (covered) {
    if (!plans.prefill.empty()) plans.assigned.add(implementation_id::prefill);
    if (!plans.decode.empty()) plans.assigned.add(implementation_id::decode);
  } else {
    if (only != nullptr && with_decode) {
      detail::refuse_declining_implementation(forced, detail::names_of(implementations()),
                                              "the step has 2^31 tiles of keys or more");
    }
    plans.prefill.seqs.clear();
    plans.decode.num_seqs = 0;
  }
  plans.x_split =
      may_serve(implementation_id::x_split) ? plan_x_split(input, history.least_partitions) : x_split_plan{};
  plan_general(input, !covered || (history.general_was_needed && !plans.forced), plans.general);
}

implementation_set choose_implementations(const step_plans& plans, const attention_kernel_args& args) noexcept {
  const auto accepts = [&](implementation_id id) { return entry_of(id).accepts_call(args, nullptr); };
  implementation_set chosen;
  if (!plans.assigned.empty()) {
    const bool all_accept = std::all_of(std::begin(list), std::end(list), [&](const implementation& entry) {
      return !plans.assigned.has(entry.id) || entry.accepts_call(args, nullptr);
    });
    if (all_accept) return plans.assigned;
    if (plans.forced) return chosen;
  }
  if (plans.x_split.has_decodes) {
    if (accepts(implementation_id::x_split)) {
      chosen.add(implementation_id::x_split);
      if (plans.x_split.has_others) chosen.add(implementation_id::general);
      return chosen;
    }
    if (plans.forced) return chosen;
  }
  chosen.add(implementation_id::general);
  return chosen;
}

const implementation& implementation_of(const step_plans& plans, const implementation_set& chosen, std::int32_t seq) {
  if (chosen.has(implementation_id::prefill)) {
    const bool is_prefill = std::binary_search(plans.prefill.seqs.begin(), plans.prefill.seqs.end(), seq);
    return entry_of(is_prefill ? implementation_id::prefill : implementation_id::decode);
  }
  for (const implementation_id id : {implementation_id::decode, implementation_id::latent}) {
    if (chosen.has(id)) return entry_of(id);
  }
  const bool is_x_split =
      chosen.has(implementation_id::x_split) && plans.query_lens[static_cast<std::size_t>(seq)] == 1;
  return entry_of(is_x_split ? implementation_id::x_split : implementation_id::general);
}

std::vector<std::string> explain(const step_plans& plans) {
  const std::size_t num_seqs = plans.query_lens.size();
  const auto with_tokens = [&](auto condition) {
    return static_cast<std::int64_t>(std::count_if(plans.query_lens.begin(), plans.query_lens.end(), condition));
  };
  const std::int64_t decodes = with_tokens([](std::int32_t query_len) { return query_len == 1; });
  const std::int64_t all = with_tokens([](std::int32_t query_len) { return query_len > 0; });
  const bool tensor_cores = !plans.assigned.empty();
  std::vector<std::string> sentences;
  for (const implementation& entry : implementations()) {
    std::string sentence(entry.name);
    std::string why;
    if (plans.forced && plans.input.spec.implementation != entry.name &&
        !(entry.id == implementation_id::general && plans.x_split.has_others)) {
      sentence.append(" is not asked: ").append(plans.input.spec.implementation).append(" is forced");
    } else if (!entry.accepts(plans.input, &why)) {
      sentence.append(" declines: ").append(why);
    } else if (entry.id == implementation_id::prefill) {
      sentence.append(" takes ").append(sequences(static_cast<std::int64_t>(plans.prefill.seqs.size()), num_seqs));
      if (plans.prefill.empty() && all > 0) {
        sentence += tensor_cores ? "; decode is estimated to be faster for the others"
                                 : "; some have few new tokens, and decode declines";
      }
    } else if (entry.id == implementation_id::decode) {
      sentence.append(" takes ").append(sequences(plans.decode.num_seqs, num_seqs));
      if (!tensor_cores && all > 0) sentence += "; the step has 2^31 tiles of keys or more";
    } else if (entry.id == implementation_id::latent) {
      sentence.append(" takes ").append(sequences(static_cast<std::int64_t>(plans.latent.seqs.size()), num_seqs));
    } else if (entry.id == implementation_id::x_split) {
      sentence.append(" takes ").append(sequences(decodes, num_seqs));
      sentence += tensor_cores ? " of calls that those above decline and whose cache has layout_kind::x_split"
                               : " of calls whose cache has layout_kind::x_split";
    } else {
      sentence.append(" takes ").append(sequences(all, num_seqs));
      if (tensor_cores || plans.x_split.has_decodes) sentence += " of calls that those above decline";
      if (!plans.general.has_items) sentence += ", without splitting their keys";
    }
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

}  // namespace bifolio::inline v0_2::cuda
