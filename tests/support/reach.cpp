// SPDX-License-Identifier: Apache-2.0
#include "support/reach.hpp"

#include <errno.h>
#include <unistd.h>

#include <bifolio/cpu.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#if BIFOLIO_TEST_RECORDS_LAUNCHES
#include <cuda_runtime_api.h>

#include "cuda/host/backend.hpp"
#include "cuda/host/runtime.hpp"
#endif

namespace bifolio::test {
namespace {

// The record of this program; written when it ends.
class reach_record {
 public:
  reach_record() {
    const char* const folder = std::getenv("BIFOLIO_TEST_REACH_DIR");
    if (folder != nullptr) folder_ = folder;
  }
  ~reach_record() { write(); }
  reach_record(const reach_record&) = delete;
  reach_record& operator=(const reach_record&) = delete;

  [[nodiscard]] bool on() const noexcept { return !folder_.empty(); }
  void has(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    has_.insert(kernel);
  }
  void reached(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    ++reached_[kernel];
  }
#if BIFOLIO_TEST_RECORDS_LAUNCHES
  void launched(const void* function) {
    const std::lock_guard lock(mutex_);
    kernel_launches& kernel = launched_[function];
    if (kernel.count++ == 0) kernel.symbol = symbol_of(function);
  }
#endif

 private:
  void write() const {
    if (folder_.empty()) return;
    const std::string path = folder_ + "/" + program_invocation_short_name + "." + std::to_string(getpid()) + ".tsv";
    std::FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) {
      std::perror(path.c_str());
      return;
    }
    for (const std::string& kernel : has_) std::fprintf(file, "has\t%s\n", kernel.c_str());
    for (const auto& [kernel, calls] : reached_) std::fprintf(file, "reached\t%s\t%ld\n", kernel.c_str(), calls);
    for (const auto& [function, kernel] : launched_) {
      std::fprintf(file, "launched\t%s\t%ld\n", kernel.symbol.c_str(), kernel.count);
    }
    std::fclose(file);
  }

  struct kernel_launches {
    std::string symbol;
    long count = 0;
  };
#if BIFOLIO_TEST_RECORDS_LAUNCHES
  static std::string symbol_of(const void* function) {
    const char* symbol = nullptr;
#if CUDART_VERSION >= 12030
    if (cudaFuncGetName(&symbol, function) != cudaSuccess) symbol = nullptr;
#endif
    return symbol == nullptr ? "unknown" : symbol;
  }
#endif

  std::string folder_;
  std::mutex mutex_;
  std::set<std::string> has_;
  std::map<std::string, long> reached_;
  std::map<const void*, kernel_launches> launched_;
};

reach_record& the_record() {
  static reach_record instance;
  return instance;
}

// Kernels that move elements differ by the two dtypes, "move" for the cache and "rotate" for heads of q.
std::string pair_name(const std::string& backend_name, std::string_view what, dtype dst, dtype src) {
  return backend_name + " " + std::string(what) + " " + std::string(to_string(dst)) + " from " +
         std::string(to_string(src));
}

class recording_backend final : public backend {
 public:
  recording_backend(std::unique_ptr<backend> inner, std::string name)
      : inner_(std::move(inner)), name_(std::move(name)) {
    for (const dtype dst : tensor_dtypes) {
      for (const dtype src : tensor_dtypes) {
        for (const std::string_view what : {"move", "rotate"}) the_record().has(pair_name(name_, what, dst, src));
      }
    }
    the_record().has(name_ + " merge");
    for (const std::string_view what : {"append", "gather", "rotate_append", "copy_blocks", "convert_blocks"}) {
      for (const bool at_packs : {true, false}) the_record().has(start_name(what, at_packs));
    }
  }

  [[nodiscard]] device where() const noexcept override { return inner_->where(); }
  [[nodiscard]] std::string description() const override { return inner_->description(); }
  [[nodiscard]] errc health() const noexcept override { return inner_->health(); }
  [[nodiscard]] memory_resource& memory() noexcept override { return inner_->memory(); }
  [[nodiscard]] memory_resource& staging_memory() noexcept override { return inner_->staging_memory(); }
  [[nodiscard]] errc upload(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    return inner_->upload(dst, src, num_bytes, stream);
  }
  [[nodiscard]] errc download(void* dst, const void* src, std::size_t num_bytes, stream_ref stream) noexcept override {
    return inner_->download(dst, src, num_bytes, stream);
  }
  [[nodiscard]] errc synchronize(stream_ref stream) noexcept override { return inner_->synchronize(stream); }
  [[nodiscard]] errc clear(void* dst, std::size_t num_bytes, stream_ref stream) noexcept override {
    return inner_->clear(dst, num_bytes, stream);
  }
  [[nodiscard]] event make_event() override { return inner_->make_event(); }
  [[nodiscard]] errc record(event& point, stream_ref stream) noexcept override { return inner_->record(point, stream); }
  [[nodiscard]] errc wait(const event& point, stream_ref stream) noexcept override {
    return inner_->wait(point, stream);
  }

