// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which kernels the suite has reached. While the environment variable BIFOLIO_TEST_REACH_DIR names a folder, the
/// kernels that serve the backends under test are counted, and the program writes <folder>/<program>.<process>.tsv as
/// it ends:
///
///   has <tab> kernel              a backend under test has this kernel
///   reached <tab> kernel <tab> n  it computed n sequences, or n calls of another kind
///   launched <tab> symbol <tab> n n launches of a compiled CUDA kernel, by its mangled name
///
/// tests/reach/kernel_reach.sh then finds what no program has reached. Only programs that hold results against a naive
/// model are given the variable.

#include <bifolio/attention.hpp>
#include <bifolio/backend.hpp>
#include <memory>

namespace bifolio::test {

/// `make_backend`, with what serves its cache calls and merges, and every CUDA launch, recorded.
[[nodiscard]] std::unique_ptr<backend> open_backend(device where = {}, const backend_options& options = {});

/// Records the kernels that computed this call. For callers of `backend::attention` that check its results.
void record_attention(const backend& where, const attention_plan& plan, const attention_params& params);

}  // namespace bifolio::test
