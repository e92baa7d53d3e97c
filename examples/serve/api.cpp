// SPDX-License-Identifier: Apache-2.0
#include "api.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "chat_prompt.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace serve {
namespace {

using bifolio::token_id;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t max_stops = 16, max_stop_bytes = 256;

[[noreturn]] void refuse(const std::string& sentence) { throw api_error(400, sentence); }

[[noreturn]] void refuse_value(const char* name, const json& value, const std::string& allowed) {
  refuse(fmt::format("\"{}\" is {}, allowed are {}", name, tools::json_excerpt(value), allowed));
}

/// Fields of a body; one that is absent or null has its default.
class fields {
 public:
  explicit fields(const json& body) : body_(body) {}

  [[nodiscard]] const json* find(const char* name) const {
    const auto found = body_.find(name);
    return found != body_.end() && !found->is_null() ? &*found : nullptr;
  }
  [[nodiscard]] bool flag(const char* name) const {
    const json* value = find(name);
    if (value != nullptr && !value->is_boolean()) refuse_value(name, *value, "true and false");
    return value != nullptr && value->get<bool>();
  }
  [[nodiscard]] std::int64_t integer(const char* name, std::int64_t least, std::int64_t most,
                                     std::int64_t otherwise) const {
    const json* value = find(name);
    if (value == nullptr) return otherwise;
    const bool fits = value->is_number_unsigned() ? value->get<std::uint64_t>() <= static_cast<std::uint64_t>(most)
                                                  : value->is_number_integer();
    if (!fits || value->get<std::int64_t>() < least || value->get<std::int64_t>() > most) {
      refuse_value(name, *value, fmt::format("whole numbers from {} to {}", least, most));
    }
    return value->get<std::int64_t>();
  }
  [[nodiscard]] float number(const char* name, double least, double most, double otherwise) const {
    const json* value = find(name);
    if (value == nullptr) return static_cast<float>(otherwise);
    if (!value->is_number() || !(value->get<double>() >= least) || !(value->get<double>() <= most)) {
      refuse_value(name, *value, fmt::format("numbers from {} to {}", least, most));
    }
    return value->get<float>();
  }

 private:
  const json& body_;
};

/// Fields that would change the answer and that nothing here carries out, with the one value that asks for nothing.
void refuse_unsupported(const fields& body) {
  const std::pair<const char*, json> unsupported[] = {
      {"logprobs", false},      {"top_logprobs", 0},
      {"echo", false},          {"suffix", ""},
      {"presence_penalty", 0},  {"frequency_penalty", 0},
      {"best_of", 1},           {"logit_bias", json::object()},
      {"tools", json::array()}, {"functions", json::array()},
      {"tool_choice", "none"},  {"response_format", json{{"type", "text"}}}};
  for (const auto& [name, nothing] : unsupported) {
    const json* value = body.find(name);
    if (value != nullptr && *value != nothing) refuse_value(name, *value, tools::json_excerpt(nothing) + " alone");
  }
}

std::vector<std::string> parse_stops(const fields& body) {
  const json* value = body.find("stop");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  const auto is_stop = [](const json& one) {
    return one.is_string() && !one.get_ref<const std::string&>().empty() &&
           one.get_ref<const std::string&>().size() <= max_stop_bytes;
  };
  if (list.size() > max_stops || !std::ranges::all_of(list, is_stop)) {
    refuse_value("stop", *value, fmt::format("a string or up to {}, of 1 to {} bytes", max_stops, max_stop_bytes));
  }
  return list.get<std::vector<std::string>>();
}

std::vector<token_id> encode(const std::string& text, const model_facts& model) {
  if (const std::uint64_t least = model.tokens->min_num_ids(text.size());
      least > static_cast<std::uint64_t>(model.max_positions)) {
    refuse(fmt::format("the prompt of {} bytes has at least {} tokens, the model takes at most {}", text.size(), least,
                       model.max_positions));
  }
  return model.tokens->encode(text);
}

std::vector<token_id> parse_ids(const json& list, const model_facts& model) {
  std::vector<token_id> ids;
  for (const json& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= model.vocab_size) {
      refuse_value("prompt", id, fmt::format("token ids from 0 to {}", model.vocab_size - 1));
    }
    ids.push_back(token_id{id.get<std::int32_t>()});
  }
  return ids;
}

