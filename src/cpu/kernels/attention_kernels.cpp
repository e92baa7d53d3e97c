// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/attention_kernels.hpp"

#include "cpu/kernels/attention_micro.hpp"
#include "cpu/kernels/attention_rows.hpp"
#include "cpu/kernels/attention_tiles.hpp"
#include "cpu/kernels/simd.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

/// A row's running maximum rises only when a tile exceeds it by more than this; e^8 · 512 is far from overflow.
inline constexpr float rescale_threshold = 8.0f;
/// Dims of K that are transposed at a time: 64 × 32 floats leave room in L1 for what the rows read; with many rows, and
/// where two dims share 32 bits, the scores are loaded and stored less often. Even: no pair is cut.
inline constexpr int decode_chunk = 32;
inline constexpr int prefill_chunk = 128;
inline constexpr int pair_chunk = 64;
/// Up to this many rows, V is widened anew for each row group rather than once into scratch.
inline constexpr int in_place_rows = 12;

/// Where the keys of one tile lie, without the head: element offsets from the start of the K and V halves. Entries
/// outside [begin, end) are not set.
struct tile_place {
  std::int64_t first = 0;  // position of the tile's first key
  int begin = 0;           // visible to some row of the item, relative to `first`
  int end = 0;
  bool even[tile_vectors];  // keys of one vector are all there and lie in one block
  std::int64_t k[tile_keys];
  std::int64_t v[tile_keys];
};

/// How scores and outputs are summed: in float32 or, for calls that are bfloat16 throughout, by the hardware's dot
/// products of pairs or its tiles. The latter two scale scores afterwards and round probabilities.
enum class arithmetic { widened, dots, tiles };

/// One item's loops. `Key` is the KV cache's element.
template <class Key, arithmetic Sums>
class item_runner {
  static constexpr bool uses_dots = Sums == arithmetic::dots;
  static constexpr bool uses_tiles = Sums == arithmetic::tiles;
  static constexpr bool may_keep_pairs = sizeof(Key) == 2 && (uses_dots || keeps_pairs);
  static constexpr int most_group_rows = uses_tiles ? tile_rows : max_group_rows;  // of one group alone,
  static constexpr int rows_a_group = uses_tiles ? tile_rows : group_rows;         // of one among others

