// SPDX-License-Identifier: Apache-2.0
#include "routes.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "input_error.hpp"
#include "tools/common/escape.hpp"

namespace serve {
namespace {

using httplib::Request;
using httplib::Response;

constexpr const char* json_type = "application/json";
constexpr std::chrono::milliseconds patience{50};  // between two looks at whether the client is still there

void refuse(Response& response, int status, std::string_view sentence) {
  response.status = status;
  if (status == 429) response.set_header("Retry-After", "1");
  response.set_content(format_error(status, sentence), json_type);
}

int status_of(generate::order_refusal::reason why) {
  using reason = generate::order_refusal::reason;
  switch (why) {
    case reason::never:
      return 400;
    case reason::full:
      return 429;
    case reason::ending:
      return 503;
    case reason::stopped:
      break;
  }
  return 500;
}

void refuse_for(Response& response, const std::exception_ptr& problem) {
  try {
    std::rethrow_exception(problem);
  } catch (const api_error& known) {
    refuse(response, known.status, known.what());
  } catch (const generate::order_refused& order) {
    refuse(response, status_of(order.why), order.what());
  } catch (const generate::input_error& asked) {
    refuse(response, 400, asked.what());
  } catch (const std::exception& other) {
    refuse(response, 500, other.what());
  }
}

/// What the library itself refuses, which has no text yet.
void refuse_unread(const Request& asked, Response& response) {
  if (!response.body.empty()) return;
  const std::string path = tools::excerpt(asked.method + " " + asked.path);
  refuse(response, response.status,
         response.status == 404   ? fmt::format("there is no {}", path)
         : response.status == 413 ? std::string("the body is too large (--max-body-kib)")
                                  : fmt::format("{} could not be read as HTTP", path));
}

}  // namespace

routes::routes(httplib::Server& server, generate::engine_thread& texts, const model_facts& model, const options& chosen)
    : texts_(texts), model_(model), chosen_(chosen) {
  // A request a connection, so that an idle client keeps no thread for long.
  const auto num_threads = static_cast<std::size_t>(chosen.max_queue) + 64;
  server.new_task_queue = [num_threads] { return new httplib::ThreadPool(num_threads); };
  server.set_keep_alive_max_count(1);
  server.set_keep_alive_timeout(5);
  server.set_read_timeout(5);
  server.set_write_timeout(chosen.write_seconds);
  server.set_tcp_nodelay(true);
  server.set_payload_max_length(std::size_t{64} << 20);  // of paths that take no body; `read_body` has the real bound
  server.set_error_handler(refuse_unread);
  server.set_exception_handler(
      [](const Request&, Response& response, const std::exception_ptr& problem) { refuse_for(response, problem); });
  // Counted before an answer is written, so that a client that has read one finds it in /metrics.
  server.set_post_routing_handler([this](const Request&, Response& response) {
    const auto found = std::find(statuses.begin(), statuses.end() - 1, response.status);
    ++by_status_[static_cast<std::size_t>(found - statuses.begin())];
  });

  const auto get = [&server](const char* path, const char* type, auto text) {
    server.Get(path, [type, text](const Request&, Response& response) { response.set_content(text(), type); });
  };
  get("/", "text/html; charset=utf-8", page);
  get("/metrics", "text/plain; version=0.0.4", [this] { return metrics(); });
  get("/map", json_type, [this] { return texts_.frame(); });
  get("/v1/models", json_type, [this] { return models(); });
  get("/health", json_type, [this] {
    if (const std::string failure = texts_.failure(); !failure.empty()) throw api_error(503, failure);
    return std::string("{\"status\":\"ok\"}");
  });
  const auto post = [&](const char* path, bool is_chat) {
    server.Post(path, [this, is_chat](const Request&, Response& response, const httplib::ContentReader& body) {
      complete(body, response, is_chat);
    });
  };
  post("/v1/completions", false);
  post("/v1/chat/completions", true);
}

/// An answer that does not stream goes out in chunks as well, so that the client's going is noticed before it is there.
void routes::complete(const httplib::ContentReader& body, Response& response, bool is_chat) {
  const completion_request what = parse_request(read_body(body), is_chat, model_);
  const std::shared_ptr<generate::open_order> one = texts_.submit(what.order);
  ++num_open_;
  response.set_header("Cache-Control", "no-cache");
  response.set_chunked_content_provider(
      what.stream ? "text/event-stream" : json_type,
      [one, form = answer(fmt::format("{}-{}", is_chat ? "chatcmpl" : "cmpl", num_answers_++), what, model_.name)](
          std::size_t, httplib::DataSink& sink) mutable {
        const generate::text_news now = one->take(patience);
        const std::string text = form.next(now);
        const bool is_there = text.empty() ? sink.is_writable() : sink.write(text.data(), text.size());
        if (is_there && now.is_done) sink.done();
        return is_there;
      },
      [this, one](bool) {  // everything was written, or the client is gone
        texts_.cancel(one);
        --num_open_;
      });
}

/// Bounded here as well: the library's own bound does not count a chunked body. Of one that is too large a little more
/// is read and dropped, because a client that is still sending does not see an answer.
std::string routes::read_body(const httplib::ContentReader& body) const {
  constexpr std::size_t dropped_bytes = std::size_t{16} << 20;
  const auto limit = static_cast<std::size_t>(chosen_.max_body_kib) * 1024;
  std::string text;
  std::size_t num_bytes = 0;
  const bool is_read = body([&](const char* data, std::size_t size) {
    num_bytes += size;
    if (num_bytes <= limit) text.append(data, size);
    return num_bytes <= limit + dropped_bytes;
  });
  if (num_bytes > limit) throw api_error(413, fmt::format("the body has more than {} bytes (--max-body-kib)", limit));
  if (!is_read) throw api_error(400, "the body ended before its announced length");
  return text;
}

std::string routes::models() const {
  return to_text({{"object", "list"},
                  {"data",
                   {{{"id", model_.name},
                     {"object", "model"},
                     {"created", start_},
                     {"owned_by", "bifolio"},
                     {"max_model_len", model_.on.max_positions}}}}});
}

std::string routes::metrics() {
  std::string text = texts_.metrics();
  text += "# HELP bifolio_http_requests_total Answers by status; 0: any other.\n";
  text += "# TYPE bifolio_http_requests_total counter\n";
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    text += fmt::format("bifolio_http_requests_total{{status=\"{}\"}} {}\n", statuses[i], by_status_[i].load());
  }
  return text;
}

}  // namespace serve
