// SPDX-License-Identifier: Apache-2.0
// The log of a pool: the lines as they are, or frames that a writer wrote, which come back. Whatever a reader takes can
// be drawn, and no byte of it drives a terminal or breaks a document.
#include "tools/common/pool_log.hpp"

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tools/common/pool_drawing.hpp"
#include "tools/common/pool_svg.hpp"
#include "tools/common/program.hpp"
#include "tools/xml_flaw.hpp"

namespace {

using namespace bifolio::fuzz;
using tools::pool_frame;

void draw(const pool_frame& frame) {
  if (!nlohmann::json::accept(tools::to_json(frame))) flaw("a frame becomes no JSON");
  if (frame.device.size() + frame.host.size() > 4096) return;
  for (const char c : tools::draw_pool(frame, {.columns = 24})) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') flaw("a control character in a picture");
  }
  const std::string flaw_of_svg = bifolio::test::xml_flaw(tools::draw_pool_svg(frame, 24));
  if (!flaw_of_svg.empty()) flaw("a picture is no document: " + flaw_of_svg);
}

std::string text_from(choices& from) { return std::string(text_of(from.bytes(from.below(24)))); }

void change(choices& from, std::vector<tools::cell>& cells) {
  constexpr std::string_view marks = ".:~+123456789AZaz#";
  for (std::uint8_t num = cells.empty() ? 0 : from.below(16); num > 0; --num) {
    cells[from.byte() % cells.size()] = *tools::cell_of(marks[from.byte() % marks.size()]);
  }
}

void write_and_read(choices& from) {
  pool_frame frame;
  frame.block_size = from.byte();
  frame.device.resize(from.byte());
  frame.host.resize(from.below(64));
  const auto path = scratch_folder() / "pool.jsonl";
  tools::pool_log_writer writer(path);
  tools::pool_log_reader reader("input");
  std::ifstream log(path, std::ios::binary);
  std::string line;
  const auto next = [&] {
    log.clear();
    if (!std::getline(log, line)) flaw("a line is missing");
    return reader.take(line);
  };
  for (bool is_first = true; !from.empty(); is_first = false) {
    frame.step += from.below(4);
    frame.hits = static_cast<std::int64_t>(std::uint64_t{from.word()} << from.below(32));
    frame.copies = -std::int64_t{from.byte()};
    frame.running = text_from(from);
    frame.swapped = text_from(from);
    frame.news.assign(from.below(3), text_from(from));
    change(from, frame.device);
    change(from, frame.host);
    writer.add(frame);
    if (is_first && next()) flaw("the first line is a frame");
    if (!next()) flaw("a frame is none");
    if (tools::to_json(reader.now()) != tools::to_json(frame)) flaw("another frame came back");
    draw(reader.now());
  }
}

}  // namespace

BIFOLIO_FUZZ_TARGET(pool_log) {
  choices from(input);
  if (from.flag()) return write_and_read(from);
  tools::pool_log_reader reader("input");
  std::istringstream text{std::string(text_of(from.rest()))};
  try {
    for (std::string line; std::getline(text, line);) {
      if (reader.take(line)) draw(reader.now());
    }
  } catch (const tools::input_error&) {
  }
}
