// SPDX-License-Identifier: Apache-2.0
#include "api.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <random>

#include "chat_prompt.hpp"
#include "input_error.hpp"
#include "json_settings.hpp"
#include "prompts.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace serve {
namespace {

using bifolio::token_id;
using generate::json_settings;
using generate::text_news;
using generate::text_piece;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t max_stops = 16, max_stop_bytes = 256;

/// Fields that would change the answer and that nothing here carries out, with the one value that asks for nothing.
const std::pair<const char*, json> unsupported[] = {
    {"logprobs", false},      {"top_logprobs", 0},
    {"echo", false},          {"suffix", ""},
    {"presence_penalty", 0},  {"frequency_penalty", 0},
    {"best_of", 1},           {"logit_bias", json::object()},
    {"tools", json::array()}, {"functions", json::array()},
    {"tool_choice", "none"},  {"response_format", json{{"type", "text"}}}};

json_settings parse_body(std::string_view text) {
  try {
    return {"the body", "", tools::parse_json(text)};
  } catch (const tools::json_error& problem) {
    throw generate::input_error(fmt::format("the body is {}", problem.what()));
  }
}

json as_list(const json& value) { return value.is_array() ? value : json::array({value}); }

std::vector<std::string> parse_stops(const json_settings& body) {
  if (!body.has("stop")) return {};
  const json list = as_list(body.object()["stop"]);
  const auto is_stop = [](const json& one) {
    return one.is_string() && !one.get_ref<const std::string&>().empty() &&
           one.get_ref<const std::string&>().size() <= max_stop_bytes;
  };
  if (list.size() > max_stops || !std::ranges::all_of(list, is_stop)) {
    body.refuse("stop", fmt::format("a text or up to {}, of 1 to {} bytes", max_stops, max_stop_bytes));
  }
  return list.get<std::vector<std::string>>();
}

/// A text, a list of texts, a list of ids, or a list of lists of ids.
std::vector<std::vector<token_id>> parse_prompts(const json_settings& body, const generate::model_setup& on) {
  const auto refuse = [&] { body.refuse("prompt", "a text, a list of texts, token ids or a list of lists of these"); };
  if (!body.has("prompt")) throw generate::input_error("there is no \"prompt\"");
  const json& value = body.object()["prompt"];
  const bool is_one = value.is_string() || (value.is_array() && !value.empty() && value.front().is_number());
  std::vector<std::vector<token_id>> prompts;
  for (const json& one : is_one ? json::array({value}) : as_list(value)) {
    const std::string name = fmt::format("prompt {}", prompts.size() + 1);
    if (one.is_string()) {
      prompts.push_back(generate::encode_prompt(name, one.get<std::string>(), *on.model.tokens, on.max_positions));
      continue;
    }
    if (!one.is_array()) refuse();
    std::vector<token_id> ids;
    for (const json& id : one) {
      if (!id.is_number_integer() || id < INT32_MIN || id > INT32_MAX) refuse();
      ids.push_back(token_id{id.get<std::int32_t>()});
    }
    generate::check_prompt(name, ids, on.config().vocab_size, on.max_positions);
    prompts.push_back(std::move(ids));
  }
  if (prompts.empty()) refuse();
  return prompts;
}

std::vector<token_id> parse_chat(const json_settings& body, const generate::model_setup& on) {
  const auto refuse = [&] { body.refuse("messages", "a list of objects with a \"role\" and a \"content\" of texts"); };
  if (!body.has("messages")) throw generate::input_error("there are no \"messages\"");
  std::vector<generate::chat_message> messages;
  for (const json& one : body.list("messages")) {
    if (!one.is_object() || !one.contains("content") || !one.value("role", json()).is_string()) refuse();
    generate::chat_message message{one["role"].get<std::string>(), {}};
    for (const json& part : as_list(one["content"])) {
      const json text = part.is_object() && part.value("type", json()) == "text" ? part.value("text", json()) : part;
      if (!text.is_string()) refuse();
      message.content += text.get<std::string>();
    }
    messages.push_back(std::move(message));
  }
  if (messages.empty()) refuse();
  const std::string text = generate::format_chat(messages, *on.model.tokens);
  return generate::encode_prompt("the chat", text, *on.model.tokens, on.max_positions);
}

ordered_json usage_of(const text_news& now) {
  return {{"prompt_tokens", now.num_prompt_tokens},
          {"completion_tokens", now.num_new_tokens},
          {"total_tokens", now.num_prompt_tokens + now.num_new_tokens},
          {"prompt_tokens_details", {{"cached_tokens", now.num_cached_tokens}}}};
}

ordered_json reason_of(const text_piece& what) {
  if (!what.ended_by) return nullptr;
  return *what.ended_by == generate::ending::steps ? "length" : "stop";
}

std::string line(const std::string& data) { return "data: " + data + "\n\n"; }

}  // namespace

