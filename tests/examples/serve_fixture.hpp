// SPDX-License-Identifier: Apache-2.0
#pragma once

/// examples/serve in process: a small random model, a port of its own, and clients that behave and that do not.

#include <doctest/doctest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "engine_thread.hpp"
#include "model_fixtures.hpp"
#include "model_setup.hpp"
#include "routes.hpp"

namespace bifolio::test {

struct serve_setup {
  std::int64_t num_blocks = 256;
  std::int32_t max_queue = 16;
  std::int32_t write_seconds = 2;
  bool prefix_caching = true;
};

class running_server {
 public:
  explicit running_server(const serve_setup& setup = {}) : options_(options_of(setup)) {
    server_.set_socket_options([](int socket) {
      httplib::default_socket_options(socket);
      const int small = 4096;  // so that a reader that stops is soon noticed
      (void)::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { (void)server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  ~running_server() {
    texts_.drain(true);
    server_.stop();
    thread_.join();
  }

  [[nodiscard]] httplib::Client client() const {
    httplib::Client client("127.0.0.1", port_);
    client.set_read_timeout(60);
    return client;
  }
  [[nodiscard]] generate::engine_thread& texts() noexcept { return texts_; }
  [[nodiscard]] const serve::model_facts& facts() const noexcept { return facts_; }
  [[nodiscard]] int port() const noexcept { return port_; }

  /// A counter or gauge without labels.
  [[nodiscard]] double metric(const std::string& name) {
    const std::string text = "\n" + texts_.metrics(), line = "\nbifolio_" + name + " ";
    const std::size_t at = text.find(line);
    REQUIRE(at != std::string::npos);
    return std::stod(text.substr(at + line.size()));
  }
  /// Whether the pool is empty and no request open within `seconds`.
  [[nodiscard]] bool becomes_idle(int seconds = 20) {
    for (int i = 0; i < 100 * seconds; ++i) {
      if (metric("requests_open") == 0 && metric("used_blocks") == 0 && metric("running_sequences") == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

 private:
  static serve::options options_of(const serve_setup& setup) {
    serve::options o;
    o.model = random_hugging_face("serve", 3,
                                  {.dim = 32,
                                   .hidden_dim = 32,
                                   .num_layers = 1,
                                   .num_q_heads = 4,
                                   .num_kv_heads = 2,
                                   .head_dim = 8,
                                   .max_positions = 2048});
    o.device = "cpu";
    o.num_threads = 1;
    o.num_blocks = setup.num_blocks;
    o.max_queue = setup.max_queue;
    o.write_seconds = setup.write_seconds;
    o.prefix_caching = setup.prefix_caching;
    o.max_batch_seqs = 32;
    return o;
  }

  serve::options options_;
  generate::model_setup on_{options_};
  generate::cache_setup cache_{options_, on_, options_.max_batch_seqs};
  generate::engine_thread texts_{on_, cache_, options_, options_.max_queue};
  serve::model_facts facts_{"random", on_, options_.max_batch_seqs};
  httplib::Server server_;
  serve::routes routes_{server_, texts_, facts_, options_};
  int port_ = 0;
  std::thread thread_;
};

/// What a stream said, choice by choice, and how each ended.
struct streamed {
  std::vector<std::string> texts, reasons;
  nlohmann::json usage;
  bool is_complete = false;  ///< it ended with [DONE]
};

inline streamed read_stream(const std::string& body, std::size_t num_choices) {
  streamed result{std::vector<std::string>(num_choices), std::vector<std::string>(num_choices), {}, false};
  for (std::size_t at = 0; at < body.size();) {
    const std::size_t end = body.find("\n\n", at);
    REQUIRE(end != std::string::npos);
    const std::string line = body.substr(at, end - at);
    at = end + 2;
    REQUIRE(line.starts_with("data: "));
    REQUIRE(!result.is_complete);
    if (line == "data: [DONE]") {
      result.is_complete = true;
      continue;
    }
    const nlohmann::json chunk = nlohmann::json::parse(line.substr(6));
    if (chunk.contains("usage")) result.usage = chunk["usage"];
    for (const nlohmann::json& choice : chunk["choices"]) {
      const std::size_t i = choice["index"];
      REQUIRE(result.reasons.at(i).empty());  // nothing follows the end
      if (choice.contains("text")) result.texts[i] += choice["text"].get<std::string>();
      if (choice.contains("delta")) result.texts[i] += choice["delta"].value("content", "");
      if (choice["finish_reason"].is_string()) result.reasons[i] = choice["finish_reason"];
    }
  }
  return result;
}

/// A connection without manners.
class raw_client {
 public:
  explicit raw_client(int port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    REQUIRE(socket_ >= 0);
    if (receive_buffer > 0) {
      (void)::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  raw_client(const raw_client&) = delete;
  raw_client& operator=(const raw_client&) = delete;
  ~raw_client() { (void)::close(socket_); }

  void send(std::string_view text) { (void)::send(socket_, text.data(), text.size(), MSG_NOSIGNAL); }
  void post(const std::string& body, std::size_t announced) {
    send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(announced) + "\r\n\r\n" +
         body);
  }
  /// Some bytes, or none at the end.
  std::string receive(std::size_t most) {
    std::string text(most, '\0');
    const ssize_t size = ::recv(socket_, text.data(), most, 0);
    text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    return text;
  }

 private:
  int socket_;
};

}  // namespace bifolio::test