 public:
  item_runner(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : args_(args),
        item_(item),
        scratch_(scratch),
        padded_(padded_dims(args.head_dim)),
        dims_((args.head_dim + 2 * lanes - 1) / (2 * lanes) * (2 * lanes)),
        stride_(partial_stride(args.head_dim)),
        head_rows_(item.num_tokens * args.group_size),
        num_heads_(item.kv_head_end - item.kv_head_begin),
        num_groups_(groups_of(head_rows_)),
        base_rows_(head_rows_ / num_groups_),
        extra_rows_(head_rows_ % num_groups_),
        pairs_(!uses_tiles && may_keep_pairs && (uses_dots || head_rows_ <= in_place_rows)),
        query_values_(uses_dots ? (args.head_dim + 1) / 2
                      : pairs_  ? (args.head_dim + 1) / 2 * 2
                                : args.head_dim),
        k_contiguous_(args.k_strides.dim == 1 && args.k_strides.chunk >= args.head_dim),
        v_contiguous_(args.v_strides.dim == 1 && args.v_strides.chunk >= args.head_dim),
        v_in_place_(!uses_tiles && v_contiguous_ && dims_ == args.head_dim &&
                    (head_rows_ <= in_place_rows || sizeof(Key) == 4)) {
    const visible_range first = range_of_token(0);
    const visible_range last = range_of_token(item.num_tokens - 1);
    seen_ = {first.begin, last.end};
  }

  void run() noexcept {
    if constexpr (uses_tiles) {
      pack_tile_queries();
    } else {
      pack_queries();
    }
    run_tiles();
    if (item_.partials == nullptr) finish_rows(scratch_.totals, 0);
  }

  /// Folds the splits of each row in order of position.
  void finish() noexcept {
    if (seen_.begin >= seen_.end) return finish_rows(nullptr, 0);
    finish_rows(item_.partials, num_rows() * stride_);
  }

 private:
  [[nodiscard]] std::int64_t num_rows() const noexcept { return static_cast<std::int64_t>(num_heads_) * head_rows_; }
  [[nodiscard]] std::int64_t first_split() const noexcept { return seen_.begin / split_keys; }

  [[nodiscard]] visible_range range_of_token(int token) const noexcept {
    return args_.window.of(item_.first_position + token, item_.seq_len);
  }
  [[nodiscard]] visible_range range_of_row(int row) const noexcept { return range_of_token(row / args_.group_size); }

  [[nodiscard]] float* state_of(float* base, int head, int row) const noexcept {
    return base + (static_cast<std::int64_t>(head) * head_rows_ + row) * stride_;
  }
  static BIFOLIO_INLINE float& maximum_of(float* state, int padded) noexcept { return state[padded]; }
  static BIFOLIO_INLINE float& sum_of(float* state, int padded) noexcept { return state[padded + 1]; }

  [[nodiscard]] static int groups_of(int rows) noexcept {
    return rows <= most_group_rows ? 1 : (rows + rows_a_group - 1) / rows_a_group;
  }
  // Rows of group `g` of one KV head: as even as possible.
  [[nodiscard]] int group_begin(int g) const noexcept { return g * base_rows_ + (g < extra_rows_ ? g : extra_rows_); }

  void pack_queries() noexcept {
    float* row_values = scratch_.values;
    for (int head = 0; head < num_heads_; ++head) {
      float* queries = scratch_.queries + static_cast<std::int64_t>(head) * head_rows_ * query_values_;
      for (int g = 0; g < num_groups_; ++g) {
        const int begin = group_begin(g);
        const int rows = group_begin(g + 1) - begin;
        float* packed = queries + static_cast<std::int64_t>(begin) * query_values_;
        for (int i = 0; i < rows; ++i) {
          const std::int64_t offset = query_offset(head, begin + i);
          if constexpr (uses_dots) {
            pair_row(static_cast<const bfloat16*>(args_.q) + offset, args_.head_dim, row_values);
          } else {
            widen_any(args_.q_type, args_.q, offset, args_.head_dim, args_.scale, row_values);
            if (query_values_ > args_.head_dim) row_values[args_.head_dim] = 0;
          }
          for (int d = 0; d < query_values_; ++d) packed[static_cast<std::int64_t>(d) * rows + i] = row_values[d];
        }
      }
    }
  }

  // The part of the tile at `first` that lies in [begin, end), through a block table.
  void place_tile(tile_place& place, std::int64_t first, std::int64_t begin, std::int64_t end,
                  const std::int32_t* block_table) const noexcept {
    place.first = first;
    place.begin = static_cast<int>((begin > first ? begin : first) - first);
    place.end = static_cast<int>((end < first + tile_keys ? end : first + tile_keys) - first);
    for (int c = 0; c < tile_vectors; ++c) {
      const auto token = static_cast<std::int32_t>((first + c * lanes) % args_.block_size);
      place.even[c] = c * lanes >= place.begin && (c + 1) * lanes <= place.end && token + lanes <= args_.block_size;
    }
    int key = place.begin;
    while (key < place.end) {
      const std::int64_t position = first + key;
      const std::int64_t logical = position / args_.block_size;
      const auto token = static_cast<std::int32_t>(position - logical * args_.block_size);
      const std::int64_t physical = block_table[logical];
      const int left_in_block = args_.block_size - token;
      const int run = left_in_block < place.end - key ? left_in_block : place.end - key;
      std::int64_t k = physical * args_.k_strides.block + token * args_.k_strides.token;
      std::int64_t v = physical * args_.v_strides.block + token * args_.v_strides.token;
      for (int i = 0; i < run; ++i) {
        place.k[key + i] = k;
        place.v[key + i] = v;
        k += args_.k_strides.token;
        v += args_.v_strides.token;
      }
      key += run;
    }
  }

  void run_tiles() noexcept {
    const std::int64_t items_first = static_cast<std::int64_t>(item_.split_begin) * split_keys;
    const std::int64_t items_end = static_cast<std::int64_t>(item_.split_end) * split_keys;
    const std::int64_t begin = seen_.begin > items_first ? seen_.begin : items_first;
    const std::int64_t end = seen_.end < items_end ? seen_.end : items_end;
    if (begin >= end) return;

    // Units: all KV heads of a tile, then the next tile. Each is fetched two ahead, and asked for again one ahead.
    const std::int64_t first_tile = begin / tile_keys;
    const std::int64_t num_tiles = (end + tile_keys - 1) / tile_keys - first_tile;
    const std::int64_t num_units = num_tiles * num_heads_;
    const auto place = [&](std::int64_t t) {
      if (t < num_tiles) place_tile(places_[t % 3], (first_tile + t) * tile_keys, begin, end, item_.block_table);
    };
    for (std::int64_t t = 0; t < 3; ++t) place(t);
    if (num_units > 1) list_unit(1);
    float* states = begin_split(begin / split_keys);
    std::int64_t unit = 0;
    for (std::int64_t t = 0; t < num_tiles; ++t) {
      for (int head = 0; head < num_heads_; ++head, ++unit) {
        ahead_.stop();
        if (unit + 2 < num_units) {
          list_unit(unit + 2);
          look_ahead(unit + 2);
        } else {
          if (unit + 2 == num_units || num_units == 1) guess_next_item();
          const auto beyond = static_cast<int>(unit + 2 - num_units);
          if (beyond < next_heads_) {
            list_runs(unit + 2, next_place_, next_head_ + beyond);
            look_ahead(unit + 2);
          }
        }
        run_unit(places_[t % 3], head, states);
      }
      place(t + 3);
      const std::int64_t next = (first_tile + t + 1) * tile_keys;
      if (next >= end || next % split_keys == 0) {
        end_split((next - 1) / split_keys, states);
        if (next >= end) return;
        states = begin_split(next / split_keys);
      }
    }
  }

  // The states of a new split: nothing seen.
  float* begin_split(std::int64_t split) noexcept {
    float* states =
        item_.partials == nullptr ? scratch_.states : item_.partials + (split - first_split()) * num_rows() * stride_;
    for (std::int64_t row = 0; row < num_rows(); ++row) {
      float* state = states + row * stride_;
      for (int d = 0; d < dims_; d += lanes) store(state + d, vf(0.0f));
      maximum_of(state, padded_) = minus_infinity;
      store(scratch_.sums + row * workspace_align, vf(0.0f));
    }
    return states;
  }

  // Reduces the sums; folds the split into the totals when the item holds all splits of its rows.
  void end_split(std::int64_t split, float* states) noexcept {
    const std::int64_t split_first = split * split_keys;
    for (int head = 0; head < num_heads_; ++head) {
      for (int row = 0; row < head_rows_; ++row) {
        float* state = state_of(states, head, row);
        const std::int64_t index = static_cast<std::int64_t>(head) * head_rows_ + row;
        sum_of(state, padded_) = reduce_add(load(scratch_.sums + index * workspace_align));
        if (item_.partials != nullptr) continue;
        const visible_range range = range_of_row(row);
        if (range.begin >= split_first + split_keys || range.end <= split_first || range.begin >= range.end) continue;
        fold(state_of(scratch_.totals, head, row), state, range.begin >= split_first);
      }
    }
  }

  // total ← total ⊕ partial; `first`: total ← partial.
  void fold(float* total, float* partial, bool first) const noexcept {
    if (first) {
      for (int d = 0; d < dims_; d += lanes) store(total + d, load(partial + d));
      maximum_of(total, padded_) = maximum_of(partial, padded_);
      sum_of(total, padded_) = sum_of(partial, padded_);
      return;
    }
    const merge_weights weights = weights_of(maximum_of(total, padded_), maximum_of(partial, padded_));
    const vf a(weights.a);
    const vf b(weights.b);
    for (int d = 0; d < dims_; d += lanes) store(total + d, fma(load(partial + d), b, load(total + d) * a));
    sum_of(total, padded_) = sum_of(partial, padded_) * weights.b + sum_of(total, padded_) * weights.a;
  }

  // The memory that one unit will read: a run a row, or a run for the keys of one vector where they lie side by side.
  struct run_list {
    int count = 0;
    int bytes = 0;  // of each
    const char* runs[2 * tile_keys];
  };

  void list_unit(std::int64_t unit) noexcept {
    list_runs(unit, places_[unit / num_heads_ % 3], static_cast<int>(unit % num_heads_));
  }

  void list_runs(std::int64_t unit, const tile_place& place, int head) noexcept {
    bool whole = k_contiguous_ && args_.k_strides.token == args_.head_dim;
    whole = whole && v_contiguous_ && args_.v_strides.token == args_.head_dim;
    for (int c = 0; c < tile_vectors; ++c) whole = whole && place.even[c];
    run_list& list = lists_[unit % 2];
    list.count = 0;
    list.bytes = static_cast<int>(sizeof(Key)) * args_.head_dim * (whole ? lanes : 1);
    if (k_contiguous_) add_runs(list, args_.k, args_.k_strides.head, head, place, place.k, whole);
    if (v_contiguous_) add_runs(list, args_.v, args_.v_strides.head, head, place, place.v, whole);
  }

  void add_runs(run_list& list, const void* half, std::int64_t head_stride, int head, const tile_place& place,
                const std::int64_t* offsets, bool whole) const noexcept {
    const Key* base = static_cast<const Key*>(half) + (item_.kv_head_begin + head) * head_stride;
    for (int key = place.begin; key < place.end; key += whole ? lanes : 1) {
      list.runs[list.count++] = reinterpret_cast<const char*>(base + offsets[key]);
    }
  }

  // The first tile and the KV heads of the item that this lane will probably run next.
  void guess_next_item() noexcept {
    attention_item next;
    if (item_.guess_next == nullptr || !item_.guess_next(item_.guess_context, next)) return;
    const std::int64_t splits_first = static_cast<std::int64_t>(next.split_begin) * split_keys;
    const std::int64_t splits_end = static_cast<std::int64_t>(next.split_end) * split_keys;
    const visible_range first = args_.window.of(next.first_position, next.seq_len);
    const visible_range last = args_.window.of(next.first_position + next.num_tokens - 1, next.seq_len);
    const std::int64_t begin = first.begin > splits_first ? first.begin : splits_first;
    const std::int64_t end = last.end < splits_end ? last.end : splits_end;
    if (begin >= end) return;
    place_tile(next_place_, begin / tile_keys * tile_keys, begin, end, next.block_table);
    next_head_ = next.kv_head_begin - item_.kv_head_begin;
    next_heads_ = next.kv_head_end - next.kv_head_begin;
  }

  // Starts the stream of the lines of `unit`, and once more of those of the unit before it.
  void look_ahead(std::int64_t unit) noexcept {
    const run_list& list = lists_[unit % 2];
    const run_list& before = lists_[(unit + 1) % 2];
    // Steps of a unit: one a column of a transposition, one a dim in the scores, one a key and register pass in the
    // accumulation. Measured: the best period is that with which the stream ends with the unit; shorter leaves the
    // memory idle at the end, longer loses lines. Below 3 the queue of outstanding misses overruns.
    // Tiles count no steps.
    int period = 3;
    if constexpr (!uses_tiles) {
      const int vectors = vectors_beside(base_rows_ + (extra_rows_ > 0 ? 1 : 0));
      const int passes = (dims_ + vectors * lanes - 1) / (vectors * lanes);
      const int columns = tile_keys / lanes * args_.head_dim * static_cast<int>(sizeof(Key)) / 4;
      const int kernels = num_groups_ * (args_.head_dim * (tile_vectors / vectors) + tile_keys * passes);
      const int lines = list.count * ((list.bytes + cache_line_bytes - 1) / cache_line_bytes);
      const int room = lines > 0 ? line_stream::ways * (columns + kernels) / lines : period;
      period = room < period ? period : room;
    }
    const bool alike = before.count == list.count && before.bytes == list.bytes;
    ahead_.start(list.runs, alike ? before.runs : list.runs, list.count, list.bytes, period);
  }

  // One row of K or V from any layout.
  static void stage_row(const Key* from, const kv_strides& strides, int head_dim, Key* to) noexcept {
    for (int d = 0; d < head_dim;) {
      const int run = head_dim - d < strides.chunk ? head_dim - d : strides.chunk;
      for (int i = 0; i < run; ++i) to[d + i] = from[i * strides.dim];
      from += strides.chunk_stride;
      d += run;
    }
  }

  // V of one of the tile's keys; a row whose dims are not contiguous is brought to scratch, as row `slot` there.
  [[nodiscard]] const Key* value_row(const tile_place& place, int head, int key, int slot) const noexcept {
    const Key* row =
        static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head + place.v[key];
    if (v_contiguous_) return row;
    Key* staging = static_cast<Key*>(scratch_.staging) + static_cast<std::int64_t>(slot) * padded_;
    stage_row(row, args_.v_strides, args_.head_dim, staging);
    return staging;
  }

  // Dims [dim, dim + dims) of the tile's keys, transposed, into scratch.
  void pack_keys(const tile_place& place, int head, int dim, int dims) noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head + dim;
    auto* staging = static_cast<Key*>(scratch_.staging);
    const Key* zeros = static_cast<const Key*>(scratch_.zero_row);
    for (int column = 0; column < tile_keys; column += lanes) {
      float* keys = scratch_.keys + column;
      if (k_contiguous_ && place.even[column / lanes]) {
        const even_rows<Key> rows(k + place.k[column], args_.k_strides.token);
        transpose_rows(rows, dims, keys);
        continue;
      }
      scattered_rows<Key> rows;
      for (int i = 0; i < lanes; ++i) {
        const int key = column + i;
        if (key < place.begin || key >= place.end) {
          rows.row[i] = zeros;
        } else if (k_contiguous_) {
          rows.row[i] = k + place.k[key];
        } else {
          Key* row = staging + static_cast<std::int64_t>(i) * padded_;
          stage_row(k + place.k[key], args_.k_strides, args_.head_dim, row);
          rows.row[i] = row;
        }
      }
      transpose_rows(rows, dims, keys);
    }
  }

