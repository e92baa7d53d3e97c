// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "added_tokens.hpp"
#include "bpe_model.hpp"
#include "input_error.hpp"
#include "json_settings.hpp"
#include "pre_tokenizer.hpp"
#include "tokenizer.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"
#include "unicode.hpp"

namespace generate {
namespace {

using bifolio::token_id;
using nlohmann::json;

const std::string low_line = "\u2581";  // "▁", which represents a space in vocabularies of SentencePiece's kind

/// In as many steps as the text is long: a prompt may be megabytes of spaces.
void replace_all(std::string& text, const std::string& from, const std::string& to) {
  std::string result;
  std::size_t begin = 0;
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, begin)) {
    result.append(text, begin, at - begin).append(to);
    begin = at + from.size();
  }
  if (begin == 0) return;
  text = result.append(text, begin);
}

/// The printable character that represents a byte in byte-level vocabularies: GPT-2's encoder.py, bytes_to_unicode.
std::array<char32_t, 256> byte_characters() {
  std::array<char32_t, 256> result{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool stands_for_itself =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
    result[byte] = stands_for_itself ? byte : next++;
  }
  return result;
}

/// A step on a whole text between added tokens.
using normalizer = std::function<void(std::string&)>;

/// A step on a word: cuts it into words.
struct splitter {
  enum class action : std::uint8_t {
    rule,       ///< by a regular expression, or the like
    metaspace,  ///< spaces become "▁", one is put in front, a word begins at each
    at_text,    ///< a word ends after each `text`
    bytes,      ///< every byte becomes its character
  };
  enum class prefix : std::uint8_t { never, first, always };

  action what = action::rule;
  split_rule rule = split_rule::gpt2;
  prefix space = prefix::never;  ///< is a space put before words that have none?
  bool splits = true;
  std::string text;
};

/// A word on its way through the splitters. Only the first of a text gets a space of `prefix::first`.
struct word {
  std::string text;
  bool is_first = false;
};

/// Which bytes tokens are, and what is dropped at the start of a text.
struct decoding {
  enum class start : std::uint8_t { keep, drop_space, drop_all_spaces };

  bool byte_level = false;
  bool byte_tokens = false;  ///< "<0x0A>" is a byte
  start begin = start::keep;
};

class hugging_face_tokenizer final : public tokenizer {
 public:
  hugging_face_tokenizer(const json_settings& file, std::int32_t vocab_size)
      : model_(file.nested("model"), vocab_size) {
    if (file.has("normalizer")) read_normalizer(file.nested("normalizer"));
    if (file.has("pre_tokenizer")) read_splitter(file.nested("pre_tokenizer"));
    if (file.has("decoder")) read_decoder(file.nested("decoder"));
    if (decoding_.byte_level != has_bytes_) {
      throw input_error(fmt::format(
          "{}: of \"pre_tokenizer\" and \"decoder\" one is \"ByteLevel\", allowed are both or none", file.file()));
    }
    pieces_.resize(static_cast<std::size_t>(vocab_size));
    for (const auto& [piece, id] : model_.vocabulary()) pieces_[static_cast<std::size_t>(id)] = bytes_of(piece);
    read_added_tokens(file, vocab_size);
    if (file.has("post_processor")) read_template(file.nested("post_processor"), vocab_size);
    for (const std::string& piece : pieces_) longest_ = std::max(longest_, std::uint64_t{piece.size()});
    takes_every_byte_ = !drops_text_ && (has_bytes_ ? has_all_byte_characters() : model_.has_all_bytes());
  }

