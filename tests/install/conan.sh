#!/usr/bin/env bash
# conan.sh <source dir> <work dir> [conan]
#
# Runs the Conan recipe: export, build (one instruction set), package, and its test_package. Conan's own recipes of xsimd
# and oneTBB come from the network, which a test does not use: stand-ins with the same names hand on those of the system.
# Exit code 77: there is no conan, "skipped".
set -euo pipefail
source=$1 work=$2 conan=${3-${BIFOLIO_CONAN-conan}}
command -v "$conan" >/dev/null || { echo "SKIPPED: there is no conan (pip install conan, or BIFOLIO_CONAN names it)"; exit 77; }
rm -rf "$work" && mkdir -p "$work/xsimd" "$work/onetbb"
export CONAN_HOME=$work/home
"$conan" profile detect
stand_in() {  # <name> <version> <CMake package> <target> <system library or nothing>
  cat >"$work/$1/conanfile.py" <<PY
from conan import ConanFile


class StandIn(ConanFile):
    name, version, settings = "$1", "$2", ("os", "arch", "compiler", "build_type")

    def package_info(self):
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
        self.cpp_info.includedirs = ["/usr/include"] if "$1" == "xsimd" else []
        self.cpp_info.system_libs = "$5".split()
        self.cpp_info.set_property("cmake_file_name", "$3")
        self.cpp_info.set_property("cmake_target_name", "$4")
PY
  "$conan" create "$work/$1" -nr
}
stand_in xsimd 13.0.0 xsimd xsimd ''
stand_in onetbb 2021.8.0 TBB TBB::tbb tbb
"$conan" create "$source/packaging/conan" -nr -o "bifolio/*:isas=baseline" -s compiler.cppstd=20 2>&1 | tee "$work/log"
grep -q "^bifolio [0-9.]*" "$work/log" || { echo "the consumer did not say which bifolio it has"; exit 1; }
