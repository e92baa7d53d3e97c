// SPDX-License-Identifier: Apache-2.0
// The small files of the programs, by the first byte: static scales, prompts as lines or as JSON lines, the layer
// groups of a model, a report to compare with.
#include <bifolio/kv_layout.hpp>
#include <memory>
#include <string>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "model.hpp"
#include "prompts.hpp"
#include "scales_file.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"
#include "tools/common/report_compare.hpp"

namespace {

using namespace bifolio::fuzz;

void read_scales(choices& from) {
  constexpr const char* codes[] = {"e4m3", "e5m2-head", "i8-head", "i8-token"};
  const bifolio::kv_code k = bifolio::parse_kv_code(codes[from.below(4)]);
  const bifolio::kv_code v = bifolio::parse_kv_code(codes[from.below(4)]);
  bifolio::kv_layout layout{.num_kv_heads = 1 + from.below(3), .block_size = 16, .k = {.code = k, .head_dim = 8}};
  layout.v = {.code = v, .head_dim = 8};
  const std::int32_t num_layers = 1 + from.below(4);
  const auto path = write_scratch("scales.json", from.rest());
  const generate::static_scales scales = generate::read_scales(path, layout, num_layers);
  const auto wanted = [&](const bifolio::kv_code& code) {
    const bool by_head = code.granularity == bifolio::scale_granularity::head;
    return code.has_static_scales() ? static_cast<std::size_t>(num_layers * (by_head ? layout.num_kv_heads : 1)) : 0;
  };
  if (scales.k.size() != wanted(k) || scales.v.size() != wanted(v)) flaw("another number of scales");
  generate::write_scales(path, layout, scales);
  const generate::static_scales again = generate::read_scales(path, layout, num_layers);
  if (again.k != scales.k || again.v != scales.v) flaw("scales do not come back from their file");
}

void read_prompts(choices& from) {
  const std::uint8_t form = from.byte();
  generate::options o;
  o.chat = (form & 2) != 0;
  if ((form & 4) != 0) o.prompt_ids = {{bifolio::token_id{from.byte()}, bifolio::token_id{2 * from.byte()}}};
  generate::loaded_model model;
  model.weights.config.vocab_size = 256;
  model.weights.config.max_positions = 32;
  model.tokens = generate::make_byte_tokenizer(bifolio::token_id{0});
  // Without a file there are texts of its own.
  if ((form & 8) == 0) o.prompts_file = write_scratch((form & 1) != 0 ? "prompts.jsonl" : "prompts.txt", from.rest());
  for (const generate::prompt& one : generate::collect_prompts(o, model)) {
    if (one.ids.empty() || one.ids.size() > 32) flaw("a prompt that the model does not take");
    if (one.max_new_tokens < 0) flaw("a negative number of tokens");
  }
}

void read_groups(choices& from) {
  const auto groups = trace_replay::read_model_file(write_scratch("groups.json", from.rest()).string());
  if (groups.empty()) flaw("a model without groups");
  for (const bifolio::group_config& one : groups) {
    if (one.block_size < 0 || one.num_blocks < 0 || one.num_host_blocks < 0 || one.window < 0) flaw("below 0");
  }
}

void read_report(choices& from) {
  tools::report now;
  now.add({{"name", "a"}, {"count", std::int64_t{3}}, {"us", 2.5}});
  now.add({{"name", "b"}, {"us", 0.0}});
  const tools::report both = tools::compared(now, std::string(text_of(from.rest())), "input");
  if (both.rows().size() != now.rows().size()) flaw("a row was lost");
}

}  // namespace

BIFOLIO_FUZZ_TARGET(program_files) {
  constexpr void (*forms[])(choices&) = {read_scales, read_prompts, read_groups, read_report};
  choices from(input);
  try {
    forms[from.below(4)](from);
  } catch (const tools::input_error&) {
  }
}
