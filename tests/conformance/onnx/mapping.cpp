// SPDX-License-Identifier: Apache-2.0
#include "conformance/onnx/mapping.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>

namespace bifolio::test::onnx {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Everything that this file knows of; a case with anything else is not expressible.
const std::set<std::string> known_attributes = {"is_causal",         "kv_num_heads", "left_window_size",
                                                "prob_mod",          "q_num_heads",  "qk_matmul_output_mode",
                                                "right_window_size", "scale",        "score_mod",
                                                "softmax_precision", "softcap"};
const std::set<std::string> known_inputs = {"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"};
const std::set<std::string> known_outputs = {"Y", "present_key", "present_value", "qk_matmul_output"};

// Thrown when a case cannot be expressed.
struct inexpressible {
  std::string why;
};

dtype dtype_of(const tensor& t) {
  for (const dtype type : tensor_dtypes) {
    if (t.type == to_string(type)) return type;
  }
  throw inexpressible{t.type + " elements; the library has " + std::string(tensor_dtype_names)};
}

// [batch, heads, length, dims], whether the tensor has the heads as a dimension of their own or packed into the last.
struct head_tensor {
  const tensor* from = nullptr;
  std::int64_t batch = 0, heads = 0, length = 0, dims = 0;
  bool packed = false;

  head_tensor(const tensor& t, std::int64_t num_heads) : from(&t) {
    packed = t.shape.size() == 3;
    batch = t.shape.at(0);
    heads = packed ? num_heads : t.shape.at(1);
    length = t.shape.at(packed ? 1 : 2);
    dims = packed ? t.shape.at(2) / num_heads : t.shape.at(3);
  }
  [[nodiscard]] double at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t d) const {
    const std::int64_t index =
        packed ? ((b * length + i) * heads + h) * dims + d : ((b * heads + h) * length + i) * dims + d;
    return from->values.at(static_cast<std::size_t>(index));
  }
};

// K or V: what is in the past, and then what is new.
struct joined_tensor {
  std::optional<head_tensor> past;
  head_tensor added;

  joined_tensor(const tensor* before, const tensor& now, std::int64_t num_heads) : added(now, num_heads) {
    if (before != nullptr) past.emplace(*before, num_heads);
  }
  [[nodiscard]] std::int64_t past_length() const { return past ? past->length : 0; }
  [[nodiscard]] std::int64_t length() const { return past_length() + added.length; }
  [[nodiscard]] double at(std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t d) const {
    return j < past_length() ? past->at(b, h, j, d) : added.at(b, h, j - past_length(), d);
  }

  // ONNX returns what it attended to; that must be what is laid into the cache.
  void require_equal(const tensor* present, const char* name) const {
    if (present == nullptr) return;
    const head_tensor all(*present, added.heads);
    bool equal =
        all.batch == added.batch && all.heads == added.heads && all.length == length() && all.dims == added.dims;
    for (std::int64_t b = 0; equal && b < all.batch; ++b) {
      for (std::int64_t h = 0; h < all.heads; ++h) {
        for (std::int64_t j = 0; j < all.length; ++j) {
          for (std::int64_t d = 0; d < all.dims; ++d) equal = equal && all.at(b, h, j, d) == at(b, h, j, d);
        }
      }
    }
    if (!equal) throw std::runtime_error(std::string(name) + " is not the past followed by what is new");
  }
};

// attn_mask as numbers to add, [batch, q_heads, queries, keys] by right-aligned broadcasting.
class mask_reader {
 public:
  explicit mask_reader(const tensor* mask) : mask_(mask) {}
  [[nodiscard]] double at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (mask_ == nullptr) return 0;
    std::int64_t index = 0;
    const std::int64_t wanted[] = {b, h, i, j};
    const std::size_t rank = mask_->shape.size();
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const std::int64_t extent = mask_->shape[axis];
      index = index * extent + (extent == 1 ? 0 : wanted[4 - rank + axis]);
    }
    const double value = mask_->values.at(static_cast<std::size_t>(index));
    if (mask_->type == "bool") return value != 0 ? 0 : -infinity;
    return value;
  }

 private:
  const tensor* mask_;
};

// Which extents of the bias the mask needs. Hidden positions without a key are the same in every row.
bias_kind bias_kind_of(const tensor* mask) {
  if (mask == nullptr) return bias_kind::one_row;
  const std::size_t rank = mask->shape.size();
  const auto extent = [&](std::size_t from_the_right) {
    return rank < from_the_right ? 1 : mask->shape[rank - from_the_right];
  };
  const bool by_token = extent(2) > 1 || extent(4) > 1;
  const bool by_head = extent(3) > 1;
  if (by_token) return by_head ? bias_kind::full : bias_kind::one_head;
  return by_head ? bias_kind::one_token : bias_kind::one_row;
}

