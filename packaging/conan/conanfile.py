# SPDX-License-Identifier: Apache-2.0
"""Conan 2 recipe: builds the checkout that it lies in."""
import os

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Bifolio(ConanFile):
    name = "bifolio"
    version = "0.2.0"
    license = "Apache-2.0"
    description = "Paged KV cache and attention for your own inference engine"
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False], "tbb": [True, False], "isas": ["ANY"]}
    default_options = {"shared": False, "fPIC": True, "tbb": True, "isas": "all"}

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        for pattern in ("CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def requirements(self):
        self.requires("xsimd/[>=8.1]")
        if self.options.tbb:
            self.requires("onetbb/[>=2021]", transitive_headers=False)

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for name in ("TESTS", "EXAMPLES", "TOOLS", "BENCH"):
            toolchain.cache_variables[f"BIFOLIO_BUILD_{name}"] = False
        toolchain.cache_variables["BIFOLIO_CUDA"] = "OFF"
        toolchain.cache_variables["BIFOLIO_TBB"] = bool(self.options.tbb)
        toolchain.cache_variables["BIFOLIO_ISAS"] = str(self.options.isas)
        toolchain.cache_variables["BIFOLIO_XSIMD_INCLUDE_DIR"] = self.dependencies["xsimd"].cpp_info.includedirs[0]
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # The package's own CMake files know more than what could be said here.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append(os.path.join("lib", "cmake", "bifolio"))
        self.cpp_info.libs = ["bifolio_core"]
