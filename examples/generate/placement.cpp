// SPDX-License-Identifier: Apache-2.0
#include "placement.hpp"

#include <fmt/format.h>

#include "cuda/cuda_llama.hpp"
#include "input_error.hpp"
#include "llama.hpp"

namespace generate {
namespace {

using bifolio::dtype;

void set_codes(placed_model& placed, const attention_types& types, dtype usual) {
  const bifolio::kv_code both = types.kv.value_or(bifolio::kv_code{usual});
  placed.k_code = types.k.value_or(both);
  placed.v_code = types.v.value_or(both);
}

/// Empty, or what of the model only the CPU computes.
const char* find_cpu_part(const model_config& c) {
  if (c.experts.count > 0) return "mixtures of experts";
  for (const layer_kind& kind : c.kinds) {
    if (kind.is_recurrent) return "recurrent layers";
    if (kind.rope.attention_factor != 1.0f) return "rotary positions with an attention factor";
  }
  return "";
}

placed_model place_on_cuda(bifolio::device device, const checkpoint& model, const attention_types& types) {
  placed_model placed;
  set_codes(placed, types, dtype::bf16);
  placed.where = bifolio::make_backend(device);
  const dtype stored = placed.k_code.type;
  const dtype query = types.query.value_or(bifolio::is_tensor_dtype(stored) ? stored : dtype::bf16);
  placed.runner = make_cuda_llama(model, *placed.where, query);
  return placed;
}

placed_model place_on_cpu(const checkpoint& model, bifolio::executor& workers, const attention_types& types,
                          std::optional<bifolio::cpu_isa> isa) {
  // One set of threads for the model's matrices and for attention: bifolio takes any executor.
  bifolio::backend_options settings;
  settings.own_executor = &workers;
  settings.isa = isa;
  placed_model placed;
  set_codes(placed, types, dtype::f32);
  placed.where = bifolio::make_backend({}, settings);
  placed.runner = std::make_unique<llama>(model, workers, types.query.value_or(dtype::f32));
  return placed;
}

}  // namespace

placed_model place_model(const std::string& device, const checkpoint& model, bifolio::executor& workers,
                         const attention_types& types, std::optional<bifolio::cpu_isa> isa) {
  const std::string cpu_part = find_cpu_part(model.config);
  if (device == "auto") {
    if (!cpu_part.empty() || !find_cuda_problem().empty()) return place_on_cpu(model, workers, types, isa);
    try {
      return place_on_cuda({bifolio::device_type::cuda, 0}, model, types);
    } catch (const bifolio::error& problem) {  // a GPU for which this program holds no kernels
      if (problem.code() != bifolio::errc::unsupported) throw;
      return place_on_cpu(model, workers, types, isa);
    }
  }
  const bifolio::device wanted = bifolio::parse_device(device);
  if (wanted.type == bifolio::device_type::cpu) return place_on_cpu(model, workers, types, isa);
  const std::string problem = find_cuda_problem();
  if (!problem.empty()) throw input_error(fmt::format("--device is '{}', but {}", device, problem));
  if (!cpu_part.empty()) {
    throw input_error(
        fmt::format("--device is '{}', but this model has {}, which are computed on the CPU alone", device, cpu_part));
  }
  return place_on_cuda(wanted, model, types);
}

}  // namespace generate