// score_mod's graphs, by the operators they consist of.
enum class score_change : std::uint8_t { none, add, causal, soft_cap, minus_distance };
score_change score_change_of(const node_case& from) {
  const auto found = from.attributes.find("score_mod");
  if (found == from.attributes.end()) return score_change::none;
  const std::string& operators = found->second.front();
  if (operators == "Add") return score_change::add;
  if (operators == "Div+Tanh+Mul") return score_change::soft_cap;
  const std::string ranges = "Shape+Gather+Gather+Range+Reshape+Range+Reshape+";
  if (operators == ranges + "GreaterOrEqual+Where") return score_change::causal;
  if (operators == ranges + "Sub+Cast+Add") return score_change::minus_distance;
  throw inexpressible{"score_mod " + operators};
}

void require_known(const node_case& from) {
  const auto check = [](const auto& present, const std::set<std::string>& known, const char* kind) {
    for (const auto& [name, unused] : present) {
      if (known.count(name) == 0) throw inexpressible{std::string(kind) + " " + name};
    }
  };
  check(from.attributes, known_attributes, "attribute");
  check(from.inputs, known_inputs, "input");
  check(from.outputs, known_outputs, "output");
  if (from.attributes.count("prob_mod") != 0) throw inexpressible{"prob_mod changes probabilities after the softmax"};
}

void add_words(std::string& list, const std::string& words) { list += (list.empty() ? "" : ", ") + words; }

