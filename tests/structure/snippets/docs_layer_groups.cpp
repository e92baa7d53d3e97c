// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
#include <cstdint>
#include <vector>
using namespace bifolio;
void groups() {
  // snippet
}
void layers_of_groups(const std::vector<std::int32_t>& odd_layers, const std::vector<std::int32_t>& even_layers,
                      const attention_spec& spec) {
  // snippet
}
