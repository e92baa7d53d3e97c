// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/dispatch.hpp"

#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/decode/plan.hpp"
#if BIFOLIO_CUDA_SM90
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/plan.hpp"
#endif

namespace bifolio::cuda {
namespace {

// fast_plan::family is a set of these.
constexpr std::int32_t decodes = 1;
constexpr std::int32_t prefills = 2;

// fast_plan::numbers. The tensor map of q, which a captured launch holds, ends at the last token: other numbers of
// tokens need another capture.
enum number : std::size_t { decode_grid, prefill_words, prefill_tokens };

#if BIFOLIO_CUDA_SM90
bool has_prefill(const plan_input& input) noexcept {
  // wgmma exists on compute capability 9.0 alone.
  return input.device.compute_capability == 90 && input.device.encode_tensor_map != nullptr &&
         prefill_block_size(input.spec.block_size) &&
         find_prefill_entry(input.spec.k_code.type, input.spec.qk_head_dim) != nullptr;
}

/// Which of the two kernels computes a sequence of `query_len` new tokens: a rule of the sequence alone, so that its
/// bits do not depend on the batch. Decode cuts the keys over the whole device but reads them once for every 16 rows;
/// prefill gives 128 rows to one multiprocessor. Both times are estimates for an otherwise idle device.
bool prefers_prefill(const plan_input& input, std::int32_t query_len, std::int32_t seq_len) noexcept {
  const attention_spec& spec = input.spec;
  const std::int64_t group = spec.num_q_heads / spec.num_kv_heads;
  const std::int64_t rows = query_len * group;
  if (rows <= 64) return false;
  const std::int64_t packed = prefill_packed_heads(static_cast<std::int32_t>(group));
  const std::int64_t items = (query_len * packed + 127) / 128 * (spec.num_q_heads / packed);
  const std::int64_t rounds = (items + input.device.num_sms - 1) / input.device.num_sms;
  const double prefill_us = static_cast<double>(rounds) * (seq_len / 128 + 2) * 2.0 * spec.qk_head_dim / 128;
  const double tiles = static_cast<double>((rows + 15) / 16) * spec.num_kv_heads * (seq_len / 64 + 2);
  const double decode_us = 5.0 + tiles / (2.0 * input.device.num_sms) * 1.4 * spec.qk_head_dim / 128;
  return prefill_us < decode_us;
}
#endif

std::string decode_name(dtype type, std::int32_t head_dim, bool options, bool deterministic) {
  return shape_name("decode", type, head_dim) + (options ? " options" : " plain") +
         (deterministic ? " deterministic" : "");
}

#if BIFOLIO_CUDA_SM90
std::string prefill_name(dtype type, std::int32_t head_dim, bool pairs, bool options) {
  return shape_name("prefill", type, head_dim) + (pairs ? " block 16" : " any block") +
         (options ? " options" : " plain");
}
#endif

}  // namespace

std::string shape_name(const char* kernel, dtype type, std::int32_t head_dim) {
  return std::string("cuda ") + kernel + " " + std::string(to_string(type)) + " d" + std::to_string(head_dim);
}

void plan_fast(const plan_input& input, fast_plan& plan) {
  plan.usable = false;
  plan.family = 0;
  plan.workspace_bytes = 0;
  plan.num_counters = 0;
  const attention_spec& spec = input.spec;
  const decode_entry* const entry = find_decode_entry(spec.k_code.type, spec.qk_head_dim);
  const bool fits_32_bits = input.max_seq_len < longest_window && input.max_query_len < longest_window;
  if (entry == nullptr || !has_plain_planes(spec) || !fits_32_bits || input.query_positions != nullptr ||
      spec.q_type != spec.k_code.type || spec.out_type != spec.k_code.type ||
      static_cast<std::size_t>(entry->shared_bytes) > input.device.max_shared_bytes_per_block) {
    plan.words.clear();
    return;
  }

  const std::int32_t grid = input.device.num_sms * entry->ctas_per_sm;
  decode_planner decode(input, grid, plan.words);
#if BIFOLIO_CUDA_SM90
  prefill_planner prefill(input, plan);
  // Deterministic plans give every token to one kernel, so that its bits do not depend on how a prompt is cut.
  const bool with_prefill = !spec.deterministic && has_prefill(input);
#endif
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int32_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    if (query_len == 0) continue;
#if BIFOLIO_CUDA_SM90
    if (with_prefill && prefers_prefill(input, query_len, input.seq_lens[seq])) {
      prefill.add(seq);
      continue;
    }
#endif
    decode.add(seq);
  }
  if (!decode.finish()) {
    plan.words.clear();
    return;
  }

