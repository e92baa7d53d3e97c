// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
using namespace bifolio;
void groups() {
  // snippet
}
