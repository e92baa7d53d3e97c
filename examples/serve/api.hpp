// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The shapes of OpenAI's API: what a body asks for, and what is answered. Knows nothing of sockets or threads.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine_thread.hpp"
#include "model_setup.hpp"

namespace serve {

/// A request that is not served: the HTTP status and one sentence. An `input_error` has the status 400.
class api_error : public std::runtime_error {
 public:
  api_error(int http_status, const std::string& sentence) : std::runtime_error(sentence), status(http_status) {}
  int status;
};

/// What a body is checked against.
struct model_facts {
  std::string name;
  const generate::model_setup& on;
  std::int32_t max_sequences = 0;  ///< of one request
};

struct completion_request {
  bool is_chat = false;
  bool stream = false;
  bool include_usage = false;  ///< in a last chunk of the stream
  generate::text_order order;  ///< its sequences are the choices of the answer
};

/// Throws `input_error`, `api_error`.
[[nodiscard]] completion_request parse_request(std::string_view body, bool is_chat, const model_facts& model);

/// Puts what comes of a request into the form that was asked for.
class answer {
 public:
  answer(std::string id, const completion_request& what, const std::string& model);

  /// What to send now. A stream has lines for every piece; an answer that does not stream comes as a whole at the end.
  [[nodiscard]] std::string next(const generate::text_news& now);

 private:
  [[nodiscard]] nlohmann::ordered_json begin(const char* chat_object) const;
  [[nodiscard]] std::string stream(const generate::text_news& now);

  std::string id_;
  std::string model_;
  std::int64_t created_;
  bool is_chat_, streams_, include_usage_;
  std::vector<generate::text_piece> choices_;  // of an answer that does not stream
  std::vector<bool> has_begun_;                // of a stream
};

[[nodiscard]] std::string format_error(int status, std::string_view sentence);
[[nodiscard]] std::string to_text(const nlohmann::ordered_json& value);

}  // namespace serve
