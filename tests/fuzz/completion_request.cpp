// SPDX-License-Identifier: Apache-2.0
// The body of a request to the server. What is taken is in the limits; any tokens then become an answer that is JSON
// and has no stop string in it.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "api.hpp"
#include "choices.hpp"
#include "fuzz_target.hpp"
#include "text_stream.hpp"
#include "tools/common/program.hpp"

namespace {

using namespace bifolio::fuzz;
using nlohmann::json;

constexpr std::int32_t max_sequences = 8;

const generate::model_setup& tiny_model() {
  static const generate::model_setup model([] {
    generate::engine_options o;
    o.model = std::string(BIFOLIO_FUZZ_MODELS) + "/llama3";  // whose tokens are bytes
    o.device = "cpu";
    o.num_threads = 1;
    return o;
  }());
  return model;
}

void check(const serve::completion_request& got) {
  const generate::text_order& order = got.order;
  if (order.texts.empty() || order.num_sequences > max_sequences) flaw("a number of texts that is not allowed");
  const std::int32_t room = tiny_model().max_positions + 1;
  for (const generate::text_request& one : order.texts) {
    if (one.prompt.empty() || one.max_new_tokens < 1) flaw("nothing to compute");
    if (static_cast<std::int32_t>(one.prompt.size()) + one.max_new_tokens > room) flaw("more than the model takes");
    for (const bifolio::token_id id : one.prompt) {
      if (to_index(id) < 0 || to_index(id) >= tiny_model().config().vocab_size) flaw("an id out of range");
    }
    if (!(one.how.top_p > 0 && one.how.top_p <= 1 && one.how.temperature >= 0)) flaw("another distribution");
  }
}

void check_text(const std::string& text, const std::string& whole, const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    if (text.find(stop) != std::string::npos) flaw("a stop string was shown");
  }
  bool has_stop = false;
  for (const std::string& stop : stops) has_stop = has_stop || whole.find(stop) != std::string::npos;
  if (!whole.starts_with(text) || (!has_stop && text != whole)) flaw("another text");
}

void check_json(const std::string& answer, bool streams) {
  if (!streams) {
    if (!answer.empty() && !json::accept(answer)) flaw("an answer is no JSON");
    return;
  }
  for (std::size_t at = 0; at < answer.size();) {
    const std::size_t end = answer.find("\n\n", at);
    if (end == std::string::npos || answer.compare(at, 6, "data: ") != 0) flaw("a line of another form");
    const std::string data = answer.substr(at + 6, end - at - 6);
    if (data != "[DONE]" && !json::accept(data)) flaw("a line is no JSON");
    at = end + 2;
  }
}

}  // namespace

BIFOLIO_FUZZ_TARGET(completion_request) {
  choices from(input);
  const bool is_chat = from.flag();
  const auto tokens = from.bytes(from.below(64));  // of the answer
  const serve::model_facts facts{"tiny", tiny_model(), max_sequences};
  try {
    const serve::completion_request got =
        serve::parse_request({reinterpret_cast<const char*>(from.rest().data()), from.rest().size()}, is_chat, facts);
    check(got);
    serve::answer answer("id", got, facts.name);
    const generate::tokenizer& tokenizer = *tiny_model().model.tokens;
    generate::text_stream text(tokenizer, got.order.texts[0].prompt.back(), got.order.stops);
    std::string shown, whole;
    const std::size_t sequence = got.order.num_sequences - 1;
    const auto show = [&](std::string piece, bool is_last) {
      shown += piece;
      generate::text_news news;
      generate::text_piece& next = news.pieces.emplace_back();
      next.sequence = sequence;
      next.text = std::move(piece);
      if (is_last) next.ended_by = generate::ending::steps;
      news.is_done = is_last;
      if (is_last && tokens.size() % 8 == 7) news.failure = shown;
      check_json(answer.next(news), got.stream);
    };
    for (const std::uint8_t byte : tokens) {
      if (byte != 0) whole += static_cast<char>(byte);  // 0 begins texts and has no bytes
      if (text.add(bifolio::token_id{byte})) break;
      show(text.take(), false);
    }
    show(text.take_rest(), true);
    check_text(shown, whole, got.order.stops);
  } catch (const tools::input_error&) {
  } catch (const serve::api_error&) {
  }
}
