// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Static scales in a file, so that a calibration is done once: a JSON object with "k" and "v", each
/// {"code": "e4m3-head", "scales": [[…], …]}, a list for each layer of one scale or one per KV head. A plane whose code
/// has none is null.

#include <bifolio/kv_layout.hpp>
#include <filesystem>

#include "scoring.hpp"

namespace generate {

/// The scales of a file for a cache of this layout. Throws `input_error` for a file that cannot be read, another code,
/// another number of layers or heads, and a scale that the library does not take.
[[nodiscard]] static_scales read_scales(const std::filesystem::path& path, const bifolio::kv_layout& layout,
                                        std::int32_t num_layers);

/// Throws `input_error` where the file cannot be written.
void write_scales(const std::filesystem::path& path, const bifolio::kv_layout& layout, const static_scales& scales);

}  // namespace generate
