// SPDX-License-Identifier: Apache-2.0
/// Caches, their sequences and the steps of rows.

#include "cache.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>

#include "tools/common/pool_cells.hpp"
#include "tools/common/pool_svg.hpp"

using namespace bifolio;

namespace bifolio_python {
namespace {

metrics metrics_of(core_cache& cache, core_scheduler* requests) {
  const kv_cache_manager& manager = cache.cache().manager();
  metrics now{.cache = manager.stats()};
  if (manager.prefix() != nullptr) now.prefix = manager.prefix()->stats();
  if (requests != nullptr) now.scheduler = requests->requests().stats();
  return now;
}

/// The counters of a struct in its order; all of them have 64 bits.
template <class Counters>
nb::object numbers_of(const Counters* from) {
  static_assert(sizeof(Counters) % sizeof(std::int64_t) == 0);
  if (from == nullptr) return nb::none();
  std::array<std::int64_t, sizeof(Counters) / sizeof(std::int64_t)> values{};
  std::memcpy(values.data(), from, sizeof(Counters));
  nb::list list;
  for (const std::int64_t value : values) list.append(value);
  return list;
}

/// DLPack's types of the elements of a plane; `bits` for those that NumPy does not have.
nb::dlpack::dtype dlpack_type(dtype type, bool bits) {
  const auto size = static_cast<std::uint8_t>(8 * size_of(type));
  const auto named = [&](int code) { return nb::dlpack::dtype{static_cast<std::uint8_t>(code), size, 1}; };
  constexpr int uint_code = 1;
  switch (type) {
    case dtype::f32:
    case dtype::f16:
      return named(2);
    case dtype::bf16:
      return named(bits ? uint_code : 4);
    case dtype::e4m3:
      return named(bits ? uint_code : 10);
    case dtype::e5m2:
      return named(bits ? uint_code : 12);
    case dtype::i8:
      return named(0);
    case dtype::u8:
      return named(uint_code);
  }
  refuse(errc::internal, "a plane has elements of an unknown type");
}

/// One plane of a layer as an array, in the order of its layout. `owner` is the cache.
dlpack_array plane_of(core_cache& self, nb::handle owner, std::int32_t layer, bool of_v, bool bits) {
  const auto layers = self.cache().engine().layers();
  if (layer < 0 || static_cast<std::size_t>(layer) >= layers.size()) {
    refuse(errc::out_of_range,
           "layer " + std::to_string(layer) + " is not there; there are " + std::to_string(layers.size()));
  }
  const kv_cache_view& view = layers[static_cast<std::size_t>(layer)];
  const kv_layout& layout = view.layout;
  const kv_plane& plane = of_v ? layout.v : layout.k;
  const kv_strides& strides = plane.strides;
  const auto blocks = static_cast<std::size_t>(view.num_blocks);
  const auto heads = static_cast<std::size_t>(layout.num_kv_heads);
  const auto tokens = static_cast<std::size_t>(layout.block_size);
  const auto dims = static_cast<std::size_t>(plane.head_dim);
  const auto chunk = static_cast<std::size_t>(strides.chunk);
  std::vector<std::size_t> shape;
  std::vector<std::int64_t> steps;
  switch (layout.kind) {
    case layout_kind::nhd:
      shape = {blocks, tokens, heads, dims};
      steps = {strides.block, strides.token, strides.head, strides.dim};
      break;
    case layout_kind::x_split:
      if (chunk < dims && chunk > 1) {
        shape = {blocks, heads, dims / chunk, tokens, chunk};
        steps = {strides.block, strides.head, strides.chunk_stride, strides.token, strides.dim};
      } else {
        shape = {blocks, heads, dims, tokens};
        steps = {strides.block, strides.head, chunk < dims ? strides.chunk_stride : strides.dim, strides.token};
      }
      break;
    case layout_kind::hnd:
    case layout_kind::strided:
      shape = {blocks, heads, tokens, dims};
      steps = {strides.block, strides.head, strides.token, strides.dim};
      break;
  }
  void* const data = of_v ? view.v_data() : view.k;
  const bool on_cuda = self.where().type == device_type::cuda;
  return dlpack_array(data, shape.size(), shape.data(), owner, steps.data(), dlpack_type(plane.code.type, bits),
                      on_cuda ? nb::device::cuda::value : nb::device::cpu::value, self.where().index);
}

std::string map_of(core_cache& self, const std::vector<std::pair<std::uint64_t, std::string>>& letters,
                   std::int32_t columns) {
  std::vector<tools::lettered_sequence> sequences;
  for (const auto& [seq, letter] : letters) sequences.push_back({seq_id{seq}, letter.empty() ? '#' : letter.front()});
  const kv_cache_manager& manager = self.cache().manager();
  tools::pool_frame frame;
  frame.block_size = manager.config().block_size;
  tools::mark_cells(frame, manager, sequences);
  tools::count_blocks(frame, manager);
  for (const tools::lettered_sequence& one : sequences) {
    (manager.is_swapped_out(one.seq) ? frame.swapped : frame.running) += one.letter;
  }
  return tools::draw_pool_svg(frame, columns);
}

/// A batch of events in vLLM's form: those since the last call, or all that is cached after "cleared".
nb::bytes encode_events(core_cache& self, bool whole, double timestamp, const std::string& medium, std::int32_t rank) {
  kv_cache_manager& manager = self.cache().manager();
  const prefix_caching_options& options = manager.config().prefix;
  if (!options.enabled || !options.record_events) {
    refuse(errc::failed_precondition, "the cache records no events; make it with prefix=True and events=True");
  }
  std::vector<cache_event> events;
  stored_contents stored;
  const std::lock_guard lock(self.changes());
  if (whole) {
    manager.prefix()->list_contents(events, stored);
    events.insert(events.begin(), cache_event{.what = cache_event::kind::cleared});
  } else {
    manager.drain_events(events, stored);
  }
  std::string batch;
  encode_kv_events(timestamp, events, stored,
                   {.block_size = manager.config().block_size, .medium = medium, .data_parallel_rank = rank}, batch);
  return nb::bytes(batch.data(), batch.size());
}

/// What a cache takes of the host's memory where nothing is said.
constexpr std::int64_t most_host_bytes = std::int64_t{4} << 30;

cache_settings settings_of(const nb::dict& given) {
  const auto number = [&](const char* name) { return nb::cast<std::int32_t>(given[name]); };
  const auto text = [&](const char* name) { return nb::cast<std::string>(given[name]); };
  cache_settings settings;
  settings.device = text("device");
  settings.num_threads = number("threads");
  settings.reserve = nb::cast<double>(given["reserve"]);
  model_cache_config& config = settings.model;
  config.num_layers = number("layers");
  config.layout = parse_layout(text("layout"));
  config.attention.num_q_heads = number("q_heads");
  config.attention.num_kv_heads = number("kv_heads");
  config.attention.qk_head_dim = number("head_dim");
  config.attention.q_type = config.attention.out_type = parse_dtype(text("dtype"));
  config.attention.k_code = config.attention.v_code = parse_kv_code(text("kv_dtype"));
  config.layer_windows = nb::cast<std::vector<std::int32_t>>(given["windows"]);
  config.cache.block_size = number("block_size");
  config.cache.num_blocks = nb::cast<std::int64_t>(given["blocks"]);
  config.cache.max_sequences = number("max_sequences");
  config.cache.prefix.enabled = nb::cast<bool>(given["prefix"]);
  if (const auto seed = nb::cast<std::optional<std::pair<std::uint64_t, std::uint64_t>>>(given["seed"])) {
    config.cache.prefix.seed = hash_seed{seed->first, seed->second};
  }
  config.cache.prefix.record_events = config.cache.prefix.record_tokens = nb::cast<bool>(given["events"]);
  config.memory_bytes = nb::cast<std::int64_t>(given["memory"]);
  config.host_memory_bytes = nb::cast<std::int64_t>(given["host_memory"]);
  return settings;
}

}  // namespace

void require_blocks(alloc_status status) {
  if (status != alloc_status::ok) throw out_of_blocks{status};
}

std::vector<token_id> to_tokens(const std::vector<std::int32_t>& numbers) {
  std::vector<token_id> tokens;
  tokens.reserve(numbers.size());
  for (const std::int32_t number : numbers) tokens.push_back(token_id{number});
  return tokens;
}

core_cache::core_cache(const cache_settings& settings) {
  backend_options options;
  options.num_threads = settings.num_threads;
  where_ = make_backend(parse_device(settings.device), options);
  model_cache_config model = settings.model;
  if (model.cache.num_blocks == 0 && model.memory_bytes == 0) {
    model.memory_bytes = memory_budget(*where_, {.fraction = settings.reserve});
    // The host's memory is everybody's.
    if (where_->where().type == device_type::cpu) model.memory_bytes = std::min(model.memory_bytes, most_host_bytes);
    if (model.memory_bytes == 0) {
      const memory_amount amount = where_->amount_of_memory();
      refuse(errc::out_of_memory, "too little memory is free on the device " + to_string(where_->where()) + ": " +
                                      std::to_string(amount.free_bytes) + " of " + std::to_string(amount.total_bytes) +
                                      " bytes, less the reserve; give blocks or memory, or a smaller reserve");
    }
  }
  cache_.emplace(*where_, model);
}

core_step::core_step(core_cache& cache, const std::vector<std::pair<std::uint64_t, std::vector<std::int32_t>>>& given,
                     const std::vector<std::int32_t>& counts, std::uintptr_t stream)
    : cache_(&cache) {
  if (!counts.empty() && counts.size() != given.size()) {
    refuse(errc::invalid_argument, "counts has " + std::to_string(counts.size()) + " numbers for " +
                                       std::to_string(given.size()) + " sequences");
  }
  const nb::gil_scoped_release unlocked;
  std::vector<std::vector<token_id>> tokens;
  std::vector<step_row> rows;
  tokens.reserve(given.size());
  for (const auto& [seq, numbers] : given) tokens.push_back(to_tokens(numbers));
  for (std::size_t i = 0; i < given.size(); ++i) {
    rows.push_back({seq_id{given[i].first}, tokens[i], counts.empty() ? 0 : counts[i]});
  }
  const std::lock_guard lock(cache.changes());
  step_ = cache.cache().begin_step(rows, stream_ref{reinterpret_cast<void*>(stream)});
  require_blocks(step_.status());
}

model_step& core_step::step() {
  if (!step_) refuse(errc::failed_precondition, "the step has ended: it was committed or dropped");
  return step_;
}

nb::object core_step::attend(std::int32_t layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                             std::optional<float> scale, float soft_cap, nb::handle sinks, nb::handle slopes,
                             nb::handle lse) {
  model_step& step = this->step();
  const device where = cache_->where();
  const array_ref array_q(q, "q"), array_k(k, "k"), array_v(v, "v");
  attention_params params;
  params.q = to_rows(array_q, where);
  const tensor_view rows_k = to_rows(array_k, where), rows_v = to_rows(array_v, where);
  const std::array<std::int64_t, 3> shape{params.q.num_tokens, params.q.num_heads, rows_v.head_dim};
  array_out written(out, "out", q, array_q, shape);
  params.out = to_rows(written.array(), where);
  params.scale = scale;
  params.soft_cap = soft_cap;
  params.sinks = to_head_values(sinks, "sinks", params.q.num_heads, where);
  params.alibi_slopes = to_head_values(slopes, "alibi_slopes", params.q.num_heads, where);
  if (!lse.is_none()) {
    params.lse = to_lse(array_ref(lse, "lse", access::write), params.q.num_tokens, params.q.num_heads, where);
  }
  errc code = errc::ok;
  {
    const nb::gil_scoped_release unlocked;
    code = step.attend(layer, params, rows_k, rows_v);
  }
  if (code == errc::ok) return written.finish();
  if (const auto problem = step.find_problem(layer, params, rows_k, rows_v)) throw *problem;
  refuse(code, "attend: " + std::string(to_string(code)) + " in layer " + std::to_string(layer));
}

void core_step::commit(const std::optional<std::vector<std::int32_t>>& accepted) {
  model_step& open = step();
  const std::lock_guard lock(cache_->changes());
  if (!accepted) {
    open.commit();
  } else if (accepted->empty()) {
    refuse(errc::invalid_argument, "accepted is empty; it must have a number for each row");
  } else {
    open.commit(*accepted);
  }
}

void core_step::drop() {
  const std::lock_guard lock(cache_->changes());
  step_ = {};
}

void define_cache(nb::module_& module) {
  nb::class_<core_cache>(module, "Cache")
      .def("__init__",
           [](core_cache* self, const settings_dict& settings) { new (self) core_cache(settings_of(settings)); })
      .def(
          "open",
          [](core_cache& self, const std::vector<std::int32_t>& numbers, const nb::bytes& salt, std::uint64_t adapter) {
            const std::vector<token_id> tokens = to_tokens(numbers);
            const prompt_view prompt{.tokens = tokens, .scope = {{salt.c_str(), salt.size()}, adapter}};
            const nb::gil_scoped_release unlocked;
            const std::lock_guard lock(self.changes());
            if (tokens.empty()) {  // of a model that does not say its tokens
              const allocate_result made = self.cache().manager().allocate(1);
              require_blocks(made.status);
              return std::pair(to_index(made.seq), std::int64_t{0});
            }
            const open_result opened = self.cache().open(prompt);
            require_blocks(opened.status);
            return std::pair(to_index(opened.seq), opened.num_cached_tokens);
          },
          nb::arg("tokens"), nb::arg("salt"), nb::arg("adapter_id"))
      .def(
          "fork",
          [](core_cache& self, std::uint64_t seq) {
            const std::lock_guard lock(self.changes());
            const allocate_result forked = self.cache().fork(seq_id{seq});
            require_blocks(forked.status);
            return to_index(forked.seq);
          },
          nb::arg("seq"))
      .def(
          "truncate",
          [](core_cache& self, std::uint64_t seq, std::int64_t count) {
            const std::lock_guard lock(self.changes());
            self.cache().truncate(seq_id{seq}, count);
          },
          nb::arg("seq"), nb::arg("num_tokens"))
      .def(
          "free",
          [](core_cache& self, std::uint64_t seq) {
            const std::lock_guard lock(self.changes());
            self.cache().free(seq_id{seq});
          },
          nb::arg("seq"))
      .def(
          "num_committed",
          [](core_cache& self, std::uint64_t seq) { return self.cache().manager().num_committed(seq_id{seq}); },
          nb::arg("seq"))
      .def(
          "swap",
          [](core_cache& self, const std::vector<std::uint64_t>& numbers, bool out) {
            std::vector<seq_id> seqs;
            for (const std::uint64_t number : numbers) seqs.push_back(seq_id{number});
            const nb::gil_scoped_release unlocked;
            const std::lock_guard lock(self.changes());
            require_blocks(out ? self.cache().swap_out(seqs) : self.cache().swap_in(seqs));
          },
          nb::arg("seqs"), nb::arg("out"))
      .def(
          "metrics_text",
          [](core_cache& self, const std::vector<std::pair<std::string, std::string>>& given,
             core_scheduler* requests) {
            return prometheus_text(metrics_of(self, requests), std::vector<metric_label>(given.begin(), given.end()));
          },
          nb::arg("labels"), nb::arg("scheduler").none())
      .def(
          "metrics_json",
          [](core_cache& self, core_scheduler* requests) { return json_text(metrics_of(self, requests)); },
          nb::arg("scheduler").none())
      .def(
          "counters",
          [](core_cache& self, core_scheduler* requests) -> nb::typed<nb::tuple, nb::any, nb::any, nb::any> {
            const metrics now = metrics_of(self, requests);
            return nb::make_tuple(numbers_of(&now.cache), numbers_of(now.prefix ? &*now.prefix : nullptr),
                                  numbers_of(now.scheduler ? &*now.scheduler : nullptr));
          },
          nb::arg("scheduler").none())
      .def("check", [](core_cache& self) { return self.cache().manager().check(); })
      .def(
          "plane",
          [](nb::handle self, std::int32_t layer, bool of_v, bool bits) {
            return plane_of(nb::cast<core_cache&>(self), self, layer, of_v, bits);
          },
          nb::arg("layer"), nb::arg("of_v"), nb::arg("bits"))
      .def("encode_events", &encode_events, nb::arg("whole"), nb::arg("timestamp"), nb::arg("medium"), nb::arg("rank"))
      .def("map", &map_of, nb::arg("letters"), nb::arg("columns"))
      .def_prop_ro("description", &core_cache::description)
      .def_prop_ro("device", [](core_cache& self) { return to_string(self.where()); })
      .def_prop_ro("num_blocks", [](core_cache& self) { return self.cache().config().cache.num_blocks; })
      .def_prop_ro("block_size", [](core_cache& self) { return self.cache().config().cache.block_size; });

  nb::class_<core_step>(module, "Step")
      .def(nb::init<core_cache&, const std::vector<std::pair<std::uint64_t, std::vector<std::int32_t>>>&,
                    const std::vector<std::int32_t>&, std::uintptr_t>(),
           nb::arg("cache"), nb::arg("rows"), nb::arg("counts"), nb::arg("stream"), nb::keep_alive<1, 2>())
      .def(nb::init<core_scheduler&, std::uintptr_t>(), nb::arg("scheduler"), nb::arg("stream"), nb::keep_alive<1, 2>())
      .def("attend", &core_step::attend, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("out").none(), nb::arg("scale").none(), nb::arg("soft_cap"), nb::arg("sinks").none(),
           nb::arg("alibi_slopes").none(), nb::arg("lse").none())
      .def("commit", &core_step::commit, nb::arg("accepted").none())
      .def("commit_sampled", &core_step::commit_sampled, nb::arg("tokens"))
      .def("drop", &core_step::drop)
      .def_prop_ro("is_open", &core_step::is_open)
      .def_prop_ro("num_tokens", [](core_step& self) { return self.step().num_tokens(); })
      .def_prop_ro("num_samples",
                   [](core_step& self) {
                     std::int64_t sum = 0;
                     for (const scheduled_seq& row : self.step().plan().seqs) sum += row.num_samples;
                     return sum;
                   })
      .def_prop_ro("rows",
                   [](core_step& self) -> nb::typed<nb::list, nb::any> {
                     nb::list rows;
                     for (const scheduled_seq& row : self.step().plan().seqs) {
                       rows.append(nb::make_tuple(to_index(row.request), row.sample, row.query_len, row.seq_len,
                                                  row.num_samples, row.num_drafts, row.num_cached_tokens));
                     }
                     return rows;
                   })
      .def_prop_ro(
          "graph_key",
          [](core_step& self) -> nb::object {
            const std::vector<std::uint64_t> key = self.step().graph_key();
            if (key.empty()) return nb::none();
            nb::list numbers;
            for (const std::uint64_t number : key) numbers.append(number);
            return nb::tuple(numbers);
          },
          nb::sig("def graph_key(self) -> tuple[int, ...] | None"))
      .def_prop_ro("plan", [](core_step& self) { return to_string(self.step().plan()); })
      .def_prop_ro(
          "tokens", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().tokens); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "positions", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().positions); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "sample_rows", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().sample_rows); },
          nb::rv_policy::automatic);
}

}  // namespace bifolio_python
