// SPDX-License-Identifier: Apache-2.0
/// The part of the Python package that is C++: caches, steps and merges over arrays of any framework that speaks
/// DLPack. bifolio/__init__.py is what people see.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bifolio/bifolio.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace bifolio;

namespace {

[[noreturn]] void refuse(errc code, const std::string& sentence) { throw error(code, sentence); }

/// Rows of any framework as the library reads them. `where` is the device that its memory has to be on.
tensor_view to_view(const nb::ndarray<>& array, const char* name, const device& where) {
  const std::string what(name);
  if (array.ndim() != 3) {
    refuse(errc::invalid_argument,
           what + " has " + std::to_string(array.ndim()) + " dimensions; it must be [tokens, heads, head_dim]");
  }
  const bool on_cuda = array.device_type() == nb::device::cuda::value;
  const bool is_there = where.type == device_type::cuda ? on_cuda && array.device_id() == where.index
                                                        : array.device_type() == nb::device::cpu::value;
  if (!is_there) refuse(errc::invalid_argument, what + " is not on the cache's device, " + to_string(where));
  if (array.shape(2) > 1 && array.stride(2) != 1) {
    refuse(errc::invalid_argument, "the last dimension of " + what + " has the stride " +
                                       std::to_string(array.stride(2)) + "; its elements must be next to each other");
  }
  const nb::dlpack::dtype type = array.dtype();
  std::optional<dtype> element;
  if (type.lanes == 1 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) {
    if (type.bits == 32) element = dtype::f32;
    if (type.bits == 16) element = dtype::f16;
  }
  if (type.lanes == 1 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16) {
    element = dtype::bf16;
  }
  if (!element) {
    refuse(errc::invalid_argument, what + " has elements of type code " + std::to_string(int{type.code}) + " and " +
                                       std::to_string(int{type.bits}) +
                                       " bits; it takes float32, float16 and bfloat16");
  }
  return {array.data(),
          *element,
          static_cast<std::int64_t>(array.shape(0)),
          static_cast<std::int32_t>(array.shape(1)),
          static_cast<std::int32_t>(array.shape(2)),
          array.stride(0),
          array.stride(1)};
}

/// float32 values of every token and head, without gaps.
float* to_lse(const nb::ndarray<>& array, const char* name, std::int64_t num_tokens, std::int32_t num_heads) {
  const bool fits = array.ndim() == 2 && array.dtype() == nb::dtype<float>() &&
                    static_cast<std::int64_t>(array.shape(0)) == num_tokens &&
                    static_cast<std::int64_t>(array.shape(1)) == num_heads &&
                    (array.shape(1) < 2 || array.stride(1) == 1) &&
                    (array.shape(0) < 2 || array.stride(0) == static_cast<std::int64_t>(array.shape(1)));
  if (!fits) refuse(errc::invalid_argument, std::string(name) + " must be dense float32 [tokens, heads]");
  return static_cast<float*>(array.data());
}

class core_cache {
 public:
  core_cache(const std::string& where, std::int32_t num_threads, std::int32_t layers, std::int32_t q_heads,
             std::int32_t kv_heads, std::int32_t head_dim, const std::string& type, const std::string& kv_code,
             const std::string& layout, std::int32_t block_size, std::int64_t blocks, std::int64_t memory_bytes,
             std::int64_t host_memory_bytes, std::int32_t max_sequences, bool prefix,
             std::optional<std::pair<std::uint64_t, std::uint64_t>> seed, const std::vector<std::int32_t>& windows) {
    backend_options options;
    options.num_threads = num_threads;
    where_ = make_backend(parse_device(where), options);
    model_cache_config config;
    config.num_layers = layers;
    config.layout = parse_layout(layout);
    config.attention.num_q_heads = q_heads;
    config.attention.num_kv_heads = kv_heads;
    config.attention.qk_head_dim = head_dim;
    config.attention.q_type = config.attention.out_type = parse_dtype(type);
    config.attention.k_code = config.attention.v_code = parse_kv_code(kv_code);
    config.layer_windows = windows;
    config.cache.block_size = block_size;
    config.cache.num_blocks = blocks;
    config.cache.max_sequences = max_sequences;
    config.cache.prefix.enabled = prefix;
    if (seed) config.cache.prefix.seed = hash_seed{seed->first, seed->second};
    config.memory_bytes = memory_bytes;
    config.host_memory_bytes = host_memory_bytes;
    cache_.emplace(*where_, config);
  }

  [[nodiscard]] model_cache& cache() { return *cache_; }
  [[nodiscard]] device where() const { return where_->where(); }
  [[nodiscard]] std::string description() const { return where_->description(); }

