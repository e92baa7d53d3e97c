// SPDX-License-Identifier: Apache-2.0
// The byte-pair encoding against the plain algorithm: look at every pair, merge the best, begin again.
#include "tokenizer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "input_error.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;

struct scored_piece {
  std::string text;
  float score = 0;
};
using vocabulary = std::vector<scored_piece>;

/// Three special tokens and the 256 bytes, as every file of this format begins.
vocabulary beginning() {
  vocabulary pieces{{"<unk>", 0}, {"\n<s>\n", 0}, {"\n</s>\n", 0}};
  for (int byte = 0; byte < 256; ++byte)
    pieces.push_back({std::string("<").append(std::to_string(byte)).append(">"), 0});
  return pieces;
}

std::unique_ptr<generate::tokenizer> load(const vocabulary& pieces) {
  std::string bytes(4, '\0');
  const auto put = [&](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  for (const scored_piece& one : pieces) {
    put(one.score);
    put(static_cast<std::int32_t>(one.text.size()));
    bytes += one.text;
  }
  const auto path = write_file(scratch_directory() / "scored.tok", bytes);
  return generate::load_bpe_tokenizer(path, static_cast<std::int32_t>(pieces.size()));
}

class naive_encoder {
 public:
  explicit naive_encoder(const vocabulary& pieces) : pieces_(pieces) {}

  std::vector<token_id> encode(const std::string& text) const {
    std::vector<std::size_t> ids;
    const auto add = [&](const std::string& character) {
      if (const std::size_t id = find(character); id < pieces_.size()) {
        ids.push_back(id);
      } else {
        for (const char c : character) ids.push_back(3 + static_cast<unsigned char>(c));
      }
    };
    if (!text.empty()) add(" ");
    for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
      do ++end;
      while (end < text.size() && end - begin < 4 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u);
      add(text.substr(begin, end - begin));
    }
    while (merge_best(ids)) {
    }
    std::vector<token_id> result{token_id{1}};
    for (const std::size_t id : ids) result.push_back(token_id{static_cast<std::int32_t>(id)});
    return result;
  }

 private:
  std::size_t find(const std::string& text) const {
    const auto found =
        std::find_if(pieces_.begin(), pieces_.end(), [&](const scored_piece& one) { return one.text == text; });
    return static_cast<std::size_t>(found - pieces_.begin());
  }
  bool merge_best(std::vector<std::size_t>& ids) const {
    std::size_t best = ids.size(), best_id = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      const std::size_t joined = find(pieces_[ids[i]].text + pieces_[ids[i + 1]].text);
      if (joined == pieces_.size()) continue;
      if (best < ids.size() && pieces_[joined].score <= pieces_[best_id].score) continue;
      best = i;
      best_id = joined;
    }
    if (best == ids.size()) return false;
    ids[best] = best_id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    return true;
  }

  const vocabulary& pieces_;
};

}  // namespace

TEST_CASE("random texts in random vocabularies are encoded as the plain algorithm encodes them") {
  constexpr std::uint64_t seed = 41;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::vector<std::string> characters{"a", "b", " ", "c", "\xc3\xa9", "\xe2\x82\xac", "\xff", "\x80"};
  // Of two characters in half of the rounds: then nearly every pair joins, and pairs change under waiting candidates.
  std::size_t num_characters = 0;
  const auto text_of = [&](std::size_t most) {
    std::string text;
    for (auto count = random() % (most + 1); count > 0; --count) text += characters[random() % num_characters];
    return text;
  };
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::size_t num_merged = 0;
  for (int round = 0; round < 150; ++round) {
    vocabulary pieces = beginning();
    num_characters = round % 4 < 2 ? 2 : characters.size();
    for (const std::string& character : characters) {
      if (random() % 4 != 0) pieces.push_back({character, 0});
    }
    // Few different scores, so that many pairs tie; names of adjacent bytes may be pieces, too.
    const float scores[] = {-3, -2, -1, -0.0f, 0, 1, infinity, -infinity};
    for (auto count = random() % 60; count > 0; --count) {
      std::string piece = random() % 8 == 0 ? pieces[3 + random() % 256].text + text_of(2) : text_of(5);
      if (random() % 16 == 0) piece = "<255><128>";
      pieces.push_back({piece, round % 2 == 0 ? scores[random() % 8] : static_cast<float>(random() % 1000)});
    }
    if (round % 16 == 0) pieces[3 + random() % 256].text.clear();
    const auto tokens = load(pieces);
    const naive_encoder naive(pieces);
    for (int i = 0; i < 12; ++i) {
      const std::string text = text_of(40);
      const std::vector<token_id> expected = naive.encode(text);
      CAPTURE(round);
      CAPTURE(i);
      REQUIRE(tokens->encode(text) == expected);
      REQUIRE(tokens->min_num_ids(text.size()) <= expected.size());
      num_merged += text.size() + 2 - std::min(text.size() + 2, expected.size());
    }
  }
  CHECK(num_merged > 1000);
}

TEST_CASE("a long text is encoded in far fewer steps than the square of its length") {
  vocabulary pieces = beginning();
  for (std::size_t length = 1; length <= 1024; length *= 2) {
    pieces.push_back({std::string(length, 'a'), -static_cast<float>(length)});
  }
  const auto tokens = load(pieces);
  constexpr std::size_t num_bytes = std::size_t{1} << 20;
  const std::vector<token_id> ids = tokens->encode(std::string(num_bytes, 'a'));
  REQUIRE(ids.size() == 2 + num_bytes / 1024);  // the first one, and the byte of the space
  CHECK(std::all_of(ids.begin() + 2, ids.end(), [](token_id id) { return to_index(id) == 269; }));
  CHECK(tokens->min_num_ids(num_bytes) == 1 + num_bytes / 1024);
  CHECK(tokens->min_num_ids(num_bytes + 1) == 2 + num_bytes / 1024);
  CHECK(tokens->min_num_ids(0) == 1);
}

TEST_CASE("a score that is not a number is refused by its token") {
  vocabulary pieces = beginning();
  pieces[7].score = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_WITH_AS((void)load(pieces), doctest::Contains("the score of token 7 is not a number"),
                       generate::input_error);
}

TEST_CASE("bytes have one id each after the first") {
  const auto bytes = generate::make_byte_tokenizer(token_id{0});
  for (const std::size_t length : {0u, 1u, 63u}) CHECK(bytes->min_num_ids(length) == length + 1);
}
