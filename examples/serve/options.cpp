// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "command_line.hpp"

namespace serve {

std::optional<options> parse_options(int argc, const char* const* argv) {
  options o;
  generate::command_line line("serve",
                              "Serves a language model over HTTP as OpenAI's API has it, through bifolio's paged KV "
                              "cache, with a page at / that shows the texts and the block pool.",
                              "Examples:\n"
                              "  serve --port 8080\n"
                              "  serve --model Llama-3.2-1B-Instruct --device cuda --max-batch-seqs 256\n"
                              "  curl 127.0.0.1:8080/v1/completions -d '{\"prompt\": \"In the beginning\"}'\n");
  line.value("--host", "ADDRESS", o.host, "The address to listen on; there is no authentication, so keep it local",
             [&o](const std::string&, const std::string& text) { o.host = text; });
  line.integer("--port", o.port, 0, 65535, "8080", "The port; 0 takes any that is free and says which");
  line.integer("--max-queue", o.max_queue, 1, 4096, "64", "Requests that run or wait; one more is answered with 429");
  line.integer("--max-body-kib", o.max_body_kib, 1, 1 << 16, "1024", "Largest body of a request; 413 beyond it");
  line.integer("--write-seconds", o.write_seconds, 1, 3600, "10",
               "A client that takes nothing for so long is dropped and its request ended");
  line.integer("--drain-seconds", o.drain_seconds, 0, 3600, "30",
               "After SIGTERM running requests may take so long to end; a second signal ends them at once");
  add_engine_options(line, o);
  if (!line.parse(argc, argv)) return {};
  check_engine_options(o);
  return o;
}

}  // namespace serve
