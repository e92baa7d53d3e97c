// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the library has to say besides answers and errors: a backend that was opened, a device that was lost, copies
/// that were never carried out. Silent by default. Nothing that happens once a step is logged.

#include <bifolio/export.hpp>
#include <cstdint>

namespace bifolio::inline v0_2 {

enum class log_level : std::uint8_t { error, warning, info };

/// Gets one message, a sentence without a line break, which holds during the call. Called from any thread, one call at
/// a time. It must not throw and must not call the library: what that logs would wait for this call to return.
using log_function = void (*)(void* user, log_level level, const char* message);

/// From now on `function` gets all messages of the process, in the place of the one before, which is not running any
/// more when this returns. Null: nobody. Thread-safe.
BIFOLIO_API void set_log(log_function function, void* user = nullptr) noexcept;

}  // namespace bifolio::inline v0_2
