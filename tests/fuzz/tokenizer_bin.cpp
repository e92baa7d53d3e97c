// SPDX-License-Identifier: Apache-2.0
// llama2.c's tokenizer file and a text: the bytes as they are, or the pieces that every such file has and then pieces
// made of the input's bytes.
#include <bit>
#include <string_view>
#include <vector>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tokenizer.hpp"
#include "tools/common/program.hpp"

namespace {

using namespace bifolio::fuzz;

void put(std::vector<std::uint8_t>& file, std::uint32_t value) {
  for (unsigned shift = 0; shift < 32; shift += 8) file.push_back(static_cast<std::uint8_t>(value >> shift));
}

/// <unk>, <s>, </s> and the 256 bytes.
constexpr std::int32_t num_fixed = 259;

/// The longest piece, then score, length and bytes of each.
std::vector<std::uint8_t> file_of_pieces(choices& from, std::int32_t num_pieces) {
  std::vector<std::uint8_t> file;
  put(file, 1 + from.below(16));
  for (std::int32_t i = 0; i < num_fixed; ++i) {
    put(file, 0);
    const std::string_view piece = i == 0 ? "<unk>" : i < 3 ? "<s>" : "<0x41>";  // ids, not names, make bytes of them
    put(file, static_cast<std::uint32_t>(piece.size()));
    file.insert(file.end(), piece.begin(), piece.end());
  }
  for (std::int32_t i = num_fixed; i < num_pieces; ++i) {
    const std::uint8_t kind = from.byte();
    const float score = kind < 250 ? -static_cast<float>(kind % 32) : std::bit_cast<float>(from.word());
    const auto bytes = from.bytes(kind == 249 ? 0 : std::size_t{1} + kind / 32 % 4);
    put(file, std::bit_cast<std::uint32_t>(score));
    put(file, static_cast<std::uint32_t>(bytes.size()));
    file.insert(file.end(), bytes.begin(), bytes.end());
  }
  for (std::uint8_t extra = from.below(3); extra > 0; --extra) file.push_back(0);
  return file;
}

}  // namespace

BIFOLIO_FUZZ_TARGET(tokenizer_bin) {
  choices from(input);
  const std::uint8_t form = from.byte();
  // Now and then too small for the bytes.
  const std::int32_t vocab_size = from.below(32) == 0 ? 3 : num_fixed + from.below(64);
  const auto text = text_of(from.bytes(from.byte()));
  const auto path = (form & 1) != 0 ? write_scratch("tokenizer.bin", file_of_pieces(from, vocab_size))
                                    : write_scratch("tokenizer.bin", from.rest());
  try {
    const auto tokens = generate::load_bpe_tokenizer(path, vocab_size);
    const std::vector<bifolio::token_id> ids = tokens->encode(text);
    if (ids.size() < tokens->min_num_ids(text.size())) flaw("fewer ids than min_num_ids says");
    for (const bifolio::token_id id : ids) {
      if (static_cast<std::int32_t>(id) < 0 || static_cast<std::int32_t>(id) >= vocab_size) flaw("id out of range");
    }
    (void)tokens->decode_all(ids);
  } catch (const tools::input_error&) {
  }
}
