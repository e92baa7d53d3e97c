// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <charconv>
#include <cmath>
#include <limits>

#include "input_error.hpp"
#include "tools/common/escape.hpp"

namespace generate {
namespace {

template <class Integer>
Integer parse_integer(const std::string& name, const std::string& text, Integer least, Integer most) {
  Integer value{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw input_error(fmt::format("{} is '{}', allowed are whole numbers from {} to {}", name, text, least, most));
  }
  return value;
}

float parse_number(const std::string& name, const std::string& text, float above, float most, bool above_itself) {
  float value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value > most ||
      value < above || (value == above && !above_itself)) {
    throw input_error(fmt::format("{} is '{}', allowed are numbers {} {} up to {}", name, text,
                                  above_itself ? "from" : "above", above, most));
  }
  return value;
}

/// A description with its default, in lines that fit next to the names of the options.
std::string wrapped(const std::string& about, const std::string& otherwise = {}) {
  const std::string text = otherwise.empty() ? about : fmt::format("{} (default: {})", about, otherwise);
  std::string lines;
  std::size_t width = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (width > 0) {
      const bool fits = width + 1 + word.size() <= 76;
      lines += fits ? ' ' : '\n';
      width = fits ? width + 1 : 0;
    }
    lines += word;
    width += word.size();
    begin = end + 1;
  }
  return lines;
}

/// "baseline|avx2|…"
std::string isa_names() {
  std::string names;
  for (const bifolio::cpu_isa isa : bifolio::known_isas())
    names.append(names.empty() ? "" : "|").append(to_string(isa));
  return names;
}

/// Hangs plain functions of a string on CLI11's options, so that every refusal is a sentence of ours.
class command_line {
 public:
  command_line()
      : app_(
            "Writes text with a language model of the Llama family, several prompts at once, through bifolio's paged "
            "KV cache.",
            "generate") {
    app_.set_help_flag("-h,--help", "Show this and leave");
    app_.footer(tools::exit_codes);
    app_.get_formatter()->column_width(34);
  }

  template <class Take>
  CLI::Option* value(const std::string& name, const char* type, const std::string& otherwise, const std::string& about,
                     Take take) {
    return app_
        .add_option_function<std::string>(
            name, [name, take](const std::string& text) { take(name, text); }, wrapped(about, otherwise))
        ->type_name(type);
  }
  template <class Integer>
  void integer(const std::string& name, Integer& target, Integer least, Integer most, const std::string& otherwise,
               const std::string& about) {
    value(name, "N", otherwise, about, [&target, least, most](const std::string& option, const std::string& text) {
      target = parse_integer(option, text, least, most);
    });
  }
  void number(const std::string& name, float& target, float above, float most, bool above_itself,
              const std::string& about) {
    value(name, "X", fmt::format("{}", target), about,
          [&target, above, most, above_itself](const std::string& option, const std::string& text) {
            target = parse_number(option, text, above, most, above_itself);
          });
  }
  void path(const std::string& name, std::filesystem::path& target, const std::string& otherwise,
            const std::string& about) {
    value(name, "PATH", otherwise, about, [&target](const std::string& option, const std::string& text) {
      if (text.empty()) throw input_error(fmt::format("{} is empty, a path is expected", option));
      target = text;
    });
  }
  /// Words that bifolio itself reads; `allowed` is what the sentence about another word lists.
  template <class Target, class Parse>
  void word(const std::string& name, Target& target, const std::string& otherwise, const std::string& allowed,
            const std::string& about, Parse parse) {
    value(name, allowed.c_str(), otherwise, about,
          [&target, allowed, parse](const std::string& option, const std::string& text) {
            try {
              target = parse(text);
            } catch (const bifolio::error&) {
              throw input_error(fmt::format("{} is '{}', allowed are {}", option, text, allowed));
            }
          });
  }

  CLI::App& app() noexcept { return app_; }

 private:
  CLI::App app_;
};

bool parse_switch(const std::string& text) {
  if (text != "on" && text != "off") throw bifolio::error(bifolio::errc::invalid_argument, text);
  return text == "on";
}

bifolio::preemption_mode parse_preemption(const std::string& text) {
  using bifolio::preemption_mode;
  if (text == "recompute") return preemption_mode::recompute;
  if (text == "swap") return preemption_mode::swap;
  if (text == "automatic") return preemption_mode::automatic;
  throw bifolio::error(bifolio::errc::invalid_argument, text);
}

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

void check_device(const std::string& name, const std::string& text) {
  if (text == "auto") return;
  try {
    static_cast<void>(bifolio::parse_device(text));
  } catch (const bifolio::error&) {
    throw input_error(fmt::format("{} is '{}', allowed are cpu, cuda, cuda:N and auto", name, text));
  }
}

}  // namespace

