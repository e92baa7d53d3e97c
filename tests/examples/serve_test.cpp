// SPDX-License-Identifier: Apache-2.0
// The server: what it answers, and what clients that leave, stop reading or send nonsense do to the others: nothing.
#include <doctest/doctest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>

#include "serve_fixture.hpp"
#include "support/program_run.hpp"
#include "support/random.hpp"

extern char** environ;

namespace {

using namespace bifolio::test;
using nlohmann::json;
using namespace std::chrono_literals;

json post(httplib::Client& client, const std::string& path, const json& body, int status = 200) {
  const auto answer = client.Post(path, body.dump(), "application/json");
  REQUIRE(answer);
  INFO(answer->body);
  REQUIRE(answer->status == status);
  return json::parse(answer->body);
}

std::string post_stream(httplib::Client& client, const std::string& path, json body) {
  body["stream"] = true;
  const auto answer = client.Post(path, body.dump(), "application/json");
  REQUIRE(answer);
  REQUIRE(answer->status == 200);
  return answer->body;
}

}  // namespace

TEST_CASE("what cannot be served is refused with a status and a sentence that names value and range") {
  running_server server;
  httplib::Client client = server.client();
  const std::vector<std::tuple<std::string, int, std::string>> refusals{
      {"", 400, "the body is not valid JSON"},
      {"{\"prompt\": \"a\"", 400, "the body is not valid JSON"},
      {"7", 400, "the body: it is 7, allowed is an object"},
      {"{}", 400, "there is no \"prompt\""},
      {"{\"prompt\": {}}", 400, "\"prompt\" is {}, allowed is a text"},
      {"{\"prompt\": []}", 400, "\"prompt\" is []"},
      {"{\"prompt\": [256]}", 400, "prompt 1 has the token id 256, allowed are 0 to 255"},
      {"{\"prompt\": [-1]}", 400, "prompt 1 has the token id -1"},
      {"{\"prompt\": [[]]}", 400, "prompt 1 is empty"},
      {"{\"prompt\": \"a\", \"n\": 33}", 400, "\"n\" is 33, allowed is a whole number from 1 to 32"},
      {"{\"prompt\": \"a\", \"n\": 1.5}", 400, "\"n\" is 1.5"},
      {"{\"prompt\": [\"a\", \"b\"], \"n\": 20}", 400, "2 prompts with \"n\" 20 are 40 texts, allowed are 32"},
      {"{\"prompt\": \"a\", \"max_tokens\": 2048}", 400,
       "\"max_tokens\" is 2048, allowed is a whole number from 1 to 2047"},
      {"{\"prompt\": \"a\", \"max_tokens\": 18446744073709551615}", 400, "\"max_tokens\" is 18446744073709551615"},
      {"{\"prompt\": \"a\", \"temperature\": -1}", 400, "\"temperature\" is -1, allowed is a number from 0 to 100"},
      {"{\"prompt\": \"a\", \"top_p\": 2}", 400, "\"top_p\" is 2"},
      {"{\"prompt\": \"a\", \"stop\": 3}", 400, "\"stop\" is 3, allowed is a text or up to 16"},
      {"{\"prompt\": \"a\", \"stop\": [\"\"]}", 400, "\"stop\" is"},
      {"{\"prompt\": \"a\", \"stream\": 1}", 400, "\"stream\" is 1, allowed is true or false"},
      {"{\"prompt\": \"a\", \"logprobs\": 3}", 400, "\"logprobs\" is 3, allowed is false"},
      {"{\"prompt\": \"a\", \"echo\": true}", 400, "\"echo\" is true"},
      {"{\"prompt\": \"a\", \"model\": \"other\"}", 404, "\"model\" is \"other\"; this server has \"random\" alone"},
      {"{\"prompt\": \"" + std::string(3000, 'a') + "\"}", 400, "prompt 1 of 3000 bytes has at least 3001 tokens"},
      {std::string(70, '['), 400, "JSON nested deeper than 64 levels"},
      {"{\"prompt\": \"" + std::string(1100 * 1024, 'a') + "\"}", 413, "more than 1048576 bytes"}};
  for (const auto& refusal : refusals) {
    const std::string &body = std::get<0>(refusal), &part = std::get<2>(refusal);
    const int status = std::get<1>(refusal);
    CAPTURE(part);
    const auto answer = client.Post("/v1/completions", body, "application/json");
    REQUIRE(answer);
    CHECK(answer->status == status);
    const json error = json::parse(answer->body)["error"];
    CHECK(error["message"].get<std::string>().find(part) != std::string::npos);
    CHECK(error["code"] == status);
  }
  for (const char* body : {"{}", "{\"messages\": []}", "{\"messages\": [1]}", "{\"messages\": [{\"role\": \"user\"}]}",
                           "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}"}) {
    CAPTURE(body);
    const auto answer = client.Post("/v1/chat/completions", body, "application/json");
    REQUIRE(answer);
    CHECK(answer->status == 400);
  }
  CHECK(client.Get("/nothing")->status == 404);
  // A body in chunks is bounded as well.
  const std::string part(64 * 1024, 'a');
  const auto chunked = client.Post(
      "/v1/completions",
      [&](std::size_t offset, httplib::DataSink& sink) {
        if (offset > 4 * 1024 * 1024) {
          sink.done();
          return true;
        }
        return sink.write(part.data(), part.size());
      },
      "application/json");
  if (chunked) CHECK(chunked->status == 413);  // or the connection was closed before the client had sent all
  CHECK(server.becomes_idle());
}

