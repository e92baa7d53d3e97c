// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A test that cannot run here is skipped, never passed: it says why and leaves its case. The executable then ends with
/// exit code 77, which ctest reports as skipped, unless a check failed.

#include <string_view>

namespace bifolio::test {

/// Prints "SKIPPED: <reason>" and notes it for main(). The caller returns from its test case afterwards:
/// `if (!there) return bifolio::test::skip("the models are not there");`. Not thread-safe.
void skip(std::string_view reason);

[[nodiscard]] int num_skips() noexcept;

}  // namespace bifolio::test
