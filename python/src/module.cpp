// SPDX-License-Identifier: Apache-2.0
/// The part of the Python package that is C++: caches, steps, schedulers and attention over arrays of any framework
/// that speaks DLPack. The modules of python/bifolio are what people see.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cache.hpp"

using namespace bifolio;

NB_MODULE(_core, module) {
  using namespace bifolio_python;
  module.attr("version") = BIFOLIO_VERSION;

  // Exceptions of the package: an object of its class, made from what the library said.
  static PyObject* refused = nullptr;
  static PyObject* lacking = nullptr;
  module.def(
      "set_exceptions",
      [](nb::object error_class, nb::object blocks_class) {
        refused = error_class.release().ptr();
        lacking = blocks_class.release().ptr();
      },
      nb::arg("error_class"), nb::arg("blocks_class"));
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const error& problem) {
      const nb::object made = nb::handle(refused)(std::string(to_string(problem.code())), std::string(problem.what()));
      PyErr_SetObject(refused, made.ptr());
    } catch (const out_of_blocks& problem) {
      const nb::object made = nb::handle(lacking)(problem.status == alloc_status::later);
      PyErr_SetObject(lacking, made.ptr());
    }
  });

  define_cache(module);
  define_scheduler(module);
  define_attention(module);
  define_replay(module);
}
