# Outside packages of the library itself, each with its reason. Tests, bench and examples look for theirs next to their
# own targets.

# xsimd: portable vectors of the CPU kernels. Header only; its CMake target of 8.1 drags -lxtl, so the include directory
# is taken alone.
find_path(BIFOLIO_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp REQUIRED)
if(CMAKE_CROSSCOMPILING AND BIFOLIO_XSIMD_INCLUDE_DIR STREQUAL "/usr/include")
  # The host's other headers must not come along.
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/xsimd)
  file(CREATE_LINK ${BIFOLIO_XSIMD_INCLUDE_DIR}/xsimd ${PROJECT_BINARY_DIR}/xsimd/xsimd SYMBOLIC)
  set(BIFOLIO_XSIMD_INCLUDE_DIR ${PROJECT_BINARY_DIR}/xsimd CACHE PATH "xsimd alone" FORCE)
endif()

# OpenMP: an executor for programs that live on it.
if(BIFOLIO_OPENMP)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
endif()

# oneTBB: thread-safe request intake of the scheduler, and an executor for programs that live on TBB.
if(BIFOLIO_TBB)
  find_package(TBB REQUIRED)
endif()

find_package(Threads REQUIRED)
