// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A model of the tests with some things changed: its configuration, its tensors and where they lie. What is not
/// changed is consistent, so that a reader comes as far as a change lets it.

#include "choices.hpp"

namespace bifolio::fuzz {

/// Writes config.json and model.safetensors, or two shards and their index, into the scratch folder, which it clears.
void write_edited_model(choices& from);

}  // namespace bifolio::fuzz
