// SPDX-License-Identifier: Apache-2.0
// A Hugging Face folder. Either a sound config.json, an index of shards and one shard, of which the input holds the
// text of the index and the header of the shard; or a tiny model of one of the architectures with some things changed,
// which is run for some tokens.
#include <algorithm>
#include <bifolio/error.hpp>
#include <string>

#include "checkpoint.hpp"
#include "choices.hpp"
#include "edited_model.hpp"
#include "examples/generation_fixture.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"

namespace {

using namespace bifolio::fuzz;

constexpr std::string_view config = R"({"model_type": "llama", "hidden_size": 4, "intermediate_size": 4,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 3,
  "max_position_embeddings": 8, "tie_word_embeddings": true})";

std::string shard_of(std::string_view header, std::size_t data_bytes) {
  std::string file;
  for (unsigned shift = 0; shift < 64; shift += 8) file += static_cast<char>(std::uint64_t{header.size()} >> shift);
  file += header;
  file.append(data_bytes, '\1');
  return file;
}

void load_texts(choices& from, bool has_index) {
  const std::size_t data_bytes = std::size_t{from.byte()} * 4;
  const auto index = from.bytes(has_index ? std::size_t{from.byte()} * 8 : 0);
  clear_scratch_folder();
  write_scratch("config.json", config);
  if (has_index) write_scratch("model.safetensors.index.json", index);
  const std::string shard = shard_of(text_of(from.rest()), data_bytes);
  // A whole file in the place of the shards is taken first.
  write_scratch(has_index ? "b.safetensors" : "model.safetensors", shard);
  write_scratch("a.safetensors", shard);
  const generate::checkpoint model = generate::load_hugging_face(scratch_folder());
  if (model.layers.size() != 1) flaw("the number of layers is not the configuration's");
}

void run_edited_model(choices& from) {
  write_edited_model(from);
  generate::checkpoint model = generate::load_hugging_face(scratch_folder());
  generate::model_config& c = model.config;
  if (model.layers.size() != static_cast<std::size_t>(c.num_layers)) flaw("another number of layers");
  c.max_positions = std::min(c.max_positions, 64);
  std::vector<bifolio::token_id> ids;
  for (std::int32_t i = 0; i < std::min(5, c.max_positions); ++i)
    ids.push_back(bifolio::token_id{i * 7 % c.vocab_size});
  bifolio::test::generation_setup setup;
  setup.num_blocks = 16;
  const auto logits = bifolio::test::paged_logits(model, ids, 3, setup);
  for (const std::vector<float>& row : logits) {
    if (row.size() != static_cast<std::size_t>(c.vocab_size)) flaw("logits of another length");
  }
}

}  // namespace

BIFOLIO_FUZZ_TARGET(checkpoint_folder) {
  choices from(input);
  const std::uint8_t form = from.byte();
  try {
    if ((form & 2) != 0) return run_edited_model(from);
    load_texts(from, (form & 1) != 0);
  } catch (const tools::input_error&) {
  } catch (const bifolio::error&) {  // a cache that is not supported
  }
}
