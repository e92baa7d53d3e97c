// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "command_line.hpp"
#include "tools/common/escape.hpp"

namespace generate {
namespace {

constexpr const char* examples =
    "Examples:\n"
    "  generate --prompt 'In the beginning' --max-positions 200\n"
    "  generate --prompts-file prompts.txt --samples 4 --map --num-blocks 64\n"
    "  generate --model Llama-3.2-1B --prompt 'The capital of France is' --temperature 0\n";

/// "1,2,3"
std::vector<bifolio::token_id> parse_ids(const std::string& name, const std::string& text) {
  std::vector<bifolio::token_id> ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::int32_t id = 0;
    const auto [stop, problem] = std::from_chars(text.data() + begin, text.data() + end, id);
    if (problem != std::errc() || stop != text.data() + end || id < 0) {
      throw input_error(fmt::format("{} is '{}', allowed are whole numbers from 0 on with commas between them", name,
                                    tools::excerpt(text)));
    }
    ids.push_back(bifolio::token_id{id});
    begin = end + 1;
  }
  return ids;
}

}  // namespace

std::optional<options> parse_options(int argc, const char* const* argv) {
  options o;
  command_line line("generate",
                    "Writes text with a language model of the Llama family, several prompts at once, through bifolio's "
                    "paged KV cache.",
                    examples);
  CLI::Option* prompts = line.texts("--prompt", "TEXT", "A text to continue; may be given several times");
  CLI::Option* prompt_ids = line.texts(
      "--prompt-ids", "ID,ID,...",
      "A prompt as token ids, which the tokenizer does not see and puts nothing before; may be given several times");
  line.path("--prompts-file", o.prompts_file, "none",
            "A file with a prompt in each line that is not empty; in a .jsonl file every line is a JSON string");
  line.path("--shared-prompt", o.shared_prompt, "none",
            "A file with a text that every prompt but those of --prompt-ids begins with; its blocks are computed once");
  line.flag("--chat", o.chat,
            "Each prompt is what a user says to an assistant, in the form of a chat that the tokenizer has marks for");
  CLI::Option* stops =
      line.texts("--stop", "TEXT", "End a text before this one, of 1 byte or more; may be given several times");
  line.number("--temperature", o.how.temperature, 0, 100, true, "Flattens the distribution; 0 takes the best token");
  line.number("--top-p", o.how.top_p, 0, 1, false, "Sample among the best tokens that together have this probability");
  line.integer<std::uint64_t>("--seed", o.seed, 0, std::numeric_limits<std::uint64_t>::max(), "1",
                              "Of the random numbers; every sequence draws its own");
  line.integer("--samples", o.num_samples, 1, 4096, "1",
               "Continuations of each prompt; they share the prompt's blocks and copy on write");
  add_engine_options(line, o);
  line.flag("--json", o.json,
            "Print nothing but one JSON object per sequence, each on a line: prompt, prompt_ids, output_ids, text "
            "(prompt and continuation), ended_by");
  line.flag("--lines", o.lines,
            "Show a line for each sequence, all of them at once, instead of one text after another");
  line.flag("--map", o.map,
            "The same with the block pool above: a letter for the sequence that uses a block, a digit "
            "for how many share it");
  line.flag("--stats", o.stats, "More rows in the table at the end; with --json, print the table too");
  line.path(
      "--score-file", o.score_file, "none",
      "Generate nothing: say how probable the model finds this text, as mean negative log-likelihood of a token. A "
      "text of more tokens than the model takes is refused, unless --max-positions N allows its first N alone");
  if (!line.parse(argc, argv)) return {};
  check_engine_options(o);
  o.prompts = prompts->results();
  o.stops = stops->results();
  if (std::ranges::find(o.stops, "") != o.stops.end()) throw input_error("--stop is empty, a text is expected");
  for (const std::string& text : prompt_ids->results()) o.prompt_ids.push_back(parse_ids("--prompt-ids", text));
  o.lines = o.lines || o.map;
  if (o.json && o.lines) throw input_error("--json goes with neither --lines nor --map: stdout is for one of them");
  return o;
}

}  // namespace generate
