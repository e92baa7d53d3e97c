// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The shapes of OpenAI's API: what a body asks for, and what is answered. Knows nothing of sockets or of the engine.

#include <bifolio/types.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "sampler.hpp"
#include "tokenizer.hpp"

namespace serve {

/// A request that is not served: the HTTP status and one sentence.
class api_error : public std::runtime_error {
 public:
  api_error(int http_status, const std::string& sentence) : std::runtime_error(sentence), status(http_status) {}
  int status;
};

/// What of the model and the server a body is checked against.
struct model_facts {
  std::string name;
  const generate::tokenizer* tokens = nullptr;
  std::int32_t vocab_size = 0;
  std::int32_t max_positions = 0;
  std::int32_t max_sequences = 0;  ///< of one request
};

struct completion_request {
  bool is_chat = false;
  bool stream = false;
  bool include_usage = false;  ///< in a last chunk of the stream
  std::vector<std::vector<bifolio::token_id>> prompts;
  std::int32_t num_samples = 1;  ///< of each prompt; choice number prompt · num_samples + sample
  std::int32_t max_tokens = 16;
  generate::sampling how{1, 1};
  std::optional<std::uint64_t> seed;
  std::vector<std::string> stops;
};

/// Throws `api_error` (400 or 404).
[[nodiscard]] completion_request parse_request(std::string_view body, bool is_chat, const model_facts& model);

struct usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;  ///< of these, found in the prefix cache
  std::int64_t completion_tokens = 0;
};

/// A part of a choice's text. `letter`: of its sequence in the block map.
struct piece {
  std::size_t choice = 0;
  std::string text;
  const char* finish_reason = nullptr;  ///< with the last piece: "stop" or "length"
  char letter = '#';
};

/// Ids of one answer.
struct answer_head {
  std::string id;
  std::int64_t created = 0;
  std::string model;
  bool is_chat = false;
};

/// One line of a stream, "data: …\n\n". `first`: of its choice.
[[nodiscard]] std::string format_chunk(const answer_head& head, const piece& what, bool first);
[[nodiscard]] std::string format_usage_chunk(const answer_head& head, const usage& used);
/// The whole answer of a request that does not stream.
[[nodiscard]] std::string format_answer(const answer_head& head, const std::vector<piece>& choices, const usage& used);
[[nodiscard]] std::string format_error(int status, std::string_view sentence);
[[nodiscard]] std::string to_text(const nlohmann::ordered_json& value);

}  // namespace serve
