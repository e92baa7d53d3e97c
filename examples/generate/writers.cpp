// SPDX-License-Identifier: Apache-2.0
#include "writers.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"
#include "tools/common/utf8.hpp"

namespace generate {
namespace {

using bifolio::token_id;
using tools::complete_utf8;
using tools::printable_text;

/// The leading bytes of `text` that are whole words: all but a word at the end that may go on, and the spaces before
/// it. A text without spaces, as in Chinese, has no such words: of a longer run only a character whose rest may still
/// come is held back.
std::size_t whole_words(std::string_view text) {
  constexpr std::size_t longest_word = 48;  // bytes
  constexpr std::string_view spaces = " \t\n\r";
  const std::size_t space = text.find_last_of(spaces);
  const std::size_t word = space == std::string_view::npos ? 0 : space + 1;
  if (text.size() - word > longest_word) return complete_utf8(text);
  const std::size_t last = text.substr(0, word).find_last_not_of(spaces);
  return last == std::string_view::npos ? 0 : last + 1;
}

/// How much is shown of the end of a text that the limit of positions cut: not the beginning of a word.
std::size_t shown_of_cut(std::string_view text) {
  constexpr std::string_view ends = ".,;:!?)]}\"'";
  return !text.empty() && ends.find(text.back()) != std::string_view::npos ? text.size() : whole_words(text);
}

class text_writer final : public sequence_writer {
 public:
  text_writer(const tokenizer& tokens, std::int32_t num_samples, bool emphasise_prompt)
      : tokens_(tokens), num_samples_(static_cast<std::size_t>(num_samples)), emphasise_(emphasise_prompt) {}

  void token(const std::vector<sequence_record>& records, std::size_t sequence) override {
    if (sequence == current_) write_more(records);
  }

  void end(const std::vector<sequence_record>& records, std::size_t sequence) override {
    if (sequence != current_) return;
    write_more(records);
    while (current_ < records.size() && records[current_].ended) {
      close(records[current_]);
      ++current_;
      num_shown_ = 0;
      is_open_ = false;
      if (current_ < records.size()) write_more(records);
    }
  }

 private:
  /// What of the current sequence was not written yet.
  void write_more(const std::vector<sequence_record>& records) {
    const sequence_record& record = records[current_];
    if (!is_open_) open(record, records.size());
    write(record, whole_words(std::string_view(record.text).substr(num_shown_)));
  }

  /// The next bytes of its text.
  void write(const sequence_record& record, std::size_t num_bytes) {
    tools::write_stdout(printable_text(std::string_view(record.text).substr(num_shown_, num_bytes)));
    num_shown_ += num_bytes;
  }

  void open(const sequence_record& record, std::size_t num_sequences) {
    is_open_ = true;
    const std::string sample =
        num_samples_ > 1 ? fmt::format(", sample {} of {}", current_ % num_samples_ + 1, num_samples_) : std::string();
    tools::write_stdout(
        fmt::format("--- {} of {}{} ---\n", current_ / num_samples_ + 1, num_sequences / num_samples_, sample));
    const std::string prompt = printable_text(tokens_.decode_all(record.prompt_ids));
    tools::write_stdout(emphasise_ && !prompt.empty() ? "\x1b[1m" + prompt + "\x1b[0m" : prompt);
  }

  void close(const sequence_record& record) {
    const bool is_cut = record.ended_by == ending::steps;
    const std::string_view left = std::string_view(record.text).substr(num_shown_);
    // A text of one word, and it is cut: better than none.
    write(record, !is_cut ? left.size() : num_shown_ > 0 ? shown_of_cut(left) : complete_utf8(left));
    tools::write_stdout(is_cut ? " ...\n\n" : "\n\n");
  }

  const tokenizer& tokens_;
  std::size_t num_samples_;
  bool emphasise_;
  std::size_t current_ = 0;
  bool is_open_ = false;       // its title and prompt are written
  std::size_t num_shown_ = 0;  // bytes of its text
};

class json_writer final : public sequence_writer {
 public:
  explicit json_writer(const tokenizer& tokens) : tokens_(tokens) {}

  void end(const std::vector<sequence_record>& records, std::size_t) override {
    for (; next_ < records.size() && records[next_].ended; ++next_) write(records[next_]);
  }

 private:
  void write(const sequence_record& record) const {
    nlohmann::ordered_json line;
    line["prompt"] = record.prompt;
    line["prompt_ids"] = numbers(record.prompt_ids);
    line["output_ids"] = numbers(record.output_ids);
    line["text"] = tokens_.decode_all(record.prompt_ids) + record.text;
    line["ended_by"] = to_string(record.ended_by);
    const std::string text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    tools::write_stdout(tools::printable_json(text) + "\n");
  }

  static std::vector<std::int32_t> numbers(const std::vector<token_id>& ids) {
    std::vector<std::int32_t> result;
    for (const token_id id : ids) result.push_back(to_index(id));
    return result;
  }

  const tokenizer& tokens_;
  std::size_t next_ = 0;
};

}  // namespace

std::unique_ptr<sequence_writer> make_text_writer(const tokenizer& tokens, std::int32_t num_samples,
                                                  bool emphasise_prompt) {
  return std::make_unique<text_writer>(tokens, num_samples, emphasise_prompt);
}

std::unique_ptr<sequence_writer> make_json_writer(const tokenizer& tokens) {
  return std::make_unique<json_writer>(tokens);
}

}  // namespace generate
