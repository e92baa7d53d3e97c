// SPDX-License-Identifier: Apache-2.0
// What the map shows of served traffic, and that it is what scheduler and manager say.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "serving.hpp"
#include "source.hpp"
#include "support/program_run.hpp"
#include "tools/common/pool_drawing.hpp"
#include "tools/common/pool_svg.hpp"
#include "xml_flaw.hpp"

namespace {

using namespace bifolio::test;
using namespace block_map;
using namespace tools;

serving_options busy_options(std::uint64_t seed) {
  serving_options options;
  options.num_blocks = 96;
  options.num_host_blocks = 48;
  options.traffic.load = 0.8;
  options.traffic.seed = seed;
  return options;
}

}  // namespace

TEST_CASE("every block has one state, and all that the map can show is seen") {
  for (const bool swap : {true, false}) {
    for (const std::int32_t depth : {1, 2, 4}) {
      CAPTURE(swap);
      CAPTURE(depth);
      serving_options options = busy_options(7);
      options.swap = swap;
      options.steps_in_flight = depth;
      serving served(options);
      std::array<std::int64_t, num_cell_states> seen{};
      std::int64_t on_host = 0;
      for (int i = 0; i < 600; ++i) {
        served.step();
        REQUIRE(served.check() == "");
        const tools::pool_frame now = served.snapshot();
        REQUIRE(now.device.size() == 96);
        REQUIRE(now.host.size() == 48);
        for (const cell& one : now.device) {
          ++seen[static_cast<std::size_t>(one.state)];
          const bool is_letter = std::isalpha(static_cast<unsigned char>(one.mark)) != 0 || one.mark == '#';
          const bool is_number = std::isdigit(static_cast<unsigned char>(one.mark)) != 0 || one.mark == '+';
          switch (one.state) {
            case cell_state::free:
              REQUIRE(one.mark == '.');
              break;
            case cell_state::cached:
              REQUIRE(one.mark == ':');
              break;
            case cell_state::fenced:
              REQUIRE(one.mark == '~');
              break;
            case cell_state::used:
              REQUIRE(is_letter);
              break;
            case cell_state::shared:
              REQUIRE(is_number);
              break;
          }
        }
        for (const cell& one : now.host) on_host += one.state != cell_state::free ? 1 : 0;
      }
      const tools::pool_frame last = served.snapshot();
      for (int state = 0; state < num_cell_states; ++state) {
        CAPTURE(name_of(static_cast<cell_state>(state)));
        if (static_cast<cell_state>(state) == cell_state::fenced && depth == 1) continue;
        CHECK(seen[static_cast<std::size_t>(state)] > 0);
      }
      CHECK(last.hits > 0);
      CHECK(last.evictions > 0);
      CHECK(last.copies > 0);
      CHECK(last.preemptions > 0);
      CHECK((last.swapped_out_blocks > 0) == swap);
      CHECK((last.swapped_in_blocks > 0) == swap);
      CHECK((on_host > 0) == swap);
    }
  }
}

TEST_CASE("equal seeds give equal pictures, other seeds others") {
  serving one(busy_options(1)), same(busy_options(1)), other(busy_options(2));
  bool differs = false;
  for (int i = 0; i < 200; ++i) {
    one.step();
    same.step();
    other.step();
    const std::string picture = draw_pool(one.snapshot(), {});
    REQUIRE(picture == draw_pool(same.snapshot(), {}));
    differs = differs || picture != draw_pool(other.snapshot(), {});
  }
  CHECK(differs);
}

