// SPDX-License-Identifier: Apache-2.0
#include "tools/common/svg.hpp"

#include <fmt/format.h>

#include <array>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

struct series_colours {
  const char* light;
  const char* dark;
};

// Neighbours differ in lightness too, for readers who do not tell the hues apart.
constexpr std::array<series_colours, num_svg_series> colours{{{"#1f5fa8", "#7db8ff"},
                                                              {"#c25a12", "#ffb070"},
                                                              {"#2f7d32", "#8fd694"},
                                                              {"#8a2f7c", "#e59ad8"},
                                                              {"#6b6b00", "#d9d36a"},
                                                              {"#00707a", "#6fd8e0"}}};

std::string rules(bool dark) {
  std::string text = fmt::format(".paper{{fill:{}}}.ink{{fill:{}}}.grid{{stroke:{}}}.axis{{stroke:{};fill:none}}",
                                 dark ? "#161616" : "#ffffff", dark ? "#e8e8e8" : "#202020",
                                 dark ? "#383838" : "#dddddd", dark ? "#a0a0a0" : "#555555");
  for (std::size_t i = 0; i < colours.size(); ++i) {
    const char* colour = dark ? colours[i].dark : colours[i].light;
    text += fmt::format(".series{}{{stroke:{};fill:none;stroke-width:1.8}}.area{}{{fill:{}}}", i, colour, i, colour);
  }
  return text;
}

}  // namespace

std::string begin_svg(int width, int height, const std::string& name) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<title>{2}</title>\n"
      "<style>text{{fill:currentColor}}svg{{color:#202020}}{3}"
      "@media(prefers-color-scheme:dark){{svg{{color:#e8e8e8}}{4}}}</style>\n"
      "<rect class=\"paper\" width=\"{0}\" height=\"{1}\"/>\n",
      width, height, svg_text(name), rules(false), rules(true));
}

}  // namespace tools
