// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <unordered_map>

#include "binary_file.hpp"
#include "input_error.hpp"
#include "tokenizer.hpp"

namespace generate {
namespace {

using bifolio::token_id;

constexpr std::int32_t bos = 1;
constexpr std::int32_t eos = 2;
constexpr std::int32_t first_byte = 3;  // ids 3 … 258 are the bytes
constexpr std::int32_t no_id = -1;

class bpe_tokenizer final : public tokenizer {
 public:
  bpe_tokenizer(binary_file& file, std::int32_t vocab_size) {
    if (vocab_size < first_byte + 256) {
      throw input_error(fmt::format("{}: a vocabulary of {} has no room for the 256 byte tokens of this format",
                                    file.name(), vocab_size));
    }
    const std::string bytes = file.read_text(std::uint64_t{1} << 30);
    constexpr std::size_t prefix = sizeof(float) + sizeof(std::int32_t);
    std::size_t offset = sizeof(std::int32_t);  // the longest piece's length, which nobody needs
    if (bytes.size() < offset) throw input_error(fmt::format("{}: too short for a tokenizer file", file.name()));
    for (std::int32_t id = 0; id < vocab_size; ++id) {
      if (bytes.size() - offset < prefix) {
        throw input_error(
            fmt::format("{}: the file ends after {} of the model's {} tokens", file.name(), id, vocab_size));
      }
      float score = 0;
      std::int32_t length = 0;
      std::memcpy(&score, bytes.data() + offset, sizeof(score));
      std::memcpy(&length, bytes.data() + offset + sizeof(score), sizeof(length));
      offset += prefix;
      if (length < 0 || static_cast<std::size_t>(length) > bytes.size() - offset) {
        throw input_error(fmt::format("{}: token {} claims {} bytes where {} are left", file.name(), id, length,
                                      bytes.size() - offset));
      }
      std::string piece = bytes.substr(offset, static_cast<std::size_t>(length));
      offset += piece.size();
      id_of_.emplace(piece, id);  // of equal pieces the lowest id counts
      pieces_.push_back(std::move(piece));
      scores_.push_back(score);
    }
    if (offset != bytes.size()) {
      throw input_error(fmt::format("{}: {} bytes follow after the model's {} tokens: it belongs to another model",
                                    file.name(), bytes.size() - offset, vocab_size));
    }
  }

  [[nodiscard]] std::vector<token_id> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids = split(text);
    merge(ids);
    std::vector<token_id> result{token_id{bos}};
    for (const std::int32_t id : ids) result.push_back(token_id{id});
    return result;
  }

  [[nodiscard]] std::string decode(token_id previous, token_id id) const override {
    const std::int32_t index = to_index(id);
    if (index == bos || index == eos) return {};
    if (index >= first_byte && index < first_byte + 256) return std::string(1, static_cast<char>(index - first_byte));
    const std::string& piece = pieces_[static_cast<std::size_t>(index)];
    const bool drop_space = to_index(previous) == bos && !piece.empty() && piece[0] == ' ';
    return drop_space ? piece.substr(1) : piece;
  }

 private:
  [[nodiscard]] std::int32_t find(const std::string& piece) const {
    const auto found = id_of_.find(piece);
    return found == id_of_.end() ? no_id : found->second;
  }

  /// A space, then one token per code point, or its bytes where the vocabulary lacks it.
  [[nodiscard]] std::vector<std::int32_t> split(std::string_view text) const {
    std::vector<std::int32_t> ids;
    if (text.empty()) return ids;
    const auto add = [&](const std::string& character) {
      if (const std::int32_t id = find(character); id != no_id) {
        ids.push_back(id);
        return;
      }
      for (const char c : character) ids.push_back(static_cast<unsigned char>(c) + first_byte);
    };
    add(" ");
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = begin + 1;  // a lead byte and up to three continuation bytes
      while (end < text.size() && end - begin < 4 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) ++end;
      add(std::string(text.substr(begin, end - begin)));
      begin = end;
    }
    return ids;
  }

  /// Merges the adjacent pair whose joined piece scores highest, the leftmost on a tie, until no pair joins. What a
  /// pair would become is looked up once and again only when a neighbour changes.
  void merge(std::vector<std::int32_t>& ids) const {
    std::vector<std::int32_t> joined(ids.size(), no_id);  // joined[i]: what ids[i] and ids[i + 1] make
    const auto join = [&](std::size_t i) {
      joined[i] = i + 1 < ids.size()
                      ? find(pieces_[static_cast<std::size_t>(ids[i])] + pieces_[static_cast<std::size_t>(ids[i + 1])])
                      : no_id;
    };
    for (std::size_t i = 0; i < ids.size(); ++i) join(i);
    while (true) {
      std::size_t best = ids.size();
      float best_score = -std::numeric_limits<float>::infinity();
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
        if (joined[i] == no_id) continue;
        const float score = scores_[static_cast<std::size_t>(joined[i])];
        if (best == ids.size() || score > best_score) {
          best = i;
          best_score = score;
        }
      }
      if (best == ids.size()) return;
      ids[best] = joined[best];
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      joined.erase(joined.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      join(best);
      if (best > 0) join(best - 1);
    }
  }

  std::vector<std::string> pieces_;
  std::vector<float> scores_;
  std::unordered_map<std::string, std::int32_t> id_of_;
};

}  // namespace

std::unique_ptr<tokenizer> load_bpe_tokenizer(const std::filesystem::path& path, std::int32_t vocab_size) {
  binary_file file(path);
  return std::make_unique<bpe_tokenizer>(file, vocab_size);
}

}  // namespace generate
