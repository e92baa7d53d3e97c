// SPDX-License-Identifier: Apache-2.0
#include "bpe_model.hpp"

#include <fmt/format.h>

#include "input_error.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"
#include "unicode.hpp"

namespace generate {
namespace {

using nlohmann::json;

std::uint64_t pair_key(std::int32_t left, std::int32_t right) noexcept {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

/// "a b", or ["a", "b"] in newer files.
std::optional<std::pair<std::string, std::string>> parse_merge(const json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return std::pair(merge[0].get<std::string>(), merge[1].get<std::string>());
  }
  if (!merge.is_string()) return std::nullopt;
  const auto& text = merge.get_ref<const std::string&>();
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) return std::nullopt;
  return std::pair(text.substr(0, space), text.substr(space + 1));
}

}  // namespace

std::string byte_token_name(unsigned char byte) { return fmt::format("<0x{:02X}>", byte); }

std::optional<char> byte_of_token(std::string_view piece) noexcept {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return std::nullopt;
  constexpr std::string_view digits = "0123456789ABCDEF";
  const std::size_t high = digits.find(piece[3]), low = digits.find(piece[4]);
  if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
  return static_cast<char>(static_cast<unsigned char>(high << 4 | low));
}

bpe_model::bpe_model(const json_settings& model, std::int32_t vocab_size) {
  const std::string type = model.text("type", "BPE");
  if (type != "BPE") model.refuse("type", "\"BPE\" (others are not supported)");
  model.require_plain("dropout", 0.0);
  model.require_plain("continuing_subword_prefix", "");
  model.require_plain("end_of_word_suffix", "");
  fuses_unknown_ = model.flag("fuse_unk", false);
  byte_fallback_ = model.flag("byte_fallback", false);
  ignores_merges_ = model.flag("ignore_merges", false);

  const json vocabulary = model.nested("vocab").object();
  id_of_.reserve(vocabulary.size());
  for (const auto& [piece, id] : vocabulary.items()) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= static_cast<std::uint64_t>(vocab_size)) {
      throw input_error(fmt::format("{}: the id of \"{}\" is {}, allowed are 0 to {}, as the model's vocabulary has {}",
                                    model.file(), tools::excerpt(piece), tools::json_excerpt(id), vocab_size - 1,
                                    vocab_size));
    }
    id_of_.emplace(piece, id.get<std::int32_t>());
  }
  if (model.has("unk_token")) {
    unknown_ = find(model.text("unk_token"));
    if (!unknown_) model.refuse("unk_token", "null or a token of the vocabulary");
  }
  has_all_bytes_ = byte_fallback_;
  for (int byte = 0; byte < 256; ++byte) {
    has_all_bytes_ = has_all_bytes_ && find(byte_token_name(static_cast<unsigned char>(byte)));
  }
  read_merges(model);
}

void bpe_model::read_merges(const json_settings& model) {
  const json& merges = model.list("merges");
  joins_.reserve(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto parts = parse_merge(merges[i]);
    const auto left = parts ? find(parts->first) : std::nullopt;
    const auto right = parts ? find(parts->second) : std::nullopt;
    const auto joined = left && right ? find(parts->first + parts->second) : std::nullopt;
    if (!joined) {
      throw input_error(fmt::format("{}: merge {} is {}, allowed are two tokens that make a third of the vocabulary",
                                    model.file(), i, tools::json_excerpt(merges[i])));
    }
    joins_.insert_or_assign(pair_key(*left, *right), bpe_join{*joined, static_cast<double>(i)});
  }
}

std::optional<std::int32_t> bpe_model::find(const std::string& piece) const {
  const auto found = id_of_.find(piece);
  return found == id_of_.end() ? std::nullopt : std::optional(found->second);
}

void bpe_model::encode(std::string_view word, std::vector<std::int32_t>& ids) const {
  if (ignores_merges_) {
    if (const auto whole = find(std::string(word))) return ids.push_back(*whole);
  }
  std::vector<std::int32_t> own;
  split_characters(word, own);
  merge_pairs(own, [this](std::int32_t left, std::int32_t right) {
    const auto found = joins_.find(pair_key(left, right));
    return found == joins_.end() ? bpe_join{} : found->second;
  });
  ids.insert(ids.end(), own.begin(), own.end());
}

/// One token per character; of one that has none its bytes, if all of these have tokens, else the unknown token, else
/// nothing. As in the `tokenizers` package, an unknown token waits for those that it may be fused with.
void bpe_model::split_characters(std::string_view word, std::vector<std::int32_t>& ids) const {
  bool unknown_waits = false;
  const auto flush = [&] {
    if (unknown_waits) ids.push_back(*unknown_);
    unknown_waits = false;
  };
  std::vector<std::int32_t> bytes;
  for (std::size_t at = 0; at < word.size();) {
    const std::string piece(word.substr(at, character_at(word, at).num_bytes));
    at += piece.size();
    if (const auto id = find(piece)) {
      flush();
      ids.push_back(*id);
      continue;
    }
    if (byte_fallback_) {
      bytes.clear();
      for (const char c : piece) {
        if (const auto id = find(byte_token_name(static_cast<unsigned char>(c)))) bytes.push_back(*id);
      }
      if (bytes.size() == piece.size()) {
        ids.insert(ids.end(), bytes.begin(), bytes.end());
        continue;
      }
    }
    if (!unknown_) continue;
    if (!fuses_unknown_) flush();
    unknown_waits = true;
  }
  flush();
}

}  // namespace generate
