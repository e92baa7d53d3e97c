// SPDX-License-Identifier: Apache-2.0
#include "mutants.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#ifndef BIFOLIO_NUM_MUTANTS
#define BIFOLIO_NUM_MUTANTS 1
#endif

unsigned char bifolio_mutant_states[BIFOLIO_NUM_MUTANTS] = {};

namespace {

constexpr std::size_t num_mutants = BIFOLIO_NUM_MUTANTS;
// A mapping, so that what a process reached is there however the process ends.
volatile unsigned char* reached = nullptr;

// Before any other initialiser of the program.
[[gnu::constructor(101)]] void read_environment() {
  if (const char* number = std::getenv("BIFOLIO_MUTANT")) {
    const unsigned long chosen = std::strtoul(number, nullptr, 10);
    if (chosen >= num_mutants) {
      std::fprintf(stderr, "BIFOLIO_MUTANT=%s: there are %zu mutants\n", number, num_mutants);
      std::_Exit(2);
    }
    bifolio_mutant_states[chosen] = 1;
  }
  const char* path = std::getenv("BIFOLIO_MUTANTS_REACHED");
  if (path == nullptr) return;
  const int file = ::open(path, O_RDWR | O_CREAT, 0644);
  void* mapping = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, static_cast<off_t>(num_mutants)) == 0) {
    mapping = ::mmap(nullptr, num_mutants, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (mapping == MAP_FAILED) {
    std::perror(path);
    std::_Exit(2);
  }
  ::close(file);
  reached = static_cast<unsigned char*>(mapping);
  for (unsigned char& state : bifolio_mutant_states) state = 2;
}

}  // namespace

extern "C" bool bifolio_record_mutant(int number) noexcept {
  reached[number] = 1;
  bifolio_mutant_states[number] = 0;  // once is enough; threads that come together write the same
  return false;
}