  plan.usable = true;
  plan.numbers[decode_grid] = grid;
  plan.numbers[prefill_words] = 0;
  plan.numbers[prefill_tokens] = 0;
  if (!decode.empty()) {
    plan.family |= decodes;
    plan.workspace_bytes = decode.workspace_floats() * sizeof(float);
    plan.num_counters = decode.num_counters();
  }
#if BIFOLIO_CUDA_SM90
  if (!prefill.empty()) {
    plan.family |= prefills;
    plan.words.resize((plan.words.size() + 3) / 4 * 4);
    plan.numbers[prefill_words] = static_cast<std::int32_t>(plan.words.size());
    plan.numbers[prefill_tokens] = static_cast<std::int32_t>(input.num_tokens);
    prefill.write();
  }
#endif
}

bool fast_serves(const attention_kernel_args& args, const fast_plan& plan) noexcept {
  if (!plan.usable || !decode_serves(args)) return false;
#if BIFOLIO_CUDA_SM90
  if ((plan.family & prefills) != 0 && !prefill_serves(args)) return false;
#endif
  return true;
}

cudaError_t launch_fast(const runtime_api& api, const attention_kernel_args& args, const fast_plan& plan,
                        const device_numbers& device, cudaStream_t stream) noexcept {
  cudaError_t status = cudaSuccess;
#if BIFOLIO_CUDA_SM90
  if ((plan.family & prefills) != 0) {
    status = launch_prefill(api, args, *find_prefill_entry(args.kv_type, args.head_dim),
                            args.fast_words + plan.numbers[prefill_words], device, stream);
  }
#endif
  if ((plan.family & decodes) != 0 && status == cudaSuccess) {
    status = launch_decode(api, args, *find_decode_entry(args.kv_type, args.head_dim), args.fast_words,
                           plan.numbers[decode_grid], device.dependent_launch, stream);
  }
  return status;
}

void append_fast_kernel_names(const device_numbers& device, std::vector<std::string>& names) {
  for (const dtype type : all_dtypes) {
    for (const std::int32_t head_dim : {64, 128, 256}) {
      const decode_entry* const decode = find_decode_entry(type, head_dim);
      if (decode != nullptr && static_cast<std::size_t>(decode->shared_bytes) <= device.max_shared_bytes_per_block) {
        for (const bool options : {false, true}) {
          for (const bool deterministic : {false, true}) {
            names.push_back(decode_name(type, head_dim, options, deterministic));
          }
        }
      }
#if BIFOLIO_CUDA_SM90
      if (device.compute_capability == 90 && device.encode_tensor_map != nullptr &&
          find_prefill_entry(type, head_dim) != nullptr) {
        for (const bool pairs : {false, true}) {
          for (const bool options : {false, true}) names.push_back(prefill_name(type, head_dim, pairs, options));
        }
      }
#endif
    }
  }
}

void name_fast_kernels(const attention_kernel_args& args, const attention_spec& spec, const fast_plan& plan,
                       const std::vector<std::int32_t>& query_lens, std::vector<std::string>& names) {
  const bool options = has_options(args);
  for (std::size_t seq = 0; seq < query_lens.size(); ++seq) {
    if (query_lens[seq] > 0) names[seq] = decode_name(args.kv_type, args.head_dim, options, spec.deterministic);
  }
#if BIFOLIO_CUDA_SM90
  if ((plan.family & prefills) == 0) return;
  const std::string prefill = prefill_name(args.kv_type, args.head_dim, prefill_takes_pairs(args.block_size), options);
  for (const std::int32_t seq : plan.prefill_seqs) names[static_cast<std::size_t>(seq)] = prefill;
#endif
}

}  // namespace bifolio::cuda