TEST_CASE("the plain picture has a character a block and no escapes, the coloured one the same characters") {
  serving served(busy_options(3));
  for (int i = 0; i < 100; ++i) served.step();
  const tools::pool_frame now = served.snapshot();
  const std::string plain = draw_pool(now, {.columns = 32});
  CHECK(plain.find('\x1b') == plain.npos);
  for (std::size_t row = 0; row < 3; ++row) {
    std::string marks;
    for (std::size_t i = 32 * row; i < 32 * (row + 1); ++i) marks += now.device[i].mark;
    CAPTURE(marks);
    CHECK(plain.find(' ' + marks + '\n') != plain.npos);
  }
  std::string coloured = draw_pool(now, {.columns = 32, .colours = true});
  CHECK(coloured.find("\x1b[48;5;") != coloured.npos);
  for (std::size_t at = coloured.find('\x1b'); at != coloured.npos; at = coloured.find('\x1b')) {
    coloured.erase(at, coloured.find_first_of("mK", at) - at + 1);
  }
  CHECK(coloured == plain);
}

TEST_CASE("each layer group has a picture of its pool below the first one's") {
  pool_frame small;
  small.step = 7;
  small.block_size = 16;
  small.device = {{cell_state::used, 'A'}, {cell_state::shared, '2'}, {}, {cell_state::cached, ':'}};
  group_frame slides{.kind = "window", .block_size = 4, .device = {{cell_state::used, 'A'}, {}, {}}};
  slides.host = {{cell_state::used, 'B'}, {}};
  slides.hits = 3;
  small.others = {slides, {.kind = "state", .block_size = 1, .device = {{cell_state::fenced, '~'}}, .evictions = 2}};
  const std::string text = draw_pool(small, {2, false});
  const std::string pools = text.substr(text.find("device"), text.find("       . free") - text.find("device"));
  CHECK(pools ==
        "device, 4 blocks of 16 tokens\n     0 A2\n     2 .:\n"
        "group 1 (window), 3 blocks of 4 tokens, 3 hits, 0 evictions\n     0 A.\n     2 .\n"
        "group 1 on the host, 2 blocks\n     0 B.\n"
        "group 2 (state), 1 blocks of 1 tokens, 0 hits, 2 evictions\n     0 ~\n\n");

  serving_options options = busy_options(7);
  options.window = 40;
  options.num_states = 60;
  serving served(options);
  std::array<std::array<std::int64_t, num_cell_states>, 2> seen{};
  for (int i = 0; i < 400; ++i) {
    served.step();
    REQUIRE(served.check() == "");
    const pool_frame now = served.snapshot();
    REQUIRE(now.others.size() == 2);
    REQUIRE(now.others[0].device.size() == 96);
    REQUIRE(now.others[1].device.size() == 60);
    for (std::size_t g = 0; g < 2; ++g) {
      for (const cell& one : now.others[g].device) ++seen[g][static_cast<std::size_t>(one.state)];
    }
  }
  for (const auto& group : seen) {
    for (const std::int64_t count : group) CHECK(count > 0);
  }
  CHECK(served.snapshot().others[0].hits > 0);
  CHECK(served.snapshot().others[1].hits > 0);
}

TEST_CASE("both kinds of SVG are well-formed and show every block") {
  serving served(busy_options(4));
  std::vector<tools::pool_frame> frames;
  for (int i = 0; i < 60; ++i) {
    served.step();
    frames.push_back(served.snapshot());
  }
  const auto count = [](const std::string& text, const std::string& part) {
    std::int64_t result = 0;
    for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++result;
    return result;
  };
  const std::string still = draw_pool_svg(frames.back(), 24);
  CHECK(xml_flaw(still) == "");
  CHECK(count(still, "<rect") == 1 + 96 + 48 + num_cell_states);
  const std::string moving = draw_animated_pool_svg(frames, 24, 10);
  CHECK(xml_flaw(moving) == "");
  CHECK(count(moving, "<rect") == 1 + 96 + 48 + num_cell_states);
  CHECK(count(moving, "@keyframes") > 60);  // a headline for each frame, and cells
  CHECK(count(moving, "{fill:var(--s") > 10);
  for (const char* part : {">A</text>", "prefix hits", "prefers-color-scheme:dark", "prefers-reduced-motion"}) {
    CAPTURE(part);
    CHECK(moving.find(part) != moving.npos);  // letters and counters stay
  }
  CHECK(xml_flaw(draw_animated_pool_svg(std::span(frames).first(1), 24, 10)) == "");
}

