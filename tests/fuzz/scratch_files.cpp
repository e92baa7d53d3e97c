// SPDX-License-Identifier: Apache-2.0
#include "scratch_files.hpp"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "fuzz_target.hpp"

namespace bifolio::fuzz {
namespace {

namespace fs = std::filesystem;

struct owned_folder {
  fs::path path;

  owned_folder() {
    const fs::path in_memory = "/dev/shm";
    std::error_code ignored;
    const fs::path parent = fs::is_directory(in_memory, ignored) ? in_memory : fs::temp_directory_path();
    std::string pattern = (parent / "bifolio-fuzz-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) flaw("no scratch folder can be made in " + parent.string());
    path = pattern;
  }
  ~owned_folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  owned_folder(const owned_folder&) = delete;
  owned_folder& operator=(const owned_folder&) = delete;
};

}  // namespace

const fs::path& scratch_folder() {
  static const owned_folder folder;
  return folder.path;
}

void clear_scratch_folder() {
  for (const fs::directory_entry& entry : fs::directory_iterator(scratch_folder())) fs::remove_all(entry.path());
}

fs::path write_scratch(std::string_view name, std::span<const std::uint8_t> bytes) {
  fs::path path = scratch_folder() / name;
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) flaw("cannot write " + path.string());
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  if (std::fclose(file) != 0 || !written) flaw("cannot write " + path.string());
  return path;
}

fs::path write_scratch(std::string_view name, std::string_view text) {
  return write_scratch(name, std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()));
}

}  // namespace bifolio::fuzz
