// SPDX-License-Identifier: Apache-2.0
#include "routes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <iterator>

#include "tools/common/escape.hpp"

namespace serve {
namespace {

constexpr const char* json_type = "application/json";
constexpr std::chrono::milliseconds patience{50};  // between two looks at whether the client is still there

void refuse(httplib::Response& answer, int status, std::string_view sentence) {
  answer.status = status;
  if (status == 429) answer.set_header("Retry-After", "1");
  answer.set_content(format_error(status, sentence), json_type);
}

}  // namespace

routes::routes(httplib::Server& server, service& texts, const model_facts& model, const options& chosen)
    : texts_(texts), model_(model), chosen_(chosen), start_(std::time(nullptr)) {
  using httplib::Request;
  using httplib::Response;
  // A request a connection, so that an idle client keeps no thread for long.
  const auto num_threads = static_cast<std::size_t>(chosen.max_queue) + 64;
  server.new_task_queue = [num_threads] { return new httplib::ThreadPool(num_threads); };
  server.set_keep_alive_max_count(1);
  server.set_keep_alive_timeout(5);
  server.set_read_timeout(5);
  server.set_write_timeout(chosen.write_seconds);
  server.set_tcp_nodelay(true);
  server.set_payload_max_length(std::size_t{64} << 20);  // of paths that take no body; `read_body` has the real bound
  server.set_logger([this](const Request&, const Response& answer) {
    const auto found = std::find(statuses.begin(), statuses.end() - 1, answer.status);
    ++by_status_[static_cast<std::size_t>(found - statuses.begin())];
  });
  server.set_error_handler([](const Request& asked, Response& answer) {
    if (!answer.body.empty()) return;
    const std::string path = tools::excerpt(asked.method + " " + asked.path);
    refuse(answer, answer.status,
           answer.status == 404   ? fmt::format("there is no {}", path)
           : answer.status == 413 ? std::string("the body is too large (--max-body-kib)")
                                  : fmt::format("{} could not be read as HTTP", path));
  });
  server.set_exception_handler([](const Request&, Response& answer, std::exception_ptr problem) {
    try {
      std::rethrow_exception(problem);
    } catch (const api_error& known) {
      refuse(answer, known.status, known.what());
    } catch (const std::exception& other) {
      refuse(answer, 500, other.what());
    }
  });
  server.Get("/", [](const Request&, Response& answer) { answer.set_content(page(), "text/html; charset=utf-8"); });
  server.Get("/health", [this](const Request&, Response& answer) {
    const std::string failure = texts_.failure();
    if (!failure.empty()) return refuse(answer, 503, failure);
    answer.set_content("{\"status\":\"ok\"}", json_type);
  });
  server.Get("/metrics",
             [this](const Request&, Response& answer) { answer.set_content(metrics(), "text/plain; version=0.0.4"); });
  server.Get("/map", [this](const Request&, Response& answer) { answer.set_content(texts_.frame(), json_type); });
  server.Get("/v1/models", [this](const Request&, Response& answer) {
    nlohmann::ordered_json list{{"object", "list"}, {"data", nlohmann::ordered_json::array()}};
    list["data"].push_back({{"id", model_.name},
                            {"object", "model"},
                            {"created", start_},
                            {"owned_by", "bifolio"},
                            {"max_model_len", model_.max_positions}});
    answer.set_content(to_text(list), json_type);
  });
  server.Post("/v1/completions", [this](const Request&, Response& answer, const httplib::ContentReader& body) {
    complete(body, answer, false);
  });
  server.Post("/v1/chat/completions", [this](const Request&, Response& answer, const httplib::ContentReader& body) {
    complete(body, answer, true);
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

void routes::complete(const httplib::ContentReader& body, httplib::Response& answer, bool is_chat) {
  completion_request what = parse_request(read_body(body), is_chat, model_);
  const bool streams = what.stream;
  answer_head head{fmt::format("{}-{}", is_chat ? "chatcmpl" : "cmpl", num_answers_++), std::time(nullptr), model_.name,
                   is_chat};
  const std::shared_ptr<call> one = texts_.submit(std::move(what));
  ++num_open_;
  if (streams) {
    stream(one, head, answer);
  } else {
    answer_whole(one, head, answer);
  }
}

void routes::stream(const std::shared_ptr<call>& one, const answer_head& head, httplib::Response& answer) {
  const auto has_begun = std::make_shared<std::vector<bool>>(
      one->what().prompts.size() * static_cast<std::size_t>(one->what().num_samples), false);
  answer.set_header("Cache-Control", "no-cache");
  answer.set_chunked_content_provider(
      "text/event-stream",
      [one, head, has_begun](std::size_t, httplib::DataSink& sink) {
        const call::news news = one->take(patience);
        if (news.pieces.empty() && !news.is_done) return sink.is_writable();  // not when the client is gone
        std::string lines;
        for (const piece& next : news.pieces) {
          lines += format_chunk(head, next, !(*has_begun)[next.choice]);
          (*has_begun)[next.choice] = true;
        }
        if (news.is_done) {
          if (!news.failure.empty()) lines += "data: " + format_error(500, news.failure) + "\n\n";
          if (one->what().include_usage) lines += format_usage_chunk(head, news.used);
          lines += "data: [DONE]\n\n";
        }
        if (!sink.write(lines.data(), lines.size())) return false;
        if (news.is_done) sink.done();
        return true;
      },
      [this, one](bool) { release(one); });
}

/// Chunked as well, so that the client's going is noticed while the text is made.
void routes::answer_whole(const std::shared_ptr<call>& one, const answer_head& head, httplib::Response& answer) {
  std::vector<piece> choices(one->what().prompts.size() * static_cast<std::size_t>(one->what().num_samples));
  for (std::size_t i = 0; i < choices.size(); ++i) choices[i].choice = i;
  answer.set_chunked_content_provider(
      json_type,
      [one, head, choices](std::size_t, httplib::DataSink& sink) mutable {
        const call::news news = one->take(patience);
        for (const piece& next : news.pieces) {
          piece& choice = choices[next.choice];
          choice.text += next.text;
          if (next.finish_reason != nullptr) choice.finish_reason = next.finish_reason;
        }
        if (!news.is_done) return sink.is_writable();
        const std::string text =
            news.failure.empty() ? format_answer(head, choices, news.used) : format_error(500, news.failure);
        if (!sink.write(text.data(), text.size())) return false;
        sink.done();
        return true;
      },
      [this, one](bool) { release(one); });
}

/// Everything was written, or the client is gone.
void routes::release(const std::shared_ptr<call>& one) {
  texts_.cancel(one);
  --num_open_;
}

std::string routes::metrics() {
  const service_counts now = texts_.counts();
  std::string text;
  const auto out = std::back_inserter(text);
  const auto head = [&](const char* name, const char* type, const char* what) {
    fmt::format_to(out, "# HELP bifolio_{} {}\n# TYPE bifolio_{} {}\n", name, what, name, type);
  };
  const auto value = [&](const char* name, const char* type, const char* what, std::int64_t count) {
    head(name, type, what);
    fmt::format_to(out, "bifolio_{} {}\n", name, count);
  };
  head("http_requests_total", "counter", "Answers by status; 0: any other.");
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    fmt::format_to(out, "bifolio_http_requests_total{{status=\"{}\"}} {}\n", statuses[i], by_status_[i].load());
  }
  value("requests_open", "gauge", "Requests that run or wait.", now.num_calls);
  value("requests_refused_total", "counter", "Requests that found the queue full.", now.num_refused);
  value("requests_cancelled_total", "counter", "Requests whose client left.", now.num_cancelled);
  head("sequences", "gauge", "Sequences by where they are.");
  fmt::format_to(out,
                 "bifolio_sequences{{state=\"running\"}} {}\nbifolio_sequences{{state=\"waiting\"}} {}\n"
                 "bifolio_sequences{{state=\"swapped\"}} {}\n",
                 now.schedule.num_running, now.schedule.num_waiting, now.schedule.num_swapped);
  value("blocks", "gauge", "Blocks of the pool.", now.cache.num_blocks);
  value("blocks_used", "gauge", "Blocks that sequences hold.", now.cache.num_used_blocks);
  value("blocks_cached", "gauge", "Blocks that the prefix cache can find.", now.prefix.num_cached_blocks);
  value("block_table_entries", "gauge", "Blocks in the tables of all sequences, shared ones counted each time.",
        now.cache.num_table_entries);
  value("steps_total", "counter", "Steps of the engine.", now.schedule.num_steps);
  value("computed_tokens_total", "counter", "Tokens that went through the model.", now.schedule.num_scheduled_tokens);
  value("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", now.schedule.num_cached_tokens);
  value("sampled_tokens_total", "counter", "Tokens that were generated.", now.schedule.num_sampled_tokens);
  value("preemptions_total", "counter", "Sequences that lost their blocks for a while.", now.schedule.num_preemptions);
  value("evicted_blocks_total", "counter", "Cached blocks whose contents were given up.",
        now.prefix.num_evicted_blocks);
  value("copied_blocks_total", "counter", "Blocks copied on write.", now.cache.num_copied_blocks);
  head("time_to_first_token_seconds", "histogram", "From the request's arrival to its first token.");
  std::int64_t below = 0;
  for (std::size_t i = 0; i < now.first_token_counts.size(); ++i) {
    below += now.first_token_counts[i];
    const std::string bound = i < first_token_bounds.size() ? fmt::format("{}", first_token_bounds[i]) : "+Inf";
    fmt::format_to(out, "bifolio_time_to_first_token_seconds_bucket{{le=\"{}\"}} {}\n", bound, below);
  }
  fmt::format_to(out, "bifolio_time_to_first_token_seconds_sum {}\nbifolio_time_to_first_token_seconds_count {}\n",
                 now.first_token_seconds, below);
  return text;
}

}  // namespace serve