TEST_CASE("a log holds every frame, and what is no log is refused with its line") {
  const std::filesystem::path scratch = std::filesystem::path(BIFOLIO_TEST_SCRATCH_DIR) / "block_map_log";
  std::filesystem::create_directories(scratch);
  const std::string log = (scratch / "run.jsonl").string();
  std::vector<pool_frame> frames;
  {
    serving served(busy_options(3));
    pool_log_writer writer(log);
    for (int i = 0; i < 200; ++i) {
      served.step();
      frames.push_back(served.snapshot());
      writer.add(frames.back());
    }
  }
  log_source followed(log);
  for (const pool_frame& frame : frames) {
    REQUIRE(followed.next() == frame_source::answer::frame);
    REQUIRE(to_json(followed.now()) == to_json(frame));
    REQUIRE(followed.now().device == frame.device);
  }
  CHECK(followed.next() == frame_source::answer::later);
  // A line that comes in parts is a frame when it is complete.
  const std::string text = read_file(log);
  const std::size_t cut = text.size() - 30;
  write_file(log, text.substr(0, cut));
  log_source growing(log);
  for (int i = 0; i < 199; ++i) REQUIRE(growing.next() == frame_source::answer::frame);
  REQUIRE(growing.next() == frame_source::answer::later);
  std::ofstream(log, std::ios::app | std::ios::binary) << text.substr(cut);
  CHECK(growing.next() == frame_source::answer::frame);
  CHECK(to_json(growing.now()) == to_json(frames.back()));

  const run_result drawn = run_program(BIFOLIO_BLOCK_MAP_PROGRAM, {"--follow", log}, scratch);
  CHECK(drawn.code == 0);
  CHECK(drawn.out == draw_pool(frames.back(), {}));
  const std::string svg = (scratch / "run.svg").string();
  CHECK(run_program(BIFOLIO_BLOCK_MAP_PROGRAM, {"--follow", log, "--svg", svg, "--animated"}, scratch).code == 0);
  CHECK(xml_flaw(read_file(svg)) == "");

  const std::string first = text.substr(0, text.find('\n') + 1);
  for (const std::string& wrong :
       {std::string(), std::string("\n"), std::string("{}\n"), first, first + "{}\n", first + "[1]\n",
        std::string("{\"bifolio_pool_log\":2,\"block_size\":16,\"device\":1,\"host\":0}\n"),
        std::string("{\"bifolio_pool_log\":1,\"block_size\":16,\"device\":99999999999,\"host\":0}\n"),
        std::string("{\"bifolio_pool_log\":1,\"block_size\":16,\"device\":1e300,\"host\":0}\n"),
        std::string("{\"bifolio_pool_log\":1,\"block_size\":1e999,\"device\":1,\"host\":0}\n")}) {
    CAPTURE(wrong);
    write_file(log, wrong);
    const run_result result = run_program(BIFOLIO_BLOCK_MAP_PROGRAM, {"--follow", log}, scratch);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    CHECK(!result.err.empty());
  }
  // A frame with a block that is not there, or in no state that a block can have.
  const std::size_t device = text.rfind("\"device\":[[");
  const std::size_t line = text.rfind('\n', text.size() - 2) + 1;
  for (const char* cells : {"[[95,\"AA\"]]", "[[96,\"A\"]]", "[[-1,\"A\"]]", "[[0.5,\"A\"]]", "[[1e300,\"A\"]]",
                            "[[18446744073709551615,\"A\"]]", "[[0,\"?\"]]", "[[0,1]]", "7"}) {
    CAPTURE(cells);
    const std::string rest = text.substr(text.find("]],\"host\"", device) + 2);
    write_file(log, first + text.substr(line, device - line) + "\"device\":" + cells + rest);
    CHECK(run_program(BIFOLIO_BLOCK_MAP_PROGRAM, {"--follow", log}, scratch).code == 2);
  }
}

