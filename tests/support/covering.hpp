// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Pairwise covering designs: rows of choices such that every two values of every two axes meet in some row. Most
/// faults need at most two particular values at once (Kuhn, Wallace, Gallo 2004), and the rows grow with the two
/// longest axes instead of the product of all.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/random.hpp"

namespace bifolio::test {

/// `sizes[a]` values on axis a → rows of indices, one per axis. Greedy: each row is the best of some random candidates,
/// each candidate seeded with a pair that is still missing.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> pairwise_rows(const std::vector<std::size_t>& sizes,
                                                                         std::uint64_t seed) {
  random_source random(seed);
  const std::size_t axes = sizes.size();
  std::vector<std::size_t> first(axes, 0);  // where axis a's values start among all values
  std::size_t num_values = 0;
  for (std::size_t a = 0; a < axes; ++a) {
    first[a] = num_values;
    num_values += sizes[a];
  }
  std::vector<bool> covered(num_values * num_values, false);
  const auto pair_index = [&](std::size_t a, std::size_t i, std::size_t b, std::size_t j) {
    return (first[a] + i) * num_values + first[b] + j;
  };
  std::vector<std::vector<std::size_t>> rows;
  for (std::size_t a = 0; a < axes; ++a) {
    for (std::size_t b = a + 1; b < axes; ++b) {
      for (std::size_t i = 0; i < sizes[a]; ++i) {
        for (std::size_t j = 0; j < sizes[b]; ++j) {
          if (covered[pair_index(a, i, b, j)]) continue;
          std::vector<std::size_t> best;
          std::size_t best_new = 0;
          for (int attempt = 0; attempt < 24; ++attempt) {
            std::vector<std::size_t> row(axes);
            for (std::size_t c = 0; c < axes; ++c) row[c] = random.next() % sizes[c];
            row[a] = i;
            row[b] = j;
            std::size_t fresh = 0;
            for (std::size_t c = 0; c < axes; ++c) {
              for (std::size_t d = c + 1; d < axes; ++d) fresh += covered[pair_index(c, row[c], d, row[d])] ? 0u : 1u;
            }
            if (fresh > best_new) {
              best_new = fresh;
              best = row;
            }
          }
          for (std::size_t c = 0; c < axes; ++c) {
            for (std::size_t d = c + 1; d < axes; ++d) covered[pair_index(c, best[c], d, best[d])] = true;
          }
          rows.push_back(std::move(best));
        }
      }
    }
  }
  return rows;
}

}  // namespace bifolio::test
