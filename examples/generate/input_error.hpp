// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The one way in which this program refuses what it was given: a sentence for the user, shown as it is. `main` turns
/// it into exit code 2.

#include <stdexcept>

namespace generate {

/// A file or an option that cannot be used. The sentence names the value received and the values allowed.
class input_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace generate
