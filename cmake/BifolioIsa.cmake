# CPU kernels: every source is compiled once per instruction set into objects of its own. Only these objects carry
# -m flags; src/cpu/isa.cpp chooses one of their tables at run time.
#
# The objects always build -O3 -DNDEBUG (under sanitizers -O1): at -O0 weak inline functions of a wide ISA could replace the narrow ones at link
# time. -ffp-contract=off: fused multiply-adds are written where they are meant, so that two instances of one template
# round alike. -fno-exceptions: kernels throw nothing, and the weak reference to the unwinder goes with it.

# BIFOLIO_ISAS says for which instruction sets of this architecture: `all`, `native` (those that the machine of the
# build can run, on Linux; all elsewhere) or a list of names. An ISA that is left out is as if the machine did not have it.
# BIFOLIO_BUILT_ISAS is the result.

set(BIFOLIO_ISAS all CACHE STRING "Instruction sets of the CPU kernels: all, native, or a list of names")

# The rows of cpu_isas.hpp: _bifolio_isas holds those of this processor, _bifolio_extended_<isa> the row that one extends.
set(_bifolio_isa_rows "${PROJECT_SOURCE_DIR}/include/bifolio/detail/cpu_isas.hpp")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_bifolio_isa_rows}")
file(READ "${_bifolio_isa_rows}" _bifolio_isa_rows)
string(REGEX MATCHALL "ISA\\([a-z0-9_]+, *[a-z0-9_]+, *[a-z0-9_]+" _bifolio_isa_rows "${_bifolio_isa_rows}")
string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" _bifolio_processor)
string(REGEX REPLACE "^amd64$" "x86_64" _bifolio_processor "${_bifolio_processor}")
string(REGEX REPLACE "^arm64$" "aarch64" _bifolio_processor "${_bifolio_processor}")
set(_bifolio_known_isas)
set(_bifolio_isas)
foreach(row IN LISTS _bifolio_isa_rows)
  string(REGEX MATCH "ISA\\(([a-z0-9_]+), *([a-z0-9_]+), *([a-z0-9_]+)" row "${row}")
  list(APPEND _bifolio_known_isas ${CMAKE_MATCH_1})
  set(_bifolio_extended_${CMAKE_MATCH_1} ${CMAKE_MATCH_3})
  if(CMAKE_MATCH_2 STREQUAL _bifolio_processor)
    list(APPEND _bifolio_isas ${CMAKE_MATCH_1})
  endif()
endforeach()
if(NOT _bifolio_isas)
  list(GET _bifolio_known_isas 0 _bifolio_isas)
endif()

# _bifolio_isa(<isa> [<flag>...] [CPUINFO <feature>...]): the compiler flags of a row, and what /proc/cpuinfo calls the
# features that its test asks the processor for; both in addition to those of the row that it extends.
macro(_bifolio_isa isa)
  cmake_parse_arguments(_bifolio "" "" "CPUINFO" ${ARGN})
  set(BIFOLIO_ISA_FLAGS_${isa} ${BIFOLIO_ISA_FLAGS_${_bifolio_extended_${isa}}} ${_bifolio_UNPARSED_ARGUMENTS})
  set(_bifolio_cpuinfo_${isa} ${_bifolio_cpuinfo_${_bifolio_extended_${isa}}} ${_bifolio_CPUINFO})
  list(REMOVE_ITEM _bifolio_isas_without_flags ${isa})
endmacro()

set(_bifolio_isas_without_flags ${_bifolio_known_isas})
set(_bifolio_baseline_flags)
if(_bifolio_processor STREQUAL "x86_64")
  set(_bifolio_baseline_flags -msse2 -mno-sse3)