 private:
  std::unique_ptr<backend> where_;
  std::optional<model_cache> cache_;
};

/// What a refusal for lack of blocks is thrown as.
struct out_of_blocks {
  alloc_status status;
};
void require_blocks(alloc_status status) {
  if (status != alloc_status::ok) throw out_of_blocks{status};
}

std::vector<token_id> to_tokens(const std::vector<std::int32_t>& numbers) {
  std::vector<token_id> tokens;
  tokens.reserve(numbers.size());
  for (const std::int32_t number : numbers) tokens.push_back(token_id{number});
  return tokens;
}

class core_step {
 public:
  core_step(core_cache& cache, const std::vector<std::pair<std::uint64_t, std::vector<std::int32_t>>>& given)
      : cache_(&cache) {
    std::vector<std::vector<token_id>> tokens;
    std::vector<step_row> rows;
    for (const auto& [seq, numbers] : given) tokens.push_back(to_tokens(numbers));
    for (std::size_t i = 0; i < given.size(); ++i) rows.push_back({seq_id{given[i].first}, tokens[i]});
    step_ = cache.cache().begin_step(rows);
    require_blocks(step_.status());
  }

  void require_open() const {
    if (!step_) refuse(errc::failed_precondition, "the step has ended: it was committed or dropped");
  }
  model_step& step() {
    require_open();
    return step_;
  }
  [[nodiscard]] core_cache& cache() const { return *cache_; }

  void attend(std::int32_t layer, const nb::ndarray<>& q, const nb::ndarray<>& k, const nb::ndarray<>& v,
              const nb::ndarray<>& out, std::optional<float> scale, float soft_cap, std::uintptr_t) {
    require_open();
    const device where = cache_->where();
    attention_params params;
    params.q = to_view(q, "q", where);
    params.out = to_view(out, "out", where);
    params.scale = scale;
    params.soft_cap = soft_cap;
    const tensor_view rows_k = to_view(k, "k", where), rows_v = to_view(v, "v", where);
    errc code = errc::ok;
    {
      const nb::gil_scoped_release unlocked;
      code = step_.attend(layer, params, rows_k, rows_v);
    }
    if (code == errc::ok) return;
    if (code != errc::out_of_range) {
      const auto problem = find_problem(step_.attention_plan_of(layer), step_.complete(layer, params));
      if (problem && problem->code() == code) throw *problem;
    }
    refuse(code, "attend: " + std::string(to_string(code)) + " in layer " + std::to_string(layer) +
                     "; shapes and types of k and v must be those of the cache");
  }

  void commit(const std::optional<std::vector<std::int32_t>>& accepted) {
    if (!accepted) {
      step().commit();
    } else if (accepted->empty()) {
      refuse(errc::invalid_argument, "accepted is empty; it must have a number for each row");
    } else {
      step().commit(*accepted);
    }
  }
  void drop() { step_ = {}; }
  [[nodiscard]] bool is_open() const { return static_cast<bool>(step_); }

