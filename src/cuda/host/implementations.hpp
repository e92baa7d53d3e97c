// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The ordered list of CUDA attention implementations, fastest first, and how a step and its calls are given to them.
///
///   prefill  tensor cores of 9.0, many new tokens, codes      scheduler metadata is uploaded
///   decode   tensor cores, any number of new tokens, codes    scheduler metadata is uploaded
///   latent   tensor cores of 9.0, V in K (MLA), records       scheduler metadata is uploaded
///   x_split  one new token, caches of layout_kind::x_split    nothing is uploaded
///   general  everything                                       a list of items is uploaded where it pays
///
/// Planning knows the spec, the device and the lengths; a call adds strides, alignment and options. So there are two
/// conditions: `accepts` of a step and `accepts_call` of a call.
///
/// At planning, every sequence is assigned to prefill or decode, as far as they accept the step (assignment.hpp); all
/// go to latent where it does, which the others then do not. If one does, they alone are planned and uploaded. If not,
/// x_split (which takes sequences of one new token) and general are planned.
///
/// A call is served by the implementations that its step was assigned to when all of them accept it. Otherwise by
/// x_split, when it accepts, for its sequences, and by general for the rest. Neither needs anything of the plan then:
/// x_split reads the lengths on the device, and so does general without a list of items. The plan remembers that
/// general was needed; from the next step on it has the list of items too, with which general splits the keys of long
/// sequences. No bit of a result depends on whether there is one.
///
/// A forced implementation is planned alone (x_split: with general for sequences that it does not take), and a call
/// that it declines is refused.

#include <bifolio/attention.hpp>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/attention/implementations.hpp"
#include "cuda/attention/decode/plan.hpp"
#include "cuda/attention/general/plan.hpp"
#include "cuda/attention/latent/plan.hpp"
#include "cuda/attention/prefill/plan.hpp"
#include "cuda/attention/x_split/plan.hpp"
#include "cuda/host/kernel_args.hpp"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// In the order of the list.
enum class implementation_id : std::uint8_t { prefill, decode, latent, x_split, general };
inline constexpr std::size_t num_implementations = 5;

/// Those that compute one call together.
class implementation_set {
 public:
  [[nodiscard]] bool has(implementation_id id) const noexcept { return bits_.test(static_cast<std::size_t>(id)); }
  void add(implementation_id id) noexcept { bits_.set(static_cast<std::size_t>(id)); }
  [[nodiscard]] bool empty() const noexcept { return bits_.none(); }
  friend bool operator==(const implementation_set&, const implementation_set&) = default;

 private:
  std::bitset<num_implementations> bits_;
};

/// What planning made of one step.
struct step_plans {
  prefill_plan prefill;
  decode_plan decode;
  latent_plan latent;
  x_split_plan x_split;  ///< has_decodes only where x_split accepts the step
  general_plan general;
  implementation_set assigned;  ///< those that all sequences were assigned to; empty: x_split and general
  bool forced = false;          ///< no other implementation may serve the calls
  std::vector<std::int32_t> query_lens;
  plan_input input;  ///< what was planned, without the arrays
};

/// Scheduler metadata on the device.
struct step_metadata {
  prefill_metadata prefill;
  decode_metadata decode;
  prefill_metadata latent;
  general_metadata general;
};

struct launch_context {
  const runtime_api& api;
  const device_numbers& device;
  const step_plans& plans;
  const step_metadata& metadata;
  cudaStream_t stream;
};

/// One entry of the list. `why`: null, or receives why the answer is no.
struct implementation {
  std::string_view name;
  implementation_id id;
  bool (*accepts)(const plan_input& step, std::string* why) noexcept;
  bool (*accepts_call)(const attention_kernel_args& args, std::string* why) noexcept;
  /// Launches its kernels for its sequences. Allocates nothing.
  cudaError_t (*launch)(const launch_context& context, const attention_kernel_args& args) noexcept;
  /// The kernel that computes its sequences of a call.
  std::string (*kernel_name)(const step_plans& plans, const attention_kernel_args& args);
  /// All kernels that it chooses from on this device.
  void (*append_kernel_names)(const device_numbers& device, std::vector<std::string>& names);
};

[[nodiscard]] std::span<const implementation> implementations() noexcept;

/// CTAs of decode's persistent grid; 0 for a spec that decode does not take.
[[nodiscard]] std::int32_t decode_grid(const attention_spec& spec, const device_numbers& device) noexcept;

/// What later steps keep of earlier ones.
struct planning_history {
  bool general_was_needed = false;    ///< by a call of a step that was planned without it
  std::int32_t least_partitions = 1;  ///< of x_split, as reserved
  bool prefill_combines = false;      ///< an earlier step of the plan had partial results of prefill
  bool latent_combines = false;       ///< or of latent
};

/// Plans one step; `plans` keeps the capacity of its vectors. Throws std::bad_alloc, and `error` where the forced
/// implementation does not exist or declines.
void plan_step(const plan_input& input, const detail::forced_implementation& forced, const planning_history& history,
               step_plans& plans);

/// The implementations that compute this call. Empty: the forced one declines it.
[[nodiscard]] implementation_set choose_implementations(const step_plans& plans,
                                                        const attention_kernel_args& args) noexcept;

/// The one of a chosen set that computes sequence `seq`, which has new tokens.
[[nodiscard]] const implementation& implementation_of(const step_plans& plans, const implementation_set& chosen,
                                                      std::int32_t seq);

/// For every implementation of the list: what it takes of this step, or why it declines.
[[nodiscard]] std::vector<std::string> explain(const step_plans& plans);

}  // namespace bifolio::inline v0_2::cuda
