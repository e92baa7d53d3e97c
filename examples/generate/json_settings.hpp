// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Settings from JSON that is not trusted (config.json, tokenizer.json, a request's body): each is checked for its type
/// where it is read, and a refusal names the file, the setting, its value and what is allowed.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace generate {

/// The JSON object in a file of at most 64 MiB. Throws `input_error`.
[[nodiscard]] nlohmann::json read_json_object(const std::filesystem::path& path);

/// A setting that is null counts as absent, except for `is_null`. All throw `input_error`.
class json_settings {
 public:
  explicit json_settings(const std::filesystem::path& path) : file_(path.string()), object_(read_json_object(path)) {}
  /// `file` and `where` ("", or the names of the enclosing settings, each with a dot after it) are for the sentences.
  json_settings(std::string file, std::string where, nlohmann::json object);

  [[nodiscard]] const std::string& file() const noexcept { return file_; }
  [[nodiscard]] const nlohmann::json& object() const noexcept { return object_; }
  [[nodiscard]] bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  [[nodiscard]] bool is_null(const char* key) const { return object_.contains(key) && object_[key].is_null(); }

  [[nodiscard]] std::int32_t integer(const char* key, std::optional<std::int32_t> otherwise = {}) const;
  [[nodiscard]] float number(const char* key, std::optional<float> otherwise = {}) const;
  /// From `least` to `most`.
  [[nodiscard]] std::int64_t integer(const char* key, std::int64_t least, std::int64_t most,
                                     std::int64_t otherwise) const;
  [[nodiscard]] float number(const char* key, float least, float most, float otherwise) const;
  [[nodiscard]] bool flag(const char* key, bool otherwise) const;
  [[nodiscard]] std::string text(const char* key, std::optional<std::string> otherwise = {}) const;
  /// A number or a list of numbers; what is null in the list is left out. No ids when the setting itself is null.
  [[nodiscard]] std::vector<std::int32_t> tokens(const char* key, const std::vector<std::int32_t>& otherwise) const;
  /// A list, empty when it is absent.
  [[nodiscard]] const nlohmann::json& list(const char* key) const;
  /// The settings inside an object, which must be there.
  [[nodiscard]] json_settings nested(const char* key) const;
  [[nodiscard]] bool is_object(const char* key) const { return has(key) && object_[key].is_object(); }

  /// Throws unless a setting that this program has no code for is absent or at its plain value.
  void require_plain(const char* key, const nlohmann::json& plain) const;

  [[noreturn]] void refuse(const char* key, const std::string& allowed) const;

 private:
  void require(const char* key) const;

  std::string file_;
  std::string where_;
  nlohmann::json object_;
};

}  // namespace generate