/// A text, a list of texts, a list of ids, or a list of lists of ids.
std::vector<std::vector<token_id>> parse_prompts(const fields& body, const model_facts& model) {
  const json* value = body.find("prompt");
  if (value == nullptr) refuse("there is no \"prompt\"");
  if (value->is_string()) return {encode(value->get<std::string>(), model)};
  if (!value->is_array() || value->empty()) refuse_value("prompt", *value, "a text, a list of texts, and token ids");
  if (value->front().is_number()) return {parse_ids(*value, model)};
  std::vector<std::vector<token_id>> prompts;
  for (const json& one : *value) {
    if (one.is_string()) {
      prompts.push_back(encode(one.get<std::string>(), model));
    } else if (one.is_array()) {
      prompts.push_back(parse_ids(one, model));
    } else {
      refuse_value("prompt", one, "texts and lists of token ids");
    }
  }
  return prompts;
}

std::vector<chat_message> parse_messages(const fields& body) {
  const json* value = body.find("messages");
  const std::string allowed = "a list of objects with \"role\" and \"content\", which is a text";
  if (value == nullptr) refuse("there are no \"messages\"");
  if (!value->is_array() || value->empty()) refuse_value("messages", *value, allowed);
  std::vector<chat_message> messages;
  for (const json& one : *value) {
    const auto role = one.is_object() ? one.find("role") : one.end();
    const auto content = one.is_object() ? one.find("content") : one.end();
    if (!one.is_object() || role == one.end() || !role->is_string() || content == one.end()) {
      refuse_value("messages", one, allowed);
    }
    chat_message message{role->get<std::string>(), {}};
    for (const json& part : content->is_array() ? *content : json::array({*content})) {
      const bool is_part = part.is_object() && part.value("type", json()) == "text" && part.contains("text");
      const json& text = is_part ? part.at("text") : part;
      if (!text.is_string()) refuse_value("content", part, "texts");
      message.content += text.get<std::string>();
    }
    messages.push_back(std::move(message));
  }
  return messages;
}

ordered_json to_json(const usage& used) {
  ordered_json result;
  result["prompt_tokens"] = used.prompt_tokens;
  result["completion_tokens"] = used.completion_tokens;
  result["total_tokens"] = used.prompt_tokens + used.completion_tokens;
  result["prompt_tokens_details"]["cached_tokens"] = used.cached_tokens;
  return result;
}

