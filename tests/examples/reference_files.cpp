// SPDX-License-Identifier: Apache-2.0
#include "reference_files.hpp"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace bifolio::test {
namespace {

namespace fs = std::filesystem;
using row = std::unordered_map<std::string, std::string>;

/// A table with a header line, its fields apart by tabs.
std::vector<row> read_table(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  const auto fields = [](const std::string& line) {
    std::vector<std::string> result(1);
    for (const char c : line) {
      if (c == '\t') {
        result.emplace_back();
      } else {
        result.back() += c;
      }
    }
    return result;
  };
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> names = fields(line);
  std::vector<row> rows;
  while (std::getline(file, line)) {
    const std::vector<std::string> values = fields(line);
    if (values.size() != names.size()) throw std::runtime_error("a broken line in " + path.string());
    row& r = rows.emplace_back();
    for (std::size_t i = 0; i < names.size(); ++i) r[names[i]] = values[i];
  }
  return rows;
}

template <class Number>
std::vector<Number> numbers(const std::string& text) {
  std::istringstream stream(text);
  std::vector<Number> values;
  for (Number value; stream >> value;) values.push_back(value);
  return values;
}

/// Several tests may want the model at once: each unpacks to a name of its own and renames, which is atomic.
fs::path unpack(const fs::path& packed) {
  const fs::path unpacked = scratch_directory() / packed.stem();
  if (fs::exists(unpacked)) return unpacked;
  const fs::path mine = unpacked.string() + "." + std::to_string(getpid());
  const std::string command = "xz --decompress --stdout '" + packed.string() + "' > '" + mine.string() + "'";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
  fs::rename(mine, unpacked);
  return unpacked;
}

}  // namespace

fs::path scratch_directory() {
  const fs::path directory = fs::path(BIFOLIO_TEST_SCRATCH_DIR) / "scratch";
  fs::create_directories(directory);
  return directory;
}

std::optional<reference_model> find_reference_model(const std::string& name) {
  const fs::path folder = fs::path(BIFOLIO_SHARED_DIR) / "models" / name;
  if (!fs::exists(folder / "reference.tsv")) return {};
  reference_model model;
  model.name = name;
  model.tokenizer = folder / (name == "stories260K" ? "tok512.bin" : "tokenizer.bin");
  model.weights = folder / (name + ".bin");
  if (!fs::exists(model.weights)) model.weights = unpack(folder / (name + ".bin.xz"));

  for (row& r : read_table(folder / "reference.tsv")) {
    model.rows.push_back({r["id"], nlohmann::json::parse(r["prompt_json"]).get<std::string>(),
                          numbers<std::int32_t>(r["prompt_ids"]), numbers<std::int32_t>(r["output_ids"]),
                          r["ended_by"]});
  }
  for (row& r : read_table(folder / "logits.tsv")) {
    reference_logits l{
        r["id"], std::stoi(r["pos"]), std::stoi(r["token_in"]), std::stod(r["mean_logit"]), std::stod(r["rms_logit"]),
        {}};
    std::string largest = r["top16_id:logit"];
    for (char& c : largest) c = c == ':' ? ' ' : c;
    const std::vector<double> pairs = numbers<double>(largest);
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      l.largest.emplace_back(static_cast<std::int32_t>(pairs[i]), pairs[i + 1]);
    }
    model.logits.push_back(std::move(l));
  }
  for (row& r : read_table(folder / "nll.tsv")) {
    model.texts.push_back(
        {std::stod(r["mean_nll"]), numbers<std::int32_t>(r["ids"]), numbers<double>(r["nll_per_position"])});
  }
  return model;
}

}  // namespace bifolio::test
