// SPDX-License-Identifier: Apache-2.0
#include "loaded_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <system_error>

#include "input_error.hpp"

namespace generate {

std::filesystem::path find_bundled_model() {
  namespace fs = std::filesystem;
  std::error_code problem;
  const fs::path here = fs::read_symlink("/proc/self/exe", problem).parent_path();
  const std::array<fs::path, 3> places{fs::path(BIFOLIO_EXAMPLE_MODEL_DIR), here / "model",
                                       here / ".." / "share" / "bifolio" / "model"};
  for (const fs::path& place : places) {
    if (fs::exists(place / "config.json", problem)) return place;
  }
  throw input_error(fmt::format("the bundled model is not there (looked in {}, {} and {}); name one with --model",
                                places[0].string(), places[1].string(), places[2].string()));
}

namespace {

/// What `tokenizer` names, or else the tokenizer.json of the model's directory, or else bytes.
std::unique_ptr<generate::tokenizer> load_tokenizer(const std::filesystem::path& model,
                                                    const std::filesystem::path& tokenizer,
                                                    const model_config& config) {
  if (!tokenizer.empty()) {
    return tokenizer.extension() == ".json" ? load_hugging_face_tokenizer(tokenizer, config.vocab_size)
                                            : load_bpe_tokenizer(tokenizer, config.vocab_size);
  }
  std::error_code problem;
  const std::filesystem::path directory = std::filesystem::is_directory(model, problem) ? model : model.parent_path();
  const std::filesystem::path own = directory / "tokenizer.json";
  if (!is_llama2c(model) && std::filesystem::exists(own, problem)) {
    return load_hugging_face_tokenizer(own, config.vocab_size);
  }
  if (config.vocab_size != 256) {
    throw input_error(fmt::format(
        "{}: its vocabulary of {} tokens needs --tokenizer, as there is no tokenizer.json next to it (only one of 256 "
        "bytes does not)",
        model.string(), config.vocab_size));
  }
  if (config.bos_id < 0) {
    throw input_error(
        fmt::format("{}: a vocabulary of bytes needs a \"bos_token_id\" that starts a text", model.string()));
  }
  return make_byte_tokenizer(bifolio::token_id{config.bos_id});
}

}  // namespace

loaded_model load_model(const std::filesystem::path& model, const std::filesystem::path& tokenizer) {
  loaded_model result;
  result.weights = is_llama2c(model) ? load_llama2c(model) : load_hugging_face(model);
  const model_config& config = result.weights.config;
  result.tokens = load_tokenizer(model, tokenizer, config);
  return result;
}

std::int64_t num_parameters(const model_config& c) noexcept {
  const std::int64_t dim = c.dim;
  const std::int64_t mlps = std::max(1, c.experts.count);
  const std::int64_t mlp = 3 * dim * c.hidden_dim * mlps + dim * c.experts.count;
  const std::int64_t attention = dim * (std::int64_t{c.qkv_dim()} + c.q_dim());
  const recurrence_config& r = c.recurrence;
  const std::int64_t recurrence = dim * (r.conv_dim() + 2 * std::int64_t{r.v_dim()} + 2 * r.num_v_heads);
  std::int64_t sum = dim + (c.tied_classifier ? 1 : 2) * dim * c.vocab_size;
  for (std::int32_t l = 0; l < c.num_layers; ++l) {
    sum += 2 * dim + mlp + (c.kinds[c.kind_of(l)].is_recurrent ? recurrence : attention);
  }
  return sum;
}

}  // namespace generate
