# Installed package: find_package(bifolio) gives bifolio::core, bifolio::cuda where it was built, and bifolio::bifolio; pkg-config gives "bifolio".
include(CMakePackageConfigHelpers)

set(BIFOLIO_CONFIG_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/bifolio")

set(BIFOLIO_INSTALLED bifolio_core bifolio)
if(BIFOLIO_HAS_CUDA)
  list(APPEND BIFOLIO_INSTALLED bifolio_cuda)
endif()
if(BIFOLIO_C)
  list(APPEND BIFOLIO_INSTALLED bifolio_c)
endif()
if(BIFOLIO_EVENTS)
  list(APPEND BIFOLIO_INSTALLED bifolio_events)
endif()
install(
  TARGETS ${BIFOLIO_INSTALLED}
  EXPORT bifolio_targets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/bifolio ${PROJECT_BINARY_DIR}/include/bifolio
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(EXPORT bifolio_targets NAMESPACE bifolio:: FILE bifolioTargets.cmake DESTINATION ${BIFOLIO_CONFIG_DIR})

# What a package has to come with.
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
# The programs, under names that say whose they are.
foreach(program trace_replay block_map)
  if(TARGET ${program})
    install(PROGRAMS $<TARGET_FILE:${program}> DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME bifolio_${program})
  endif()
endforeach()
if(TARGET bifolio_bench)
  install(TARGETS bifolio_bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# Whether the library is static, as 1 or 0, for the package file.
set(BIFOLIO_IS_STATIC 1)
if(BUILD_SHARED_LIBS)
  set(BIFOLIO_IS_STATIC 0)
endif()
set(BIFOLIO_HAS_CUDA_PACKAGE 0)
if(BIFOLIO_HAS_CUDA)
  set(BIFOLIO_HAS_CUDA_PACKAGE 1)
endif()
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/bifolioConfig.cmake.in ${PROJECT_BINARY_DIR}/cmake/bifolioConfig.cmake
  INSTALL_DESTINATION ${BIFOLIO_CONFIG_DIR} NO_SET_AND_CHECK_MACRO)
# Below 1.0 a minor version may break its callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/bifolioConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/bifolioConfig.cmake ${PROJECT_BINARY_DIR}/cmake/bifolioConfigVersion.cmake
        DESTINATION ${BIFOLIO_CONFIG_DIR})

# pkg-config. Of a static library the caller must link what it uses; of a shared one not. Paths are relative to the .pc
# file, so that the tree can be moved.
set(BIFOLIO_PC_CFLAGS "")
set(BIFOLIO_PC_LIBS "")
set(BIFOLIO_PC_REQUIRES "")
if(NOT BUILD_SHARED_LIBS)
  set(BIFOLIO_PC_CFLAGS "-DBIFOLIO_STATIC_DEFINE")
  set(BIFOLIO_PC_LIBS "-lstdc++ -lm -pthread")
  if(BIFOLIO_OPENMP)
    string(APPEND BIFOLIO_PC_LIBS " ${OpenMP_CXX_FLAGS}")
  endif()
  if(BIFOLIO_TBB)
    set(BIFOLIO_PC_REQUIRES "tbb")
  endif()
endif()
# The CUDA library comes before the core, which it uses, and registers itself through the symbol that is asked for. Its
# static archive needs the toolkit's static runtime.
set(BIFOLIO_PC_CUDA "")
if(BIFOLIO_HAS_CUDA)
  set(BIFOLIO_PC_CUDA "-Wl,--undefined=bifolio_cuda_registration -lbifolio_cuda ")
  if(NOT BUILD_SHARED_LIBS)
    string(APPEND BIFOLIO_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
file(RELATIVE_PATH BIFOLIO_PC_PREFIX "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/bifolio.pc.in ${PROJECT_BINARY_DIR}/cmake/bifolio.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/bifolio.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
