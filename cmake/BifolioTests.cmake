# How tests are made and registered.
#
#   bifolio_add_test(NAME <name> SOURCES <file>... [LINK <target>...] [LABELS <label>...] [DEFINES <NAME=value>...]
#                    [ARGUMENTS <arg>...] [ENVIRONMENT <NAME=value>...] [TIMEOUT <seconds>] [INCLUDE_INTERNAL]
#                    [OPTIMIZE] [RUN_SERIAL] [RECORDS_REACH])
#
# makes a doctest executable from the sources (target bifolio_test_<name>) and one ctest test <name>.
#   INCLUDE_INTERNAL  the sources include headers of src/ ("common/checked.hpp"). Such a test uses symbols that a shared
#                     library hides and is therefore left out when BUILD_SHARED_LIBS is on.
#   OPTIMIZE          the test's own code (an oracle, a long random mix) takes the time. Other sources of tests compile
#                     with -O1 in a release build, in two thirds of the time; libraries of tests as the build says, and
#                     what is emulated as well.
#   LABELS            default "quick". What `tools/test` selects by:
#                       quick    seconds; also run under ASan+UBSan
#                       long     up to a minute or two in a release build; left out under sanitizers
#                       longest  more of the same; only where it is asked for (tools/test --long)
#                       threads  what TSan is for; give it in addition to quick or long
#                       emulated also runs on 64-bit Arm under qemu, some twenty times slower; in addition to quick
#                       example  runs a program of examples/
#                       frameworks  compares with packages that need not be installed (tools/test --frameworks)
#                       structure, install  the tree and the package, not the code; once, in release
#   TIMEOUT           default 300; four times that under sanitizers and emulation
#   RECORDS_REACH     the test holds results of all backends against a naive model: the kernels that it reaches are
#                     recorded for the test kernel_reach (tests/reach)
#   RUN_SERIAL        for tests that use all cores or much memory
#
# Skipping: exit code 77 is "skipped" everywhere. A doctest case calls bifolio::test::skip("why") of support/skip.hpp;
# the executable then ends with 77 unless something failed, and the reason is printed. Put cases that may be skipped into
# an executable of their own, so that it counts as skipped only when its subject was.
#
# bifolio_add_script_test(NAME <name> COMMAND <command>... [TARGETS <target>...] [LABELS ...] [ENVIRONMENT ...]
#                         [TIMEOUT ...] [RUN_SERIAL])
# registers a command under the same rules; TARGETS are the executables that it runs.

# doctest: the test framework. Header only; taken by package or by path.
find_package(doctest QUIET)
if(NOT doctest_FOUND)
  find_path(BIFOLIO_DOCTEST_INCLUDE_DIR doctest/doctest.h REQUIRED)
  add_library(bifolio_doctest INTERFACE)
  target_include_directories(bifolio_doctest SYSTEM INTERFACE ${BIFOLIO_DOCTEST_INCLUDE_DIR})
  add_library(doctest::doctest ALIAS bifolio_doctest)
endif()

set(BIFOLIO_SHARED_DIR "${PROJECT_SOURCE_DIR}/../shared" CACHE PATH
    "Test material outside the project (models, traces); tests that need it are skipped without it")
set(BIFOLIO_SKIP_RETURN_CODE 77)
set(BIFOLIO_REACH_DIR "${PROJECT_BINARY_DIR}/tests/reach/records")

# bifolio_quick_tests, bifolio_threads_tests, bifolio_emulated_tests: build the executables of one label alone.
add_custom_target(bifolio_quick_tests)
add_custom_target(bifolio_threads_tests)
add_custom_target(bifolio_emulated_tests)

function(_bifolio_test_properties name labels timeout environment run_serial)
  if(NOT labels)
    set(labels quick)
  endif()
  if(NOT timeout)
    set(timeout 300)
  endif()
  if(CMAKE_CROSSCOMPILING OR CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
    math(EXPR timeout "4 * ${timeout}")
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} ENVIRONMENT "${environment}"
                                          SKIP_RETURN_CODE ${BIFOLIO_SKIP_RETURN_CODE} RUN_SERIAL ${run_serial})
  if("long" IN_LIST labels OR "longest" IN_LIST labels)  # first, so that the others fill the other cores
    set_tests_properties(${name} PROPERTIES COST 1000)
  endif()
