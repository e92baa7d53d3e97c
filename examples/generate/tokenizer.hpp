// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Text to token ids and back. Bytes in, bytes out: what a model produces need not be valid UTF-8.

#include <bifolio/types.hpp>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

inline constexpr bifolio::token_id no_token{-1};

class tokenizer {
 public:
  virtual ~tokenizer() = default;
  /// The ids of a text, the one that starts a sequence first, if the tokenizer has such a one.
  [[nodiscard]] virtual std::vector<bifolio::token_id> encode(std::string_view text) const = 0;
  /// The bytes of `id` after `previous`, which is `no_token` at the start. `id` must be in the vocabulary of the model.
  [[nodiscard]] virtual std::string decode(bifolio::token_id previous, bifolio::token_id id) const = 0;

  /// No text of `num_bytes` bytes has fewer ids than this, the first one included. Known without encoding it.
  [[nodiscard]] std::uint64_t min_num_ids(std::uint64_t num_bytes) const noexcept;

  /// The bytes of a whole sequence. Special ids give none.
  [[nodiscard]] std::string decode_all(const std::vector<bifolio::token_id>& ids) const;

 protected:
  /// For `max_id_bytes`: an id may stand for any number of bytes, or a text may have no id at all.
  static constexpr std::uint64_t any_num_bytes = std::numeric_limits<std::uint64_t>::max();

 private:
  /// The most bytes of a text that become one id, at least 1.
  [[nodiscard]] virtual std::uint64_t max_id_bytes() const noexcept = 0;
  /// How many ids `encode` puts before those of the text.
  [[nodiscard]] virtual std::uint64_t num_first_ids() const noexcept { return 1; }
};

/// One token per byte, id = byte; `separator` starts a sequence and ends it.
[[nodiscard]] std::unique_ptr<tokenizer> make_byte_tokenizer(bifolio::token_id separator);

/// llama2.c's tokenizer file: scored pieces of a byte-pair encoding. Throws `input_error` when the file does not hold
/// exactly `vocab_size` pieces, or a score is not a number. Encoding n bytes takes O(n log n) steps.
[[nodiscard]] std::unique_ptr<tokenizer> load_bpe_tokenizer(const std::filesystem::path& path, std::int32_t vocab_size);

/// A Hugging Face tokenizer.json with a byte-pair encoding of one of two kinds: byte-level (GPT-2, Llama 3, Qwen) and
/// SentencePiece's (Llama 2, Mistral, Gemma). The ids are those of the `tokenizers` package; what this program has no
/// code for is refused by name. `vocab_size`: of the model; all ids of the file are below it. Throws `input_error`.
[[nodiscard]] std::unique_ptr<tokenizer> load_hugging_face_tokenizer(const std::filesystem::path& path,
                                                                     std::int32_t vocab_size);

}  // namespace generate
