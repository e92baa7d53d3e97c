# An overlay port: builds the checkout that it lies in.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(cuda OFF)
if("cuda" IN_LIST FEATURES)
  set(cuda ON)
endif()
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DBIFOLIO_BUILD_TESTS=OFF -DBIFOLIO_BUILD_EXAMPLES=OFF -DBIFOLIO_BUILD_TOOLS=OFF -DBIFOLIO_BUILD_BENCH=OFF
          -DBIFOLIO_CUDA=${cuda})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME bifolio CONFIG_PATH lib/cmake/bifolio)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
