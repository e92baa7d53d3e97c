// SPDX-License-Identifier: Apache-2.0
// A config.json, and a generation_config.json after its first zero byte.
#include "hugging_face_config.hpp"

#include <algorithm>

#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"

BIFOLIO_FUZZ_TARGET(hugging_face_config) {
  using namespace bifolio::fuzz;
  const auto end = std::find(input.begin(), input.end(), std::uint8_t{0});
  const auto first = static_cast<std::size_t>(end - input.begin());
  clear_scratch_folder();
  const auto path = write_scratch("config.json", input.first(first));
  if (first < input.size()) write_scratch("generation_config.json", input.subspan(first + 1));
  try {
    const generate::hugging_face_config config = generate::read_hugging_face_config(path);
    if (config.model.dim < 1 || config.model.num_layers < 1 || config.model.vocab_size < 1) {
      flaw("a configuration without numbers was accepted");
    }
    if (config.model.num_q_heads % config.model.num_kv_heads != 0) flaw("heads that do not divide were accepted");
    for (const generate::layer_kind& kind : config.model.kinds) {
      const std::int32_t dims = config.model.rotated_dims();
      if (generate::rotary_frequencies(kind.rope, dims).size() != static_cast<std::size_t>(dims / 2)) {
        flaw("another number of rotated pairs");
      }
    }
  } catch (const tools::input_error&) {
  }
}