TEST_CASE("a seed gives the same texts whole and streamed, alone and in company, cached or not") {
  running_server server;
  httplib::Client client = server.client();
  const json body{{"prompt", json::array({"one prompt of some length, longer than a block", "another"})},
                  {"n", 3},
                  {"max_tokens", 60},
                  {"seed", 7},
                  {"temperature", 1.2}};
  const json whole = post(client, "/v1/completions", body);
  REQUIRE(whole["choices"].size() == 6);
  CHECK(whole["object"] == "text_completion");
  CHECK(whole["usage"]["completion_tokens"] <= 6 * 60);
  CHECK(whole["usage"]["prompt_tokens"] == 1 + 46 + 1 + 7);
  json with_usage = body;
  with_usage["stream_options"] = {{"include_usage", true}};
  const streamed parts = read_stream(post_stream(client, "/v1/completions", with_usage), 6);
  CHECK(parts.is_complete);
  CHECK(parts.usage["prompt_tokens_details"]["cached_tokens"] == 32);
  for (std::size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    CHECK(whole["choices"][i]["index"] == i);
    CHECK(parts.texts[i] == whole["choices"][i]["text"]);
    CHECK(parts.reasons[i] == whole["choices"][i]["finish_reason"]);
  }
  CHECK(parts.texts[0] != parts.texts[1]);
  json other = body;
  other["seed"] = 8;
  CHECK(post(client, "/v1/completions", other)["choices"][0]["text"] != whole["choices"][0]["text"]);
  other.erase("seed");  // by itself every request has another
  CHECK(post(client, "/v1/completions", other)["choices"] != post(client, "/v1/completions", other)["choices"]);
  std::vector<std::thread> company;
  for (int i = 0; i < 4; ++i) {
    company.emplace_back([&] {
      httplib::Client own = server.client();
      CHECK(post(own, "/v1/completions", body)["choices"] == whole["choices"]);
    });
  }
  for (std::thread& one : company) one.join();
  CHECK(server.becomes_idle());
}

TEST_CASE("a stop string ends a text before itself, also when it spans tokens, and none of it is streamed") {
  running_server server;
  httplib::Client client = server.client();
  json body{{"prompt", "abc"}, {"max_tokens", 200}, {"seed", 1}, {"temperature", 1}};
  const std::string text = post(client, "/v1/completions", body)["choices"][0]["text"];
  REQUIRE(text.size() > 60);
  int num_cut = 0;
  for (std::size_t at = 1; at + 3 < text.size() && num_cut < 8; ++at) {
    const std::string stop = text.substr(at, 3);
    if (stop.find("\xef") != std::string::npos || static_cast<signed char>(stop[0]) < 0 || stop[2] < 0 || stop[1] < 0) {
      continue;  // bytes that are no UTF-8 became U+FFFD
    }
    CAPTURE(at);
    body["stop"] = json::array({"never said, because it is too long and too strange", stop});
    const json choice = post(client, "/v1/completions", body)["choices"][0];
    CHECK(choice["text"] == text.substr(0, text.find(stop)));
    CHECK(choice["finish_reason"] == "stop");
    const streamed parts = read_stream(post_stream(client, "/v1/completions", body), 1);
    CHECK(parts.texts[0] == choice["text"]);
    CHECK(parts.reasons[0] == "stop");
    ++num_cut;
  }
  CHECK(num_cut > 3);
}

