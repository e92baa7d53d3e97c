// SPDX-License-Identifier: Apache-2.0
#include "cpu/implementations.hpp"

#include "common/attention/implementations.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

constexpr attention_implementation list[] = {
    {.name = "tiles",
     .loops = attention_loops::tiles,
     .takes_mixed_dtypes = false,
     .takes_bias = false,
     .takes_codes = true,
     .takes_zeros = false,
     .least_group_of_codes = 8,
     .most_group_beside_tiles = 0,
     .decodes_rows = false,
     .prefill_rows = 384,
     .rounds_queries = false},
    {.name = "dots",
     .loops = attention_loops::dots,
     .takes_mixed_dtypes = false,
     .takes_bias = true,
     .takes_codes = true,
     .takes_zeros = true,
     .least_group_of_codes = 1,
     .most_group_beside_tiles = 2,
     .decodes_rows = false,
     .prefill_rows = 192,
     .rounds_queries = false},
    {.name = "integers",
     .loops = attention_loops::integers,
     .takes_mixed_dtypes = false,
     .takes_bias = true,
     .takes_codes = true,
     .takes_zeros = true,
     .least_group_of_codes = 1,
     .most_group_beside_tiles = 0,
     .decodes_rows = false,
     .prefill_rows = 192,
     .rounds_queries = true},
    {.name = "vectors",
     .loops = attention_loops::vectors,
     .takes_mixed_dtypes = true,
     .takes_bias = true,
     .takes_codes = true,
     .takes_zeros = true,
     .least_group_of_codes = 1,
     .most_group_beside_tiles = 0,
     .decodes_rows = true,
     .prefill_rows = 192,
     .rounds_queries = false},
};

}  // namespace

bool attention_problem::is_widened() const noexcept {
  const auto widens = [](const kv_code& code) {
    return code.type == dtype::bf16 || (!detail::is_plain(code) && !code.is_record());
  };
  return is_coded() && widens(k_code) && widens(v_code);
}

std::string_view attention_problem::kernel_type_name() const noexcept {
  if (!is_coded()) return to_string(k_code.type);
  return is_widened() ? widened_kernel_type : decoded_kernel_type;
}

attention_problem problem_of(const kernel_table& table, const attention_spec& spec) noexcept {
  return {.table = table,
          .q_type = spec.q_type,
          .k_code = spec.k_code,
          .v_code = spec.v_code,
          .out_type = spec.out_type,
          .group_size = spec.num_kv_heads > 0 ? spec.num_q_heads / spec.num_kv_heads : 1};
}

attention_problem problem_of(const kernel_table& table, const attention_spec& spec,
                             const attention_params& params) noexcept {
  attention_problem problem = problem_of(table, spec);
  problem.has_bias = params.bias.data != nullptr;
  return problem;
}

bool attention_implementation::accepts(const attention_problem& problem, std::string* why) const noexcept {
  if (problem.is_coded() && !(problem.is_widened() ? takes_codes : decodes_rows)) {
    return detail::declines(
        why, "K is stored as ", [&](std::string& text) { text += to_string(problem.k_code); }, " and V as ",
        [&](std::string& text) { text += to_string(problem.v_code); },
        "; it takes one 16-bit dtype for both, or 8-bit codes and bf16");
  }
  if (rounds_queries && (problem.k_code.type != dtype::i8 || !problem.is_widened())) {
    return detail::declines(
        why, "K is stored as ", [&](std::string& text) { text += to_string(problem.k_code); }, " and V as ",
        [&](std::string& text) { text += to_string(problem.v_code); },
        "; it takes i8 codes of K, and 8-bit codes or bf16 of V");
  }
  if (!takes_zeros && problem.is_coded() && (problem.k_code.type == dtype::u8 || problem.v_code.type == dtype::u8)) {
    return detail::declines(
        why, "K is stored as ", [&](std::string& text) { text += to_string(problem.k_code); }, " and V as ",
        [&](std::string& text) { text += to_string(problem.v_code); }, "; it takes no codes with zero points");
  }
  const dtype kv_type = problem.kernel_type();
  if (problem.table.attention.items_of(loops, kv_type).run == nullptr) {
    return detail::declines(why, "the instruction set ", to_string(problem.table.isa), " has none for a KV cache of ",
                            to_string(kv_type));
  }
  const bool mixed = problem.q_type != kv_type || problem.out_type != kv_type;
  if (mixed && !takes_mixed_dtypes) {
    return detail::declines(why, "queries are ", to_string(problem.q_type), ", the KV cache is ", to_string(kv_type),
                            " and the output is ", to_string(problem.out_type), "; it takes one dtype for all");
  }
  if (problem.has_bias && !takes_bias) return detail::declines(why, "the call has a bias");
  return true;
}

bool attention_implementation::yields_beside_tiles(const attention_problem& problem) const noexcept {
  const bool has_tiles = problem.table.attention.items_of(attention_loops::tiles, problem.kernel_type()).run != nullptr;
  return has_tiles && most_group_beside_tiles > 0 &&
         !(problem.is_coded() && problem.group_size <= most_group_beside_tiles);
}

std::span<const attention_implementation> attention_implementations() noexcept { return list; }

const attention_implementation* implementation_of(const attention_problem& call, std::string_view forced) noexcept {
  for (const attention_implementation& entry : list) {
    if (forced.empty() ? !entry.is_asked(call) : entry.name != forced) continue;
    if (entry.accepts(call, nullptr)) return &entry;
  }
  return nullptr;
}

std::vector<std::string> explain_implementations(const attention_problem& planned, std::string_view forced,
                                                 std::int32_t num_seqs) {
  std::vector<std::string> sentences;
  const attention_implementation* taken = nullptr;  // by every call, or by those without a bias
  for (const attention_implementation& entry : list) {
    std::string sentence(entry.name);
    std::string why;
    if (!forced.empty() && entry.name != forced) {
      sentence.append(" is not asked: ").append(forced).append(" is forced");
    } else if (!entry.accepts(planned, &why)) {
      sentence.append(" declines: ").append(why);
    } else if (forced.empty() && entry.rounds_queries) {
      sentence += " is not asked: it rounds queries, and has to be forced";
    } else if (forced.empty() && entry.yields_beside_tiles(planned)) {
      sentence.append(" is not asked: where there are tiles it is for codes with at most ")
          .append(std::to_string(entry.most_group_beside_tiles))
          .append(" query heads on a KV head");
    } else if (forced.empty() && !entry.is_asked(planned)) {
      sentence += " is not asked: those below are faster for codes with so few query heads on a KV head";
    } else if (taken == nullptr) {
      taken = &entry;
      sentence.append(" takes all ").append(std::to_string(num_seqs)).append(" sequences");
      if (!entry.takes_bias) sentence += " of calls without a bias";
    } else if (!taken->takes_bias && entry.takes_bias) {
      taken = &entry;
      sentence.append(" takes all ").append(std::to_string(num_seqs)).append(" sequences of calls with a bias");
    } else {
      sentence.append(" is not asked: those above take every call");
    }
    sentences.push_back(sentence);
  }
  return sentences;
}

}  // namespace bifolio::inline v0_2::cpu