  [[nodiscard]] errc append(const append_params& params, stream_ref stream) noexcept override {
    const errc code = inner_->append(params, stream);
    started("append", params.kv, params.k.num_tokens > 0, code);
    return moved(params.kv.layout.k.code.type, params.k.type, params.k.num_tokens > 0, code);
  }
  [[nodiscard]] errc gather(const gather_params& params, stream_ref stream) noexcept override {
    const errc code = inner_->gather(params, stream);
    started("gather", params.kv, params.k.num_tokens > 0, code);
    return moved(params.k.type, params.kv.layout.k.code.type, params.k.num_tokens > 0, code);
  }
  [[nodiscard]] errc rotate_append(const rotate_append_params& params, stream_ref stream) noexcept override {
    const errc code = inner_->rotate_append(params, stream);
    if (params.q.num_heads > 0) reached("rotate", params.q_out.type, params.q.type, params.q.num_tokens > 0, code);
    const append_params& a = params.append;
    started("rotate_append", a.kv, a.k.num_tokens > 0, code);
    return reached("move", a.kv.layout.k.code.type, a.k.type, a.k.num_tokens > 0, code);
  }
  [[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                 stream_ref stream) noexcept override {
    const errc code = inner_->copy_blocks(layers, copies, stream);
    for (const kv_cache_view& layer : layers) {
      started("copy_blocks", layer, !copies.empty(), code);
      moved(layer.layout.k.code.type, layer.layout.k.code.type, !copies.empty(), code);
    }
    return code;
  }
  [[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies, stream_ref stream) noexcept override {
    const errc code = inner_->convert_blocks(src, dst, copies, stream);
    started("convert_blocks", dst, !copies.empty(), code);
    return moved(dst.layout.k.code.type, src.layout.k.code.type, !copies.empty(), code);
  }
  [[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                 std::span<const block_copy> copies, stream_ref stream) noexcept override {
    return inner_->swap_blocks(src, dst, copies, stream);
  }

  void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                      std::int64_t num_blocks, stream_ref stream) override {
    inner_->plan_attention(plan, spec, host_batch, num_blocks, stream);
  }
  [[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params,
                               stream_ref stream) noexcept override {
    return inner_->attention(plan, params, stream);
  }
  [[nodiscard]] std::vector<std::string> attention_kernels() const override { return inner_->attention_kernels(); }
  [[nodiscard]] std::vector<std::string> describe(const attention_plan& plan,
                                                  const attention_params& params) const override {
    return inner_->describe(plan, params);
  }
  [[nodiscard]] std::vector<std::string> explain(const attention_plan& plan) const override {
    return inner_->explain(plan);
  }
  [[nodiscard]] errc merge_states(const merge_params& params, stream_ref stream) noexcept override {
    const errc code = inner_->merge_states(params, stream);
    if (code == errc::ok && params.out.num_tokens > 0) the_record().reached(name_ + " merge");
    return code;
  }

 private:
  errc reached(std::string_view what, dtype dst, dtype src, bool anything, errc code) noexcept {
    if (code == errc::ok && anything) the_record().reached(pair_name(name_, what, dst, src));
    return code;
  }
  errc moved(dtype dst, dtype src, bool anything, errc code) noexcept {
    return reached("move", dst, src, anything, code);
  }
  // Kernels may take packs of 8-bit codes whose planes start at multiples of 16 bytes: both sides of that are wanted.
  [[nodiscard]] std::string start_name(std::string_view what, bool at_packs) const {
    return name_ + " " + std::string(what) + (at_packs ? " of codes in packs of 16 bytes" : " of codes anywhere");
  }
  void started(std::string_view what, const kv_cache_view& kv, bool anything, errc code) noexcept {
    if (code != errc::ok || !anything || size_of(kv.layout.k.code.type) != 1) return;
    the_record().reached(start_name(what, reinterpret_cast<std::uintptr_t>(kv.k) % 16 == 0));
  }

  std::unique_ptr<backend> inner_;
  std::string name_;
};

#if BIFOLIO_TEST_RECORDS_LAUNCHES
// The runtime with its launches recorded.
const cuda::runtime_api& recorded_runtime() {
  static const cuda::runtime_api recorded = [] {
    cuda::runtime_api api = cuda::real_runtime();
    api.launch_kernel = [](const cudaLaunchConfig_t* config, const void* function, void** args) {
      the_record().launched(function);
      return cuda::real_runtime().launch_kernel(config, function, args);
    };
    return api;
  }();
  return recorded;
}
#endif

std::unique_ptr<backend> open_recorded(device where, const backend_options& options) {
#if BIFOLIO_TEST_RECORDS_LAUNCHES
  // Not wrapped: functions that are specific to CUDA need the backend's own type.
  if (where.type == device_type::cuda) {
    return std::make_unique<cuda::cuda_backend>(recorded_runtime(), where.index);
  }
#endif
  std::unique_ptr<backend> inner = make_backend(where, options);
  if (where.type != device_type::cpu) return inner;
  const cpu_isa isa = options.isa.value_or(default_isa());
  return std::make_unique<recording_backend>(std::move(inner), "cpu " + std::string(to_string(isa)));
}

}  // namespace

std::unique_ptr<backend> open_backend(device where, const backend_options& options) {
  if (!the_record().on()) return make_backend(where, options);
  std::unique_ptr<backend> opened = open_recorded(where, options);
  for (const std::string& kernel : opened->attention_kernels()) the_record().has(kernel);
  return opened;
}

void record_attention(const backend& where, const attention_plan& plan, const attention_params& params) {
  if (!the_record().on()) return;
  for (const std::string& kernel : where.describe(plan, params)) {
    if (!kernel.empty()) the_record().reached(kernel);
  }
}

}  // namespace bifolio::test
