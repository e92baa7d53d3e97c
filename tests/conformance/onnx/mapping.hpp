// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How a case of ONNX is expressed with attention_spec and attention_params, or why it cannot be.
///
/// ONNX's position of query i is i + offset: the offset is the number of past keys; with `nonpad_kv_seqlen` it is that
/// length minus the number of queries; otherwise 0. Causal masks and windows count from there. bifolio's last query is
/// at seq_len − 1. Where positions matter, a sequence is therefore stored up to the position of its last query, which
/// leaves out keys that no query attends to; where they do not, up to its last valid key. Heads of K and V that differ
/// in size are padded with zeros to the larger size.

#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "conformance/onnx/fixture.hpp"

namespace bifolio::test::onnx {

struct mapped_case {
  std::string why_not;   ///< why bifolio cannot express it; empty when it can, and only then is the rest filled
  std::string how;       ///< what of bifolio it uses, in words
  std::string compared;  ///< which of ONNX's outputs a test can compare
  attention_case call;
  attention_contents contents{attention_case{}};
  /// What ONNX expects, in the form of `run_attention`: heads padded with zeros; no LSE where it cannot be computed
  /// from the case.
  attention_output expected;
};

/// Heads are padded to at least `head_dim`. The caller chooses `layout` and `block_size` of the call. Throws
/// std::runtime_error when the case contradicts itself, as when its present_key is not its past_key followed by its K.
[[nodiscard]] mapped_case map_case(const node_case& from, std::int32_t head_dim = 0);

}  // namespace bifolio::test::onnx
