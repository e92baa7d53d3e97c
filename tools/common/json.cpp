// SPDX-License-Identifier: Apache-2.0
#include "tools/common/json.hpp"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

using nlohmann::json;

/// Makes the value from the parser's events, keeping a stack of the lists and objects that are open.
class value_builder final : public nlohmann::json_sax<json> {
 public:
  [[nodiscard]] json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t& value) override { return put(std::move(value)); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    member_ = &(*open_.back())[name];
    return true;
  }
  bool parse_error(std::size_t position, const std::string& token, const json::exception& problem) override {
    constexpr int number_overflow = 406;  // of the library's documented numbers
    if (problem.id != number_overflow) throw json_error("not valid JSON at byte " + std::to_string(position));
    throw json_error("JSON with a number out of range at byte " + std::to_string(position) + ": " + excerpt(token));
  }

 private:
  template <class Value>
  json* place(Value&& value) {
    if (open_.empty()) return &(root_ = std::forward<Value>(value));
    if (!open_.back()->is_array()) return &(*member_ = std::forward<Value>(value));
    open_.back()->push_back(std::forward<Value>(value));
    return &open_.back()->back();
  }
  template <class Value>
  bool put(Value&& value) {
    (void)place(json(std::forward<Value>(value)));
    return true;
  }
  bool open(json container) {
    if (open_.size() == max_json_depth) {
      throw json_error("JSON nested deeper than " + std::to_string(max_json_depth) + " levels");
    }
    open_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  json root_;
  std::vector<json*> open_;  // outermost first
  json* member_ = nullptr;   // of the innermost object: where the next value goes
};

constexpr std::size_t excerpt_bytes = 60;
constexpr int excerpt_depth = 3;

/// Writes until there is enough. At most `excerpt_depth` calls inside one another.
void append(std::string& to, const json& value, int depth) {
  if (to.size() > excerpt_bytes) return;
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    to += json(text.substr(0, excerpt_bytes + 1)).dump(-1, ' ', true, json::error_handler_t::replace);
    return;
  }
  if (!value.is_structured()) {
    to += value.dump();
    return;
  }
  const bool is_list = value.is_array();
  to += is_list ? '[' : '{';
  if (depth == excerpt_depth && !value.empty()) {
    to += "...";
  } else {
    const char* separator = "";
    for (const auto& [name, item] : value.items()) {
      if (to.size() > excerpt_bytes) return;
      to += separator;
      if (!is_list) {
        append(to, name, depth + 1);
        to += ':';
      }
      append(to, item, depth + 1);
      separator = ",";
    }
  }
  to += is_list ? ']' : '}';
}

}  // namespace

json parse_json(std::string_view text) {
  value_builder builder;
  (void)json::sax_parse(text, &builder);
  return builder.take();
}

std::optional<std::int64_t> whole_number(const json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) return std::nullopt;
  return value.get<std::int64_t>();
}

std::string json_excerpt(const json& value) {
  std::string text;
  append(text, value, 1);
  return excerpt(text);
}

}  // namespace tools
