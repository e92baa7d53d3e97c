# Language level, warnings and symbol visibility, as functions that a target calls. Nothing directory-wide.

# -O1 as this project uses it. GCC 12 forgets a mask at -O1 when it replaces temporaries: bit_cast<float>(bits & 0xffff0000),
# rounded to bfloat16 in the same function, came out as if nothing had been masked. -O2 and -O3 are right.
set(BIFOLIO_O1 -O1)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND BIFOLIO_O1 -fno-tree-ter)
endif()

function(bifolio_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
                                             CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wsign-conversion;-Wpedantic>)
  # A switch over an enumeration handles every enumerator, so that a new dtype or layout is an error wherever it is not
  # handled.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror=switch>)
  if(BIFOLIO_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  if(CMAKE_CXX_FLAGS_${type} MATCHES "-O1")
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${BIFOLIO_O1}>")
  endif()
endfunction()

# Under -fsanitize=undefined the checks of every pointer make GCC compile one attention kernel for five minutes instead
# of one, and one test for twenty seconds instead of eleven. Kernels and tests go without them; AddressSanitizer, which
# sees what they would find, stays on.
set(BIFOLIO_NO_POINTER_CHECKS "")
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[a-z,]*undefined")
  set(BIFOLIO_NO_POINTER_CHECKS -fno-sanitize=null,alignment,object-size,pointer-overflow)
endif()
