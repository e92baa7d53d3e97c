// SPDX-License-Identifier: Apache-2.0
#include "arrays.hpp"

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

using namespace bifolio;

namespace bifolio_python {
namespace {

// DLPack's numbers of types (kDLUInt and so on).
constexpr std::uint8_t code_int = 0, code_uint = 1, code_float = 2, code_bfloat = 4;

/// DLPack 1.3's table of C functions, which a type has as the capsule __dlpack_c_exchange_api__.
struct exchange_api {
  std::uint32_t major = 0, minor = 0;
  exchange_api* before = nullptr;
  int (*allocate)(nb::dlpack::dltensor* prototype, void** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message)) = nullptr;
  int (*own)(void* object, void** out) = nullptr;
  int (*to_object)(void* managed, void** out) = nullptr;
  int (*view)(void* object, nb::dlpack::dltensor* out) = nullptr;
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out) = nullptr;
};

const exchange_api* find_exchange_api(PyTypeObject* type) {
  PyObject* const capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const exchange_api*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->major > 1) api = api->before;
  return api != nullptr && api->major == 1 && api->view != nullptr ? api : nullptr;
}

/// The first part of the name of the module that a type is of.
std::string framework_of(nb::handle object) {
  const std::string module = nb::cast<std::string>(nb::handle(Py_TYPE(object.ptr())).attr("__module__"));
  return module.substr(0, module.find('.'));
}

enum class framework : std::uint8_t { other, numpy, cupy, jax };

/// What calls need to know of the type of an array. Asking takes a quarter of a call's time.
struct array_kind {
  PyTypeObject* of = nullptr;
  const exchange_api* api = nullptr;  ///< null where the type has no table
  framework from = framework::other;
};

array_kind find_array_kind(nb::handle object) {
  array_kind kind{Py_TYPE(object.ptr()), find_exchange_api(Py_TYPE(object.ptr())), framework::other};
  const std::string name = framework_of(object);
  if (name == "numpy") kind.from = framework::numpy;
  if (name == "cupy") kind.from = framework::cupy;
  if (name == "jaxlib") kind.from = framework::jax;
  return kind;
}

/// What was found for the first types is kept, and the types with it.
array_kind array_kind_of(nb::handle object) {
  static std::array<array_kind, 8> known{};
  PyTypeObject* const type = Py_TYPE(object.ptr());
  for (array_kind& kind : known) {
    if (kind.of == type) return kind;
    if (kind.of != nullptr) continue;
    const array_kind found = find_array_kind(object);
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    return kind = found;
  }
  return find_array_kind(object);
}

/// NumPy's types of ml_dtypes, which neither DLPack exports of NumPy nor buffers know, as integers of their size.
nb::object view_of_bits(nb::handle object, std::optional<nb::dlpack::dtype>& type) {
  if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "view")) return {};
  const nb::object dtype = object.attr("dtype");
  if (!nb::hasattr(dtype, "name") || nb::cast<std::string>(dtype.attr("name")) != "bfloat16") return {};
  type = nb::dlpack::dtype{code_bfloat, 16, 1};
  return object.attr("view")("uint16");
}

template <class Array>
bool import_array(nb::handle object, Array& out) {
  return nb::try_cast<Array>(object, out);
}

/// Sets what a framework's allocator says.
void set_python_error(void*, const char*, const char* message) { PyErr_SetString(PyExc_RuntimeError, message); }

