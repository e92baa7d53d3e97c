# Cross-compiles for 64-bit Arm with Debian's g++-aarch64-linux-gnu. Tests run under qemu-aarch64 where it is installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
find_program(BIFOLIO_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(BIFOLIO_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${BIFOLIO_QEMU} -L /usr/aarch64-linux-gnu)
endif()
