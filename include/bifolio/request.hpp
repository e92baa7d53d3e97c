// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What goes into a `scheduler` and what comes out of it, besides the plans of its steps.

#include <bifolio/error.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/export.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::inline v0_2 {

/// An `extra_key` that owns its value.
struct owned_extra_key {
  std::int64_t position = 0;
  std::uint32_t kind = 0;
  std::vector<std::byte> value{};
};

struct request {
  std::vector<token_id> prompt{};    ///< at least one; ids ≥ 0
  std::int32_t max_new_tokens = 16;  ///< of each sample, ≥ 1
  std::int32_t num_samples = 1;      ///< independent continuations of the one prompt, 1 … max_running
  /// 0, or the number of continuations that a beam search keeps, 1 … the smaller of max_running and
  /// max_tokens_per_step; num_samples is then 1. See `sampled_token::from_sample`.
  std::int32_t beam_width = 0;
  /// Most draft tokens per step, see `scheduler::propose`. Together with the token before them they must fit into what
  /// one sequence may compute per step (max_chunk_tokens, max_tokens_per_step). Not with beams.
  std::int32_t max_draft_tokens = 0;
  std::int32_t priority = 0;  ///< larger goes first, see `scheduler_config::priority_span`; −10^6 … 10^6

  /// Separates the prompt's cached blocks from others with equal tokens (`prefix_scope`); at most max_salt_bytes.
  std::string prefix_salt{};
  std::uint64_t adapter_id = 0;
  std::vector<owned_extra_key> extras{};  ///< by rising position, within the prompt; max_extras_bytes in all
  retention_hint retention{};             ///< of the blocks that the request leaves in the prefix cache

  /// For managers with a cross group, as `cross_input`: the encoder's output that all samples attend to. The step whose
  /// plan names the sequence in `step_plan::encoded` computes and stores it.
  std::int32_t num_cross_tokens = 0;
  std::vector<std::byte> cross_digest{};
};

struct submit_result {
  request_id id = invalid_request;  ///< valid if ok
  alloc_status status = alloc_status::never;
};

/// What the caller sampled.
struct sampled_token {
  token_id token{};
  bool stop = false;  ///< ends the sequence after this token (end of text, a stop word, the user left)
  /// Of a beam search only: the beam (`scheduled_seq::sample`) that this token continues; −1: the row's own. The entry
  /// for beam j makes the new beam j, so a beam is continued as often as it is listed, and a beam that is not listed is
  /// dropped. With `stop` the new beam j ends and the search goes on with one beam less. A caller that wants to keep
  /// the width stores the finished text (`scheduler::output`) itself and lists another continuation.
  std::int32_t from_sample = -1;
};

enum class finish_reason : std::uint8_t {
  length,  ///< max_new_tokens are there
  stop,    ///< `sampled_token::stop`
};

/// "length" or "stop".
[[nodiscard]] BIFOLIO_API std::string_view to_string(finish_reason reason) noexcept;

struct finished_sequence {
  request_id request = invalid_request;
  std::int32_t sample = 0;
  finish_reason reason = finish_reason::length;
  std::vector<token_id> tokens{};      ///< sampled ones, the last included; the prompt is not repeated
  std::int64_t num_cached_tokens = 0;  ///< of the prompt, when it was first admitted; the same for all its samples
};

/// A placeholder of an in-flight token (asynchronous scheduling): the token was not known yet when a step's inputs were
/// built, because an earlier step in flight samples it. The engine copies it from there, usually on the device.
struct token_placeholder {
  std::int64_t step = 0;      ///< step_plan::step of the step that samples it
  std::int32_t sampled = 0;   ///< which of the tokens that step samples, counted as `commit` takes them
  std::int32_t position = 0;  ///< index into step_inputs::tokens, which holds −1 there
  friend constexpr bool operator==(const token_placeholder&, const token_placeholder&) = default;
};

/// Everything a model needs of one step. Capacity is kept between steps.
struct step_inputs {
  step_batch batch;                     ///< what attention and append read; with layer groups the first one's
  std::vector<step_batch> groups;       ///< of layer groups 1, 2, …
  std::vector<token_id> tokens;         ///< [num_tokens], of the plan's sequences one after another
  std::vector<std::int32_t> positions;  ///< [num_tokens], 0 for a sequence's first token
  /// Rows whose logits are sampled: the last one of each sequence with num_samples > 0, the last 1 + num_drafts ones
  /// of a sequence with drafts.
  std::vector<std::int32_t> sample_rows;
  std::vector<token_placeholder> placeholders;  ///< none while at most one step is in flight
};

}  // namespace bifolio::inline v0_2