nb::object allocate_with(const exchange_api& api, std::span<const std::int64_t> shape, nb::dlpack::dtype type,
                         nb::dlpack::device where) {
  std::array<std::int64_t, 4> sizes{};
  std::copy(shape.begin(), shape.end(), sizes.begin());
  nb::dlpack::dltensor prototype;
  prototype.device = where;
  prototype.ndim = static_cast<std::int32_t>(shape.size());
  prototype.dtype = type;
  prototype.shape = sizes.data();
  void* managed = nullptr;
  void* object = nullptr;
  if (api.allocate(&prototype, &managed, nullptr, set_python_error) != 0 || api.to_object(managed, &object) != 0) {
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

std::string shape_text(const array_ref& array) {
  std::string text = "[";
  for (std::int32_t i = 0; i < array.ndim(); ++i) {
    text += std::to_string(array.shape(i)) + (i + 1 < array.ndim() ? ", " : "");
  }
  return text + "]";
}

}  // namespace

void refuse(errc code, const std::string& sentence) { throw error(code, sentence); }

array_ref::array_ref(nb::handle object, const char* name, access how) : name_(name) {
  const array_kind kind = array_kind_of(object);
  if (const exchange_api* const api = kind.api) {
    if (api->view(object.ptr(), &tensor_) == 0) return;
    const nb::python_error problem;
    const std::string said = nb::cast<std::string>(problem.value().attr("__str__")());
    refuse(errc::invalid_argument, std::string(name) + " cannot be exported: " + said.substr(0, said.find('\n')));
  }
  std::optional<nb::dlpack::dtype> type;
  nb::handle source = object;
  const auto import = [&] {
    if (how == access::write) return import_array(source, writable_);
    return import_array(source, imported_);
  };
  bool imported = import();
  if (!imported && (viewed_ = view_of_bits(object, type)).is_valid()) {
    source = viewed_;
    imported = import();
  }
  if (!imported) {
    nb::ndarray<nb::ro> readable;
    if (how == access::write && import_array(source, readable)) {
      refuse(errc::invalid_argument, std::string(name) + " is read-only; the call writes to it");
    }
    const std::string type_name = nb::cast<std::string>(nb::handle(Py_TYPE(object.ptr())).attr("__name__"));
    throw nb::type_error(
        (std::string(name) + " is a " + type_name + "; it must be an array that DLPack can export").c_str());
  }
  const auto copy = [&](const auto& array) {
    tensor_.data = const_cast<void*>(static_cast<const void*>(array.data()));
    tensor_.device = {array.device_type(), array.device_id()};
    tensor_.ndim = static_cast<std::int32_t>(array.ndim());
    tensor_.dtype = type.value_or(array.dtype());
    tensor_.shape = const_cast<std::int64_t*>(array.shape_ptr());
    tensor_.strides = const_cast<std::int64_t*>(array.stride_ptr());
  };
  // JAX computes in streams of its own, which nobody else can wait for.
  if (kind.from == framework::jax) (void)object.attr("block_until_ready")();
  if (how == access::write) {
    copy(writable_);
  } else {
    copy(imported_);
  }
}

std::int64_t array_ref::stride(std::int32_t i) const noexcept {
  if (tensor_.strides != nullptr) return tensor_.strides[i];
  std::int64_t stride = 1;
  for (std::int32_t axis = ndim() - 1; axis > i; --axis) stride *= shape(axis);
  return stride;
}

dtype array_ref::element() const {
  const nb::dlpack::dtype type = tensor_.dtype;
  if (type.lanes == 1 && type.code == code_float && type.bits == 32) return dtype::f32;
  if (type.lanes == 1 && type.bits == 16) {
    if (type.code == code_float) return dtype::f16;
    if (type.code == code_bfloat || type.code == code_uint) return dtype::bf16;
  }
  refuse(errc::invalid_argument, std::string(name_) + " has elements of type code " + std::to_string(int{type.code}) +
                                     " and " + std::to_string(int{type.bits}) +
                                     " bits; it takes float32, float16 and bfloat16");
}

device array_ref::where() const {
  if (tensor_.device.device_type == nb::device::cpu::value) return {};
  if (tensor_.device.device_type == nb::device::cuda::value) return {device_type::cuda, tensor_.device.device_id};
  refuse(errc::invalid_argument, std::string(name_) + " is on a device of DLPack's type " +
                                     std::to_string(tensor_.device.device_type) + "; it must be the CPU or CUDA");
}

void array_ref::require_on(const device& where) const {
  const bool on_cuda = tensor_.device.device_type == nb::device::cuda::value;
  const bool is_there = where.type == device_type::cuda ? on_cuda && tensor_.device.device_id == where.index
                                                        : tensor_.device.device_type == nb::device::cpu::value;
  if (!is_there) refuse(errc::invalid_argument, std::string(name_) + " is not on the device " + to_string(where));
}

void array_ref::require_ndim(std::int32_t ndim, const char* axes) const {
  if (this->ndim() == ndim) return;
  refuse(errc::invalid_argument, std::string(name_) + " has the shape " + shape_text(*this) + "; it must be " + axes);
}

void array_ref::require_dense_last_axis() const {
  const std::int32_t last = ndim() - 1;
  if (shape(last) < 2 || stride(last) == 1) return;
  refuse(errc::invalid_argument, "the last dimension of " + std::string(name_) + " has the stride " +
                                     std::to_string(stride(last)) + "; its elements must be next to each other");
}

array_out::array_out(nb::handle given, const char* name, nb::handle like, const array_ref& like_array,
                     std::span<const std::int64_t> shape, bool as_float32) {
  if (!given.is_none()) {
    object_ = nb::borrow(given);
    ref_.emplace(object_, name, access::write);
    return;
  }
  const nb::dlpack::dtype type = as_float32 ? nb::dtype<float>() : like_array.type();
  const array_kind kind = array_kind_of(like);
  const exchange_api* const api = kind.api;
  if (api != nullptr && api->allocate != nullptr && api->to_object != nullptr) {
    object_ = allocate_with(*api, shape, type, like_array.place());
  } else {
    if (kind.from == framework::numpy || kind.from == framework::cupy) {
      nb::list sizes;
      for (const std::int64_t size : shape) sizes.append(size);
      static nb::handle empty;
      const bool of_numpy = kind.from == framework::numpy;
      if (of_numpy && !empty.is_valid()) empty = nb::object(nb::module_::import_("numpy").attr("empty")).release();
      const nb::object make = of_numpy ? nb::borrow(empty) : nb::module_::import_("cupy").attr("empty");
      object_ = make(nb::tuple(sizes), as_float32 ? nb::object(nb::str("float32")) : nb::object(like.attr("dtype")));
    } else if (kind.from == framework::jax) {
      // Arrays of JAX are never written: memory of our own becomes one when it is.
      where_ = like_array.where();
      std::int64_t num_bytes = type.bits / 8;
      for (const std::int64_t size : shape) num_bytes *= size;
      auto* const memory = new buffer(shared_backend(where_).memory(), static_cast<std::size_t>(num_bytes) + 1);
      const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<buffer*>(p); });
      std::array<std::size_t, 4> extents{};
      std::copy(shape.begin(), shape.end(), extents.begin());
      const bool on_cuda = where_.type == device_type::cuda;
      object_ = nb::cast(dlpack_array(memory->data(), shape.size(), extents.data(), owner, nullptr, type,
                                      on_cuda ? nb::device::cuda::value : nb::device::cpu::value, where_.index));
      importer_ = nb::module_::import_("jax.dlpack").attr("from_dlpack");
    } else {
      refuse(errc::unsupported,
             "an output like an array of " + framework_of(like) + " cannot be made; give one as out=");
    }
  }
  ref_.emplace(object_, name, access::write);
}

