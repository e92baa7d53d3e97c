// SPDX-License-Identifier: Apache-2.0
//
// Hashes of attention outputs over a fixed list of cases, one list per ISA and device: a change that claims to change
// no result leaves them as they are.
//
//   bifolio_attention_hashes [--write] [--lse] <folder> [<family>]
//
// compares with <folder>/<family>.tsv, or writes that file. A family is a CPU ISA ("cpu-avx2") or what plans of a GPU
// depend on, its compute capability and number of SMs ("cuda-sm90-132": H200 and H100); without one, all that this
// build and machine have. Output bits depend on nothing else. Those of the LSE also depend on the logf of the machine's
// C library, so they are recorded and compared only with --lse. Exit codes: 0 equal, 1 different or no such case, 77 no
// list for any family here.

#include <bit>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "support/backends.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

struct option_row {
  const char* name;
  void (*apply)(attention_case&);
};
constexpr option_row options[] = {
    {"plain", [](attention_case&) {}},
    {"full", [](attention_case& c) { c.causal = false; }},
    {"window", [](attention_case& c) { c.window_left = 40; }},
    {"both_sides",
     [](attention_case& c) {
       c.causal = false;
       c.window_left = 25;
       c.window_right = 6;
     }},
    {"soft_cap", [](attention_case& c) { c.soft_cap = 1.5f; }},
    {"alibi", [](attention_case& c) { c.alibi = true; }},
    {"sinks", [](attention_case& c) { c.sinks = true; }},
    {"bias", [](attention_case& c) { c.bias = bias_kind::full; }},
    {"negative_scale", [](attention_case& c) { c.scale = -0.25f; }},
    {"all",
     [](attention_case& c) {
       c.window_left = 90;
       c.soft_cap = 3;
       c.alibi = c.sinks = true;
       c.bias = bias_kind::masked;
     }},
};

struct shape_row {
  const char* name;
  std::vector<batch_seq> seqs;
};
const std::vector<shape_row>& shapes() {
  static const std::vector<shape_row> rows = {
      {"decode", {{1, 70}, {1, 1}, {1, 16}, {1, 333}, {0, 5}}},
      {"long", {{1, 1500}}},
      {"prefill", {{130, 130}, {17, 17}}},
      {"mixed", {{1, 200}, {40, 100}, {1, 33}, {3, 3}, {9, 160}}},
  };
  return rows;
}

struct type_row {
  const char* name;
  dtype q, kv, out;
};
constexpr type_row types[] = {
    {"f32", dtype::f32, dtype::f32, dtype::f32},
    {"f16", dtype::f16, dtype::f16, dtype::f16},
    {"bf16", dtype::bf16, dtype::bf16, dtype::bf16},
    {"f32_bf16", dtype::f32, dtype::bf16, dtype::f32},
};

struct layout_row {
  const char* name;
  arrangement layout;
};
constexpr layout_row layouts[] = {
    {"hnd", arrangement::hnd}, {"nhd", arrangement::nhd}, {"x_split", arrangement::x_split}};

struct hashed_case {
  std::string key;
  attention_case settings;
};

// Every option with every shape and type; head_dim, group, block size and layout take turns.
std::vector<hashed_case> fixed_list() {
  constexpr std::int32_t dims[] = {64, 128, 128, 256, 80, 64, 33, 128};
  constexpr std::int32_t groups[] = {4, 1, 8, 2, 7};
  constexpr std::int32_t blocks[] = {16, 16, 32, 64, 8, 128, 5};
  std::vector<hashed_case> list;
  std::size_t turn = 0;
  for (const type_row& type : types) {
    for (const shape_row& shape : shapes()) {
      for (const option_row& option : options) {
        for (const bool deterministic : {false, true}) {
          attention_case c;
          c.num_kv_heads = 2;
          c.group_size = groups[turn % std::size(groups)];
          c.head_dim = dims[turn % std::size(dims)];
          c.block_size = blocks[turn % std::size(blocks)];
          const layout_row& layout = layouts[turn % 5 == 1 ? 1 : turn % 5 == 3 ? 2 : 0];
          c.layout = layout.layout;
          c.q_type = type.q;
          c.kv_type = type.kv;
          c.out_type = type.out;
          c.seqs = shape.seqs;
          c.aligned = true;
          c.deterministic = deterministic;
          c.seed = turn + 1;
          option.apply(c);
          std::ostringstream key;
          key << type.name << '/' << shape.name << '/' << option.name << '/' << layout.name << "/d" << c.head_dim
              << "/g" << c.group_size << "/b" << c.block_size << (deterministic ? "/deterministic" : "");
          list.push_back({key.str(), std::move(c)});
        }
        ++turn;
      }
    }
  }
  return list;
}

// FNV-1a over the bits.
std::string hash_of_bits(const std::vector<float>& values) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (int byte = 0; byte < 4; ++byte) hash = (hash ^ ((bits >> (8 * byte)) & 0xffu)) * 0x100000001b3u;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