  [[nodiscard]] std::vector<token_id> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids = first_ids_;
    for (const text_part& part : raw_added_.split(text)) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      std::string normalized(part.text);
      for (const normalizer& step : normalizers_) step(normalized);
      bool is_first = part.text.data() == text.data();
      for (const text_part& inner : normalized_added_.split(normalized)) {
        if (inner.id >= 0) {
          ids.push_back(inner.id);
        } else {
          encode_words(inner.text, is_first, ids);
        }
        is_first = false;
      }
    }
    std::vector<token_id> result;
    for (const std::int32_t id : ids) result.push_back(token_id{id});
    return result;
  }

  [[nodiscard]] std::string decode(token_id previous, token_id id) const override {
    const auto index = static_cast<std::size_t>(to_index(id));
    if (index >= pieces_.size()) return {};
    std::string piece = pieces_[index];
    const bool begins = previous == no_token || (!first_ids_.empty() && to_index(previous) == first_ids_.back());
    if (begins && decoding_.begin != decoding::start::keep) {
      const std::size_t num_spaces = std::min(piece.find_first_not_of(' '), piece.size());
      piece.erase(0,
                  decoding_.begin == decoding::start::drop_space ? std::min<std::size_t>(num_spaces, 1) : num_spaces);
    }
    return piece;
  }

 private:
  /// A character that has no token and no bytes may be dropped, or fused with others: then nothing is known. NFC makes
  /// up to three bytes one.
  [[nodiscard]] std::uint64_t max_id_bytes() const noexcept override {
    return takes_every_byte_ ? 3 * longest_ : any_num_bytes;
  }
  [[nodiscard]] std::uint64_t num_first_ids() const noexcept override { return first_ids_.size(); }

  void encode_words(std::string_view text, bool is_first, std::vector<std::int32_t>& ids) const {
    std::vector<word> words{{std::string(text), is_first}};
    for (const splitter& step : splitters_) {
      std::vector<word> smaller;
      for (word& one : words) cut(step, std::move(one), smaller);
      words = std::move(smaller);
    }
    for (const word& one : words) model_.encode(one.text, ids);
  }

  void cut(const splitter& step, word from, std::vector<word>& to) const {
    const bool is_metaspace = step.what == splitter::action::metaspace;
    if (is_metaspace) replace_all(from.text, " ", low_line);
    const std::string space = is_metaspace ? low_line : " ";
    const bool wants_space =
        step.space == splitter::prefix::always || (step.space == splitter::prefix::first && from.is_first);
    if (wants_space && !from.text.starts_with(space)) from.text.insert(0, space);
    const auto add = [&](std::string_view part) {
      to.push_back({std::string(part), from.is_first && part.data() == from.text.data()});
    };
    switch (step.what) {
      case splitter::action::rule:
        for (const std::string_view part : split(step.rule, from.text)) add(part);
        break;
      case splitter::action::metaspace:
      case splitter::action::at_text: {
        const std::string& at_what = is_metaspace ? low_line : step.text;
        const std::string_view text = from.text;
        std::size_t begin = 0;
        for (std::size_t at = text.find(at_what); step.splits && at != std::string_view::npos;
             at = text.find(at_what, at + at_what.size())) {
          const std::size_t end = is_metaspace ? at : at + at_what.size();
          if (end > begin) add(text.substr(begin, end - begin));
          begin = end;
        }
        if (begin < text.size()) add(text.substr(begin));
        break;
      }
      case splitter::action::bytes: {
        static const std::array<char32_t, 256> characters = byte_characters();
        std::string mapped;
        for (const char c : from.text) append_utf8(mapped, characters[static_cast<unsigned char>(c)]);
        to.push_back({std::move(mapped), from.is_first});
        break;
      }
    }
  }

  /// The text that a token of the model denotes.
  [[nodiscard]] std::string bytes_of(const std::string& piece) const {
    if (!decoding_.byte_level) {
      if (const auto byte = byte_of_token(piece); byte && decoding_.byte_tokens) return std::string(1, *byte);
      std::string text = piece;
      replace_all(text, low_line, " ");
      return text;
    }
    static const auto byte_of = [] {
      std::unordered_map<char32_t, char> result;
      const std::array<char32_t, 256> characters = byte_characters();
      for (std::size_t byte = 0; byte < 256; ++byte) result.emplace(characters[byte], static_cast<char>(byte));
      return result;
    }();
    std::string text;
    for (std::size_t at = 0; at < piece.size();) {
      const character next = character_at(piece, at);
      at += next.num_bytes;
      const auto found = byte_of.find(next.code);
      if (found == byte_of.end()) return piece;  // no token of bytes: it is its own text
      text += found->second;
    }
    return text;
  }

  // What follows reads tokenizer.json; each function refuses what has no code above.

  /// The steps of an object, which may be a sequence of objects under `list_key`.
  template <class Read>
  static void for_each_step(const json_settings& s, const char* list_key, const Read& read) {
    if (s.text("type") != "Sequence") return read(s);
    const json& steps = s.list(list_key);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      read(json_settings(s.file(), fmt::format("{}[{}].", list_key, i), steps[i]));
    }
  }

  /// A "pattern" that is a plain text.
  static std::string read_text_pattern(const json_settings& s) {
    const json_settings pattern = s.nested("pattern");
    if (!pattern.has("String")) s.refuse("pattern", "a \"String\"");
    std::string text = pattern.text("String");
    if (text.empty()) s.refuse("pattern", "a text that is not empty");
    return text;
  }

  void read_normalizer(const json_settings& whole) {
    for_each_step(whole, "normalizers", [&](const json_settings& s) {
      const std::string type = s.text("type");
      if (type == "NFC") {
        normalizers_.push_back([](std::string& text) { text = to_nfc(text); });
      } else if (type == "Prepend") {
        normalizers_.push_back([what = s.text("prepend")](std::string& text) {
          if (!text.empty()) text.insert(0, what);
        });
      } else if (type == "Replace") {
        const std::string from = read_text_pattern(s), to = s.text("content");
        drops_text_ = drops_text_ || to.size() < from.size();
        normalizers_.push_back([from, to](std::string& text) { replace_all(text, from, to); });
      } else {
        s.refuse("type",
                 "a normalizer of \"NFC\", \"Prepend\", \"Replace\" and \"Sequence\" (others are not supported)");
      }
    });
  }

  void read_splitter(const json_settings& whole) {
    for_each_step(whole, "pretokenizers", [&](const json_settings& s) {
      const std::string type = s.text("type");
      splitter step;
      if (type == "ByteLevel") {
        step.space = s.flag("add_prefix_space", true) ? splitter::prefix::always : splitter::prefix::never;
        if (s.flag("use_regex", true)) {
          splitters_.push_back(step);
          step.space = splitter::prefix::never;
        }
        step.what = splitter::action::bytes;
        has_bytes_ = true;
      } else if (type == "Split") {
        read_split(s, step);
      } else if (type == "Digits") {
        if (!s.flag("individual_digits", false)) s.refuse("individual_digits", "true (others are not supported)");
        step.rule = split_rule::digits;
      } else if (type == "Metaspace") {
        read_metaspace(s, step);
      } else {
        s.refuse("type",
                 "a pre-tokenizer of \"ByteLevel\", \"Split\", \"Digits\", \"Metaspace\" and \"Sequence\" (others are "
                 "not supported)");
      }
      splitters_.push_back(std::move(step));
    });
  }

  static void read_split(const json_settings& s, splitter& step) {
    s.require_plain("invert", false);
    const json_settings pattern = s.nested("pattern");
    if (pattern.has("String")) {
      s.require_plain("behavior", "MergedWithPrevious");
      step.what = splitter::action::at_text;
      step.text = read_text_pattern(s);
      return;
    }
    s.require_plain("behavior", "Isolated");
    const auto rule = rule_of_pattern(pattern.text("Regex"));
    if (!rule) pattern.refuse("Regex", "the expression of GPT-2, Llama 3 or Qwen2 (others are not supported)");
    step.rule = *rule;
  }

  static void read_metaspace(const json_settings& s, splitter& step) {
    s.require_plain("replacement", low_line);
    const std::string scheme = s.text("prepend_scheme", s.flag("add_prefix_space", true) ? "always" : "never");
    if (scheme == "always") {
      step.space = splitter::prefix::always;
    } else if (scheme == "first") {
      step.space = splitter::prefix::first;
    } else if (scheme != "never") {
      s.refuse("prepend_scheme", "\"always\", \"first\" or \"never\"");
    }
    step.what = splitter::action::metaspace;
    step.splits = s.flag("split", true);
  }

  void read_decoder(const json_settings& whole) {
    for_each_step(whole, "decoders", [&](const json_settings& s) {
      const std::string type = s.text("type");
      if (type == "ByteLevel") {
        decoding_.byte_level = true;
      } else if (type == "Metaspace") {
        s.require_plain("replacement", low_line);
        if (s.text("prepend_scheme", "always") != "never") decoding_.begin = decoding::start::drop_all_spaces;
      } else if (type == "Replace") {
        if (read_text_pattern(s) != low_line) s.refuse("pattern", "\"" + low_line + "\" (others are not supported)");
        s.require_plain("content", " ");
      } else if (type == "Strip") {
        s.require_plain("content", " ");
        s.require_plain("start", 1);
        s.require_plain("stop", 0);
        decoding_.begin = decoding::start::drop_space;
      } else if (type == "ByteFallback") {
        decoding_.byte_tokens = true;
      } else if (type != "Fuse") {
        s.refuse("type",
                 "a decoder of \"ByteLevel\", \"Metaspace\", \"Replace\", \"ByteFallback\", \"Fuse\", \"Strip\" and "
                 "\"Sequence\" (others are not supported)");
      }
    });
  }

  [[nodiscard]] bool has_all_byte_characters() const {
    return std::ranges::all_of(byte_characters(), [&](char32_t code) {
      std::string piece;
      append_utf8(piece, code);
      return model_.find(piece).has_value();
    });
  }

  void read_added_tokens(const json_settings& file, std::int32_t vocab_size) {
    const json& list = file.list("added_tokens");
    for (std::size_t i = 0; i < list.size(); ++i) {
      const json_settings s(file.file(), fmt::format("added_tokens[{}].", i), list[i]);
      const std::int32_t id = s.integer("id");
      if (id < 0 || id >= vocab_size) {
        s.refuse("id", fmt::format("0 to {}, as the model's vocabulary has {}", vocab_size - 1, vocab_size));
      }
      for (const char* key : {"single_word", "lstrip", "rstrip"}) s.require_plain(key, false);
      std::string content = s.text("content");
      if (content.empty()) s.refuse("content", "a text that is not empty");
      const bool is_special = s.flag("special", false);
      pieces_[static_cast<std::size_t>(id)] = is_special ? std::string() : bytes_of(content);
      longest_ = std::max(longest_, std::uint64_t{content.size()});
      if (!s.flag("normalized", !is_special)) {
        raw_added_.add(std::move(content), id);
        continue;
      }
      for (const normalizer& step : normalizers_) step(content);
      if (!content.empty()) normalized_added_.add(std::move(content), id);
    }
  }

  /// The ids before every text. A template that puts one after the text is refused: a model would continue after it.
  void read_template(const json_settings& whole, std::int32_t vocab_size) {
    for_each_step(whole, "processors", [&](const json_settings& s) {
      const std::string type = s.text("type");
      if (type == "ByteLevel") return;  // moves offsets, which nothing here uses
      if (type != "TemplateProcessing") {
        s.refuse("type",
                 "a post-processor of \"TemplateProcessing\", \"ByteLevel\" and \"Sequence\" (others are not "
                 "supported)");
      }
      bool text_seen = false;
      for (const json& item : s.list("single")) {
        if (item.is_object() && item.contains("Sequence")) {
          text_seen = true;
          continue;
        }
        if (text_seen || !item.is_object() || !item.contains("SpecialToken")) {
          s.refuse("single", "tokens and then the text, none after it (others are not supported)");
        }
        const json_settings named(s.file(), "single[].", item);
        const std::string name = named.nested("SpecialToken").text("id");
        const json_settings token = s.nested("special_tokens").nested(name.c_str());
        for (const std::int32_t id : token.tokens("ids", {})) {
          if (id < 0 || id >= vocab_size) token.refuse("ids", fmt::format("ids from 0 to {}", vocab_size - 1));
          first_ids_.push_back(id);
        }
      }
    });
  }

  bpe_model model_;
  std::vector<normalizer> normalizers_;
  std::vector<splitter> splitters_;
  bool has_bytes_ = false;  // of the splitters one maps bytes to characters
  decoding decoding_;
  bool drops_text_ = false;        // a normalizer makes texts shorter
  bool takes_every_byte_ = false;  // of a normalized text; none is dropped or fused into an unknown token
  added_tokens raw_added_;         // found in the text as it is
  added_tokens normalized_added_;  // found after the normalizers
  std::vector<std::int32_t> first_ids_;
  std::vector<std::string> pieces_;  // [vocab_size]: the bytes of a token; none for a special one
  std::uint64_t longest_ = 1;        // bytes of a token
};

}  // namespace

std::unique_ptr<tokenizer> load_hugging_face_tokenizer(const std::filesystem::path& path, std::int32_t vocab_size) {
  return std::make_unique<hugging_face_tokenizer>(json_settings(path), vocab_size);
}

}  // namespace generate
