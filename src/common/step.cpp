// SPDX-License-Identifier: Apache-2.0
#include <bifolio/step.hpp>
#include <string_view>
#include <utility>

namespace bifolio {
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

}  // namespace

std::string to_string(const step_plan& plan) {
  json_line line;
  line.text("{\"step\":").number(plan.step).text(",\"seqs\":");
  line.list(plan.seqs, [&](const scheduled_seq& row) {
    line.text("{\"seq\":").number(to_index(row.seq)).text(",\"query_len\":").number(row.query_len);
    line.text(",\"seq_len\":").number(row.seq_len).text(",\"request\":").number(to_index(row.request));
    line.text(",\"sample\":").number(row.sample).text(",\"num_samples\":").number(row.num_samples).text("}");
  });
  line.text(",\"copies\":").list(plan.copies, [&](const block_copy& copy) {
    line.text("[").number(to_index(copy.src)).text(",").number(to_index(copy.dst)).text("]");
  });
  line.text(",\"preempted\":").list(plan.preempted, [&](seq_id seq) { line.number(to_index(seq)); });
  line.text(",\"aborted\":").list(plan.aborted, [&](request_id id) { line.number(to_index(id)); });
  return line.text(",\"num_tokens\":").number(plan.num_tokens).text("}").take();
}

}  // namespace bifolio
