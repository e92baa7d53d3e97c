// SPDX-License-Identifier: Apache-2.0
// A language model over HTTP, through bifolio's paged KV cache. tools/common/program.hpp has the exit codes.

#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>

#include "engine_thread.hpp"
#include "input_error.hpp"
#include "options.hpp"
#include "routes.hpp"
#include "tools/common/program.hpp"

namespace serve {
namespace {

std::string name_of(const options& o) {
  if (o.model.empty()) return "bifolio-example";
  const std::filesystem::path path = std::filesystem::absolute(o.model).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

/// SIGTERM and SIGINT, for the thread that waits for them.
sigset_t block_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  (void)pthread_sigmask(SIG_BLOCK, &set, nullptr);
  (void)std::signal(SIGPIPE, SIG_IGN);
  return set;
}

/// Listens on what the options say; the port.
int bind(httplib::Server& server, const options& o) {
  int listening = -1;
  server.set_socket_options([&listening](int socket) {
    listening = socket;
    httplib::default_socket_options(socket);
  });
  const int port = o.port > 0 ? (server.bind_to_port(o.host, o.port) ? o.port : -1) : server.bind_to_any_port(o.host);
  if (port <= 0) {
    throw generate::input_error(fmt::format("--host {} with --port {} cannot be listened on", o.host, o.port));
  }
  (void)::listen(listening, 128);  // the library's own queue of five drops connections that come at once
  return port;
}

/// The first signal drains, a second one or time cuts. The server cuts what it is sending when it stops, so it goes on
/// until all has been sent.
void wait_and_drain(const sigset_t& signals, generate::engine_thread& texts, const routes& paths, const options& o) {
  int taken = 0;
  if (sigwait(&signals, &taken) != 0) return;
  tools::write_stderr("shutting down: no further requests; a second signal ends those that run\n");
  texts.drain(false);
  const timespec a_moment{0, 20'000'000};
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(o.drain_seconds);
  while (texts.num_open() + paths.num_open() > 0 && std::chrono::steady_clock::now() < limit) {
    if (sigtimedwait(&signals, nullptr, &a_moment) > 0) break;
  }
  texts.drain(true);
}

int run(const options& o) {
  const sigset_t signals = block_signals();  // before there are threads, which inherit it
  generate::model_setup on(o);
  generate::cache_setup cache(o, on, o.max_batch_seqs);
  generate::engine_thread texts(on, cache, o, o.max_queue);
  const model_facts facts{name_of(o), on, o.max_batch_seqs};
  httplib::Server server;
  const routes paths(server, texts, facts, o);
  const int port = bind(server, o);
  tools::write_stderr(fmt::format("serving {} at http://{}:{}/\n", facts.name, o.host, port));

  std::atomic<bool> has_ended = false;
  std::thread watcher([&] {
    wait_and_drain(signals, texts, paths, o);
    while (!server.is_running() && !has_ended) std::this_thread::yield();  // a signal before the first accept
    if (!has_ended) server.stop();
  });
  const bool was_fine = server.listen_after_bind();  // returns when all connections have ended
  has_ended = true;
  if (!was_fine) (void)pthread_kill(watcher.native_handle(), SIGTERM);  // nobody told it to end
  watcher.join();
  tools::write_stderr("all connections have ended\n");
  return was_fine ? 0 : 1;
}

}  // namespace
}  // namespace serve

int main(int argc, char** argv) {
  return tools::run_main("serve", "there is not enough memory for this model and cache", [&] {
    const auto options = serve::parse_options(argc, argv);
    return options ? serve::run(*options) : 0;
  });
}
