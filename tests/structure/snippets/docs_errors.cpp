// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
using namespace bifolio;
int watch(backend* where, const kv_layout& layout) {
  // snippet
  return 0;
}