  template <class Rows>
  BIFOLIO_INLINE void transpose_rows(const Rows& rows, int dims, float* keys) noexcept {
    if constexpr (!uses_dots) {
      if (!pairs_) return transpose_keys<Key, true>(rows, dims, keys, ahead_);
    }
    if constexpr (may_keep_pairs) transpose_keys<Key, false>(rows, dims, keys, ahead_);
  }

  // V rows of the tile as float32 in value order in scratch.
  void widen_values(const tile_place& place, int head) noexcept {
    const int whole = args_.head_dim / (2 * lanes) * (2 * lanes);
    for (int key = place.begin; key < place.end; ++key) {
      const Key* row = value_row(place, head, key, 0);
      float* to = scratch_.values + static_cast<std::int64_t>(key) * padded_;
      vf a;
      vf b;
      for (int d = 0; d < whole; d += 2 * lanes) {
        load_pair(row + d, a, b);
        store(to + d, a);
        store(to + d + lanes, b);
      }
      if (whole < args_.head_dim) {
        Key tail[2 * lanes] = {};
        for (int d = whole; d < args_.head_dim; ++d) tail[d - whole] = row[d];
        load_pair(tail, a, b);
        store(to + whole, a);
        store(to + whole + lanes, b);
      }
    }
  }

  // V rows of the tile in pairs of keys in scratch, 0 beside a key that is alone.
  void pair_values(const tile_place& place, int head) noexcept {
    const int whole = args_.head_dim / (2 * lanes) * (2 * lanes);
    for (int pair = place.begin / 2; 2 * pair < place.end; ++pair) {
      const Key* rows[2];
      for (int i = 0; i < 2; ++i) {
        const int key = 2 * pair + i;
        rows[i] = key < place.begin || key >= place.end ? static_cast<const Key*>(scratch_.zero_row)
                                                        : value_row(place, head, key, i);
      }
      float* to = scratch_.values + static_cast<std::int64_t>(pair) * padded_;
      vf a;
      vf b;
      for (int d = 0; d < whole; d += 2 * lanes) {
        pair_rows(load_bits(rows[0] + d), load_bits(rows[1] + d), a, b);
        store(to + d, a);
        store(to + d + lanes, b);
      }
      if (whole < args_.head_dim) {
        Key tails[2][2 * lanes] = {};
        for (int i = 0; i < 2; ++i) {
          for (int d = whole; d < args_.head_dim; ++d) tails[i][d - whole] = rows[i][d];
        }
        pair_rows(load_bits(tails[0]), load_bits(tails[1]), a, b);
        store(to + whole, a);
        store(to + whole + lanes, b);
      }
    }
  }

