// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is shown of the sequences while they are made: text that streams, or one JSON object per line. Both in the
/// order of prompts and samples, whatever order the batch finishes them in. stdout only.

#include <memory>
#include <string>
#include <vector>

#include "generation.hpp"
#include "tokenizer.hpp"

namespace generate {

struct sequence_record {
  std::string prompt;
  std::vector<bifolio::token_id> prompt_ids;
  std::vector<bifolio::token_id> output_ids;
  std::string text;  ///< of the continuation, what can be shown by now (`text_stream`)
  ending ended_by = ending::steps;
  bool ended = false;
};

class sequence_writer {
 public:
  virtual ~sequence_writer() = default;
  /// `records[sequence]` has a new token at its end.
  virtual void token(const std::vector<sequence_record>& records, std::size_t sequence) {
    static_cast<void>(records), static_cast<void>(sequence);
  }
  /// `records[sequence]` has ended.
  virtual void end(const std::vector<sequence_record>& records, std::size_t sequence) {
    static_cast<void>(records), static_cast<void>(sequence);
  }
  /// As `generation_observer::on_frame`.
  virtual void frame(const std::vector<sequence_record>& records, const tools::pool_frame& pool,
                     const std::string& letters) {
    static_cast<void>(records), static_cast<void>(pool), static_cast<void>(letters);
  }
};

/// Streams the text, its control characters escaped, of the first sequence that has not ended; the others follow when
/// it is their turn. It is shown in whole words, and a text that the limit of positions cut ends with one.
[[nodiscard]] std::unique_ptr<sequence_writer> make_text_writer(const tokenizer& tokens, std::int32_t num_samples,
                                                                bool emphasise_prompt);
/// One object per line: prompt, prompt_ids, output_ids, text, ended_by. Bytes that are not UTF-8 become U+FFFD.
[[nodiscard]] std::unique_ptr<sequence_writer> make_json_writer(const tokenizer& tokens);

}  // namespace generate