TEST_CASE("no log drives the terminal that shows it") {
  pool_frame frame{.block_size = 16, .device = std::vector<cell>(4), .running = "A", .news = {"\x1b[2Jgone\r\n"}};
  CHECK(draw_pool(frame, {}).find("\\x1b[2Jgone\\x0d\\x0a\n") != std::string::npos);
  CHECK(xml_flaw(draw_pool_svg(frame, 4)) == "");
}

TEST_CASE("the program prints one frame without a terminal, several on request, and refuses what it cannot do") {
  const std::filesystem::path scratch = std::filesystem::path(BIFOLIO_TEST_SCRATCH_DIR) / "block_map";
  const auto run = [&](const std::vector<std::string>& arguments) {
    return run_program(BIFOLIO_BLOCK_MAP_PROGRAM, arguments, scratch);
  };
  const run_result once = run({"--once", "--steps", "50", "--check"});
  CHECK(once.code == 0);
  CHECK(once.err.empty());
  CHECK(once.out.rfind("step 50:", 0) == 0);
  CHECK(once.out.find('\x1b') == once.out.npos);
  CHECK(run({"--steps", "50"}).out == once.out);
  const std::string several = run({"--steps", "50", "--every", "20"}).out;
  CHECK(several.rfind("step 20:", 0) == 0);
  CHECK(several.find("\nstep 40:") != several.npos);
  CHECK(several.ends_with(once.out));
  const std::string later = run({"--steps", "50", "--every", "20", "--from", "30"}).out;
  CHECK(later.rfind("step 40:", 0) == 0);

  const std::string svg = (scratch / "map.svg").string();
  for (const auto& more : {std::vector<std::string>{}, {"--animated"}}) {
    std::filesystem::remove(svg);
    std::vector<std::string> arguments{"--steps", "40", "--svg", svg};
    arguments.insert(arguments.end(), more.begin(), more.end());
    CHECK(run(arguments).code == 0);
    CHECK(xml_flaw(read_file(svg)) == "");
  }
  const run_result help = run({"--help"});
  CHECK(help.code == 0);
  for (const char* option : {"--blocks", "--host-blocks", "--block-size", "--max-running", "--max-tokens-per-step",
                             "--steps-in-flight", "--no-swap", "--load", "--seed", "--steps", "--from", "--every",
                             "--speed", "--columns", "--once", "--svg", "--animated", "--check", "--follow"}) {
    CAPTURE(option);
    CHECK(help.out.find(option) != help.out.npos);
  }
  for (const auto& wrong : {std::vector<std::string>{"--blocks", "2"},
                            {"--blocks", "many"},
                            {"--load", "-1"},
                            {"--load", "nan"},
                            {"--animated"},
                            {"--no-such-option"},
                            {"--steps-in-flight", "17"},
                            {"--svg", "/no/such/folder/map.svg", "--steps", "3"}}) {
    const run_result result = run(wrong);
    CAPTURE(wrong[0]);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    CHECK(!result.err.empty());
  }
}

TEST_CASE("what cannot be written to stdout ends with 1 and one sentence, and what is refused is shown escaped") {
  const std::filesystem::path scratch = std::filesystem::path(BIFOLIO_TEST_SCRATCH_DIR) / "block_map_output";
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"--steps", "5"}, {"--steps", "5", "--every", "1"}}) {
    CAPTURE(arguments[0]);
    const run_result result = run_program_on_full_disk(BIFOLIO_BLOCK_MAP_PROGRAM, arguments, scratch);
    CHECK(result.code == 1);
    CHECK(result.err == "block_map: stdout cannot be written: No space left on device\n");
  }
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--blocks", "\x1b[2J"}, {"--\x1b[2J"}, {"--svg", "/nonexistent/\x1b[2J"}}) {
    const run_result result = run_program(BIFOLIO_BLOCK_MAP_PROGRAM, arguments, scratch);
    CAPTURE(result.err);
    CHECK(result.code == 2);
    CHECK(result.err.find('\x1b') == result.err.npos);
    CHECK(result.err.find("\\x1b[2J") != result.err.npos);
  }
}
