// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The one list of what the conformance suite runs on: every CPU ISA this machine supports times every executor, and
/// each device backend that the build and the machine have. Adding a backend means adding its entries here and nowhere
/// else.

#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bifolio::test {

/// A value per dtype of tensors, f32, f16 and bf16; adding one without a value does not compile.
template <class T>
class per_dtype {
 public:
  template <class... Values>
  requires(sizeof...(Values) == num_tensor_dtypes) constexpr per_dtype(Values... values)  // NOLINT: implicit on purpose
      : values_{static_cast<T>(values)...} {}
  constexpr T& operator[](std::size_t type) { return values_[type]; }
  constexpr const T& operator[](std::size_t type) const { return values_[type]; }

 private:
  T values_[num_tensor_dtypes];
};

/// What the numerical bounds need to know about a backend's arithmetic.
struct arithmetic {
  std::int64_t split_size = 512;                                    ///< keys per partial sum, B of the error bound
  per_dtype<double> unit_accumulate = {0x1p-24, 0x1p-24, 0x1p-24};  ///< roundoff of sums, by KV dtype
  per_dtype<double> unit_probability = {0, 0, 0};    ///< rounding of probabilities before they meet V, by KV dtype
  per_dtype<double> tiny_probability = {0, 0, 0};    ///< their rounding where they are subnormal, by KV dtype
  per_dtype<std::size_t> dims_together = {1, 1, 1};  ///< aligned dims of V that share a NaN, by KV dtype
  per_dtype<double> flushed = {0, 0, 0};  ///< magnitudes below which a product or sum may count as 0, by KV dtype
  double query_roundoff = 0;              ///< of queries, relative to the largest element of each
  double range_roundoff = 0;              ///< of elements of K, relative to the range of a token's
  double row_roundoff = 0;                ///< of a key's share of an output, relative to the largest element of any dim
};

struct tested_backend {
  std::string name;    ///< "cpu-avx2-tbb"
  std::string family;  ///< "cpu-avx2": equal bits are promised within a family, and only there
  std::unique_ptr<backend> owned;
  arithmetic numbers;   ///< of its loosest kernel
  bool is_host = true;  ///< pointers may be made by the test itself (sparse mappings, host allocators)
  [[nodiscard]] backend& get() const { return *owned; }
  /// Those of the kernels that may compute a call of these dtypes and this head_dim: tensor cores and bfloat16 dot
  /// products take queries, KV and output of one dtype, tensor cores only some shapes; everything else is held to
  /// float32's bound.
  [[nodiscard]] arithmetic numbers_for(dtype q_type, dtype kv_type, dtype out_type, std::int32_t head_dim) const;
  /// The same for a cache of codes, whose values are float32: kernels of bfloat16 may compute those of bfloat16 queries
  /// and outputs.
  [[nodiscard]] arithmetic numbers_for_codes(dtype q_type, dtype out_type) const;
};

/// Opens a backend and says how exact it is; nothing when this build or machine does not have it. Throws what
/// `make_backend` throws for any other reason.
[[nodiscard]] std::optional<tested_backend> open_tested(std::string name, std::string family, device where,
                                                        const backend_options& options);

/// What `numbers_for` says of a CPU backend of this ISA.
[[nodiscard]] arithmetic numbers_of(cpu_isa isa, dtype q_type, dtype kv_type, dtype out_type);

/// All of them, opened once per process and kept. Their memory() is fenced on the host: reading past the end of any
/// allocation is a fault. The environment variable BIFOLIO_TEST_BACKENDS=text keeps the names that contain the text; a
/// text that leaves none throws std::runtime_error, so that no test passes without having tested anything.
[[nodiscard]] std::span<const tested_backend> all_backends();

/// One per family; `turn` rotates through the family's executors, so that a table of cases meets them all.
[[nodiscard]] std::vector<const tested_backend*> one_per_family(std::size_t turn);

/// An executor in the caller's thread that runs workers last to first: a legal order that real pools rarely take.
[[nodiscard]] std::unique_ptr<executor> make_reversed_executor(std::int32_t concurrency);

/// threads, and those of openmp and tbb that this build has.
[[nodiscard]] std::vector<executor_kind> threaded_executors();

/// The host memory of the CPU backends of `all_backends`.
[[nodiscard]] memory_resource& fenced_host_memory();

}  // namespace bifolio::test
