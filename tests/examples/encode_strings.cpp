// SPDX-License-Identifier: Apache-2.0
// encode_strings <tokenizer.json> <vocabulary size>: of every line of stdin, a JSON string, the ids and the text that
// they decode to, as one JSON object a line. For frameworks_test.py.
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "tokenizer.hpp"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "encode_strings needs a tokenizer.json and the size of the model's vocabulary\n";
    return 2;
  }
  try {
    const auto tokens = generate::load_hugging_face_tokenizer(argv[1], std::atoi(argv[2]));
    std::ios::sync_with_stdio(false);
    for (std::string line; std::getline(std::cin, line);) {
      const auto text = nlohmann::json::parse(line).get<std::string>();
      const auto ids = tokens->encode(text);
      nlohmann::json answer{{"ids", nlohmann::json::array()}, {"text", tokens->decode_all(ids)}};
      for (const auto id : ids) answer["ids"].push_back(to_index(id));
      if (tokens->min_num_ids(text.size()) > ids.size()) answer["wrong_bound"] = tokens->min_num_ids(text.size());
      std::cout << answer.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) << '\n';
    }
  } catch (const std::exception& problem) {
    std::cerr << problem.what() << '\n';
    return 1;
  }
}