endfunction()

function(_bifolio_build_with_label labels)
  if(NOT labels)
    set(labels quick)
  endif()
  foreach(label quick threads emulated)
    if(label IN_LIST labels)
      add_dependencies(bifolio_${label}_tests ${ARGN})
    endif()
  endforeach()
endfunction()

# One object file holds doctest's implementation and main() for all tests.
function(bifolio_add_test_main)
  add_library(bifolio_test_main OBJECT ${PROJECT_SOURCE_DIR}/tests/support/main.cpp)
  bifolio_compile_options(bifolio_test_main)
  target_compile_options(bifolio_test_main PRIVATE ${BIFOLIO_NO_POINTER_CHECKS} "$<$<CONFIG:Release>:${BIFOLIO_O1}>")
  target_include_directories(bifolio_test_main PUBLIC ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(bifolio_test_main PUBLIC doctest::doctest)
  # Checks are calls, which compile faster; an exception out of one ends its test case, which then has failed.
  target_compile_definitions(bifolio_test_main PUBLIC DOCTEST_CONFIG_SUPER_FAST_ASSERTS)
endfunction()

function(bifolio_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "INCLUDE_INTERNAL;OPTIMIZE;RUN_SERIAL;RECORDS_REACH" "NAME;TIMEOUT"
                        "SOURCES;LINK;LABELS;DEFINES;ARGUMENTS;ENVIRONMENT")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_NAME OR NOT arg_SOURCES)
    message(FATAL_ERROR "bifolio_add_test(${ARGN}): NAME and SOURCES are needed; not understood: "
                        "'${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(arg_INCLUDE_INTERNAL AND BUILD_SHARED_LIBS)
    message(STATUS "Test ${arg_NAME} is left out: it uses internals, which a shared library hides")
    return()
  endif()
  set(target bifolio_test_${arg_NAME})
  add_executable(${target} ${arg_SOURCES})
  bifolio_compile_options(${target})
  target_link_libraries(${target} PRIVATE bifolio::core bifolio_test_main ${arg_LINK})
  target_compile_definitions(${target} PRIVATE BIFOLIO_SHARED_DIR="${BIFOLIO_SHARED_DIR}" ${arg_DEFINES})
  target_compile_options(${target} PRIVATE ${BIFOLIO_NO_POINTER_CHECKS})
  if(NOT arg_OPTIMIZE AND NOT CMAKE_CROSSCOMPILING)
    target_compile_options(${target} PRIVATE "$<$<CONFIG:Release>:${BIFOLIO_O1}>")
  endif()
  if(arg_INCLUDE_INTERNAL)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${target} ${arg_ARGUMENTS})
  if(arg_RECORDS_REACH)
    list(APPEND arg_ENVIRONMENT "BIFOLIO_TEST_REACH_DIR=${BIFOLIO_REACH_DIR}")
  endif()
  _bifolio_test_properties(${arg_NAME} "${arg_LABELS}" "${arg_TIMEOUT}" "${arg_ENVIRONMENT}" ${arg_RUN_SERIAL})
  if(arg_RECORDS_REACH)
    set_tests_properties(${arg_NAME} PROPERTIES FIXTURES_REQUIRED reach_folder FIXTURES_SETUP reach_records)
  endif()
  _bifolio_build_with_label("${arg_LABELS}" ${target})
endfunction()

function(bifolio_add_script_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "RUN_SERIAL" "NAME;TIMEOUT" "COMMAND;TARGETS;LABELS;ENVIRONMENT")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_NAME OR NOT arg_COMMAND)
    message(FATAL_ERROR "bifolio_add_script_test(${ARGN}): NAME and COMMAND are needed; not understood: "
                        "'${arg_UNPARSED_ARGUMENTS}'")
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${arg_COMMAND} COMMAND_EXPAND_LISTS)
  _bifolio_test_properties(${arg_NAME} "${arg_LABELS}" "${arg_TIMEOUT}" "${arg_ENVIRONMENT}" ${arg_RUN_SERIAL})
  if(arg_TARGETS)
    _bifolio_build_with_label("${arg_LABELS}" ${arg_TARGETS})
  endif()
endfunction()
