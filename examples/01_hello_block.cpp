// SPDX-License-Identifier: Apache-2.0
// 1. Hello, block.
//
// A KV cache keeps a key and a value for every token that a model has seen. bifolio keeps them in blocks of a fixed
// number of tokens, so that a sequence can grow anywhere in memory and nothing is reserved for tokens that may never
// come. The decision which block holds what is made by the `kv_cache_manager`. It deals in numbers only: no keys, no
// values.

#include <bifolio/bifolio.hpp>
#include <cstdio>

#include "expect.hpp"

namespace {

void print_table(const char* title, const bifolio::kv_cache_manager& manager, bifolio::seq_id seq) {
  std::printf("%-28s %2lld tokens in blocks", title, static_cast<long long>(manager.num_tokens(seq)));
  for (std::int64_t i = 0; i < manager.num_table_blocks(seq); ++i) {
    std::printf(" %d", to_index(manager.block_at(seq, i)));
  }
  std::printf("; %lld of %lld blocks are free\n", static_cast<long long>(manager.num_free_blocks()),
              static_cast<long long>(manager.config().num_blocks));
}

void run() {
  // A pool of eight blocks of four tokens each.
  bifolio::kv_cache_config config;
  config.block_size = 4;
  config.num_blocks = 8;
  bifolio::kv_cache_manager manager(config);

  // A sequence of six tokens takes two blocks: the first is full, the second half full.
  const auto [hello, status] = manager.allocate(6);
  expect(status == bifolio::alloc_status::ok, "an empty pool has room for six tokens");
  expect(manager.num_table_blocks(hello) == 2, "six tokens need two blocks of four");
  print_table("hello, after allocate(6):", manager, hello);

  // Two more tokens fit into what is there. The ninth takes a new block.
  expect(manager.append(hello, 2).status == bifolio::alloc_status::ok, "there is room for two more");
  expect(manager.num_free_blocks() == 6, "the tail block had room for them");
  expect(manager.append(hello, 1).status == bifolio::alloc_status::ok, "there is a block for the ninth");
  expect(manager.num_free_blocks() == 5, "which it took");
  print_table("hello, after three appends:", manager, hello);

  // Where does token 7 live? In a slot: block · block_size + offset. Kernels are handed slots and rows of block ids.
  const auto slot = to_index(manager.slot_at(hello, 7));
  std::printf("token 7 of hello lives in slot %lld = block %lld, offset %lld\n", static_cast<long long>(slot),
              static_cast<long long>(slot / 4), static_cast<long long>(slot % 4));
  expect(slot % 4 == 3, "token 7 is the last of the second block");

  // A full pool is an answer, not an exception: 24 tokens would fit if others went, 40 never will.
  expect(manager.allocate(24).status == bifolio::alloc_status::later, "24 tokens have to wait");
  expect(manager.allocate(40).status == bifolio::alloc_status::never, "40 tokens are more than the pool holds");

  // Freeing gives the blocks back. The handle is spent: using it again is an error and not somebody else's sequence.
  manager.free(hello);
  expect(manager.num_free_blocks() == 8, "all blocks are free again");
  try {
    manager.free(hello);
    expect(false, "a second free is refused");
  } catch (const bifolio::error& refused) {
    std::printf("a second free is refused: %s\n", refused.what());
    expect(refused.code() == bifolio::errc::not_found, "the handle is unknown now");
  }
  expect(manager.check().empty(), "every invariant of the manager holds");
}

}  // namespace

int main() { return run_example(run); }
