// SPDX-License-Identifier: Apache-2.0
/// Devices and events of the C interface.

#include <bifolio/cpu.hpp>
#include <bifolio/log.hpp>
#include <mutex>

#include "c/objects.hpp"
#include "common/base/require.hpp"

using namespace bifolio;
using c::at;
using c::backend_object;
using c::done;
using c::event_object;
using c::get;
using c::report;
using c::to_stream;

namespace {

/// A caller's thread pool.
class callback_executor final : public executor {
 public:
  explicit callback_executor(const bifolio_backend_options& options)
      : concurrency_(options.concurrency), run_(options.run), user_(options.user) {
    detail::require_between("concurrency", concurrency_, 1, INT32_MAX);
  }
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    call passed{function, context};
    run_(
        user_, num_workers,
        [](void* to, std::int32_t worker) {
          const call& work = *static_cast<const call*>(to);
          work.function(work.context, worker);
        },
        &passed);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "callback"; }
  /// The caller's to say: its threads are not known here.
  [[nodiscard]] errc health() const noexcept override { return errc::ok; }

 private:
  struct call {
    worker_function function;
    void* context;
  };
  std::int32_t concurrency_;
  void (*run_)(void*, std::int32_t, bifolio_worker, void*);
  void* user_;
};

}  // namespace

void bifolio_set_log(void (*function)(void*, int32_t, const char*), void* user) {
  static std::mutex setting;  // the listener changes only while nobody is called
  static void (*listener)(void*, int32_t, const char*) = nullptr;
  const std::lock_guard lock(setting);
  set_log(nullptr);
  listener = function;
  if (function == nullptr) return;
  set_log([](void* of_caller, log_level level,
             const char* message) { listener(of_caller, static_cast<std::int32_t>(level), message); },
          user);
}

bifolio_status bifolio_backend_options_init(bifolio_backend_options* options, size_t size) {
  return c::init_struct(options, size, bifolio_backend_options{}, "options");
}

bifolio_status bifolio_backend_create(const char* where, const bifolio_backend_options* options, bifolio_backend* out) {
  return done([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<backend_object>();
    backend_options chosen;
    if (options != nullptr) {
      const bifolio_backend_options given = c::read_struct(options, "options");
      chosen.num_threads = given.num_threads;
      if (given.executor != nullptr) chosen.executor_choice = parse_executor(given.executor);
      if (given.isa != nullptr) chosen.isa = parse_isa(given.isa);
      if (given.run != nullptr) {
        made->workers = std::make_unique<callback_executor>(given);
        chosen.own_executor = made->workers.get();
      }
    }
    made->device = make_backend(parse_device(&at(where, "device")), chosen);
    made->description = made->device->description();
    *out = c::open_handle(std::move(made));
  });
}

bifolio_status bifolio_backend_destroy(bifolio_backend backend) { return c::destroy<backend_object>(backend); }

bifolio_status bifolio_backend_description(bifolio_backend backend, const char** text) {
  return done([&] { at(text, "text") = get<backend_object>(backend).description.c_str(); });
}

bifolio_status bifolio_backend_health(bifolio_backend backend) {
  return c::guarded([&] { return report(get<backend_object>(backend).device->health(), "health"); });
}

bifolio_status bifolio_backend_memory_budget(bifolio_backend backend, double reserved_fraction, int64_t reserved_bytes,
                                             int64_t* out) {
  return done([&] {
    at(out, "out") = 0;
    *out = memory_budget(*get<backend_object>(backend).device, {reserved_fraction, reserved_bytes});
  });
}

bifolio_status bifolio_backend_allocate(bifolio_backend backend, size_t num_bytes, void** out) {
  return done([&] {
    void*& to = at(out, "out");  // refused before memory is taken
    to = get<backend_object>(backend).device->memory().allocate(num_bytes, 64);
  });
}

bifolio_status bifolio_backend_free(bifolio_backend backend, void* pointer, size_t num_bytes) {
  return done([&] { get<backend_object>(backend).device->memory().deallocate(pointer, num_bytes, 64); });
}

bifolio_status bifolio_backend_upload(bifolio_backend backend, void* dst, const void* host_src, size_t num_bytes,
                                      bifolio_stream stream) {
  return c::guarded([&] {
    bifolio::backend& where = *get<backend_object>(backend).device;
    if (num_bytes == 0) return bifolio_status{BIFOLIO_OK};
    (void)at(static_cast<char*>(dst), "dst");
    (void)at(static_cast<const char*>(host_src), "host_src");
    return report(where.upload(dst, host_src, num_bytes, to_stream(stream)), "upload");
  });
}

bifolio_status bifolio_backend_download(bifolio_backend backend, void* host_dst, const void* src, size_t num_bytes,
                                        bifolio_stream stream) {
  return c::guarded([&] {
    bifolio::backend& where = *get<backend_object>(backend).device;
    if (num_bytes == 0) return bifolio_status{BIFOLIO_OK};
    (void)at(static_cast<char*>(host_dst), "host_dst");
    (void)at(static_cast<const char*>(src), "src");
    return report(where.download(host_dst, src, num_bytes, to_stream(stream)), "download");
  });
}

bifolio_status bifolio_backend_synchronize(bifolio_backend backend, bifolio_stream stream) {
  return c::guarded(
      [&] { return report(get<backend_object>(backend).device->synchronize(to_stream(stream)), "synchronize"); });
}

bifolio_status bifolio_event_create(bifolio_backend backend, bifolio_event* out) {
  return done([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<event_object>();
    made->where = c::share<backend_object>(backend);
    made->point = made->where->device->make_event();
    *out = c::open_handle(std::move(made));
  });
}

bifolio_status bifolio_event_destroy(bifolio_event event) { return c::destroy<event_object>(event); }

bifolio_status bifolio_event_record(bifolio_event event, bifolio_backend backend, bifolio_stream stream) {
  return c::guarded([&] {
    return report(get<backend_object>(backend).device->record(get<event_object>(event).point, to_stream(stream)),
                  "record");
  });
}

bifolio_status bifolio_event_wait(bifolio_event event, bifolio_backend backend, bifolio_stream stream) {
  return c::guarded([&] {
    return report(get<backend_object>(backend).device->wait(get<event_object>(event).point, to_stream(stream)), "wait");
  });
}

bifolio_status bifolio_event_query(bifolio_event event, int32_t* is_done) {
  return c::guarded([&] {
    bool answer = at(is_done, "done") != 0;
    const errc code = get<event_object>(event).point.query(answer);
    *is_done = answer ? 1 : 0;
    return report(code, "query");
  });
}

bifolio_status bifolio_event_synchronize(bifolio_event event) {
  return c::guarded([&] { return report(get<event_object>(event).point.synchronize(), "synchronize"); });
}
