# Looks for the CUDA compiler. BIFOLIO_CUDA=AUTO builds bifolio::cuda where nvcc 12 or newer is found, ON insists, OFF
# does not look. Sets BIFOLIO_HAS_CUDA.
#
# BIFOLIO_CUDA_ARCHITECTURES lists compute capabilities: 80, 86, 89, 90 or 90a, in CMake's notation (90-real leaves the
# PTX out). One is the default, because each adds its share to the build time. 90 and 90a build the same objects: what
# uses instructions of 90a alone is compiled for 90a in both.

set(_bifolio_cuda_default AUTO)
if(NOT PROJECT_IS_TOP_LEVEL)  # a part of another project does not enable a language that nobody asked for
  set(_bifolio_cuda_default OFF)
endif()
set(BIFOLIO_CUDA ${_bifolio_cuda_default} CACHE STRING "CUDA backend: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE BIFOLIO_CUDA PROPERTY STRINGS AUTO ON OFF)
set(BIFOLIO_CUDA_ARCHITECTURES 90 CACHE STRING "Compute capabilities to build for: 80, 86, 89, 90, 90a")

set(BIFOLIO_HAS_CUDA OFF)
set(_bifolio_cuda_problem "")
string(TOUPPER "${BIFOLIO_CUDA}" _bifolio_cuda_wish)
if(_bifolio_cuda_wish MATCHES "^(ON|1|TRUE|YES)$")
  set(_bifolio_cuda_wish ON)
elseif(_bifolio_cuda_wish MATCHES "^(OFF|0|FALSE|NO|)$")
  set(_bifolio_cuda_wish OFF)
elseif(NOT _bifolio_cuda_wish STREQUAL "AUTO")
  message(FATAL_ERROR "BIFOLIO_CUDA is '${BIFOLIO_CUDA}'; it must be AUTO, ON or OFF")
endif()

if(NOT _bifolio_cuda_wish STREQUAL "OFF")
  if(CMAKE_CROSSCOMPILING)
    set(_bifolio_cuda_problem "the CUDA backend is not cross-compiled")
  elseif(NOT CMAKE_CUDA_COMPILER)
    if(DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
    else()
      find_program(BIFOLIO_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda /opt/cuda
                   PATH_SUFFIXES bin)
      mark_as_advanced(BIFOLIO_NVCC)
      if(BIFOLIO_NVCC)
        set(CMAKE_CUDA_COMPILER "${BIFOLIO_NVCC}")
      else()
        set(_bifolio_cuda_problem "no nvcc was found (PATH, CUDA_PATH, CUDACXX)")
      endif()
    endif()
  endif()
  if(NOT _bifolio_cuda_problem)
    # Asked before enable_language, whose failure could not be caught.
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE _bifolio_nvcc_text
                    ERROR_VARIABLE _bifolio_nvcc_text RESULT_VARIABLE _bifolio_nvcc_status)
    if(NOT _bifolio_nvcc_status EQUAL 0 OR NOT _bifolio_nvcc_text MATCHES "release ([0-9]+\\.[0-9]+)")
      set(_bifolio_cuda_problem "'${CMAKE_CUDA_COMPILER} --version' does not answer like nvcc")
    elseif(CMAKE_MATCH_1 VERSION_LESS 12.0)
      set(_bifolio_cuda_problem "nvcc is ${CMAKE_MATCH_1}; 12.0 or newer is needed")
    endif()
  endif()
  if(NOT _bifolio_cuda_problem)
    foreach(architecture IN LISTS BIFOLIO_CUDA_ARCHITECTURES)
      if(NOT architecture MATCHES "^(80|86|89|90|90a)(-real|-virtual)?$")
        message(FATAL_ERROR "BIFOLIO_CUDA_ARCHITECTURES holds '${architecture}'; it takes 80, 86, 89, 90 and 90a")
      endif()
    endforeach()
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${BIFOLIO_CUDA_ARCHITECTURES})
    endif()
    # nvcc takes the C++ compiler of this build as its host compiler, unless it cannot be one.
    if(NOT CMAKE_CUDA_HOST_COMPILER AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
    endif()
    if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
    endif()
    enable_language(CUDA)
    # CUDA Toolkit: headers and the static runtime of the CUDA backend.
    find_package(CUDAToolkit 12.0 REQUIRED)
    set(BIFOLIO_HAS_CUDA ON)
  elseif(_bifolio_cuda_wish STREQUAL "ON")
    message(FATAL_ERROR "BIFOLIO_CUDA is ON, but ${_bifolio_cuda_problem}. Install the CUDA Toolkit 12 or newer, point "
                        "CUDACXX to nvcc, or set BIFOLIO_CUDA=OFF")
  endif()
endif()
if(BIFOLIO_HAS_CUDA)
  message(STATUS "CUDA backend: on, for ${BIFOLIO_CUDA_ARCHITECTURES}")
elseif(_bifolio_cuda_wish STREQUAL "AUTO")
  message(STATUS "CUDA backend: off, because ${_bifolio_cuda_problem}")
endif()

# bifolio_cuda_compile_options(<target>): language level, visibility, no relocatable device code, warnings of the host
# part. Device code sees dtype.hpp's constexpr functions.
function(bifolio_cuda_compile_options target)
  bifolio_compile_options(${target})
  set_target_properties(${target} PROPERTIES CUDA_VISIBILITY_PRESET hidden CUDA_SEPARABLE_COMPILATION OFF
                                             CUDA_RUNTIME_LIBRARY Static
                                             CUDA_ARCHITECTURES "${BIFOLIO_CUDA_ARCHITECTURES}")
  # The language level as a flag: CMake 3.25 does not know that nvcc has C++20.
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra,-Werror=switch>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:RelWithDebInfo>>:-lineinfo>)
  # Kernels take a quarter of the bytes. Drivers read them from 550 (CUDA 12.4) on.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  if(BIFOLIO_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
  endif()
endfunction()