 private:
  core_cache* cache_;
  model_step step_;
};

/// A copy as an array that any framework imports.
template <class T, class From>
nb::ndarray<nb::array_api, T, nb::ndim<1>> array_of(const std::vector<From>& values) {
  static_assert(sizeof(T) == sizeof(From));
  auto* const copy = new std::vector<T>(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) (*copy)[i] = static_cast<T>(values[i]);
  const nb::capsule owner(copy, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::ndarray<nb::array_api, T, nb::ndim<1>>(copy->data(), {copy->size()}, owner);
}

backend& host_backend() {
  static const std::unique_ptr<backend> where = make_backend();
  return *where;
}

metrics metrics_of(core_cache& cache) {
  const kv_cache_manager& manager = cache.cache().manager();
  metrics now{.cache = manager.stats()};
  if (manager.prefix() != nullptr) now.prefix = manager.prefix()->stats();
  return now;
}

}  // namespace

NB_MODULE(_core, module) {
  module.attr("version") = BIFOLIO_VERSION;

  // Exceptions of the package: an object of its class, made from what the library said.
  static PyObject* refused = nullptr;
  static PyObject* lacking = nullptr;
  module.def("set_exceptions", [](nb::object error_class, nb::object blocks_class) {
    refused = error_class.release().ptr();
    lacking = blocks_class.release().ptr();
  });
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const error& problem) {
      const nb::object made = nb::handle(refused)(std::string(to_string(problem.code())), std::string(problem.what()));
      PyErr_SetObject(refused, made.ptr());
    } catch (const out_of_blocks& problem) {
      const nb::object made = nb::handle(lacking)(problem.status == alloc_status::later);
      PyErr_SetObject(lacking, made.ptr());
    }
  });

  nb::class_<core_cache>(module, "Cache")
      .def(nb::init<const std::string&, std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t,
                    const std::string&, const std::string&, const std::string&, std::int32_t, std::int64_t,
                    std::int64_t, std::int64_t, std::int32_t, bool,
                    std::optional<std::pair<std::uint64_t, std::uint64_t>>, const std::vector<std::int32_t>&>(),
           nb::arg("device"), nb::arg("threads"), nb::arg("layers"), nb::arg("q_heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("dtype"), nb::arg("kv_dtype"), nb::arg("layout"), nb::arg("block_size"),
           nb::arg("blocks"), nb::arg("memory"), nb::arg("host_memory"), nb::arg("max_sequences"), nb::arg("prefix"),
           nb::arg("seed").none(), nb::arg("windows"))
      .def(
          "open",
          [](core_cache& self, const std::vector<std::int32_t>& numbers, const nb::bytes& salt, std::uint64_t adapter) {
            const std::vector<token_id> tokens = to_tokens(numbers);
            const prompt_view prompt{.tokens = tokens, .scope = {{salt.c_str(), salt.size()}, adapter}};
            const open_result opened = self.cache().open(prompt);
            require_blocks(opened.status);
            return std::pair(to_index(opened.seq), opened.num_cached_tokens);
          })
      .def("fork",
           [](core_cache& self, std::uint64_t seq) {
             const allocate_result forked = self.cache().fork(seq_id{seq});
             require_blocks(forked.status);
             return to_index(forked.seq);
           })
      .def("truncate",
           [](core_cache& self, std::uint64_t seq, std::int64_t count) { self.cache().truncate(seq_id{seq}, count); })
      .def("free", [](core_cache& self, std::uint64_t seq) { self.cache().free(seq_id{seq}); })
      .def("contains", [](core_cache& self, std::uint64_t seq) { return self.cache().manager().contains(seq_id{seq}); })
      .def("num_committed",
           [](core_cache& self, std::uint64_t seq) { return self.cache().manager().num_committed(seq_id{seq}); })
      .def("swap",
           [](core_cache& self, const std::vector<std::uint64_t>& numbers, bool out) {
             std::vector<seq_id> seqs;
             for (const std::uint64_t number : numbers) seqs.push_back(seq_id{number});
             require_blocks(out ? self.cache().swap_out(seqs) : self.cache().swap_in(seqs));
           })
      .def("metrics_text",
           [](core_cache& self, const std::vector<std::pair<std::string, std::string>>& given) {
             return prometheus_text(metrics_of(self), std::vector<metric_label>(given.begin(), given.end()));
           })
      .def("metrics_json", [](core_cache& self) { return json_text(metrics_of(self)); })
      .def("check", [](core_cache& self) { return self.cache().manager().check(); })
      .def_prop_ro("description", &core_cache::description)
      .def_prop_ro("num_blocks", [](core_cache& self) { return self.cache().config().cache.num_blocks; })
      .def_prop_ro("block_size", [](core_cache& self) { return self.cache().config().cache.block_size; });

  nb::class_<core_step>(module, "Step")
      .def(nb::init<core_cache&, const std::vector<std::pair<std::uint64_t, std::vector<std::int32_t>>>&>(),
           nb::keep_alive<1, 2>())
      .def("attend", &core_step::attend, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
           nb::arg("scale").none(), nb::arg("soft_cap"), nb::arg("stream"))
      .def("commit", &core_step::commit, nb::arg("accepted").none())
      .def("drop", &core_step::drop)
      .def_prop_ro("is_open", &core_step::is_open)
      .def_prop_ro("num_tokens", [](core_step& self) { return self.step().num_tokens(); })
      .def_prop_ro(
          "tokens", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().tokens); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "positions", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().positions); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "sample_rows", [](core_step& self) { return array_of<std::int32_t>(self.step().inputs().sample_rows); },
          nb::rv_policy::automatic);

  module.def("merge", [](const nb::ndarray<>& out_a, const nb::ndarray<>& lse_a, const nb::ndarray<>& out_b,
                         const nb::ndarray<>& lse_b, const nb::ndarray<>& out, const nb::ndarray<>& lse) {
    merge_params params;
    params.a.out = to_view(out_a, "out1", {});
    params.b.out = to_view(out_b, "out2", {});
    params.out = to_view(out, "out", {});
    const std::int64_t num_tokens = params.out.num_tokens;
    const std::int32_t num_heads = params.out.num_heads;
    params.a.lse = to_lse(lse_a, "lse1", num_tokens, num_heads);
    params.b.lse = to_lse(lse_b, "lse2", num_tokens, num_heads);
    params.lse = to_lse(lse, "lse", num_tokens, num_heads);
    const nb::gil_scoped_release unlocked;
    const errc code = host_backend().merge_states(params);
    if (code != errc::ok) refuse(code, "merge: " + std::string(to_string(code)) + "; shapes must be equal");
  });
}
