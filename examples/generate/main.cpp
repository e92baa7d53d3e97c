// SPDX-License-Identifier: Apache-2.0
// Text from a language model through bifolio's paged KV cache. tools/common/program.hpp has the exit codes.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bifolio/bifolio.hpp>

#include "binary_file.hpp"
#include "generation.hpp"
#include "input_error.hpp"
#include "loaded_model.hpp"
#include "options.hpp"
#include "paged_attention.hpp"
#include "parallel.hpp"
#include "placement.hpp"
#include "prompts.hpp"
#include "report.hpp"
#include "scoring.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"
#include "writers.hpp"

namespace generate {
namespace {

using bifolio::token_id;

/// Keeps what was said, hands it to a writer and shows how far the work is.
class session final : public generation_observer {
 public:
  session(std::vector<sequence_record> records, std::unique_ptr<sequence_writer> writer, progress_line& progress)
      : records_(std::move(records)), writer_(std::move(writer)), progress_(progress) {}

  void on_token(std::size_t sequence, token_id token) override {
    records_[sequence].output_ids.push_back(token);
    writer_->token(records_, sequence);
  }
  void on_end(std::size_t sequence, ending how) override {
    records_[sequence].ended = true;
    records_[sequence].ended_by = how;
    writer_->end(records_, sequence);
  }
  void on_step(const generation_progress& progress) override { progress_.show(progress); }

 private:
  std::vector<sequence_record> records_;
  std::unique_ptr<sequence_writer> writer_;
  progress_line& progress_;
};

std::int32_t choose_max_positions(const options& o, const model_config& model) {
  if (o.max_positions > model.max_positions) {
    throw input_error(fmt::format("--max-positions is {}, allowed are 1 to {}, the model's limit", o.max_positions,
                                  model.max_positions));
  }
  return o.max_positions > 0 ? o.max_positions : model.max_positions;
}

/// What was asked for, or what the sequences can need at most, within the budget of memory.
std::int64_t choose_num_blocks(const options& o, const bifolio::kv_layout& layout, std::int32_t num_layers,
                               std::int64_t num_sequences, std::int32_t max_positions) {
  if (o.num_blocks > 0) return o.num_blocks;
  const std::int64_t running = std::min<std::int64_t>(num_sequences, std::max(o.max_batch_seqs, o.num_samples));
  const std::int64_t need = running * bifolio::blocks_for(max_positions, o.block_size);
  const std::int64_t spare = need / 50 + 2;  // what the manager's watermark keeps free
  return std::min(need + spare, std::max<std::int64_t>(
                                    1, bifolio::num_blocks_for_memory(o.cache_mebibytes << 20, layout, num_layers)));
}

std::string describe(const model_config& c) {
  return fmt::format("{:.2f} million parameters, {} layers, {} query heads on {} KV heads of {}, vocabulary {}",
                     static_cast<double>(num_parameters(c)) * 1e-6, c.num_layers, c.num_q_heads, c.num_kv_heads,
                     c.head_dim, c.vocab_size);
}

/// The text of --score-file. All of it, unless --max-positions allows its beginning alone.
std::vector<token_id> encode_scored(const options& o, const loaded_model& model, std::int32_t max_positions) {
  binary_file file(o.score_file);
  const std::string text = file.read_text(64 << 20);
  const auto limit = static_cast<std::size_t>(max_positions);
  const auto refuse = [&](std::uint64_t num_ids, const char* at_least) {
    throw input_error(fmt::format(
        "{}: the text of {} bytes has {}{} tokens, the model takes at most {}; --max-positions {} scores its "
        "beginning alone",
        file.name(), text.size(), at_least, num_ids, limit, limit));
  };
  const bool takes_beginning = o.max_positions > 0;
  if (const std::uint64_t least = model.tokens->min_num_ids(text.size()); least > limit && !takes_beginning) {
    refuse(least, "at least ");
  }
  std::vector<token_id> ids = model.tokens->encode(text);
  if (ids.size() > limit && !takes_beginning) refuse(ids.size(), "");
  ids.resize(std::min(ids.size(), limit));
  return ids;
}

/// How keys and values are stored.
struct cache_codes {
  bifolio::kv_code k;
  bifolio::kv_code v;
};

/// From the first tokens of a prompt, or of the text that is scored.
void add_static_scales(bifolio::cache_engine_config& cache, const options& o, model_runner& network,
                       bifolio::backend& where, std::span<const token_id> ids) {
  constexpr std::size_t most_ids = 256;
  static_scales scales = calibrate(network, where, cache.layout.k.code, cache.layout.v.code,
                                   ids.first(std::min(ids.size(), most_ids)), o.max_batch_tokens);
  cache.k_scales = std::move(scales.k);
  cache.v_scales = std::move(scales.v);
}

void score_file(const options& o, const loaded_model& model, model_runner& network, bifolio::backend& where,
                const cache_codes& codes, std::int32_t max_positions) {
  const std::vector<token_id> ids = encode_scored(o, model, max_positions);
  const std::int64_t num_blocks = bifolio::blocks_for(static_cast<std::int64_t>(ids.size()), o.block_size);
  bifolio::cache_engine_config cache =
      cache_config(network.config(), o.layout, codes.k, codes.v, o.block_size, num_blocks);
  add_static_scales(cache, o, network, where, ids);
  bifolio::cache_engine engine(where, cache);
  const score result = score_tokens(network, engine, ids, o.max_batch_tokens, o.deterministic);
  tools::write_stdout(fmt::format("{{\"num_ids\": {}, \"mean_nll\": {:.8f}, \"num_best\": {}}}\n", ids.size(),
                                  result.mean_nll, result.num_best));
}

/// "e4m3", or "K e4m3, V bf16".
std::string names_of(const cache_codes& codes) {
  if (codes.k == codes.v) return std::string(short_name(codes.k));
  return fmt::format("K {}, V {}", short_name(codes.k), short_name(codes.v));
}

void generate_text(const options& o, const loaded_model& model, model_runner& network, bifolio::backend& where,
                   const cache_codes& codes, std::int32_t max_positions) {
  const model_config& c = network.config();
  const std::vector<prompt> prompts = collect_prompts(o, model);
  std::vector<std::vector<token_id>> ids;
  for (const prompt& each : prompts) ids.push_back(each.ids);
  const auto num_sequences = static_cast<std::int64_t>(prompts.size()) * o.num_samples;

  bifolio::cache_engine_config cache = cache_config(c, o.layout, codes.k, codes.v, o.block_size, 1);
  const bifolio::kv_layout& layout = cache.layout;
  const std::int64_t num_blocks = cache.num_blocks =
      choose_num_blocks(o, layout, c.num_layers, num_sequences, max_positions);
  std::span<const token_id> sample = ids.front();
  add_static_scales(cache, o, network, where,
                    sample.first(std::min(sample.size(), static_cast<std::size_t>(max_positions))));
  bifolio::cache_engine engine(where, cache);
  tools::write_stderr(fmt::format("cache: {} blocks of {} tokens in {}, {} {}, on {}\n", num_blocks, o.block_size,
                                  format_bytes(static_cast<std::int64_t>(engine.num_bytes())), names_of(codes),
                                  to_string(o.layout), where.description()));

  std::vector<sequence_record> records;
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    for (std::int32_t s = 0; s < o.num_samples; ++s)
      records.push_back({prompts[p].text, ids[p], {}, ending::steps, false});
  }
  const bool stdout_is_terminal = isatty(STDOUT_FILENO) != 0;
  const bool stderr_is_terminal = isatty(STDERR_FILENO) != 0;
  using style = progress_line::style;
  const style shown = stdout_is_terminal && !o.json               ? style::none  // the text is the progress
                      : stderr_is_terminal && !stdout_is_terminal ? style::live
                                                                  : style::occasional;
  generation_config config;
  config.max_positions = max_positions;
  config.num_samples = o.num_samples;
  config.how = o.how;
  config.seed = o.seed;
  config.max_batch_tokens = o.max_batch_tokens;
  config.max_batch_seqs = o.max_batch_seqs;
  config.prefix_caching = o.prefix_caching;
  config.preemption = o.preemption;
  config.deterministic = o.deterministic;
  std::optional<host_cache> host;
  if (o.num_host_blocks > 0) host.emplace(where, engine.config(), o.num_host_blocks);

