// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::test {

/// Why `text` is no well-formed XML document, as far as the tools use XML (elements, attributes, entities; no
/// comments, no CDATA); empty when it is.
inline std::string xml_flaw(const std::string& text) {
  std::vector<std::string> open;
  std::size_t num_roots = 0;
  const auto flaw_in_text = [](std::string_view part) -> std::string {
    for (std::size_t at = part.find('&'); at != std::string_view::npos; at = part.find('&', at + 1)) {
      bool known = false;
      for (const char* entity : {"&amp;", "&lt;", "&gt;", "&quot;"})
        known = known || part.substr(at).starts_with(entity);
      if (!known) return "an & that begins no entity";
    }
    for (const char c : part) {
      if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') return "a control character";
    }
    return {};
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t tag = text.find('<', at);
    const std::string_view between = std::string_view(text).substr(at, tag == text.npos ? text.npos : tag - at);
    if (const std::string flaw = flaw_in_text(between); !flaw.empty()) return flaw;
    if (open.empty() && between.find_first_not_of(" \n\t") != between.npos) return "text outside the root element";
    if (tag == text.npos) break;
    const std::size_t end = text.find('>', tag);
    if (end == text.npos) return "a tag without end";
    std::string_view inside = std::string_view(text).substr(tag + 1, end - tag - 1);
    at = end + 1;
    if (inside.starts_with('?') && inside.ends_with('?')) continue;
    if (inside.starts_with('/')) {
      if (open.empty() || open.back() != inside.substr(1))
        return "</" + std::string(inside.substr(1)) + "> closes nothing";
      open.pop_back();
      continue;
    }
    const bool empty = inside.ends_with('/');
    if (empty) inside.remove_suffix(1);
    const std::size_t name_end = inside.find_first_of(" \n");
    const std::string name(inside.substr(0, name_end));
    if (name.empty() || std::isalpha(static_cast<unsigned char>(name[0])) == 0) return "a tag without name";
    if (open.empty() && ++num_roots > 1) return "two root elements";
    std::vector<std::string> names;
    std::string_view rest = name_end == inside.npos ? std::string_view{} : inside.substr(name_end);
    while (true) {
      const std::size_t begin = rest.find_first_not_of(" \n");
      if (begin == rest.npos) break;
      rest.remove_prefix(begin);
      const std::size_t equals = rest.find("=\"");
      if (equals == rest.npos) return "an attribute without value in <" + name + ">";
      const std::string attribute(rest.substr(0, equals));
      if (attribute.find_first_of(" \"<&") != attribute.npos) return "attribute '" + attribute + "' in <" + name + ">";
      for (const std::string& other : names) {
        if (other == attribute) return "attribute " + attribute + " twice in <" + name + ">";
      }
      names.push_back(attribute);
      rest.remove_prefix(equals + 2);
      const std::size_t close = rest.find('"');
      if (close == rest.npos) return "a value without end in <" + name + ">";
      if (const std::string flaw = flaw_in_text(rest.substr(0, close)); !flaw.empty()) return flaw;
      rest.remove_prefix(close + 1);
    }
    if (!empty) open.push_back(name);
  }
  if (!open.empty()) return "<" + open.back() + "> is not closed";
  return num_roots == 1 ? "" : "no root element";
}

}  // namespace bifolio::test