  // Rows that share registers, and what each sees of a tile.
  struct row_group {
    int begin = 0;
    int rows = 0;
    bool any = false;                                               // some row sees some key
    visible_range common{0, tile_keys};                             // seen by all rows; empty when begin ≥ end
    visible_range seen[static_cast<std::size_t>(most_group_rows)];  // relative to the tile
  };

  // ---- on tiles --------------------------------------------------------------------------------------------------

  [[nodiscard]] int tile_steps() const noexcept { return padded_ / tile_depth; }
  [[nodiscard]] float* tile_queries(int head, int g) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * num_groups_ + g) * (padded_ / 2 * tile_rows);
  }

  // [groups][pairs of dims][16 rows]; what is missing is 0.
  void pack_tile_queries() noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int g = 0; g < num_groups_; ++g) {
        float* queries = tile_queries(head, g);
        for (int i = 0; i < padded_ / 2 * tile_rows; i += lanes) store(queries + i, vf(0.0f));
        for (int row = group_begin(g); row < group_begin(g + 1); ++row) {
          pair_row(static_cast<const Key*>(args_.q) + query_offset(head, row), args_.head_dim, scratch_.values);
          float* column = queries + (row - group_begin(g));
          for (int pair = 0; 2 * pair < args_.head_dim; ++pair) column[pair * tile_rows] = scratch_.values[pair];
        }
      }
    }
  }

  // Where the tile's keys lie for `score_tiles`; those that do not lie ready are brought into scratch.
  void find_tile_keys(const tile_place& place, int head, key_rows (&keys)[tile_keys / tile_rows]) noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
    const std::int64_t staged_stride = std::int64_t{2} * padded_;
    auto* staged = reinterpret_cast<char*>(scratch_.keys);
    for (int column = 0; column < tile_keys; column += tile_rows) {
      key_rows& rows = keys[column / tile_rows];
      if (k_contiguous_ && place.even[column / lanes] && args_.head_dim == padded_) {
        rows = {reinterpret_cast<const char*>(k + place.k[column]), args_.k_strides.token * 2};
        continue;
      }
      rows = {staged + column * staged_stride, staged_stride};
      for (int key = column; key < column + tile_rows; ++key) {
        if (key < place.begin || key >= place.end) continue;  // scores of what stands there are not used
        const Key* row = k + place.k[key];
        if (!k_contiguous_) {
          auto* staging = static_cast<Key*>(scratch_.staging);
          stage_row(row, args_.k_strides, args_.head_dim, staging);
          row = staging;
        }
        auto* to = reinterpret_cast<float*>(staged + key * staged_stride);
        for (int d = 0; d < padded_; d += tile_depth) store(to + d / 2, load_elements(row + d, args_.head_dim - d));
      }
    }
  }

  // V of the tile in pairs for `output_tiles`, 0 for keys that are not in `seen`.
  void pair_tile_values(const tile_place& place, int head, visible_range seen) noexcept {
    constexpr int depth = tile_depth / 2;
    const int last = (place.end + tile_depth - 1) / tile_depth * depth;
    for (int pair = place.begin / tile_depth * depth; pair < last; ++pair) {
      const Key* rows[2];
      for (int i = 0; i < 2; ++i) {
        const int key = 2 * pair + i;
        rows[i] = key < seen.begin || key >= seen.end ? static_cast<const Key*>(scratch_.zero_row)
                                                      : value_row(place, head, key, i);
      }
      float* to = scratch_.values + static_cast<std::int64_t>(pair) * padded_;
      for (int d = 0; d < padded_; d += tile_depth) {
        vf a;
        vf b;
        pair_rows(load_elements(rows[0] + d, args_.head_dim - d), load_elements(rows[1] + d, args_.head_dim - d), a, b);
        store(to + d, a);
        store(to + d + lanes, b);
      }
      ahead_.batch();
    }
  }

  [[nodiscard]] bool has_finite_values(const tile_place& place, int head) noexcept {
    for (int key = place.begin; key < place.end; ++key) {
      if (!all_finite(value_row(place, head, key, 0), args_.head_dim)) return false;
    }
    return true;
  }

  // Adds to the states of rows [begin, end) of the group what their probabilities make of the V that lies in scratch.
  void add_outputs(const tile_place& place, const row_group& group, int begin, int end, float* states) noexcept {
    auto* out = static_cast<float*>(scratch_.staging);  // [16][padded], used by nothing else by now
    output_tiles(scratch_.scores, scratch_.values, padded_, place.begin / tile_depth,
                 (place.end + tile_depth - 1) / tile_depth, padded_, out, ahead_);
    for (int i = begin; i < end; ++i) {
      if (group.seen[i].begin >= group.seen[i].end) continue;
      float* state = states + i * stride_;
      const float* row = out + static_cast<std::int64_t>(i) * padded_;
      for (int d = 0; d < padded_; d += lanes) {
        store(state + d, load(state + d) + load(row + d));
      }
    }
  }

  void run_unit_on_tiles(const tile_place& place, int head, float* states) noexcept {
    key_rows keys[tile_keys / tile_rows];
    find_tile_keys(place, head, keys);
    const visible_range all{place.begin, place.end};
    pair_tile_values(place, head, all);
    alignas(64) float transposed[tile_keys * tile_rows];
    bool known_finite = false;
    for (int g = 0; g < num_groups_; ++g) {
      const row_group group = group_of(place, g);
      if (!group.any) continue;
      score_tiles(tile_queries(head, g), keys, tile_steps(), transposed, ahead_);
      for (int column = 0; column < tile_keys; column += tile_rows) {
        transpose(
            [&](int i) __attribute__((always_inline)) { return load(transposed + (column + i) * tile_rows); },
            [&](int j, vf row) __attribute__((always_inline)) {
              store(scratch_.scores + j * tile_keys + column, row);
              if (j < 4) ahead_.batch();
            });
      }
      const std::int64_t row_index = static_cast<std::int64_t>(head) * head_rows_ + group.begin;
      float* group_states = states + row_index * stride_;
      bool alike = true;
      for (int i = 0; i < group.rows; ++i) {
        const visible_range seen = group.seen[i];
        if (seen.begin >= seen.end) continue;
        alike = alike && seen.begin <= all.begin && seen.end >= all.end;
        softmax_row(scratch_.scores + i * tile_keys, seen, place.first, head, group.begin + i,
                    group_states + i * stride_, scratch_.sums + (row_index + i) * workspace_align);
        ahead_.batches(2);
      }
      // A probability of 0 hides what a row does not see, unless that is not finite.
      if (!alike && !known_finite) known_finite = has_finite_values(place, head);
      if (alike || known_finite) {
        add_outputs(place, group, 0, group.rows, group_states);
        continue;
      }
      for (int i = 0; i < group.rows; ++i) {
        pair_tile_values(place, head, group.seen[i]);
        add_outputs(place, group, i, i + 1, group_states);
      }
      pair_tile_values(place, head, all);
    }
  }

  // One tile × one KV head: all scores, then group by group softmax and accumulation.
  void run_unit(const tile_place& place, int head, float* states) noexcept {
    if constexpr (uses_tiles) {
      run_unit_on_tiles(place, head, states);
      ahead_.finish();
    } else {
      run_unit_on_vectors(place, head, states);
    }
  }

  void run_unit_on_vectors(const tile_place& place, int head, float* states) noexcept {
    // Dims are taken in chunks whose transposed keys stay in L1 while they are used.
    const int chunk = !k_contiguous_                ? args_.head_dim
                      : pairs_                      ? pair_chunk
                      : head_rows_ <= in_place_rows ? decode_chunk
                                                    : prefill_chunk;
    for (int dim = 0; dim < args_.head_dim; dim += chunk) {
      const int dims = args_.head_dim - dim < chunk ? args_.head_dim - dim : chunk;
      pack_keys(place, head, dim, dims);
      for (int g = 0; g < num_groups_; ++g) score_group(place, head, g, dim, dims);
    }

    const Key* in_place[tile_keys];
    const float* widened[tile_keys];
    if (v_in_place_) {
      const Key* v = static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head;
      // The other key of a pair may lie outside: it is loaded, never multiplied.
      if (uses_dots && place.begin % 2 != 0) in_place[place.begin - 1] = static_cast<const Key*>(scratch_.zero_row);
      if (uses_dots && place.end % 2 != 0) in_place[place.end] = static_cast<const Key*>(scratch_.zero_row);
      for (int key = place.begin; key < place.end; ++key) in_place[key] = v + place.v[key];
    } else if constexpr (uses_dots) {
      pair_values(place, head);
    } else {
      widen_values(place, head);
      for (int key = place.begin; key < place.end; ++key) {
        widened[key] = scratch_.values + static_cast<std::int64_t>(key) * padded_;
      }
    }
    for (int g = 0; g < num_groups_; ++g) {
      const row_group group = group_of(place, g);
      if (!group.any) continue;
      float* scores = scratch_.scores + static_cast<std::int64_t>(group.begin) * tile_keys;
      const std::int64_t row_index = static_cast<std::int64_t>(head) * head_rows_ + group.begin;
      float* group_states = states + row_index * stride_;
      for (int i = 0; i < group.rows; ++i) {
        if (group.seen[i].begin >= group.seen[i].end) continue;
        softmax_row(scores + i * tile_keys, group.seen[i], place.first, head, group.begin + i,
                    group_states + i * stride_, scratch_.sums + (row_index + i) * workspace_align);
      }
      if constexpr (uses_dots) {
        if (v_in_place_) {
          accumulate_dot(scores, value_rows{in_place}, group, group_states);
        } else {
          accumulate_dot(scores, value_pairs{scratch_.values, padded_}, group, group_states);
        }
      } else if (v_in_place_) {
        accumulate(scores, in_place, group, group_states);
      } else {
        accumulate(scores, widened, group, group_states);
      }
    }
  }

  [[nodiscard]] BIFOLIO_INLINE row_group group_of(const tile_place& place, int g) const noexcept {
    row_group group;
    group.begin = group_begin(g);
    group.rows = group_begin(g + 1) - group.begin;
    int token = group.begin / args_.group_size;
    int left_of_token = (token + 1) * args_.group_size - group.begin;
    visible_range seen = clip(range_of_token(token), place.first);
    for (int i = 0; i < group.rows; ++i, --left_of_token) {
      if (left_of_token == 0) {
        seen = clip(range_of_token(++token), place.first);
        left_of_token = args_.group_size;
      }
      group.seen[i] = seen;
      group.any = group.any || seen.begin < seen.end;
      if (seen.begin > group.common.begin) group.common.begin = seen.begin;
      if (seen.end < group.common.end) group.common.end = seen.end;
    }
    return group;
  }

  // Adds dims [dim, dim + dims) to the scores of one row group; the first dims start them.
  BIFOLIO_INLINE void score_group(const tile_place& place, int head, int g, int dim, int dims) noexcept {
    const row_group group = group_of(place, g);
    if (!group.any) return;
    float* scores = scratch_.scores + static_cast<std::int64_t>(group.begin) * tile_keys;
    const float* queries = scratch_.queries +
                           (static_cast<std::int64_t>(head) * head_rows_ + group.begin) * query_values_ +
                           static_cast<std::int64_t>(uses_dots ? dim / 2 : dim) * group.rows;
    with_rows(
        group.rows, [&]<int Rows>() __attribute__((always_inline)) {
          const auto add = [&]<class Column>(Column) __attribute__((always_inline)) {
            const int columns = (dims + Column::dims - 1) / Column::dims;
            score_rows<Column, Rows>(queries, scratch_.keys, columns, dim > 0, scores, ahead_);
          };
          if constexpr (uses_dots) {
            add(dot_column{});
          } else if constexpr (may_keep_pairs) {
            if (pairs_) {
              add(pair_column<Key>{});
            } else {
              add(wide_column{});
            }
          } else {
            add(wide_column{});
          }
        });
  }

  static BIFOLIO_INLINE visible_range clip(visible_range range, std::int64_t first) noexcept {
    std::int64_t begin = range.begin - first;
    std::int64_t end = range.end - first;
    begin = begin < 0 ? 0 : begin;
    end = end > tile_keys ? tile_keys : end;
    return {begin, end};
  }

  // Logits → probabilities in place, against the row's running maximum; updates maximum, sums and, when the maximum
  // rises, the accumulator.
  BIFOLIO_INLINE void softmax_row(float* scores, visible_range seen, std::int64_t tile_first, int head, int row,
                                  float* state, float* sums) const noexcept {
    vf s[tile_vectors];
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) s[c] = load(scores + c * lanes);
    if constexpr (uses_dots || uses_tiles) {
      const vf scale(args_.scale);
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * scale;
    }
    if (args_.soft_cap > 0) {
      const vf cap(args_.soft_cap);
      for (int c = 0; c < tile_vectors; ++c) s[c] = cap * tanh(s[c] / cap);
    }
    if (args_.alibi_slopes != nullptr) {
      const int q_head = (item_.kv_head_begin + head) * args_.group_size + row % args_.group_size;
      const std::int64_t position = item_.first_position + row / args_.group_size;
      const vf slope(args_.alibi_slopes[q_head]);
      const vf distance = lane_numbers() + vf(static_cast<float>(tile_first - position));
      for (int c = 0; c < tile_vectors; ++c) s[c] = fma(slope, distance + vf(static_cast<float>(c * lanes)), s[c]);
    }
    if (seen.begin > 0 || seen.end < tile_keys) {
      for (int c = 0; c < tile_vectors; ++c) {
        s[c] = keep_lanes(s[c], static_cast<int>(seen.begin) - c * lanes, static_cast<int>(seen.end) - c * lanes);
      }
    }
    vf highest = s[0];
