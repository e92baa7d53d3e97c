// SPDX-License-Identifier: Apache-2.0
#include <bifolio/bifolio.hpp>
#include <memory>
#include <vector>
using namespace bifolio;
int step_of(const std::unique_ptr<backend>& where, const std::vector<token_id>& prompt,
            const std::vector<token_id>& new_tokens, seq_id b, token_id token, const tensor_view& q,
            const tensor_view& k, const tensor_view& v, const tensor_view& out) {
  // snippet
  return 0;
}
