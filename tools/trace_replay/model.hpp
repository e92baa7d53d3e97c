// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The layer groups of a model, from a file.

#include <bifolio/layer_groups.hpp>
#include <string>
#include <vector>

namespace trace_replay {

/// Reads {"groups": [{"kind": "full", "block_size": 16, "num_blocks": 50000}, …]}, whose fields are those of
/// `bifolio::group_config`; a group with states has no block_size. Throws `input_error` with the file's name and, where
/// there is one, the group.
[[nodiscard]] std::vector<bifolio::group_config> read_model_file(const std::string& path);

}  // namespace trace_replay
