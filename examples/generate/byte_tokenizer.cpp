// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.hpp"

namespace generate {
namespace {

using bifolio::token_id;

class byte_tokenizer final : public tokenizer {
 public:
  explicit byte_tokenizer(token_id separator) : separator_(separator) {}

  [[nodiscard]] std::vector<token_id> encode(std::string_view text) const override {
    std::vector<token_id> ids{separator_};
    for (const char c : text) ids.push_back(token_id{static_cast<unsigned char>(c)});
    return ids;
  }

  [[nodiscard]] std::string decode(token_id, token_id id) const override {
    if (id == separator_) return {};
    return std::string(1, static_cast<char>(static_cast<unsigned char>(to_index(id))));
  }

 private:
  [[nodiscard]] std::uint64_t max_id_bytes() const noexcept override { return 1; }

  token_id separator_;
};

}  // namespace

std::string tokenizer::decode_all(const std::vector<token_id>& ids) const {
  std::string text;
  for (std::size_t i = 0; i < ids.size(); ++i) text += decode(i == 0 ? no_token : ids[i - 1], ids[i]);
  return text;
}

std::uint64_t tokenizer::min_num_ids(std::uint64_t num_bytes) const noexcept {
  const std::uint64_t at_once = max_id_bytes();
  if (at_once == any_num_bytes) return num_first_ids();
  return num_first_ids() + num_bytes / at_once + (num_bytes % at_once != 0 ? 1 : 0);
}

std::unique_ptr<tokenizer> make_byte_tokenizer(token_id separator) {
  return std::make_unique<byte_tokenizer>(separator);
}

}  // namespace generate