TEST_CASE("a chat is continued as the assistant") {
  running_server server;
  httplib::Client client = server.client();
  const json body = json::parse(R"({"messages": [{"role": "system", "content": "be brief"},
                      {"role": "user", "content": [{"type": "text", "text": "hello"}]}], "max_tokens": 20, "seed": 2})");
  const json whole = post(client, "/v1/chat/completions", body);
  CHECK(whole["object"] == "chat.completion");
  CHECK(whole["choices"][0]["message"]["role"] == "assistant");
  // Without marks in the tokenizer a chat is plain lines.
  const json same{{"prompt", "system: be brief\nuser: hello\nassistant: "}, {"max_tokens", 20}, {"seed", 2}};
  CHECK(whole["choices"][0]["message"]["content"] == post(client, "/v1/completions", same)["choices"][0]["text"]);
  const std::string stream = post_stream(client, "/v1/chat/completions", body);
  CHECK(stream.find("\"delta\":{\"role\":\"assistant\"") != std::string::npos);
  CHECK(read_stream(stream, 1).texts[0] == whole["choices"][0]["message"]["content"]);
}

TEST_CASE("health, models, metrics, map and page answer") {
  running_server server;
  httplib::Client client = server.client();
  CHECK(client.Get("/health")->body == "{\"status\":\"ok\"}");
  CHECK(json::parse(client.Get("/v1/models")->body)["data"][0]["id"] == "random");
  (void)post(client, "/v1/completions", {{"prompt", "abc"}, {"max_tokens", 5}, {"seed", 1}});
  CHECK(server.becomes_idle());
  const std::string metrics = client.Get("/metrics")->body;
  for (const std::string line : {"bifolio_blocks 256\n", "bifolio_used_blocks 0\n", "bifolio_sampled_tokens_total 5\n",
                                 "bifolio_http_requests_total{status=\"200\"} 3\n",
                                 "bifolio_time_to_first_token_seconds_count 1\n", "_bucket{le=\"+Inf\"} 1\n"}) {
    CAPTURE(line);
    CHECK(metrics.find(line) != std::string::npos);
  }
  const json map = json::parse(client.Get("/map")->body);
  CHECK(map["device"].get<std::string>().size() == 256);
  CHECK(map["running"] == "");
  const auto page = client.Get("/");
  CHECK(page->get_header_value("Content-Type").starts_with("text/html"));
  CHECK(page->body == serve::page());
  CHECK(page->body.find("http://") == std::string::npos);  // nothing from elsewhere
  CHECK(page->body.find("https://") == std::string::npos);
}

TEST_CASE("a client that leaves ends its request, and a full queue answers 429") {
  running_server server({.max_queue = 3});
  const std::string body = json{{"prompt", "abc"}, {"max_tokens", 2000}, {"n", 4}, {"stream", true}}.dump();
  const std::string whole = json{{"prompt", "abc"}, {"max_tokens", 2000}, {"n", 4}}.dump();
  {
    raw_client reads(server.port()), waits(server.port()), silent(server.port());
    reads.post(body, body.size());
    waits.post(whole, whole.size());
    silent.post(body, body.size());
    CHECK(!reads.receive(100).empty());
    for (int i = 0; i < 500 && server.metric("requests_open") < 3; ++i) std::this_thread::sleep_for(10ms);
    httplib::Client client = server.client();
    const auto answer = client.Post("/v1/completions", whole, "application/json");
    REQUIRE(answer);
    CHECK(answer->status == 429);
    CHECK(answer->get_header_value("Retry-After") == "1");
    CHECK(answer->body.find("3 requests run or wait") != std::string::npos);
  }
  CHECK(server.becomes_idle());
  CHECK(server.metric("requests_cancelled_total") == 3);
  httplib::Client client = server.client();
  CHECK(post(client, "/v1/completions", {{"prompt", "abc"}, {"max_tokens", 3}})["choices"].size() == 1);
}