nb::object array_out::finish() {
  if (!importer_.is_valid()) return object_;
  // JAX has streams of its own, and is not told of ours.
  if (where_.type == device_type::cuda && shared_backend(where_).synchronize({}) != errc::ok) {
    refuse(errc::device_lost, "the device was lost");
  }
  return importer_(object_);
}

backend& shared_backend(const device& where) {
  static auto& all = *new std::map<std::pair<device_type, std::int32_t>, std::unique_ptr<backend>>;
  std::unique_ptr<backend>& one = all[{where.type, where.index}];
  if (!one) one = make_backend(where);
  return *one;
}

tensor_view to_rows(const array_ref& array, const device& where) {
  array.require_ndim(3, "[tokens, heads, head_dim]");
  array.require_on(where);
  array.require_dense_last_axis();
  return {array.data(),
          array.element(),
          array.shape(0),
          static_cast<std::int32_t>(array.shape(1)),
          static_cast<std::int32_t>(array.shape(2)),
          array.stride(0),
          array.stride(1)};
}

float* to_lse(const array_ref& array, std::int64_t num_tokens, std::int32_t num_heads, const device& where) {
  array.require_on(where);
  const bool fits = array.ndim() == 2 && array.type() == nb::dtype<float>() && array.shape(0) == num_tokens &&
                    array.shape(1) == num_heads && (num_heads < 2 || array.stride(1) == 1) &&
                    (num_tokens < 2 || array.stride(0) == num_heads);
  if (!fits) refuse(errc::invalid_argument, std::string(array.name()) + " must be dense float32 [tokens, heads]");
  return static_cast<float*>(array.data());
}