#pragma GCC unroll 16
    for (int c = 1; c < tile_vectors; ++c) highest = xsimd::max(highest, s[c]);
    const float tile_maximum = reduce_max(highest);
    vf sum = load(sums);
    float& maximum = maximum_of(state, padded_);
    if (tile_maximum > maximum + rescale_threshold) {
      const vf alpha(exp_scalar(maximum - tile_maximum));
      maximum = tile_maximum;
      sum = sum * alpha;
      for (int d = 0; d < dims_; d += lanes) store(state + d, load(state + d) * alpha);
    }
    const vf shift(maximum == minus_infinity ? 0.0f : maximum);
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) {
      s[c] = exp(s[c] - shift);
      if constexpr (!uses_dots && !uses_tiles) store(scores + c * lanes, s[c]);
      sum = sum + s[c];
    }
    if constexpr (uses_dots || uses_tiles) {
#pragma GCC unroll 8
      for (int c = 0; c < tile_vectors; c += 2) store(scores + c / 2 * lanes, narrow_pairs(s[c], s[c + 1]));
    }
    store(sums, sum);
  }

  // Rows together where all of them see the keys, each by itself before and after that; ascending keys in every row.
  template <class Value>
  BIFOLIO_INLINE void accumulate(const float* p, const Value* const* values, const row_group& group,
                                 float* states) noexcept {
    const visible_range* seen = group.seen;
    const visible_range common = group.common;
    const int rows = group.rows;
    const bool together = common.begin < common.end;
    const auto alone = [&](int row, std::int64_t begin, std::int64_t end) {
      if (begin >= end) return;
      accumulate_rows<1>(p + row * tile_keys, values, static_cast<int>(begin), static_cast<int>(end), dims_,
                         states + row * stride_, stride_, ahead_);
    };
    for (int i = 0; i < rows; ++i) alone(i, seen[i].begin, together ? common.begin : seen[i].end);
    if (!together) return;
    with_rows(
        rows, [&]<int Rows>() __attribute__((always_inline)) {
          accumulate_rows<Rows>(p, values, static_cast<int>(common.begin), static_cast<int>(common.end), dims_, states,
                                stride_, ahead_);
        });
    for (int i = 0; i < rows; ++i) alone(i, common.end, seen[i].end);
  }

  // The same by pairs of keys. A pair that a row sees half of is taken with the other half's bits cleared.
  template <class Values>
  BIFOLIO_INLINE void accumulate_dot(const float* p, const Values& values, const row_group& group,
                                     float* states) noexcept {
    const visible_range* seen = group.seen;
    const visible_range common{(group.common.begin + 1) / 2 * 2, group.common.end / 2 * 2};
    const int rows = group.rows;
    const bool together = common.begin < common.end;
    const auto alone = [&](int row, std::int64_t begin, std::int64_t end) {
      const auto some = [&](std::int64_t first, std::int64_t last, std::uint32_t keep) {
        accumulate_pairs<1>(p + row * tile_keys, values, static_cast<int>(first), static_cast<int>(last), keep, dims_,
                            states + row * stride_, stride_, ahead_);
      };
      if (begin >= end) return;
      if (begin % 2 != 0) {
        some(begin / 2, begin / 2 + 1, 0xffff0000u);
        ++begin;
      }
      if (begin / 2 < end / 2) some(begin / 2, end / 2, 0xffffffffu);
      if (end % 2 != 0 && begin < end) some(end / 2, end / 2 + 1, 0xffffu);
    };
    for (int i = 0; i < rows; ++i) alone(i, seen[i].begin, together ? common.begin : seen[i].end);
    if (!together) return;
    with_rows(
        rows, [&]<int Rows>() __attribute__((always_inline)) {
          accumulate_pairs<Rows>(p, values, static_cast<int>(common.begin / 2), static_cast<int>(common.end / 2),
                                 0xffffffffu, dims_, states, stride_, ahead_);
        });
    for (int i = 0; i < rows; ++i) alone(i, common.end, seen[i].end);
  }

  // Folds and writes all rows. `states` holds one state a row; with `split_stride` > 0, one a split and row.
  void finish_rows(float* states, std::int64_t split_stride) noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int row = 0; row < head_rows_; ++row) {
        const visible_range range = range_of_row(row);
        if (range.begin >= range.end) {
          write_empty_row(head, row);
          continue;
        }
        float* state = state_of(states, head, row);
        if (split_stride > 0) {
          float* total = scratch_.totals;
          const std::int64_t first = range.begin / split_keys;
          const std::int64_t last = (range.end - 1) / split_keys;
          for (std::int64_t split = first; split <= last; ++split) {
            fold(total, state + (split - first_split()) * split_stride, split == first);
          }
          state = total;
        }
        write_row(head, row, state);
      }
    }
  }

  [[nodiscard]] int query_head(int head, int row) const noexcept {
    return (item_.kv_head_begin + head) * args_.group_size + row % args_.group_size;
  }
  [[nodiscard]] std::int64_t query_offset(int head, int row) const noexcept {
    return token_of(row) * args_.q_token_stride + query_head(head, row) * args_.q_head_stride;
  }
  [[nodiscard]] std::int64_t token_of(int row) const noexcept { return item_.first_token + row / args_.group_size; }

  void write_out(int head, int row, const float* values, float lse) noexcept {
    const int q_head = query_head(head, row);
    const std::int64_t token = token_of(row);
    narrow_any(args_.out_type, values, args_.head_dim, args_.out,
               token * args_.out_token_stride + q_head * args_.out_head_stride);
    if (args_.lse != nullptr) args_.lse[token * args_.num_q_heads + q_head] = lse;
  }

  void write_empty_row(int head, int row) noexcept {
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += lanes) store(values + d, vf(0.0f));
    write_out(head, row, values, args_.sinks == nullptr ? minus_infinity : args_.sinks[query_head(head, row)]);
  }

  void write_row(int head, int row, float* state) noexcept {
    float maximum = maximum_of(state, padded_);
    float sum = sum_of(state, padded_);
    float factor = 1.0f;
    if (args_.sinks != nullptr) {
      const float sink = args_.sinks[query_head(head, row)];
      const merge_weights weights = weights_of(maximum, sink);
      sum = sum * weights.a + weights.b;
      factor = weights.a;
    }
    const vf scale(factor / sum);
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += 2 * lanes) {
      vf a = load(state + d) * scale;
      vf b = load(state + d + lanes) * scale;
      if constexpr (uses_dots || uses_tiles) {
        order_dims(a, b, a, b);
      } else if constexpr (pair_is_interleaved<Key>) {
        interleave(a, b, a, b);
      }
      store(values + d, a);
      store(values + d + lanes, b);
    }
    write_out(head, row, values, maximum + __builtin_logf(sum));
  }

  const attention_args& args_;
  const attention_item& item_;
  const attention_scratch& scratch_;
  int padded_;
  int dims_;  // head_dim in whole pairs of vectors
  std::int64_t stride_;
  int head_rows_;  // rows of one KV head
  int num_heads_;
  int num_groups_;
  int base_rows_;     // of each group;
  int extra_rows_;    // the first so many have one more
  bool pairs_;        // transposed keys of 16 bits stay in pairs
  int query_values_;  // floats of a row in scratch
  bool k_contiguous_;
  bool v_contiguous_;
  bool v_in_place_;
  visible_range seen_;    // by any row of the item
  tile_place places_[3];  // tile t at t % 3
  tile_place next_place_;
  int next_head_ = 0;  // relative to this item's first
  int next_heads_ = 0;
  run_list lists_[2];  // of unit u at u % 2
  line_stream ahead_;
};

