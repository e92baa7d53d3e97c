# CPU kernels: every source is compiled once per instruction set into objects of its own. Only these objects carry
# -m flags; src/cpu/isa.cpp chooses one of their tables at run time.
#
# The objects always build -O3 -DNDEBUG (under sanitizers -O1): at -O0 weak inline functions of a wide ISA could replace the narrow ones at link
# time. -ffp-contract=off: fused multiply-adds are written where they are meant, so that two instances of one template
# round alike. -fno-exceptions: kernels throw nothing, and the weak reference to the unwinder goes with it.

# BIFOLIO_ISAS says for which instruction sets of this architecture: `all`, `native` (those that the machine of the
# build can run, on Linux; all elsewhere) or a list of names. What is left out is as if the machine did not have it.
# BIFOLIO_BUILT_ISAS is what came of it.

set(BIFOLIO_ISAS all CACHE STRING "Instruction sets of the CPU kernels: all, native, or a list of names")

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" _bifolio_processor)
if(_bifolio_processor MATCHES "^(x86_64|amd64)$")
  set(_bifolio_isas baseline avx2 avx512 avx512_bf16 amx amx_fp16)
elseif(_bifolio_processor MATCHES "^(aarch64|arm64)$")
  set(_bifolio_isas neon)
else()
  set(_bifolio_isas baseline)
endif()

# What /proc/cpuinfo calls the features that src/cpu/isa.cpp asks the processor for. It does not name AMX-FP16.
set(_bifolio_cpuinfo_avx2 avx2 fma f16c bmi1 bmi2)
set(_bifolio_cpuinfo_avx512 ${_bifolio_cpuinfo_avx2} avx512f avx512bw avx512dq avx512vl)
set(_bifolio_cpuinfo_avx512_bf16 ${_bifolio_cpuinfo_avx512} avx512_bf16)
set(_bifolio_cpuinfo_amx ${_bifolio_cpuinfo_avx512_bf16} amx_tile amx_bf16)
set(_bifolio_cpuinfo_amx_fp16 ${_bifolio_cpuinfo_amx})

if(BIFOLIO_ISAS STREQUAL "all")
  set(BIFOLIO_BUILT_ISAS ${_bifolio_isas})
elseif(BIFOLIO_ISAS STREQUAL "native")
  set(BIFOLIO_BUILT_ISAS ${_bifolio_isas})
  if(EXISTS /proc/cpuinfo AND NOT CMAKE_CROSSCOMPILING)
    file(STRINGS /proc/cpuinfo _bifolio_cpu_flags REGEX "^flags" LIMIT_COUNT 1)
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

set(BIFOLIO_ISA_FLAGS_baseline "")
if(_bifolio_processor MATCHES "^(x86_64|amd64)$")
  set(BIFOLIO_ISA_FLAGS_baseline -msse2 -mno-sse3)
endif()
set(BIFOLIO_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(BIFOLIO_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi -mbmi2
                             -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 and 13 warn about their own AVX-512 intrinsics, which start from an undefined register on purpose (GCC bug
  # 105593).
  list(APPEND BIFOLIO_ISA_FLAGS_avx512 -Wno-maybe-uninitialized)
endif()
set(BIFOLIO_ISA_FLAGS_avx512_bf16 ${BIFOLIO_ISA_FLAGS_avx512} -mavx512bf16)
set(BIFOLIO_ISA_FLAGS_amx ${BIFOLIO_ISA_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
set(BIFOLIO_ISA_FLAGS_amx_fp16 ${BIFOLIO_ISA_FLAGS_amx}) # its one instruction more is written in bytes
set(BIFOLIO_ISA_FLAGS_neon "")

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

# bifolio_add_isa_kernels(<library> <source>...): adds the objects of all ISAs to <library>. Each object sees
# BIFOLIO_ISA (the name, used as a namespace) and BIFOLIO_ISA_<NAME>=1.
function(bifolio_add_isa_kernels library)
  foreach(isa IN LISTS BIFOLIO_BUILT_ISAS)
    set(objects bifolio_kernels_${isa})
    add_library(${objects} OBJECT ${ARGN})
    bifolio_compile_options(${objects})
    string(TOUPPER ${isa} upper)
    target_compile_definitions(${objects} PRIVATE BIFOLIO_ISA=${isa} BIFOLIO_ISA_${upper}=1 NDEBUG
                                                  BIFOLIO_STATIC_DEFINE)
    target_compile_options(
      ${objects} PRIVATE ${BIFOLIO_KERNEL_OPTIMIZATION} -fno-exceptions -ffp-contract=off -fno-math-errno
                         ${BIFOLIO_ISA_FLAGS_${isa}} ${BIFOLIO_KERNEL_SANITIZER_FLAGS})
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include
                                                  ${PROJECT_SOURCE_DIR}/src)
    target_include_directories(${objects} SYSTEM PRIVATE ${BIFOLIO_XSIMD_INCLUDE_DIR})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${objects}>)
    target_compile_definitions(${library} PRIVATE BIFOLIO_HAS_ISA_${upper}=1)
  endforeach()
endfunction()
