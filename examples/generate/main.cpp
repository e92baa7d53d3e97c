// SPDX-License-Identifier: Apache-2.0
// Text from a language model through bifolio's paged KV cache. tools/common/program.hpp has the exit codes.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <filesystem>
#include <memory>
#include <optional>

#include "binary_file.hpp"
#include "generation.hpp"
#include "input_error.hpp"
#include "lines_writer.hpp"
#include "model_setup.hpp"
#include "options.hpp"
#include "prompts.hpp"
#include "report.hpp"
#include "scoring.hpp"
#include "text_stream.hpp"
#include "tools/common/pool_log.hpp"
#include "tools/common/program.hpp"
#include "writers.hpp"

namespace generate {
namespace {

using bifolio::token_id;

/// Keeps what was said, hands it to a writer and shows how far the work is.
class session final : public generation_observer {
 public:
  /// `log` may be empty.
  session(std::vector<sequence_record> records, const tokenizer& tokens, const std::vector<std::string>& stops,
          std::unique_ptr<sequence_writer> writer, const std::filesystem::path& log, progress_line& progress)
      : records_(std::move(records)), writer_(std::move(writer)), progress_(progress) {
    for (const sequence_record& record : records_) {
      texts_.emplace_back(tokens, record.prompt_ids.empty() ? no_token : record.prompt_ids.back(), stops);
    }
    if (!log.empty()) log_.emplace(log);
  }

  bool on_token(const new_token& token) override {
    sequence_record& record = records_[token.sequence];
    text_stream& text = texts_[token.sequence];
    record.output_ids.push_back(token.id);
    if (!token.is_end && !text.add(token.id)) record.text += text.take();
    writer_->token(records_, token.sequence);
    return text.is_stopped();
  }
  void on_end(std::size_t sequence, ending how) override {
    sequence_record& record = records_[sequence];
    record.text += texts_[sequence].take_rest();
    record.ended = true;
    record.ended_by = texts_[sequence].is_stopped() ? ending::stopped : how;
    writer_->end(records_, sequence);
  }
  void on_step(const generation_progress& progress) override { progress_.show(progress); }
  void on_frame(const tools::pool_frame& frame, const std::string& letters) override {
    if (log_) log_->add(frame);
    writer_->frame(records_, frame, letters);
  }

 private:
  std::vector<sequence_record> records_;
  std::vector<text_stream> texts_;
  std::unique_ptr<sequence_writer> writer_;
  progress_line& progress_;
  std::optional<tools::pool_log_writer> log_;
};

/// The text of --score-file. All of it, unless --max-positions allows its beginning alone.
std::vector<token_id> encode_scored(const options& o, const model_setup& on) {
  binary_file file(o.score_file);
  const std::string text = file.read_text(64 << 20);
  const auto limit = static_cast<std::size_t>(on.max_positions);
  const auto refuse = [&](std::uint64_t num_ids, const char* at_least) {
    throw input_error(fmt::format(
        "{}: the text of {} bytes has {}{} tokens, the model takes at most {}; --max-positions {} scores its "
        "beginning alone",
        file.name(), text.size(), at_least, num_ids, limit, limit));
  };
  const bool takes_beginning = o.max_positions > 0;
  if (const std::uint64_t least = on.model.tokens->min_num_ids(text.size()); least > limit && !takes_beginning) {
    refuse(least, "at least ");
  }
  std::vector<token_id> ids = on.model.tokens->encode(text);
  if (ids.size() > limit && !takes_beginning) refuse(ids.size(), "");
  ids.resize(std::min(ids.size(), limit));
  return ids;
}

void score_file(const options& o, model_setup& on) {
  const std::vector<token_id> ids = encode_scored(o, on);
  cache_shape shape = shape_of(o, on);
  shape.num_blocks = bifolio::blocks_for(static_cast<std::int64_t>(ids.size()), o.block_size);
  shape.num_host_blocks = 0;
  add_static_scales(shape, o, on, ids);
  const score result =
      score_tokens(*on.placed.runner, *on.placed.where, shape, ids, o.max_batch_tokens, o.deterministic);
  tools::write_stdout(fmt::format("{{\"num_ids\": {}, \"mean_nll\": {:.8f}, \"num_best\": {}}}\n", ids.size(),
                                  result.mean_nll, result.num_best));
}

std::unique_ptr<sequence_writer> choose_writer(const options& o, const tokenizer& tokens, bool stdout_is_terminal) {
  if (o.json) return make_json_writer(tokens);
  if (o.lines) return make_lines_writer({.map = o.map, .live = stdout_is_terminal});
  return make_text_writer(tokens, o.num_samples, stdout_is_terminal);
}

void generate_text(const options& o, model_setup& on) {
  const std::vector<prompt> prompts = collect_prompts(o, on.model);
  std::vector<std::vector<token_id>> ids;
  for (const prompt& each : prompts) ids.push_back(each.ids);
  const auto num_sequences = static_cast<std::int64_t>(prompts.size()) * o.num_samples;
  cache_setup cache(o, on, std::min<std::int64_t>(num_sequences, std::max(o.max_batch_seqs, o.num_samples)),
                    ids.front());

  std::vector<sequence_record> records;
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    for (std::int32_t s = 0; s < o.num_samples; ++s)
      records.push_back({prompts[p].text, ids[p], {}, {}, ending::steps, false});
  }
  const bool stdout_is_terminal = isatty(STDOUT_FILENO) != 0;
  const bool stderr_is_terminal = isatty(STDERR_FILENO) != 0;
  using style = progress_line::style;
  const style shown = stdout_is_terminal && !o.json               ? style::none  // the text is the progress
                      : stderr_is_terminal && !stdout_is_terminal ? style::live
                                                                  : style::occasional;
  generation_config config;
  static_cast<engine_config&>(config) = engine_config_of(o, on.max_positions);
  config.watched = config.watched || o.lines;
  for (const prompt& each : prompts) config.max_new_tokens.push_back(each.max_new_tokens);
  config.num_samples = o.num_samples;
  config.how = o.how;
  config.seed = o.seed;

  generation_stats stats;
  {
    progress_line progress(shown, num_sequences, cache.shape.num_blocks);
    const tokenizer& tokens = *on.model.tokens;
    session observer(std::move(records), tokens, o.stops, choose_writer(o, tokens, stdout_is_terminal), o.events,
                     progress);
    stats = generate_all(*on.placed.runner, *on.placed.where, cache.shape, config, ids, observer);
  }
  if (!o.json || o.stats) {
    tools::write_stderr(format_report({stats, on.max_positions}, o.stats));
  }
}

void run(const options& o) {
  model_setup on(o);
  if (o.score_file.empty()) {
    generate_text(o, on);
  } else {
    score_file(o, on);
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
