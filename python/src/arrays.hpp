// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Arrays of any framework, as the library reads and writes them for the time of a call. DLPack is the only thing that
/// is asked of a framework: its table of C functions (DLPack 1.3) where the type has one, as PyTorch's has, and else
/// its Python method. Nothing is copied.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <bifolio/bifolio.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bifolio_python {

namespace nb = nanobind;

[[noreturn]] void refuse(bifolio::errc code, const std::string& sentence);

enum class access : std::uint8_t { read, write };

/// An array that somebody else owns. `name` is how errors call it, and outlives it, as `object` does.
class array_ref {
 public:
  /// Throws TypeError for what is no array, and `error` for one that cannot be written although it has to be.
  array_ref(nb::handle object, const char* name, access how = access::read);

  [[nodiscard]] const char* name() const noexcept { return name_; }
  [[nodiscard]] std::int32_t ndim() const noexcept { return tensor_.ndim; }
  [[nodiscard]] std::int64_t shape(std::int32_t i) const noexcept { return tensor_.shape[i]; }
  /// In elements.
  [[nodiscard]] std::int64_t stride(std::int32_t i) const noexcept;
  [[nodiscard]] void* data() const noexcept { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  [[nodiscard]] nb::dlpack::dtype type() const noexcept { return tensor_.dtype; }
  [[nodiscard]] nb::dlpack::device place() const noexcept { return tensor_.device; }
  /// float32, float16 or bfloat16; uint16 are the bits of bfloat16, which NumPy does not have.
  [[nodiscard]] bifolio::dtype element() const;
  /// Throws `error` (invalid_argument) for memory that is neither the host's nor CUDA's.
  [[nodiscard]] bifolio::device where() const;
  void require_on(const bifolio::device& where) const;
  void require_ndim(std::int32_t ndim, const char* axes) const;
  void require_dense_last_axis() const;

 private:
  const char* name_;
  nb::dlpack::dltensor tensor_{};
  nb::object viewed_;             // the bits of an array whose type DLPack or its framework lacks
  nb::ndarray<nb::ro> imported_;  // what keeps shape and strides alive where no table of functions is there
  nb::ndarray<> writable_;
};

/// An array that a call writes: the one that was given, or a new one of the framework of another.
class array_out {
 public:
  /// `given` None: a new array of this shape, of the framework, device and (unless float32 is asked for) type of
  /// `like`.
  array_out(nb::handle given, const char* name, nb::handle like, const array_ref& like_array,
            std::span<const std::int64_t> shape, bool as_float32 = false);

  [[nodiscard]] const array_ref& array() const noexcept { return *ref_; }
  /// The array as its framework's, when it is written.
  [[nodiscard]] nb::object finish();

 private:
  nb::object object_;
  nb::object importer_;      // a function of a framework that cannot be given memory to write to
  bifolio::device where_{};  // of what it imports
  std::optional<array_ref> ref_;
};

/// The backend of a device for arrays that belong to no cache, opened when it is asked for first, under the GIL. Never
/// closed: a driver may be gone before static objects are.
[[nodiscard]] bifolio::backend& shared_backend(const bifolio::device& where);

/// Rows [tokens, heads, head_dim] on `where`.
[[nodiscard]] bifolio::tensor_view to_rows(const array_ref& array, const bifolio::device& where);

/// float32 values of every token and head on `where`, without gaps.
[[nodiscard]] float* to_lse(const array_ref& array, std::int64_t num_tokens, std::int32_t num_heads,
                            const bifolio::device& where);

/// float32 values of every head on `where`; null for None.
[[nodiscard]] const float* to_head_values(nb::handle object, const char* name, std::int32_t num_heads,
                                          const bifolio::device& where);

/// Integers of an array (int32 or int64) of the host or of the backend's device, whose elements are downloaded, or of
/// a sequence: rows of one length, or one row.
struct integers {
  std::vector<std::int32_t> values;
  std::int64_t num_rows = 1;
  std::int64_t num_columns = 0;
};
[[nodiscard]] integers to_integers(nb::handle object, const char* name, std::int32_t ndim, bifolio::backend& where);

/// An array object that any framework imports; `owner` lives as long as it does.
using dlpack_array = nb::ndarray<nb::array_api>;

/// A copy.
template <class T, class From>
[[nodiscard]] nb::ndarray<nb::array_api, T, nb::ndim<1>> array_of(const std::vector<From>& values) {
  static_assert(sizeof(T) == sizeof(From));
  auto* const copy = new std::vector<T>(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) (*copy)[i] = static_cast<T>(values[i]);
  const nb::capsule owner(copy, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::ndarray<nb::array_api, T, nb::ndim<1>>(copy->data(), {copy->size()}, owner);
}

}  // namespace bifolio_python
