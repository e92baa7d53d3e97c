// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Text to token ids and back. Bytes in, bytes out: what a model produces need not be valid UTF-8.

#include <bifolio/types.hpp>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

class tokenizer {
 public:
  virtual ~tokenizer() = default;
  /// The ids of a text, the one that starts a sequence first.
  [[nodiscard]] virtual std::vector<bifolio::token_id> encode(std::string_view text) const = 0;
  /// The bytes of `id` after `previous`. `id` must be in the vocabulary.
  [[nodiscard]] virtual std::string decode(bifolio::token_id previous, bifolio::token_id id) const = 0;

  /// No text of `num_bytes` bytes has fewer ids than this, the first one included. Known without encoding it.
  [[nodiscard]] std::uint64_t min_num_ids(std::uint64_t num_bytes) const noexcept;

  /// The bytes of a whole sequence, first id included. Special ids at either end give none.
  [[nodiscard]] std::string decode_all(const std::vector<bifolio::token_id>& ids) const;

 private:
  /// The most bytes of a text that become one id, at least 1.
  [[nodiscard]] virtual std::uint64_t max_id_bytes() const noexcept = 0;
};

/// One token per byte, id = byte; `separator` starts a sequence and ends it.
[[nodiscard]] std::unique_ptr<tokenizer> make_byte_tokenizer(bifolio::token_id separator);

/// llama2.c's tokenizer file: scored pieces of a byte-pair encoding. Throws `input_error` when the file does not hold
/// exactly `vocab_size` pieces, or a score is not a number. Encoding n bytes takes O(n log n) steps.
[[nodiscard]] std::unique_ptr<tokenizer> load_bpe_tokenizer(const std::filesystem::path& path, std::int32_t vocab_size);

}  // namespace generate