std::optional<options> parse_options(int argc, const char* const* argv) {
  constexpr std::int32_t many = std::numeric_limits<std::int32_t>::max();
  options o;
  command_line line;
  CLI::App& app = line.app();

  line.path("--model", o.model, "the bundled model",
            "A directory with config.json and model.safetensors, a .safetensors file in such a directory (both as "
            "Hugging Face has them), or a llama2.c .bin");
  line.path("--tokenizer", o.tokenizer, "tokenizer.json next to the model, or bytes",
            "A tokenizer.json, or a llama2.c tokenizer file; needed where no tokenizer.json is next to a model whose "
            "vocabulary is not the 256 bytes");
  CLI::Option* prompts = app.add_option("--prompt", "A text to continue; may be given several times")
                             ->type_name("TEXT")
                             ->expected(1)
                             ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                             ->allow_extra_args(false);
  const std::string about_ids = wrapped(
      "A prompt as token ids, which the tokenizer does not see and puts nothing before; may be given several times");
  CLI::Option* prompt_ids = app.add_option("--prompt-ids", about_ids)
                                ->type_name("ID,ID,...")
                                ->expected(1)
                                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                                ->allow_extra_args(false);
  line.path("--prompts-file", o.prompts_file, "none",
            "A file with a prompt in each line that is not empty; in a .jsonl file every line is a JSON string");
  line.integer("--max-positions", o.max_positions, 1, many, "the model's limit",
               "Stop a sequence after N tokens have been fed, prompt included");
  line.number("--temperature", o.how.temperature, 0, 100, true, "Flattens the distribution; 0 takes the best token");
  line.number("--top-p", o.how.top_p, 0, 1, false, "Sample among the best tokens that together have this probability");
  line.integer<std::uint64_t>("--seed", o.seed, 0, std::numeric_limits<std::uint64_t>::max(), "1",
                              "Of the random numbers; every sequence draws its own");
  line.integer("--samples", o.num_samples, 1, 4096, "1",
               "Continuations of each prompt; they share the prompt's blocks and copy on write");
  line.value("--device", "cpu|cuda[:N]|auto", "auto",
             "Where the model and its cache live; auto is the first GPU, or the CPU where there is none",
             [&o](const std::string& name, const std::string& text) {
               check_device(name, text);
               o.device = text;
             });
  const auto parse_type = [](const std::string& text) {
    const bifolio::dtype type = bifolio::parse_dtype(text);
    if (bifolio::is_tensor_dtype(type)) return std::optional(type);
    throw bifolio::error(bifolio::errc::invalid_argument,
                         fmt::format("dtype '{}' is not one of {}", text, bifolio::tensor_dtype_names));
  };
  const auto parse_code = [](const std::string& text) { return std::optional(bifolio::parse_kv_code(text)); };
  line.word("--kv-dtype", o.types.kv, "f32 on the CPU, bf16 on a GPU",
            "f32|f16|bf16|e4m3|e5m2|i8|e4m3-token|i8-token|u8-token",
            "How keys and values are stored; e4m3, e5m2 and i8 have a scale per layer, or with -head per KV head, from "
            "the first tokens of the prompts; -token ones one per token and head",
            parse_code);
  line.word("--k-dtype", o.types.k, "--kv-dtype", "as --kv-dtype", "How keys are stored", parse_code);
  line.word("--v-dtype", o.types.v, "--kv-dtype", "as --kv-dtype", "How values are stored", parse_code);
  line.word("--q-dtype", o.types.query, "f32 on the CPU, --kv-dtype on a GPU", "f32|f16|bf16",
            "What queries and attention's results are rounded to; a GPU's fast kernels take those of the cache's type",
            parse_type);
  line.word("--layout", o.layout, "hnd", "hnd|nhd|x_split", "Order of the elements inside a block",
            bifolio::parse_layout);
  line.integer("--block-size", o.block_size, 1, 1 << 16, "16", "Tokens of a block");
  line.integer<std::int64_t>(
      "--num-blocks", o.num_blocks, 1, 2'000'000'000, "what all prompts can need",
      "Blocks of the pool; with few, sequences wait and are preempted, and the text is the same");
  line.integer<std::int64_t>("--cache-mib", o.cache_mebibytes, 1, 1 << 24, "1024",
                             "Most memory for the cache when --num-blocks is not given");
  line.integer("--max-batch-tokens", o.max_batch_tokens, 1, 1 << 20, "256",
               "Tokens of one step; longer prompts are fed in chunks");
  line.integer("--max-batch-seqs", o.max_batch_seqs, 1, 1 << 16, "64",
               "Sequences of one step; never fewer than --samples");
  line.word("--prefix-cache", o.prefix_caching, "on", "on|off",
            "Prompts share the blocks of what earlier ones began with; the text is the same", parse_switch);
  line.integer<std::int64_t>("--host-blocks", o.num_host_blocks, 0, 2'000'000'000, "0",
                             "Blocks of host memory that preempted sequences are swapped out to");
  line.word("--preemption", o.preemption, "automatic", "recompute|swap|automatic",
            "Whether a preempted sequence is computed again, swapped out, or whichever costs less", parse_preemption);
  line.integer("--threads", o.num_threads, 1, 4096, "all", "CPU threads");
  line.word("--isa", o.isa, "the best here", isa_names(), "Instruction set of the attention on the CPU",
            [](const std::string& text) { return std::optional(bifolio::parse_isa(text)); });
  app.add_flag(
      "--deterministic", o.deterministic,
      wrapped("On a GPU: what a sequence says does not depend on who else is in the batch, at some cost in speed; on "
              "the CPU it never does"));
  app.add_flag(
      "--json", o.json,
      wrapped("Print nothing but one JSON object per sequence, each on a line: prompt, prompt_ids, output_ids, "
              "text (prompt and continuation), ended_by"));
  app.add_flag("--stats", o.stats, wrapped("More rows in the table at the end; with --json, print the table too"));
  line.path(
      "--score-file", o.score_file, "none",
      "Generate nothing: say how probable the model finds this text, as mean negative log-likelihood of a token. A "
      "text of more tokens than the model takes is refused, unless --max-positions N allows its first N alone");

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    tools::write_stdout(app.help());
    return {};
  } catch (const CLI::ParseError& problem) {
    throw input_error(fmt::format("{} (--help lists the options)", problem.what()));
  }
  o.prompts = prompts->results();
  for (const std::string& text : prompt_ids->results()) o.prompt_ids.push_back(parse_ids("--prompt-ids", text));
  return o;
}

}  // namespace generate
