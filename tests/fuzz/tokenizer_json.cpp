// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json, and after its first zero byte a text: what the tokenizer makes of it stays in the vocabulary.
#include <algorithm>
#include <vector>

#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tokenizer.hpp"
#include "tools/common/program.hpp"

BIFOLIO_FUZZ_TARGET(tokenizer_json) {
  using namespace bifolio::fuzz;
  constexpr std::int32_t vocab_size = 700;  // of the files in tests/examples/tokenizer_files at most 602
  const auto end = std::find(input.begin(), input.end(), std::uint8_t{0});
  const auto first = static_cast<std::size_t>(end - input.begin());
  const auto path = write_scratch("tokenizer.json", input.first(first));
  try {
    const auto tokens = generate::load_hugging_face_tokenizer(path, vocab_size);
    const auto text = first < input.size() ? text_of(input.subspan(first + 1)) : std::string_view("Once upon a time");
    const std::vector<bifolio::token_id> ids = tokens->encode(text);
    if (ids.size() < tokens->min_num_ids(text.size())) flaw("fewer ids than min_num_ids says");
    for (const bifolio::token_id id : ids) {
      if (static_cast<std::int32_t>(id) < 0 || static_cast<std::int32_t>(id) >= vocab_size) flaw("id out of range");
    }
    (void)tokens->decode_all(ids);
  } catch (const tools::input_error&) {
  }
}