  generation_stats stats;
  {
    progress_line progress(shown, num_sequences, num_blocks);
    session observer(
        std::move(records),
        o.json ? make_json_writer(*model.tokens) : make_text_writer(*model.tokens, o.num_samples, stdout_is_terminal),
        progress);
    stats = generate_all(network, engine, config, ids, observer, host ? &host->engine : nullptr);
  }
  if (!o.json || o.stats) {
    tools::write_stderr(format_report({stats, layout, c.num_layers, max_positions}, o.stats));
  }
}

void run(const options& o) {
  const std::filesystem::path path = o.model.empty() ? find_bundled_model() : o.model;
  const loaded_model model = load_model(path, o.tokenizer);
  const model_config& c = model.weights.config;
  const std::int32_t max_positions = choose_max_positions(o, c);

  const auto workers = make_workers(o.num_threads);
  const placed_model placed = place_model(o.device, model.weights, *workers, o.types, o.isa);
  const cache_codes codes{placed.k_code, placed.v_code};
  tools::write_stderr(fmt::format("model: {}: {}\n", tools::printable_line(path.string()), describe(c)));

  if (o.score_file.empty()) {
    generate_text(o, model, *placed.runner, *placed.where, codes, max_positions);
  } else {
    score_file(o, model, *placed.runner, *placed.where, codes, max_positions);
  }
}

}  // namespace
}  // namespace generate

int main(int argc, char** argv) {
  return tools::run_main("generate", "there is not enough memory for this model and cache", [&] {
    if (const auto options = generate::parse_options(argc, argv)) generate::run(*options);
    return 0;
  });
}