completion_request parse_request(std::string_view text, bool is_chat, const model_facts& model) {
  const json_settings body = parse_body(text);
  if (body.has("model") && body.object()["model"] != model.name) {
    throw api_error(404, fmt::format("\"model\" is {}; this server has \"{}\" alone",
                                     tools::json_excerpt(body.object()["model"]), tools::printable_line(model.name)));
  }
  for (const auto& [name, nothing] : unsupported) body.require_plain(name, nothing);
  completion_request result;
  result.is_chat = is_chat;
  result.stream = body.flag("stream", false);
  if (body.has("stream_options")) {
    result.include_usage = body.nested("stream_options").flag("include_usage", false);
  }
  result.order.stops = parse_stops(body);
  std::vector<std::vector<token_id>> prompts;
  if (is_chat) {
    prompts.push_back(parse_chat(body, model.on));
  } else {
    prompts = parse_prompts(body, model.on);
  }
  generate::text_request common;
  common.num_samples = static_cast<std::int32_t>(body.integer("n", 1, model.max_sequences, 1));
  common.how.temperature = body.number("temperature", 0, 100, 1);
  common.how.top_p = std::max(body.number("top_p", 0, 1, 1), std::numeric_limits<float>::min());
  std::random_device any;
  common.seed = body.has("seed") ? static_cast<std::uint64_t>(body.integer("seed", INT64_MIN, INT64_MAX, 0))
                                 : std::uint64_t{any()} << 32 | any();
  const std::size_t longest = std::ranges::max(prompts, {}, &std::vector<token_id>::size).size();
  // The last token is sampled and never fed.
  const std::int64_t room = model.on.max_positions - static_cast<std::int64_t>(longest) + 1;
  const char* name = body.has("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  common.max_new_tokens =
      static_cast<std::int32_t>(body.integer(name, 1, room, is_chat ? room : std::min<std::int64_t>(16, room)));
  generate::text_order& order = result.order;
  for (std::vector<token_id>& prompt : prompts) {
    generate::text_request& one = order.texts.emplace_back(common);
    one.prompt = std::move(prompt);
    one.first_sequence = order.num_sequences;
    order.num_sequences += static_cast<std::size_t>(common.num_samples);
  }
  if (order.num_sequences > static_cast<std::size_t>(model.max_sequences)) {
    throw generate::input_error(fmt::format("{} prompts with \"n\" {} are {} texts, allowed are {} (--max-batch-seqs)",
                                            order.texts.size(), common.num_samples, order.num_sequences,
                                            model.max_sequences));
  }
  return result;
}

answer::answer(std::string id, const completion_request& what, const std::string& model)
    : id_(std::move(id)),
      model_(model),
      created_(std::time(nullptr)),
      is_chat_(what.is_chat),
      streams_(what.stream),
      include_usage_(what.include_usage),
      choices_(what.order.num_sequences),
      has_begun_(what.order.num_sequences, false) {}

std::string answer::next(const text_news& now) {
  if (streams_) return stream(now);
  for (const text_piece& what : now.pieces) {
    choices_[what.sequence].text += what.text;
    choices_[what.sequence].ended_by = what.ended_by;
  }
  if (!now.is_done) return {};
  if (!now.failure.empty()) return format_error(500, now.failure);
  ordered_json whole = begin("chat.completion");
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    ordered_json choice{{"index", i}};
    if (is_chat_) {
      choice["message"] = {{"role", "assistant"}, {"content", choices_[i].text}};
    } else {
      choice["text"] = choices_[i].text;
    }
    choice["logprobs"] = nullptr;
    choice["finish_reason"] = reason_of(choices_[i]);
    whole["choices"].push_back(std::move(choice));
  }
  whole["usage"] = usage_of(now);
  return to_text(whole);
}

std::string answer::stream(const text_news& now) {
  std::string lines;
  for (const text_piece& what : now.pieces) {
    ordered_json choice{{"index", what.sequence}};
    if (is_chat_) {
      choice["delta"] = ordered_json::object();
      if (!has_begun_[what.sequence]) choice["delta"]["role"] = "assistant";
      if (!what.text.empty()) choice["delta"]["content"] = what.text;
    } else {
      choice["text"] = what.text;
    }
    has_begun_[what.sequence] = true;
    choice["logprobs"] = nullptr;
    choice["finish_reason"] = reason_of(what);
    choice["letter"] = std::string(1, what.letter);
    ordered_json chunk = begin("chat.completion.chunk");
    chunk["choices"].push_back(std::move(choice));
    lines += line(to_text(chunk));
  }
  if (!now.is_done) return lines;
  if (!now.failure.empty()) lines += line(format_error(500, now.failure));
  if (include_usage_) {
    ordered_json chunk = begin("chat.completion.chunk");
    chunk["usage"] = usage_of(now);
    lines += line(to_text(chunk));
  }
  return lines + line("[DONE]");
}

ordered_json answer::begin(const char* chat_object) const {
  return {{"id", id_},
          {"object", is_chat_ ? chat_object : "text_completion"},
          {"created", created_},
          {"model", model_},
          {"choices", ordered_json::array()}};
}

std::string format_error(int status, std::string_view sentence) {
  return to_text({{"error",
                   {{"message", sentence},
                    {"type", status < 500 ? "invalid_request_error" : "server_error"},
                    {"param", nullptr},
                    {"code", status}}}});
}

std::string to_text(const ordered_json& value) {
  return tools::printable_json(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

}  // namespace serve
