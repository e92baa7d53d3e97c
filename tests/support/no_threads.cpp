// SPDX-License-Identifier: Apache-2.0
// Loaded before a program's own libraries: every thread is refused, as at a limit of the system.

#include <pthread.h>

#include <cerrno>

extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t*, const pthread_attr_t*,
                                                                     void* (*)(void*), void*) {
  return EAGAIN;
}
