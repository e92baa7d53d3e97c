// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A Hugging Face config.json: which architecture it is of, and the model's numbers.

#include <cstdint>
#include <filesystem>

#include "model_config.hpp"

namespace generate {

/// What a checkpoint's tensors are, beyond those that every architecture has.
struct tensor_options {
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool qk_norm = false;       ///< heads of q and k are normalised
  bool post_norms = false;    ///< the results of attention and of the MLP are normalised
  bool norms_less_1 = false;  ///< norms are stored as weight − 1
  bool sinks = false;         ///< heads of attention have a logit that takes weight and has no value
};

struct hugging_face_config {
  model_config model;
  tensor_options tensors;
};

/// Reads config.json, and from generation_config.json next to it, where that exists, the ids that end a text. Settings
/// that are absent have the values that transformers gives them. Throws `input_error`: for an architecture or a value
/// of a setting that this program has no code for, with what it has.
[[nodiscard]] hugging_face_config read_hugging_face_config(const std::filesystem::path& path);

}  // namespace generate