TEST_CASE("readers that take nothing do not stall others and are dropped") {
  running_server server({.max_queue = 16, .write_seconds = 1});
  const std::string body = json{{"prompt", "abc"}, {"max_tokens", 1500}, {"stream", true}}.dump();
  std::vector<std::unique_ptr<raw_client>> slow;
  for (int i = 0; i < 6; ++i) {
    slow.push_back(std::make_unique<raw_client>(server.port(), 1024));
    slow.back()->post(body, body.size());
  }
  httplib::Client client = server.client();
  for (int i = 0; i < 5; ++i) {
    CHECK(post(client, "/v1/completions", {{"prompt", "others"}, {"max_tokens", 20}})["choices"].size() == 1);
  }
  // Nobody reads what the six said, and their requests end all the same.
  CHECK(server.becomes_idle(60));
}

TEST_CASE("a request that the pool can never hold is refused, and one too many waits") {
  running_server server({.num_blocks = 20});
  httplib::Client client = server.client();
  const auto never =
      client.Post("/v1/completions", json{{"prompt", "a"}, {"max_tokens", 1000}}.dump(), "application/json");
  REQUIRE(never);
  CHECK(never->status == 400);
  CHECK(never->body.find("can never fit into the pool of 20 blocks") != std::string::npos);
  std::vector<std::thread> many;
  std::atomic<int> num_answered = 0;
  for (int i = 0; i < 8; ++i) {
    many.emplace_back([&] {
      httplib::Client own = server.client();
      const json answer = post(own, "/v1/completions", {{"prompt", "a"}, {"max_tokens", 150}, {"temperature", 0}});
      num_answered += answer["choices"][0]["text"].get<std::string>().empty() ? 0 : 1;
    });
  }
  for (std::thread& one : many) one.join();
  CHECK(num_answered == 8);
  CHECK(server.becomes_idle());
}

TEST_CASE("random connects, aborts and slow readers leave an empty pool, and every whole answer is right") {
  const auto rounds = static_cast<int>(240 * num_test_runs());
  running_server server({.num_blocks = 96, .max_queue = 6, .write_seconds = 1});
  std::vector<json> bodies, expected;
  {
    httplib::Client client = server.client();
    for (int i = 0; i < 12; ++i) {
      bodies.push_back({{"prompt", std::string(static_cast<std::size_t>(5 + 9 * (i % 5)), 'a')},
                        {"seed", i},
                        {"max_tokens", 10 + 20 * (i % 4)},
                        {"n", 1 + i % 3},
                        {"temperature", 1}});
      expected.push_back(post(client, "/v1/completions", bodies.back())["choices"]);
    }
  }
  const std::uint64_t seed = test_seed();
  INFO(seed_note());
  std::mutex mutex;
  std::map<int, int> num_of;
  int num_wrong = 0;
  std::atomic<int> left = rounds;
  std::vector<std::thread> clients;
  for (unsigned c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937_64 random(seed + c);
      while (left-- > 0) {
        const std::size_t which = random() % bodies.size();
        json body = bodies[which];
        int status = 0;
        bool is_right = true;
        switch (random() % 8) {
          case 0: {  // connects and leaves
            raw_client gone(server.port());
            break;
          }
          case 1: {  // leaves within the request
            raw_client half(server.port());
            half.post(body.dump().substr(0, random() % 20), 500);
            break;
          }
          case 2: {  // sends nonsense
            raw_client noise(server.port());
            std::string text(random() % 300, '\0');
            for (char& byte : text) byte = static_cast<char>(random());
            noise.send(text + "\r\n\r\n");
            break;
          }
          case 3: {  // leaves while the text comes
            body["stream"] = random() % 2 == 0;
            body["max_tokens"] = 400;
            raw_client leaves(server.port(), 1024);
            leaves.post(body.dump(), body.dump().size());
            if (random() % 2 == 0) (void)leaves.receive(random() % 500);
            break;
          }
          case 4: {  // reads slowly, and then no more
            body["stream"] = true;
            raw_client slow(server.port(), 1024);
            slow.post(body.dump(), body.dump().size());
            for (int i = 0; i < 5; ++i) {
              (void)slow.receive(50);
              std::this_thread::sleep_for(std::chrono::milliseconds(random() % 10));
            }
            break;
          }
          default: {  // behaves
            httplib::Client client = server.client();
            const bool streams = random() % 2 == 0;
            body["stream"] = streams;
            const auto answer = client.Post("/v1/completions", body.dump(), "application/json");
            if (!answer) {
              is_right = false;
              break;
            }
            status = answer->status;
            if (status == 429) break;
            is_right = status == 200;
            if (is_right && streams) {
              const streamed parts = read_stream(answer->body, expected[which].size());
              is_right = parts.is_complete;
              for (std::size_t i = 0; i < parts.texts.size(); ++i) {
                is_right = is_right && parts.texts[i] == expected[which][i]["text"];
              }
            } else if (is_right) {
              is_right = json::parse(answer->body)["choices"] == expected[which];
            }
          }
        }
        const std::lock_guard lock(mutex);
        ++num_of[status];
        if (!is_right) ++num_wrong;
      }
    });
  }
  for (std::thread& one : clients) one.join();
  CHECK(num_wrong == 0);
  CHECK(num_of[200] > 0);
  MESSAGE("answers: ", num_of[200], ", refused as too many: ", num_of[429], ", without an answer: ", num_of[0]);
  CHECK(server.becomes_idle(60));
  CHECK(server.texts().failure() == "");
}