// Calls `body` with the runner of the call's dtypes. Everything of one call has to come here: the kinds of arithmetic
// sum in different orders.
template <class Key, class Body>
BIFOLIO_INLINE void with_runner(const attention_args& args, const attention_item& item,
                                const attention_scratch& scratch, const Body& body) noexcept {
  if constexpr (has_pair_dot && __is_same(Key, bfloat16)) {
    if (args.q_type == dtype::bf16 && args.out_type == dtype::bf16) {
      const tile_scope own_tiles;
      item_runner<Key, has_tiles ? arithmetic::tiles : arithmetic::dots> runner(args, item, scratch);
      return body(runner);
    }
  }
  item_runner<Key, arithmetic::widened> runner(args, item, scratch);
  body(runner);
}

template <class Key>
void run_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_runner<Key>(args, item, scratch, [](auto& runner) { runner.run(); });
}

template <class Key>
void finish_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept {
  with_runner<Key>(args, item, scratch, [](auto& runner) { runner.finish(); });
}

}  // namespace

extern const attention_kernels attention_table;
const attention_kernels attention_table{
    {&run_item<float>, &run_item<float16>, &run_item<bfloat16>},
    {&finish_item<float>, &finish_item<float16>, &finish_item<bfloat16>},
    &merge_rows,
};

}  // namespace bifolio::cpu::BIFOLIO_ISA
