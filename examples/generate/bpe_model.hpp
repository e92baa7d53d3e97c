// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The "model" of a tokenizer.json: a byte-pair encoding with a list of merges in their order.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bpe_merge.hpp"
#include "json_settings.hpp"

namespace generate {

class bpe_model {
 public:
  /// Throws `input_error` when the settings are not such a model, or an id is not below `vocab_size`.
  bpe_model(const json_settings& model, std::int32_t vocab_size);

  /// Appends the ids of one word.
  void encode(std::string_view word, std::vector<std::int32_t>& ids) const;

  [[nodiscard]] const std::unordered_map<std::string, std::int32_t>& vocabulary() const noexcept { return id_of_; }
  [[nodiscard]] std::optional<std::int32_t> find(const std::string& piece) const;
  /// Does every byte have a token of its own, "<0x00>" … "<0xFF>", for characters that have none?
  [[nodiscard]] bool has_all_bytes() const noexcept { return has_all_bytes_; }

 private:
  void read_merges(const json_settings& model);
  void split_characters(std::string_view word, std::vector<std::int32_t>& ids) const;

  std::unordered_map<std::string, std::int32_t> id_of_;
  std::unordered_map<std::uint64_t, bpe_join> joins_;  // by the two ids
  std::optional<std::int32_t> unknown_;
  bool fuses_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignores_merges_ = false;
  bool has_all_bytes_ = false;
};

/// "<0x0A>": the token of a byte in vocabularies of SentencePiece's kind.
[[nodiscard]] std::string byte_token_name(unsigned char byte);
/// The byte of such a token; nothing for other tokens.
[[nodiscard]] std::optional<char> byte_of_token(std::string_view piece) noexcept;

}  // namespace generate
