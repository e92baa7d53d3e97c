// SPDX-License-Identifier: Apache-2.0
// Runs every target on each file of its corpus: corpus/<target>/*. What fuzzing found once is found again here, in
// every build, without a fuzzer.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fuzz_target.hpp"

namespace {

namespace fs = std::filesystem;

std::map<std::string_view, bifolio::fuzz::target_function>& targets() {
  static std::map<std::string_view, bifolio::fuzz::target_function> all;
  return all;
}

std::vector<std::uint8_t> contents_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

bifolio::fuzz::registered_target::registered_target(std::string_view name, target_function run) {
  targets().emplace(name, run);
}

int main(int argc, char** argv) {
  if (argc != 2 || !fs::is_directory(argv[1])) {
    std::fprintf(stderr, "usage: bifolio_fuzz_replay CORPUS, a folder with a folder for each target\n");
    return 2;
  }
  int failed = 0;
  for (const auto& [name, run] : targets()) {
    const fs::path folder = fs::path(argv[1]) / name;
    std::vector<fs::path> files;
    if (fs::is_directory(folder)) {
      for (const fs::directory_entry& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) {
      const std::vector<std::uint8_t> input = contents_of(file);
      std::printf("%s\n", file.c_str());
      std::fflush(stdout);  // names the file when the target ends the process
      run(input);
    }
    std::printf("%-16.*s %zu inputs\n", static_cast<int>(name.size()), name.data(), files.size());
    if (files.empty()) {
      std::fprintf(stderr, "no corpus in %s\n", folder.c_str());
      failed = 1;
    }
  }
  return failed;
}
