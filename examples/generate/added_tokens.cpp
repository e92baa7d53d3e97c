// SPDX-License-Identifier: Apache-2.0
#include "added_tokens.hpp"

#include <algorithm>

namespace generate {

void added_tokens::add(std::string content, std::int32_t id) {
  std::vector<token>& list = by_first_byte_[static_cast<unsigned char>(content[0])];
  const auto place = std::ranges::find_if(list, [&](const token& t) { return t.content.size() < content.size(); });
  list.insert(place, {std::move(content), id});
}

std::vector<text_part> added_tokens::split(std::string_view text) const {
  std::vector<text_part> parts;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::vector<token>& list = by_first_byte_[static_cast<unsigned char>(text[at])];
    const auto found =
        std::ranges::find_if(list, [&](const token& t) { return text.substr(at).starts_with(t.content); });
    if (found == list.end()) {
      ++at;
      continue;
    }
    if (at > begin) parts.push_back({-1, text.substr(begin, at - begin)});
    parts.push_back({found->id, text.substr(at, found->content.size())});
    begin = at += found->content.size();
  }
  if (begin < text.size()) parts.push_back({-1, text.substr(begin)});
  return parts;
}

}  // namespace generate
