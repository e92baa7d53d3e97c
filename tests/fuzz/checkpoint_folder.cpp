// SPDX-License-Identifier: Apache-2.0
// A Hugging Face folder of a tiny model: a sound config.json, an index of shards and one shard, of which the input
// holds the text of the index and the header of the shard.
#include <string>

#include "checkpoint.hpp"
#include "choices.hpp"
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

}  // namespace

BIFOLIO_FUZZ_TARGET(checkpoint_folder) {
  choices from(input);
  const bool has_index = from.flag();
  const std::size_t data_bytes = std::size_t{from.byte()} * 4;
  const auto index = from.bytes(has_index ? std::size_t{from.byte()} * 8 : 0);
  clear_scratch_folder();
  write_scratch("config.json", config);
  if (has_index) write_scratch("model.safetensors.index.json", index);
  const std::string shard = shard_of(text_of(from.rest()), data_bytes);
  write_scratch("model.safetensors", shard);
  write_scratch("a.safetensors", shard);
  try {
    const generate::checkpoint model = generate::load_hugging_face(scratch_folder());
    if (model.layers.size() != 1) flaw("the number of layers is not the configuration's");
  } catch (const tools::input_error&) {
  }
}