ordered_json begin_answer(const answer_head& head, const char* object) {
  return {{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
}

const char* chunk_object(const answer_head& head) { return head.is_chat ? "chat.completion.chunk" : "text_completion"; }

ordered_json reason_of(const piece& what) {
  return what.finish_reason != nullptr ? ordered_json(what.finish_reason) : ordered_json();
}

}  // namespace

completion_request parse_request(std::string_view text, bool is_chat, const model_facts& model) {
  json body;
  try {
    body = tools::parse_json(text);
  } catch (const tools::json_error& problem) {
    refuse(fmt::format("the body is {}", problem.what()));
  }
  if (!body.is_object()) refuse(fmt::format("the body is {}, a JSON object is expected", tools::json_excerpt(body)));
  const fields from(body);
  if (const json* name = from.find("model"); name != nullptr && *name != model.name) {
    throw api_error(404, fmt::format("\"model\" is {}; this server has \"{}\" alone", tools::json_excerpt(*name),
                                     tools::printable_line(model.name)));
  }
  refuse_unsupported(from);
  completion_request result;
  result.is_chat = is_chat;
  result.stream = from.flag("stream");
  if (const json* how = from.find("stream_options"); how != nullptr) {
    if (!how->is_object()) refuse_value("stream_options", *how, "objects");
    result.include_usage = fields(*how).flag("include_usage");
  }
  result.how.temperature = from.number("temperature", 0, 100, 1);
  result.how.top_p = std::max(from.number("top_p", 0, 1, 1), std::numeric_limits<float>::min());
  result.num_samples = static_cast<std::int32_t>(from.integer("n", 1, model.max_sequences, 1));
  constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
  if (from.find("seed") != nullptr) result.seed = static_cast<std::uint64_t>(from.integer("seed", -any - 1, any, 0));
  result.stops = parse_stops(from);
  if (is_chat) {
    result.prompts = {encode(format_chat(parse_messages(from), *model.tokens), model)};
  } else {
    result.prompts = parse_prompts(from, model);
  }
  std::size_t longest = 0;
  for (const std::vector<token_id>& prompt : result.prompts) {
    if (prompt.empty()) refuse("a prompt is empty, and the model's tokenizer puts no token before a text");
    longest = std::max(longest, prompt.size());
  }
  // The last token is sampled and never fed.
  const std::int64_t room = model.max_positions - static_cast<std::int64_t>(longest) + 1;
  if (room < 1) refuse(fmt::format("a prompt has {} tokens, the model takes at most {}", longest, model.max_positions));
  const char* name = from.find("max_completion_tokens") != nullptr ? "max_completion_tokens" : "max_tokens";
  result.max_tokens =
      static_cast<std::int32_t>(from.integer(name, 1, room, is_chat ? room : std::min<std::int64_t>(16, room)));
  if (static_cast<std::int64_t>(result.prompts.size()) * result.num_samples > model.max_sequences) {
    refuse(fmt::format("{} prompts with \"n\" {} are {} texts, allowed are {} (--max-batch-seqs)",
                       result.prompts.size(), result.num_samples,
                       static_cast<std::int64_t>(result.prompts.size()) * result.num_samples, model.max_sequences));
  }
  return result;
}

std::string to_text(const ordered_json& value) {
  return tools::printable_json(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

std::string format_chunk(const answer_head& head, const piece& what, bool first) {
  ordered_json choice{{"index", what.choice}};
  if (head.is_chat) {
    choice["delta"] = ordered_json::object();
    if (first) choice["delta"]["role"] = "assistant";
    if (!what.text.empty()) choice["delta"]["content"] = what.text;
  } else {
    choice["text"] = what.text;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = reason_of(what);
  choice["letter"] = std::string(1, what.letter);
  ordered_json chunk = begin_answer(head, chunk_object(head));
  chunk["choices"] = ordered_json::array({choice});
  return "data: " + to_text(chunk) + "\n\n";
}

std::string format_usage_chunk(const answer_head& head, const usage& used) {
  ordered_json chunk = begin_answer(head, chunk_object(head));
  chunk["choices"] = ordered_json::array();
  chunk["usage"] = to_json(used);
  return "data: " + to_text(chunk) + "\n\n";
}

std::string format_answer(const answer_head& head, const std::vector<piece>& choices, const usage& used) {
  ordered_json answer = begin_answer(head, head.is_chat ? "chat.completion" : "text_completion");
  answer["choices"] = ordered_json::array();
  for (const piece& one : choices) {
    ordered_json choice{{"index", one.choice}};
    if (head.is_chat) {
      choice["message"] = {{"role", "assistant"}, {"content", one.text}};
    } else {
      choice["text"] = one.text;
    }
    choice["logprobs"] = nullptr;
    choice["finish_reason"] = reason_of(one);
    answer["choices"].push_back(std::move(choice));
  }
  answer["usage"] = to_json(used);
  return to_text(answer);
}

std::string format_error(int status, std::string_view sentence) {
  ordered_json error;
  error["error"] = {{"message", sentence},
                    {"type", status < 500 ? "invalid_request_error" : "server_error"},
                    {"param", nullptr},
                    {"code", status}};
  return to_text(error);
}

}  // namespace serve
