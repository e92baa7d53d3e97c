// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the checks of the calls of a layer refuse with.

#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::validate {

/// Collects the sentence of a refusal where one is wanted.
class refusal {
 public:
  /// `sentence` may be null.
  explicit refusal(std::string* sentence) noexcept : sentence_(sentence) {}

  /// Returns `code`; the parts (text or numbers) become the sentence, which stays empty when there is no memory for it.
  template <class... Parts>
  errc operator()(errc code, const Parts&... parts) const {
    if (sentence_ == nullptr) return code;
    sentence_->clear();
    try {
      (detail::append_part(*sentence_, parts), ...);
    } catch (const std::bad_alloc&) {
      sentence_->clear();  // the code is what counts
    }
    return code;
  }

 private:
  std::string* sentence_;
};

inline errc refuse_dtype(std::string_view name, dtype type, std::string_view allowed, const refusal& refuse) {
  if (is_dtype(type)) {
    return refuse(errc::invalid_argument, "the dtype of ", name, " is ", to_string(type), "; it must be one of ",
                  allowed);
  }
  return refuse(errc::invalid_argument, "the dtype of ", name, " is number ", static_cast<std::int32_t>(type),
                "; it must be one of ", allowed);
}

}  // namespace bifolio::inline v0_2::validate