const float* to_head_values(nb::handle object, const char* name, std::int32_t num_heads, const device& where) {
  if (object.is_none()) return nullptr;
  const array_ref array(object, name);
  array.require_on(where);
  const bool fits = array.ndim() == 1 && array.type() == nb::dtype<float>() && array.shape(0) == num_heads &&
                    (num_heads < 2 || array.stride(0) == 1);
  if (!fits) refuse(errc::invalid_argument, std::string(name) + " must be dense float32 [heads]");
  return static_cast<const float*>(array.data());
}

integers to_integers(nb::handle object, const char* name, std::int32_t ndim, backend& where) {
  integers read;
  const auto narrow = [&](std::int64_t value) {
    if (value < INT32_MIN || value > INT32_MAX) {
      refuse(errc::out_of_range, std::string(name) + " has the value " + std::to_string(value) + "; they have 32 bits");
    }
    read.values.push_back(static_cast<std::int32_t>(value));
  };
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    const auto append = [&](nb::handle row) {
      std::int64_t count = 0;
      for (const nb::handle value : row) narrow(nb::cast<std::int64_t>(value)), ++count;
      return count;
    };
    if (ndim == 1) {
      read.num_columns = append(object);
      return read;
    }
    read.num_rows = 0;
    for (const nb::handle row : object) {
      const std::int64_t count = append(row);
      if (read.num_rows++ > 0 && count != read.num_columns) {
        refuse(errc::invalid_argument, std::string(name) + " has rows of different lengths; pad the shorter ones");
      }
      read.num_columns = count;
    }
    return read;
  }
  const array_ref array(object, name);
  array.require_ndim(ndim, ndim == 1 ? "[sequences]" : "[sequences, blocks]");
  const nb::dlpack::dtype type = array.type();
  if (type.code != code_int || type.lanes != 1 || (type.bits != 32 && type.bits != 64)) {
    refuse(errc::invalid_argument, std::string(name) + " must have elements of type int32 or int64");
  }
  const std::int64_t num_rows = ndim == 1 ? 1 : array.shape(0);
  const std::int64_t row_stride = ndim == 1 ? 0 : array.stride(0);
  read.num_rows = num_rows;
  read.num_columns = array.shape(ndim - 1);
  read.values.reserve(static_cast<std::size_t>(num_rows * read.num_columns));
  const void* elements = array.data();
  std::vector<std::byte> downloaded;
  if (array.where().type != device_type::cpu && num_rows > 0 && read.num_columns > 0) {
    array.require_on(where.where());
    if (row_stride < 0 || array.stride(ndim - 1) < 0) {
      refuse(errc::invalid_argument, std::string(name) + " runs backwards through its memory; give a copy of it");
    }
    const std::int64_t num_elements = 1 + (num_rows - 1) * row_stride + (read.num_columns - 1) * array.stride(ndim - 1);
    downloaded.resize(static_cast<std::size_t>(num_elements) * (type.bits / 8));
    if (const errc code = where.download(downloaded.data(), array.data(), downloaded.size(), {}); code != errc::ok) {
      refuse(code, std::string(name) + " cannot be downloaded: " + std::string(to_string(code)));
    }
    elements = downloaded.data();
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t i = 0; i < read.num_columns; ++i) {
      const std::int64_t at = row * row_stride + i * array.stride(ndim - 1);
      if (type.bits == 32) {
        read.values.push_back(static_cast<const std::int32_t*>(elements)[at]);
      } else {
        narrow(static_cast<const std::int64_t*>(elements)[at]);
      }
    }
  }
  return read;
}

}  // namespace bifolio_python