mapped_case map_known(const node_case& from, std::int32_t least_head_dim) {
  mapped_case result;
  const tensor& q_given = from.inputs.at("Q");
  const auto q_heads_given = static_cast<std::int64_t>(from.number("q_num_heads", 0));
  const auto kv_heads_given = static_cast<std::int64_t>(from.number("kv_num_heads", 0));
  const head_tensor q(q_given, q_heads_given);
  const joined_tensor k(from.input("past_key"), from.inputs.at("K"), kv_heads_given);
  const joined_tensor v(from.input("past_value"), from.inputs.at("V"), kv_heads_given);
  k.require_equal(from.output("present_key"), "present_key");
  v.require_equal(from.output("present_value"), "present_value");
  const head_tensor y(from.outputs.at("Y"), q_heads_given);
  const mask_reader mask(from.input("attn_mask"));
  const score_change change = score_change_of(from);

  attention_case& call = result.call;
  call.what = from.name;
  call.q_type = dtype_of(q_given);
  call.kv_type = dtype_of(from.inputs.at("K"));
  call.out_type = dtype_of(from.outputs.at("Y"));
  if (dtype_of(from.inputs.at("V")) != call.kv_type) throw inexpressible{"K and V of different types"};
  call.num_kv_heads = static_cast<std::int32_t>(k.added.heads);
  call.group_size = static_cast<std::int32_t>(q.heads / k.added.heads);
  call.head_dim =
      std::max({static_cast<std::int32_t>(q.dims), static_cast<std::int32_t>(v.added.dims), least_head_dim});
  call.scale = static_cast<float>(from.number("scale", 1 / std::sqrt(static_cast<double>(q.dims))));
  call.soft_cap = static_cast<float>(from.number("softcap", 0));
  call.causal = from.number("is_causal", 0) != 0 || change == score_change::causal;
  call.window_left = static_cast<std::int32_t>(from.number("left_window_size", -1));
  call.window_right = static_cast<std::int32_t>(from.number("right_window_size", -1));
  call.alibi = change == score_change::minus_distance;
  if (change == score_change::soft_cap) call.soft_cap = std::stof(from.attributes.at("score_mod").at(1));

  // Lengths, and whether anything has to be added to scores.
  const tensor* valid = from.input("nonpad_kv_seqlen");
  const bool positions_matter = call.causal || call.window_left >= 0 || call.window_right >= 0;
  const bool sees_no_later_key = call.causal || call.window_right == 0;
  const tensor* mask_given = from.input("attn_mask");
  bool needs_bias = mask_given != nullptr || change == score_change::add;
  for (std::int64_t b = 0; b < q.batch; ++b) {
    const std::int64_t keys =
        valid == nullptr ? k.length() : static_cast<std::int64_t>(valid->values.at(static_cast<std::size_t>(b)));
    const std::int64_t offset = valid == nullptr ? k.past_length() : keys - q.length;
    const std::int64_t length = positions_matter ? q.length + offset : keys;
    if (length < keys && !sees_no_later_key) throw inexpressible{"a window that shows keys after the last query"};
    if (length > keys) needs_bias = true;  // hides the positions without a key
    // ONNX extends a short mask with −∞. No case depends on it: what is past the mask is past the valid keys too.
    if (mask_given != nullptr && mask_given->shape.back() < std::min(length, keys)) {
      throw inexpressible{"a mask shorter than the keys"};
    }
    call.seqs.push_back({static_cast<std::int32_t>(q.length), static_cast<std::int32_t>(length)});
  }
  if (needs_bias) {
    call.bias = bias_kind_of(mask_given);
    call.bias_type = mask_given == nullptr || mask_given->type == "bool" ? dtype::f32 : dtype_of(*mask_given);
  }
  const double added = change == score_change::add ? std::stod(from.attributes.at("score_mod").at(1)) : 0;

  for (std::int64_t b = 0; b < q.batch; ++b) {
    attention_contents::sequence seq;
    const auto append = [&](std::vector<float>& to, const auto& source, std::int64_t heads, std::int64_t dims,
                            std::int64_t length, std::int64_t available) {
      for (std::int64_t i = 0; i < length; ++i) {
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t d = 0; d < call.head_dim; ++d) {
            // Positions without a key are hidden by the bias: what they hold must be finite and must not matter.
            const double filler = i < available ? 0 : 7;
            to.push_back(static_cast<float>(d < dims && i < available ? source.at(b, h, i, d) : filler));
          }
        }
      }
    };
    const std::int64_t length = call.seqs[static_cast<std::size_t>(b)].seq_len;
    append(seq.q, q, q.heads, q.dims, q.length, q.length);
    append(seq.k, k, k.added.heads, k.added.dims, length, k.length());
    append(seq.v, v, v.added.heads, v.added.dims, length, v.length());
    append(result.expected.out, y, y.heads, y.dims, y.length, y.length);
    for (std::int64_t i = 0; call.bias != bias_kind::none && i < q.length; ++i) {
      for (std::int64_t h = 0; h < q.heads; ++h) {
        for (std::int64_t j = 0; j < length; ++j) {
          seq.bias.push_back(static_cast<float>(j < k.length() ? mask.at(b, h, i, j) + added : -infinity));
        }
      }
    }
    result.contents.seqs.push_back(std::move(seq));
  }
  if (call.alibi) result.contents.alibi_slopes.assign(static_cast<std::size_t>(q.heads), -1.0f);

  // LSE: from the scores where the case gives them for every key that a query attends to, in float32.
  result.compared = "Y";
  if (from.output("present_key") != nullptr) result.compared += ", present K and V";
  const tensor* scores = from.output("qk_matmul_output");
  const auto mode = static_cast<std::int32_t>(from.number("qk_matmul_output_mode", 0));
  const bool with_mask = mode == 2;
  const bool capped = mode >= 1 || call.soft_cap == 0;
  if (scores != nullptr && scores->type == "f32" && mode != 3 && capped &&
      (with_mask || (!positions_matter && valid == nullptr))) {
    const head_tensor s(*scores, q.heads);
    result.compared += ", LSE from the scores";
    for (std::int64_t b = 0; b < q.batch; ++b) {
      for (std::int64_t i = 0; i < q.length; ++i) {
        for (std::int64_t h = 0; h < q.heads; ++h) {
          const auto score = [&](std::int64_t j) { return s.at(b, h, i, j) + (with_mask ? 0 : mask.at(b, h, i, j)); };
          double most = -infinity;
          for (std::int64_t j = 0; j < s.dims; ++j) most = std::max(most, score(j));
          double sum = 0;
          for (std::int64_t j = 0; j < s.dims && most > -infinity; ++j) sum += std::exp(score(j) - most);
          result.expected.lse.push_back(static_cast<float>(most > -infinity ? most + std::log(sum) : most));
        }
      }
    }
  } else if (scores != nullptr) {
    result.compared += mode == 3 ? "; not the probabilities" : "; not the scores";
  }

  // In words.
  std::string& how = result.how;
  add_words(how, std::string(to_string(call.q_type)));
  if (call.group_size > 1) add_words(how, std::to_string(call.group_size) + " query heads per KV head");
  if (q.packed) add_words(how, "packed heads");
  if (q.dims != v.added.dims)
    add_words(how, "heads of " + std::to_string(q.dims) + " and " + std::to_string(v.added.dims));
  if (from.attributes.count("scale") != 0) add_words(how, "scale");
  if (call.soft_cap > 0) add_words(how, "soft cap");
  if (call.alibi) add_words(how, "ALiBi");
  if (call.causal) add_words(how, "causal");
  if (call.window_left >= 0 || call.window_right >= 0) add_words(how, "window");
  if (k.past) add_words(how, "past K and V");
  if (mask_given != nullptr) add_words(how, mask_given->type == "bool" ? "boolean mask as a bias" : "bias");
  if (call.bias != bias_kind::none && mask_given == nullptr) add_words(how, "bias");
  if (valid != nullptr) add_words(how, "lengths of their own");
  return result;
}

}  // namespace

mapped_case map_case(const node_case& from, std::int32_t head_dim) {
  try {
    require_known(from);
    return map_known(from, head_dim);
  } catch (const inexpressible& problem) {
    mapped_case result;
    result.why_not = problem.why;
    return result;
  }
}

}  // namespace bifolio::test::onnx