struct hashes {
  std::string out, lse;
};
using hash_list = std::map<std::string, hashes>;

// One list per backend.
std::vector<hash_list> compute(const std::vector<const tested_backend*>& backends) {
  std::vector<hash_list> lists(backends.size());
  for (const auto& [key, settings] : fixed_list()) {
    attention_contents contents(settings);
    // Powers of two: exp2 of a C library is not.
    for (std::size_t h = 0; h < contents.alibi_slopes.size(); ++h) {
      contents.alibi_slopes[h] = 1.0f / static_cast<float>(2u << (h % 8));
    }
    for (std::size_t i = 0; i < backends.size(); ++i) {
      const attention_output output = run_attention(*backends[i], settings, contents, placement_in_turn(settings, 0));
      if (!lists[i].emplace(key, hashes{hash_of_bits(output.out), hash_of_bits(output.lse)}).second) {
        throw std::logic_error("two cases are called " + key);
      }
    }
  }
  return lists;
}

hash_list read(const std::filesystem::path& file) {
  std::ifstream in(file);
  hash_list list;
  std::string key;
  hashes value;
  while (in >> key >> value.out >> value.lse) list[key] = value;
  return list;
}

void write(const std::filesystem::path& file, const hash_list& list) {
  std::ofstream out(file);
  for (const auto& [key, value] : list) out << key << '\t' << value.out << '\t' << value.lse << '\n';
  if (!out.flush()) throw std::runtime_error("cannot write " + file.string());
}

// Number of differences; the first few are printed.
int compare(const std::string& name, const hash_list& expected, const hash_list& got, bool with_lse) {
  int differences = 0;
  const auto complain = [&](const std::string& text) {
    if (++differences <= 10) std::cout << name << ": " << text << '\n';
  };
  for (const auto& [key, value] : got) {
    const auto found = expected.find(key);
    if (found == expected.end()) {
      complain(key + " is not in the list");
    } else if (found->second.out != value.out) {
      complain(key + " has other output bits");
    } else if (with_lse && found->second.lse != value.lse) {
      complain(key + " has other LSE bits");
    }
  }
  for (const auto& entry : expected) {
    if (!got.contains(entry.first)) complain(entry.first + " is in the list and was not computed");
  }
  return differences;
}

// "cpu-avx2", or "cuda-sm90-132" of a GPU whose description has "sm_90, 132 SMs".
std::string list_name(const tested_backend& tested) {
  if (tested.family == "cpu-avx2_vnni") return "cpu-avx2";  // the same bits
  if (tested.is_host) return tested.family;
  const std::string text = tested.get().description();
  int capability = 0;
  int num_sms = 0;
  const std::size_t at = text.find("sm_");
  if (at == std::string::npos || std::sscanf(text.c_str() + at, "sm_%d, %d SMs", &capability, &num_sms) != 2) {
    return tested.family;
  }
  return tested.family + "-sm" + std::to_string(capability) + "-" + std::to_string(num_sms);
}

int run(const std::vector<std::string>& arguments) {
  bool writes = false;
  bool with_lse = false;
  std::vector<std::string> names;
  for (const std::string& argument : arguments) {
    if (argument == "--write") {
      writes = true;
    } else if (argument == "--lse") {
      with_lse = true;
    } else {
      names.push_back(argument);
    }
  }
  if (names.empty() || names.size() > 2) {
    throw std::runtime_error("usage: bifolio_attention_hashes [--write] [--lse] <folder> [<family>]");
  }
  const std::filesystem::path folder = names[0];
  const auto file_of = [&](const tested_backend& tested) { return folder / (list_name(tested) + ".tsv"); };
  std::vector<const tested_backend*> wanted;
  for (const tested_backend* const tested : one_per_family(0)) {
    if (names.size() == 2 && names[1] != list_name(*tested)) continue;
    if (writes || std::filesystem::exists(file_of(*tested))) {
      wanted.push_back(tested);
    } else {
      std::cout << list_name(*tested) << ": no list in " << folder.string() << '\n';
    }
  }
  if (wanted.empty()) {
    std::cout << "SKIPPED: no list of hashes for what this machine has\n";
    return 77;
  }
  const std::vector<hash_list> lists = compute(wanted);
  int differences = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::filesystem::path file = file_of(*wanted[i]);
    if (writes) {
      write(file, lists[i]);
      std::cout << "wrote " << file.string() << '\n';
    } else {
      const int found = compare(list_name(*wanted[i]), read(file), lists[i], with_lse);
      std::cout << list_name(*wanted[i]) << ": " << lists[i].size() << " cases, " << found << " differ\n";
      differences += found;
    }
  }
  return differences == 0 ? 0 : 1;
}

}  // namespace
}  // namespace bifolio::test

int main(int argc, char** argv) {
  try {
    return bifolio::test::run({argv + 1, argv + argc});
  } catch (const std::exception& problem) {
    std::cerr << "bifolio_attention_hashes: " << problem.what() << '\n';
    return 2;
  }
}
