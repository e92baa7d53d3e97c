// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Text that this program did not write (names of files and tensors, fields of a trace, what a model says), made safe
/// for the place where it is shown. A control character or a byte that is not UTF-8 becomes \xNN everywhere here, so
/// that no file can drive the terminal it is shown on.

#include <string>
#include <string_view>

namespace tools {

/// Lines stay lines: line feed and tab are kept. For text.
[[nodiscard]] std::string printable_text(std::string_view text);
/// On one line: line feed and tab are escaped as well. For names and sentences.
[[nodiscard]] std::string printable_line(std::string_view text);
/// The beginning of `text` on one line, about 60 bytes of it, followed by "..." when there is more.
[[nodiscard]] std::string excerpt(std::string_view text);

/// A cell of a Markdown table.
[[nodiscard]] std::string md_cell(std::string_view text);
/// A cell of CSV (RFC 4180): quoted when it holds a comma, a quote or a line feed.
[[nodiscard]] std::string csv_cell(std::string_view text);
/// Content or attribute of an SVG document.
[[nodiscard]] std::string svg_text(std::string_view text);
/// `json`, which a serializer wrote, with the control characters that JSON allows in a string (DEL and U+0080 … U+009F)
/// as \u00NN. It denotes the same values.
[[nodiscard]] std::string printable_json(std::string_view json);

}  // namespace tools