TEST_CASE("the program says its address, drains at SIGTERM and refuses what it cannot do") {
  const std::filesystem::path folder = BIFOLIO_SERVE_SCRATCH;
  const run_result help = run_program(BIFOLIO_SERVE_PROGRAM, {"--help"}, folder);
  CHECK(help.code == 0);
  CHECK(help.out.find("--max-queue N") != std::string::npos);
  CHECK(run_program(BIFOLIO_SERVE_PROGRAM, {"--port", "70000"}, folder).code == 2);
  CHECK(run_program(BIFOLIO_SERVE_PROGRAM, {"--model", "/nothing"}, folder).code == 2);
  CHECK(run_program(BIFOLIO_SERVE_PROGRAM, {"--host", "not an address"}, folder).code == 2);

  const std::filesystem::path said = folder / "said";
  const std::string command = "exec " + shell_quoted(BIFOLIO_SERVE_PROGRAM) + " --port 0 --device cpu --threads 1 2>" +
                              shell_quoted(said.string());
  std::string shell = "/bin/sh", option = "-c";
  std::vector<char> line(command.begin(), command.end());
  line.push_back('\0');
  char* arguments[] = {shell.data(), option.data(), line.data(), nullptr};
  pid_t process = 0;
  REQUIRE(posix_spawn(&process, "/bin/sh", nullptr, nullptr, arguments, environ) == 0);
  std::size_t at = std::string::npos;
  std::string text;
  for (int i = 0; i < 1000 && at == std::string::npos; ++i) {
    std::this_thread::sleep_for(20ms);
    text = read_file(said);
    at = text.find("/\n", text.find("http://127.0.0.1:"));
  }
  REQUIRE(at != std::string::npos);
  const int port = std::stoi(text.substr(text.find("http://127.0.0.1:") + 17));
  httplib::Client client("127.0.0.1", port);
  client.set_read_timeout(60);
  std::atomic<bool> has_begun = false;
  std::string stream;
  std::thread reader([&] {
    httplib::Request request;
    request.method = "POST";
    request.path = "/v1/completions";
    request.body = json{{"prompt", "In the beginning"}, {"max_tokens", 300}, {"stream", true}}.dump();
    request.content_receiver = [&](const char* data, std::size_t size, std::uint64_t, std::uint64_t) {
      stream.append(data, size);
      has_begun = true;
      return true;
    };
    (void)client.send(request);
  });
  while (!has_begun) std::this_thread::sleep_for(1ms);
  REQUIRE(::kill(process, SIGTERM) == 0);
  reader.join();
  int status = 0;
  REQUIRE(::waitpid(process, &status, 0) == process);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(read_stream(stream, 1).is_complete);  // what ran was finished
  CHECK(read_file(said).find("all connections have ended") != std::string::npos);
}
