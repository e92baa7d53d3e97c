// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bifolio/error.hpp>
#include <bifolio/step.hpp>
#include <charconv>
#include <string_view>
#include <type_traits>
#include <utility>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

class json_line {
 public:
  json_line& text(std::string_view raw) {
    out_.append(raw);
    return *this;
  }
  template <class Integer>
  json_line& number(Integer value) {
    out_.append(std::to_string(value));
    return *this;
  }
  template <class List, class Write>
  json_line& list(const List& items, Write write) {
    out_.push_back('[');
    bool first = true;
    for (const auto& item : items) {
      if (!first) out_.push_back(',');
      first = false;
      write(item);
    }
    out_.push_back(']');
    return *this;
  }
  [[nodiscard]] std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Just enough of JSON for what `to_string` writes: objects, lists, integers. A list or an object is read only where a
/// step_plan has one, so calls are nested no deeper than a step_plan is, whatever the text.
class json_reader {
 public:
  explicit json_reader(std::string_view text) : text_(text) {}

  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("'") + wanted + "'");
  }
  template <class Integer>
  void number(Integer& value) {
    skip_space();
    const char* begin = text_.data() + at_;
    const auto [end, problem] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (problem != std::errc()) fail("an integer that its field can hold");
    at_ += static_cast<std::size_t>(end - begin);
  }
  template <class Id>
  void id(Id& value) {
    std::underlying_type_t<Id> index{};
    number(index);
    value = Id{index};
  }
  template <class ReadItem>
  void list(ReadItem read_item) {
    expect('[');
    if (take(']')) return;
    do read_item();
    while (take(','));
    expect(']');
  }
  template <class ReadField>
  void object(ReadField read_field) {
    expect('{');
    if (take('}')) return;
    do {
      expect('"');
      const std::size_t close = std::min(text_.find('"', at_), text_.size());
      const std::string_view name = text_.substr(at_, close - at_);
      at_ = close;
      expect('"');
      expect(':');
      read_field(name);
    } while (take(','));
    expect('}');
  }
  void end() {
    skip_space();
    if (at_ != text_.size()) fail("the end");
  }
  [[noreturn]] void fail(std::string_view wanted) const {
    // The excerpt stays on the stack, as a refusal needs no memory.
    std::array<char, 16> excerpt{};
    const std::string_view rest = text_.substr(std::min(at_, text_.size()), excerpt.size());
    std::ranges::replace_copy_if(
        rest, excerpt.begin(), [](char c) { return c < ' ' || c > '~'; }, '?');
    detail::refuse(errc::invalid_argument, "a step plan's JSON has \"", std::string_view(excerpt.data(), rest.size()),
                   "\" at character ", at_, " where ", wanted, " is expected");
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  [[nodiscard]] bool take(char wanted) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

std::string to_string(const step_plan& plan) {
  json_line line;
  const auto pair = [&](const block_copy& copy) {
    line.text("[").number(to_index(copy.src)).text(",").number(to_index(copy.dst)).text("]");
  };
  const auto id = [&](auto value) { line.number(to_index(value)); };
  line.text("{\"step\":").number(plan.step).text(",\"seqs\":");
  line.list(plan.seqs, [&](const scheduled_seq& row) {
    line.text("{\"seq\":").number(to_index(row.seq)).text(",\"query_len\":").number(row.query_len);
    line.text(",\"seq_len\":").number(row.seq_len).text(",\"request\":").number(to_index(row.request));
    line.text(",\"sample\":").number(row.sample).text(",\"num_samples\":").number(row.num_samples);
    line.text(",\"num_drafts\":").number(row.num_drafts);
    line.text(",\"num_cached_tokens\":").number(row.num_cached_tokens).text("}");
  });
  line.text(",\"copies\":").list(plan.copies, pair);
  line.text(",\"swap_outs\":").list(plan.swap_outs, pair);
  line.text(",\"swap_ins\":").list(plan.swap_ins, pair);
  line.text(",\"swapped_out\":").list(plan.swapped_out, id);
  line.text(",\"swapped_in\":").list(plan.swapped_in, id);
  line.text(",\"preempted\":").list(plan.preempted, id);
  line.text(",\"aborted\":").list(plan.aborted, id).text(",\"num_tokens\":").number(plan.num_tokens);
  if (!plan.groups.empty()) {
    line.text(",\"groups\":").list(plan.groups, [&](const group_moves& group) {
      line.text("{\"copies\":").list(group.copies, pair);
      line.text(",\"swap_outs\":").list(group.swap_outs, pair);
      line.text(",\"swap_ins\":").list(group.swap_ins, pair).text("}");
    });
  }
  if (!plan.encoded.empty()) line.text(",\"encoded\":").list(plan.encoded, id);
  return line.text("}").take();
}

step_plan parse_step_plan(std::string_view json) {
  return detail::translate_bad_alloc("parse_step_plan", [&] {
    step_plan plan;
    json_reader in(json);
    const auto pairs = [&](std::vector<block_copy>& to) {
      in.list([&] {
        block_copy copy;
        in.expect('[');
        in.id(copy.src);
        in.expect(',');
        in.id(copy.dst);
        in.expect(']');
        to.push_back(copy);
      });
    };
    const auto ids = [&](auto& to) { in.list([&] { in.id(to.emplace_back()); }); };
    in.object([&](std::string_view name) {
      if (name == "step") return in.number(plan.step);
      if (name == "num_tokens") return in.number(plan.num_tokens);
      if (name == "copies") return pairs(plan.copies);
      if (name == "swap_outs") return pairs(plan.swap_outs);
      if (name == "swap_ins") return pairs(plan.swap_ins);
      if (name == "swapped_out") return ids(plan.swapped_out);
      if (name == "swapped_in") return ids(plan.swapped_in);
      if (name == "preempted") return ids(plan.preempted);
      if (name == "aborted") return ids(plan.aborted);
      if (name == "encoded") return ids(plan.encoded);
      if (name == "groups") {
        return in.list([&] {
          group_moves group;
          in.object([&](std::string_view field) {
            if (field == "copies") return pairs(group.copies);
            if (field == "swap_outs") return pairs(group.swap_outs);
            if (field == "swap_ins") return pairs(group.swap_ins);
            in.fail("a name of a group's moves");
          });
          plan.groups.push_back(std::move(group));
        });
      }
      if (name != "seqs") in.fail("a name of a step_plan");
      in.list([&] {
        scheduled_seq row;
        in.object([&](std::string_view field) {
          if (field == "seq") return in.id(row.seq);
          if (field == "query_len") return in.number(row.query_len);
          if (field == "seq_len") return in.number(row.seq_len);
          if (field == "request") return in.id(row.request);
          if (field == "sample") return in.number(row.sample);
          if (field == "num_samples") return in.number(row.num_samples);
          if (field == "num_drafts") return in.number(row.num_drafts);
          if (field == "num_cached_tokens") return in.number(row.num_cached_tokens);
          in.fail("a name of a scheduled_seq");
        });
        plan.seqs.push_back(row);
      });
    });
    in.end();
    return plan;
  });
}

}  // namespace bifolio::inline v0_2