endif()
set(_bifolio_avx512_warnings)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 and 13 warn about their own AVX-512 intrinsics, which start from an undefined register on purpose (GCC bug
  # 105593).
  set(_bifolio_avx512_warnings -Wno-maybe-uninitialized)
endif()
_bifolio_isa(baseline ${_bifolio_baseline_flags})
_bifolio_isa(avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2 CPUINFO avx2 fma f16c bmi1 bmi2)
_bifolio_isa(avx2_vnni -mavxvnni CPUINFO avx_vnni)
_bifolio_isa(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512 ${_bifolio_avx512_warnings}
             CPUINFO avx512f avx512bw avx512dq avx512vl)
_bifolio_isa(avx512_bf16 -mavx512bf16 -mavx512vbmi -mavx512vnni CPUINFO avx512_bf16 avx512vbmi avx512_vnni)
_bifolio_isa(amx -mamx-tile -mamx-bf16 CPUINFO amx_tile amx_bf16)
_bifolio_isa(amx_fp16 -DBIFOLIO_F16_TILES=1) # its instruction is written in bytes; /proc/cpuinfo does not name it
_bifolio_isa(neon)
_bifolio_isa(neon_bf16 -march=armv8.2-a+bf16+i8mm CPUINFO bf16 i8mm)
_bifolio_isa(sve256 -march=armv8.2-a+sve+bf16+i8mm -msve-vector-bits=256 CPUINFO sve svebf16 svei8mm)
if(_bifolio_isas_without_flags)
  message(FATAL_ERROR "BifolioIsa.cmake has no line of compiler flags for: ${_bifolio_isas_without_flags}")
endif()

if(BIFOLIO_ISAS STREQUAL "all")
  set(BIFOLIO_BUILT_ISAS ${_bifolio_isas})
elseif(BIFOLIO_ISAS STREQUAL "native")
  set(BIFOLIO_BUILT_ISAS ${_bifolio_isas})
  if(EXISTS /proc/cpuinfo AND NOT CMAKE_CROSSCOMPILING)
    file(STRINGS /proc/cpuinfo _bifolio_cpu_flags REGEX "^(flags|Features)" LIMIT_COUNT 1)
    string(REGEX MATCHALL "[a-z0-9_]+" _bifolio_cpu_flags "${_bifolio_cpu_flags}")
    foreach(isa IN LISTS _bifolio_isas)
      foreach(flag IN LISTS _bifolio_cpuinfo_${isa})
        if(NOT flag IN_LIST _bifolio_cpu_flags)
          list(REMOVE_ITEM BIFOLIO_BUILT_ISAS ${isa})
        endif()
      endforeach()
    endforeach()
  endif()
else()
  foreach(isa IN LISTS BIFOLIO_ISAS)
    if(NOT isa IN_LIST _bifolio_isas)
      list(JOIN _bifolio_isas ", " _bifolio_isas)
      message(FATAL_ERROR "BIFOLIO_ISAS holds '${isa}'; it takes all, native, or names out of: ${_bifolio_isas}")
    endif()
  endforeach()
  set(BIFOLIO_BUILT_ISAS ${BIFOLIO_ISAS})
  if(NOT BIFOLIO_BUILT_ISAS)
    message(FATAL_ERROR "BIFOLIO_ISAS is empty; it takes all, native, or names")
  endif()
endif()
if(NOT BIFOLIO_ISAS STREQUAL "all")
  list(JOIN BIFOLIO_BUILT_ISAS ", " _bifolio_isas)
  message(STATUS "CPU kernels: ${_bifolio_isas}")
endif()

# Sanitizers: -O1, with which one AVX-512 attention object compiles in a third of the time and does the same loads and
# stores.
set(BIFOLIO_KERNEL_OPTIMIZATION -O3)
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
  set(BIFOLIO_KERNEL_OPTIMIZATION ${BIFOLIO_O1})
endif()
set(BIFOLIO_KERNEL_SANITIZER_FLAGS ${BIFOLIO_NO_POINTER_CHECKS})
# GCC's frames for finding uses after return are aligned less than it assumes of locals that are or hold vectors: aligned
# 64-byte stores to them fault. GCC 13 looks for such uses unless it is told otherwise, GCC 12 on demand.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[a-z,]*address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND BIFOLIO_KERNEL_SANITIZER_FLAGS "SHELL:--param asan-use-after-return=0")
endif()

# bifolio_add_isa_kernels(<library> <source>...): adds the objects of all built ISAs to <library>, with BIFOLIO_ISA
# defined as the name, which is their namespace.
function(bifolio_add_isa_kernels library)
  foreach(isa IN LISTS BIFOLIO_BUILT_ISAS)
    set(objects bifolio_kernels_${isa})
    add_library(${objects} OBJECT ${ARGN})
    bifolio_compile_options(${objects})
    target_compile_definitions(${objects} PRIVATE BIFOLIO_ISA=${isa} NDEBUG BIFOLIO_STATIC_DEFINE)
    target_compile_options(
      ${objects} PRIVATE ${BIFOLIO_KERNEL_OPTIMIZATION} -fno-exceptions -ffp-contract=off -fno-math-errno
                         ${BIFOLIO_ISA_FLAGS_${isa}} ${BIFOLIO_KERNEL_SANITIZER_FLAGS})
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include
                                                  ${PROJECT_SOURCE_DIR}/src)
    target_include_directories(${objects} SYSTEM PRIVATE ${BIFOLIO_XSIMD_INCLUDE_DIR})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()

# BIFOLIO_ISA_DEFINITIONS: BIFOLIO_HAS_ISA_<isa>=1 or 0 for each row, for the file that chooses.
set(BIFOLIO_ISA_DEFINITIONS)
foreach(isa IN LISTS _bifolio_known_isas)
  if(isa IN_LIST BIFOLIO_BUILT_ISAS)
    list(APPEND BIFOLIO_ISA_DEFINITIONS BIFOLIO_HAS_ISA_${isa}=1)
  else()
    list(APPEND BIFOLIO_ISA_DEFINITIONS BIFOLIO_HAS_ISA_${isa}=0)
  endif()
endforeach()
