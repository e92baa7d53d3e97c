// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The subcommands of bifolio_bench. Each adds its options to the program and sets `run` to what is to be done when it
/// was chosen; `run` fills the report. Wrong values throw bifolio::error.

#include <CLI/CLI.hpp>
#include <functional>

#include "report.hpp"

namespace bifolio::bench {

using command = std::function<void(report&)>;

void add_attention_command(CLI::App& program, command& run);
void add_cache_ops_command(CLI::App& program, command& run);
void add_manager_command(CLI::App& program, command& run);
void add_probe_command(CLI::App& program, command& run);

}  // namespace bifolio::bench
