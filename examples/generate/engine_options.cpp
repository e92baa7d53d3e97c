// SPDX-License-Identifier: Apache-2.0
#include "engine_options.hpp"

#include <fmt/format.h>

#include <bifolio/cpu.hpp>
#include <bifolio/error.hpp>
#include <limits>

#include "command_line.hpp"

namespace generate {
namespace {

/// "baseline|avx2|…"
std::string isa_names() {
  std::string names;
  for (const bifolio::cpu_isa isa : bifolio::known_isas())
    names.append(names.empty() ? "" : "|").append(to_string(isa));
  return names;
}

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

void check_device(const std::string& name, const std::string& text) {
  if (text == "auto") return;
  try {
    static_cast<void>(bifolio::parse_device(text));
  } catch (const bifolio::error&) {
    throw input_error(fmt::format("{} is '{}', allowed are cpu, cuda, cuda:N and auto", name, text));
  }
}

}  // namespace

void add_engine_options(command_line& line, engine_options& o) {
  constexpr std::int32_t many = std::numeric_limits<std::int32_t>::max();
  line.path("--model", o.model, "the bundled model",
            "A directory with config.json and model.safetensors, a .safetensors file in such a directory (both as "
            "Hugging Face has them), or a llama2.c .bin");
  line.path("--tokenizer", o.tokenizer, "tokenizer.json next to the model, or bytes",
            "A tokenizer.json, or a llama2.c tokenizer file; needed where no tokenizer.json is next to a model whose "
            "vocabulary is not the 256 bytes");
  line.integer("--max-positions", o.max_positions, 1, many, "the model's limit",
               "Stop a sequence after N tokens have been fed, prompt included");
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
  line.word("--k-dtype", o.types.k, "that of --kv-dtype", "as --kv-dtype", "How keys are stored", parse_code);
  line.word("--v-dtype", o.types.v, "that of --kv-dtype", "as --kv-dtype", "How values are stored", parse_code);
  line.word(
      "--kv-dtype", o.types.kv, "f32 on the CPU, bf16 on a GPU",
      "f32|f16|bf16|e4m3|e5m2|i8|e4m3-token|i8-token|u8-token",
      "How keys and values are stored; e4m3, e5m2 and i8 have a scale per layer, with -head one per KV head, from "
      "--scales-file or the first tokens of the first prompt; those with -token one per token and head",
      parse_code);
  line.path("--scales-file", o.scales_file, "none",
            "Static scales of keys and values, as --save-scales writes them, instead of those of the first prompt");
  line.path("--save-scales", o.save_scales_file, "none", "Write the static scales that the cache has to this file");
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
  line.word("--executor", o.executor, "threads", "threads|openmp|tbb|serial",
            "Whose threads: the library's own, or those of OpenMP or oneTBB", bifolio::parse_executor);
  line.word("--isa", o.isa, "the best here", isa_names(), "Instruction set of the attention on the CPU",
            [](const std::string& text) { return std::optional(bifolio::parse_isa(text)); });
  line.flag("--deterministic", o.deterministic,
            "On a GPU: what a sequence says does not depend on who else is in the batch, at some cost in speed; on the "
            "CPU it "
            "never does");
  line.path("--events", o.events, "none", "Write the block pool after every step to this file, for block_map --follow");
}

void check_engine_options(const engine_options& o) {
  if (o.executor == bifolio::executor_kind::serial && o.num_threads > 1) {
    throw input_error(fmt::format("--threads is {}, but --executor serial has one", o.num_threads));
  }
}

}  // namespace generate
