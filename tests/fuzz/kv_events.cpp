// SPDX-License-Identifier: Apache-2.0
// Any list of cache events in msgpack: another reader finds the same events in the batch, merged as routers take them.
#include <bifolio/error.hpp>
#include <bifolio/kv_events.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "choices.hpp"
#include "fuzz_target.hpp"

namespace {

using namespace bifolio;
using fuzz::choices;
using fuzz::flaw;
using nlohmann::json;
using kind = cache_event::kind;

std::uint64_t number_of_any_length(choices& from) {
  const std::uint8_t length = from.byte();
  if (length < 128) return length;  // often the same: chains, and the same block again
  return (std::uint64_t{from.word()} << 32 | from.word()) >> (length % 64);
}

/// The batch's events one block each, as they were given.
void compare(const json& batch, std::span<const cache_event> events, const stored_contents& stored,
             const kv_event_form& form) {
  std::size_t at = 0, num_stored = 0;
  const auto block_size = static_cast<std::size_t>(form.block_size);
  for (const json& event : batch.at(1)) {
    if (event.at(0) == "AllBlocksCleared") {
      if (events[at++].what != kind::cleared) flaw("another event became a clearing");
      continue;
    }
    const bool is_stored = event.at(0) == "BlockStored";
    if (!is_stored && event.at(0) != "BlockRemoved") flaw("an event that routers do not know");
    if (event.back().get<std::string>() != form.medium) flaw("another medium");
    const json& hashes = event.at(1);
    if (hashes.empty()) flaw("an event without blocks");
    for (std::size_t i = 0; i < hashes.size(); ++i, ++at) {
      const cache_event& given = events[at];
      if (given.what != (is_stored ? kind::stored : kind::removed)) flaw("an event of another kind");
      if (hashes[i].get<std::uint64_t>() != given.key.low) flaw("another hash");
      if (!is_stored) continue;
      if (i > 0 && given.parent != events[at - 1].key) flaw("blocks of one event do not follow one another");
      if (i == 0) {
        const json& parent = event.at(2);
        if (parent.is_null() != (stored.is_first[num_stored] != 0))
          flaw("a first block with a parent, or none without");
        if (!parent.is_null() && parent.get<std::uint64_t>() != given.parent.low) flaw("another parent");
      }
      for (std::size_t t = 0; t < block_size; ++t) {
        const auto token = static_cast<std::uint32_t>(stored.tokens[num_stored * block_size + t]);
        if (event.at(3).at(i * block_size + t).get<std::uint32_t>() != token) flaw("another token");
      }
      ++num_stored;
    }
    if (is_stored && (event.at(3).size() != hashes.size() * block_size || event.at(4) != form.block_size)) {
      flaw("tokens of another number of blocks");
    }
  }
  if (at != events.size()) flaw("events were lost");
}

}  // namespace

BIFOLIO_FUZZ_TARGET(kv_events) {
  choices from(input);
  const auto medium = from.bytes(from.below(40));
  const std::string medium_text(medium.begin(), medium.end());
  const kv_event_form form{.block_size = from.below(20),
                           .medium = medium_text,
                           .data_parallel_rank = static_cast<std::int32_t>(number_of_any_length(from))};
  const double timestamp = static_cast<double>(from.word()) / 64;
  const std::uint8_t mistake = from.below(16);
  std::vector<cache_event> events;
  stored_contents stored;
  while (!from.empty() && events.size() < 70000) {
    const std::uint8_t what = from.byte();
    cache_event event{.what = what < 160 ? kind::stored : what < 250 ? kind::removed : kind::cleared};
    event.key = {number_of_any_length(from), what};
    // Of one chain with the event before, or not.
    event.parent = (what & 1) != 0 && !events.empty() ? events.back().key : content_key{number_of_any_length(from), 0};
    for (std::uint8_t copies = (what & 6) == 6 ? from.byte() : 0;; --copies) {  // runs whose length needs two bytes
      events.push_back(event);
      if (event.what == kind::stored) {
        stored.is_first.push_back((what & 8) != 0 ? 1 : 0);
        for (std::int32_t t = 0; t < form.block_size; ++t) {
          stored.tokens.push_back(token_id{static_cast<std::int32_t>(number_of_any_length(from))});
        }
      }
      if (copies == 0) break;
      event.parent = event.key;
    }
  }
  if (mistake == 1) stored.is_first.push_back(0);
  if (mistake == 2) stored.tokens.push_back(token_id{7});
  std::string batch = "as it was";
  try {
    encode_kv_events(timestamp, events, stored, form, batch);
  } catch (const error& refused) {
    if (refused.code() != errc::invalid_argument) flaw("refused with another code");
    if (form.data_parallel_rank >= 0 && mistake != 1 && mistake != 2) flaw("a sound list was refused");
    if (batch != "as it was") flaw("a refusal wrote something");
    return;
  }
  if (form.data_parallel_rank < 0 || mistake == 1 || mistake == 2) flaw("what should be refused was encoded");
  const json read = json::from_msgpack(batch);  // throws for what is no msgpack, or not all of it
  if (read.size() != 3 || read[0] != timestamp || read[2] != form.data_parallel_rank) flaw("another frame");
  compare(read, events, stored, form);
}
