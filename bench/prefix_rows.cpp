// SPDX-License-Identifier: Apache-2.0
#include "prefix_rows.hpp"

#include <algorithm>
#include <bifolio/memory_resource.hpp>
#include <bifolio/prefix_cache.hpp>
#include <chrono>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "row_timer.hpp"

namespace bifolio::bench {
namespace {

// Blocks of one conversation: 1024 tokens in blocks of 16.
constexpr std::int64_t chain_length = 64;

class prefix_bench : row_timer {
 public:
  prefix_bench(const prefix_rows_options& options, report& out)
      : row_timer(out, options.latency_ns),
        options_(options),
        memory_(default_host_memory(), std::size_t{1} << 62),
        pool_(options.blocks, memory_),
        cache_(pool_, {.block_size = options.block_size, .memory = &memory_}),
        random_(options.seed),
        num_chains_(options.blocks / chain_length),
        keys_(static_cast<std::size_t>(num_chains_ * chain_length)),
        tokens_(keys_.size() * static_cast<std::size_t>(options.block_size)) {
    for (token_id& token : tokens_) token = token_id{static_cast<std::int32_t>(random_() % 128'000)};
    for (std::int64_t c = 0; c < num_chains_; ++c) order_.push_back(c);
  }

  void run(report& out) {
    key_rows();
    fill_and_evict_rows();
    lookup_rows();
    worst_eviction_row();
    const double bytes = static_cast<double>(memory_.used_bytes()) / static_cast<double>(options_.blocks);
    const double tokens = static_cast<double>(options_.block_size) * sizeof(token_id);
    out.fact("metadata", std::to_string(bytes) + " bytes a block, " + std::to_string(bytes - tokens) +
                             " of them without the tokens");
  }

 private:
  [[nodiscard]] std::span<const token_id> tokens_of(std::int64_t chain, std::int64_t block) const {
    const auto size = static_cast<std::size_t>(options_.block_size);
    return std::span(tokens_).subspan(static_cast<std::size_t>(chain * chain_length + block) * size, size);
  }
  [[nodiscard]] prompt_view prompt(std::int64_t chain) const {
    const auto size = static_cast<std::size_t>(options_.block_size);
    const auto first = static_cast<std::size_t>(chain * chain_length);
    return {.tokens = std::span(tokens_).subspan(first * size, chain_length * size),
            .keys = std::span(keys_).subspan(first, chain_length)};
  }

  void make_keys(std::int64_t chain) {
    content_key last = cache_.root(default_scope).key;
    for (std::int64_t i = 0; i < chain_length; ++i) {
      last = cache_.hasher().next(last, tokens_of(chain, i));
      keys_[static_cast<std::size_t>(chain * chain_length + i)] = last;
    }
  }

  void key_rows() {
    std::vector<double> hashing;
    for (std::int32_t round = 0; round < options_.rounds; ++round) {
      time(hashing, num_chains_ * chain_length, [&] {
        for (std::int64_t c = 0; c < num_chains_; ++c) make_keys(c);
      });
    }
    add("key of " + std::to_string(options_.block_size) + " tokens", "in order", "block", hashing);
  }

  void publish(std::int64_t chain, std::span<const block_id> blocks) {
    constexpr std::int64_t ahead = 24;
    prefix_chain end = cache_.root(default_scope);
    const content_key* keys = keys_.data() + chain * chain_length;
    for (std::int64_t i = 0; i < ahead; ++i) cache_.prefetch(blocks[static_cast<std::size_t>(i)], keys[i]);
    for (std::int64_t i = 0; i < chain_length; ++i) {
      if (i + ahead < chain_length) cache_.prefetch(blocks[static_cast<std::size_t>(i + ahead)], keys[i + ahead]);
      end = cache_.publish(blocks[static_cast<std::size_t>(i)], keys[i], end, tokens_of(chain, i), i).end;
    }
  }

  /// Nanoseconds a block. Keys are made from the tokens just before, as they are when a sequence commits, so the tokens
  /// are near when they are published; the clock runs for sixteen chains at a time.
  double publish_all(std::span<const block_id> blocks) {
    clock::duration sum{};
    for (std::int64_t begin = 0; begin < num_chains_; begin += 16) {
      const std::int64_t end = std::min(begin + 16, num_chains_);
      for (std::int64_t k = begin; k < end; ++k) make_keys(order_[static_cast<std::size_t>(k)]);
      const auto start = clock::now();
      for (std::int64_t k = begin; k < end; ++k) {
        publish(order_[static_cast<std::size_t>(k)],
                blocks.subspan(static_cast<std::size_t>(k * chain_length), chain_length));
      }
      sum += clock::now() - start;
    }
    return std::chrono::duration<double, std::nano>(sum).count() / static_cast<double>(blocks.size());
  }

  /// Takes all blocks from chains that were used in random order, and gives them to the same chains in another order.
  /// "random": blocks of a chain are anywhere; "in order": next to each other, as a pool that has seen little traffic
  /// gives them; the chains, and so the keys, come in random order in both.
  void fill_and_evict_rows() {
    for (const bool random : {false, true}) {
      std::vector<double> evicting, evicting_batches, publishing;
      std::vector<block_id> blocks(static_cast<std::size_t>(num_chains_ * chain_length));
      for (std::int32_t round = 0; round <= options_.rounds; ++round) {
        const bool batches = round % 2 == 0;
        time(batches ? evicting_batches : evicting, std::ssize(blocks), [&] {
          if (!batches) {
            for (block_id& block : blocks) block = cache_.allocate_one();
            return;
          }
          for (std::size_t i = 0; i < blocks.size(); i += chain_length) {
            (void)cache_.allocate(std::span(blocks).subspan(i, chain_length));
          }
        });
        std::shuffle(order_.begin(), order_.end(), random_);
        std::sort(blocks.begin(), blocks.end());
        if (random) std::shuffle(blocks.begin(), blocks.end(), random_);
        cache_.reserve_events(std::ssize(blocks));
        publishing.push_back(publish_all(blocks));
        for (std::int64_t k = 0; k < num_chains_; ++k) {
          pool_.release(std::span(blocks).subspan(static_cast<std::size_t>(k * chain_length), chain_length));
        }
      }
      evicting_batches.erase(evicting_batches.begin());  // of a pool without contents, or filled in another order
      const char* order = random ? "random" : "in order";
      add("publish a full block", order, "block", publishing);
      add("allocate by evicting", order, "block", evicting);
      add("allocate by evicting", order, "block, 64 a call", evicting_batches);
    }
  }

  void lookup_rows() {
    std::vector<double> cold, warm, unpinned, releasing;
    std::vector<block_id> hits(static_cast<std::size_t>(num_chains_ * chain_length));
    const auto room = [&](std::int64_t k) {
      return std::span(hits).subspan(static_cast<std::size_t>(k * chain_length), chain_length);
    };
    for (std::int32_t round = 0; round < options_.rounds; ++round) {
      std::shuffle(order_.begin(), order_.end(), random_);
      std::int64_t num_hits = 0;
      time(cold, num_chains_ * chain_length, [&] {
        for (std::int64_t k = 0; k < num_chains_; ++k) {
          num_hits += cache_.match_and_pin(prompt(order_[static_cast<std::size_t>(k)]), room(k)).num_blocks;
        }
      });
      if (num_hits != num_chains_ * chain_length) {
        throw error(errc::internal, "a chain that was published was not found whole");
      }
      time(warm, 1000 * chain_length, [&] {
        for (int k = 0; k < 1000; ++k) {
          (void)cache_.match_and_pin(prompt(order_[0]), room(0));
          pool_.release(room(0));
        }
      });
      time(releasing, num_chains_ * chain_length, [&] {
        for (std::int64_t k = 0; k < num_chains_; ++k) pool_.release(room(k));
      });
    }
    add("look up and pin, hit", "random", "block", cold);
    add("look up, pin and release, hit", "the same prompt", "block", warm);
    add("release a hit", "random", "block", releasing);
  }

  /// Nine tenths of the blocks are in use; each call evicts one block of the rest. Interrupts of the machine are kept
  /// out by taking each call's least time over the rounds.
  void worst_eviction_row() {
    const std::int64_t num_pinned = num_chains_ * 9 / 10;
    std::vector<block_id> hits(static_cast<std::size_t>(num_pinned * chain_length));
    for (std::int64_t k = 0; k < num_pinned; ++k) {
      (void)cache_.match_and_pin(prompt(order_[static_cast<std::size_t>(k)]),
                                 std::span(hits).subspan(static_cast<std::size_t>(k * chain_length), chain_length));
    }
    const auto num_calls = static_cast<std::size_t>((num_chains_ - num_pinned) / 2 * chain_length);
    std::vector<double> least(num_calls, std::numeric_limits<double>::max());
    std::vector<block_id> taken(num_calls);
    for (std::int32_t round = 0; round < options_.rounds; ++round) {
      for (std::size_t i = 0; i < num_calls; ++i) {
        const auto start = std::chrono::steady_clock::now();
        taken[i] = cache_.allocate_one();
        const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
        least[i] = std::min(least[i], ns.count());
      }
      cache_.reserve_events(std::ssize(taken));
      for (std::size_t i = 0; i < num_calls; i += chain_length) {  // so that there is something to evict again
        publish(order_[static_cast<std::size_t>(num_chains_ - 1) - i / chain_length],
                std::span(taken).subspan(i, chain_length));
      }
      pool_.release(taken);
    }
    add("allocate by evicting, 90 % in use: median", "random", "call, clock included", least);
    add("allocate by evicting, 90 % in use: worst", "random", "call, clock included",
        {*std::max_element(least.begin(), least.end())});
    pool_.release(hits);
  }

  prefix_rows_options options_;
  limiting_memory_resource memory_;  // counts
  block_pool pool_;
  prefix_cache cache_;
  std::mt19937_64 random_;
  std::int64_t num_chains_;
  std::vector<content_key> keys_;  // [num_chains, chain_length]
  std::vector<token_id> tokens_;   // [num_chains, chain_length, block_size]
  std::vector<std::int64_t> order_;
};

}  // namespace

void add_prefix_rows(const prefix_rows_options& options, report& out) {
  if (options.blocks < 20 * chain_length) return;  // too few for chains
  prefix_bench(options, out).run(out);
}

}  // namespace bifolio::bench
