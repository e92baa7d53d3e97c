// SPDX-License-Identifier: Apache-2.0
#include <bifolio/kv_events.hpp>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// The few types of msgpack that batches consist of, each in its shortest form.
class msgpack_writer {
 public:
  explicit msgpack_writer(std::string& out) : out_(&out) {}

  void nil() { byte(0xc0); }
  void real(double value) {
    byte(0xcb);
    big_endian(std::bit_cast<std::uint64_t>(value), 8);
  }
  void number(std::uint64_t value) {
    if (value < 0x80) return byte(static_cast<std::uint8_t>(value));
    const int size = value <= 0xff ? 1 : value <= 0xffff ? 2 : value <= 0xffffffff ? 4 : 8;
    byte(static_cast<std::uint8_t>(0xcc + std::countr_zero(static_cast<unsigned>(size))));
    big_endian(value, size);
  }
  void text(std::string_view value) {
    if (value.size() < 32) {
      byte(static_cast<std::uint8_t>(0xa0 + value.size()));
    } else {
      byte(0xdb);
      big_endian(value.size(), 4);
    }
    out_->append(value);
  }
  void array(std::size_t size) {
    if (size < 16) return byte(static_cast<std::uint8_t>(0x90 + size));
    byte(size <= 0xffff ? 0xdc : 0xdd);
    big_endian(size, size <= 0xffff ? 2 : 4);
  }

 private:
  void byte(std::uint8_t value) { out_->push_back(static_cast<char>(value)); }
  void big_endian(std::uint64_t value, int size) {
    for (int i = size - 1; i >= 0; --i) byte(static_cast<std::uint8_t>(value >> (8 * i)));
  }

  std::string* out_;
};

/// How many events from `first` on become one: blocks that are stored one after another of one chain, or removals.
std::size_t run_length(std::span<const cache_event> events, std::size_t first) {
  using kind = cache_event::kind;
  std::size_t end = first + 1;
  const kind what = events[first].what;
  while (what != kind::cleared && end < events.size() && events[end].what == what &&
         (what == kind::removed || events[end].parent == events[end - 1].key)) {
    ++end;
  }
  return end - first;
}

void write_hashes(msgpack_writer& out, std::span<const cache_event> events) {
  out.array(events.size());
  for (const cache_event& event : events) out.number(event.key.low);
}

}  // namespace

void encode_kv_events(double timestamp, std::span<const cache_event> events, const stored_contents& stored,
                      const kv_event_form& form, std::string& batch) {
  using kind = cache_event::kind;
  detail::require_between("data_parallel_rank", form.data_parallel_rank, 0, INT32_MAX);
  std::size_t num_stored = 0, num_runs = 0;
  for (const cache_event& event : events) num_stored += event.what == kind::stored ? 1 : 0;
  for (std::size_t i = 0; i < events.size(); i += run_length(events, i)) ++num_runs;
  const auto block_size = static_cast<std::size_t>(form.block_size);
  if (stored.is_first.size() != num_stored || stored.tokens.size() != num_stored * block_size) {
    detail::refuse(errc::invalid_argument, "the events have ", num_stored, " stored blocks of ", form.block_size,
                   " tokens; stored has ", stored.is_first.size(), " with ", stored.tokens.size(),
                   " tokens (record_tokens has to be on)");
  }
  detail::translate_bad_alloc("encode_kv_events", [&] {
    std::string encoded;
    msgpack_writer out(encoded);
    out.array(3);
    out.real(timestamp);
    out.array(num_runs);
    std::size_t block = 0;
    for (std::size_t i = 0; i < events.size();) {
      const std::span<const cache_event> run = events.subspan(i, run_length(events, i));
      i += run.size();
      switch (run.front().what) {
        case kind::stored:
          out.array(7);
          out.text("BlockStored");
          write_hashes(out, run);
          if (stored.is_first[block] != 0) {
            out.nil();
          } else {
            out.number(run.front().parent.low);
          }
          out.array(run.size() * block_size);
          for (std::size_t t = block * block_size; t < (block + run.size()) * block_size; ++t) {
            out.number(static_cast<std::uint32_t>(stored.tokens[t]));
          }
          out.number(static_cast<std::uint64_t>(form.block_size));
          out.nil();
          out.text(form.medium);
          block += run.size();
          break;
        case kind::removed:
          out.array(3);
          out.text("BlockRemoved");
          write_hashes(out, run);
          out.text(form.medium);
          break;
        case kind::cleared:
          out.array(1);
          out.text("AllBlocksCleared");
          break;
      }
    }
    out.number(static_cast<std::uint64_t>(form.data_parallel_rank));
    batch.swap(encoded);
  });
}

}  // namespace bifolio::inline v0_2
