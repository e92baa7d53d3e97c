// SPDX-License-Identifier: Apache-2.0
#include "text_stream.hpp"

#include <algorithm>
#include <utility>

#include "tools/common/utf8.hpp"

namespace generate {
namespace {

/// Bytes at the end of `text` that may be the beginning of a stop string.
std::size_t possible_stop(std::string_view text, const std::vector<std::string>& stops) {
  std::size_t most = 0;
  for (const std::string& stop : stops) {
    for (std::size_t n = std::min(stop.size() - 1, text.size()); n > most; --n) {
      if (text.ends_with(std::string_view(stop).substr(0, n))) most = n;
    }
  }
  return most;
}

}  // namespace

bool text_stream::add(bifolio::token_id id) {
  if (is_stopped_) return true;
  held_ += tokens_->decode(std::exchange(before_, id), id);
  for (const std::string& stop : *stops_) {
    const std::size_t found = held_.find(stop);
    if (found == std::string::npos) continue;
    held_.resize(found);  // an earlier one that another stop string begins is found in what is left
    is_stopped_ = true;
  }
  return is_stopped_;
}

std::string text_stream::take() {
  if (is_stopped_) return take_rest();
  const std::string_view certain(held_.data(), held_.size() - possible_stop(held_, *stops_));
  const std::size_t ready = tools::complete_utf8(certain);
  std::string text = held_.substr(0, ready);
  held_.erase(0, ready);
  return text;
}

std::string text_stream::take_rest() { return std::exchange(held_, {}); }

}  // namespace generate
