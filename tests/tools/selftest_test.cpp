// SPDX-License-Identifier: Apache-2.0
// The self-test itself: what it reports of this machine, that it notices planted flaws and names their case, and how
// the program takes its options.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bifolio/cpu.hpp>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "attention_checks.hpp"
#include "cache_checks.hpp"
#include "conformance/flawed_backend.hpp"
#include "report.hpp"
#include "run.hpp"
#include "support/program_run.hpp"
#include "targets.hpp"

namespace {

using namespace bifolio::test;
using namespace selftest;
using bifolio::cpu_isa;
using bifolio::errc;
using nlohmann::json;
namespace fs = std::filesystem;

const fs::path scratch = fs::path(BIFOLIO_TEST_SCRATCH_DIR) / "selftest";

run_result run(const std::vector<std::string>& arguments) {
  return run_program(BIFOLIO_SELFTEST_PROGRAM, arguments, scratch);
}

std::string text_of(const report& said, output_format format) {
  std::ostringstream out;
  print(out, said, format);
  return out.str();
}

/// The one that every machine of this architecture has.
std::string plainest_isa() { return std::string(to_string(bifolio::supported_isas().front())); }

/// Exit code 2, nothing on stdout, and `part` on stderr.
void check_refused(const std::vector<std::string>& arguments, const std::string& part) {
  const run_result result = run(arguments);
  CAPTURE(part);
  CAPTURE(result.err);
  CHECK(result.code == 2);
  CHECK(result.out.empty());
  CHECK(result.err.find(part) != std::string::npos);
}

/// A target whose backend has a flaw, in front of a real one.
struct flawed_target {
  target real;
  std::vector<target> list;

  explicit flawed_target(flaw value) : real(std::move(open_targets({"cpu", {plainest_isa()}}).front())) {
    list.emplace_back();
    list[0].device = "cpu";
    list[0].isa = plainest_isa();
    list[0].main = make_flawed_backend(real.main.get(), value);
  }
};

/// The first few cases that a scalar backend computes in no time.
report attention_report(const std::vector<target>& targets) {
  report said;
  const std::vector<attention_case> cases = attention_cases(1);
  int num_left = 6;
  for (std::size_t n = 0; num_left > 0; ++n) {
    std::int64_t work = 0;
    for (const batch_seq& seq : cases[n].seqs) work += std::int64_t{seq.query_len} * seq.seq_len;
    if (work * cases[n].num_q_heads() * cases[n].head_dim > 1'000'000) continue;
    --num_left;
    const prepared_case what(n, cases[n]);
    for (const target& where : targets) check_attention_case(where, what, said);
  }
  return said;
}

}  // namespace

TEST_CASE("the program finds this machine equal and says so in JSON that can be read") {
  const run_result result =
      run({"--device", "cpu", "--isa", plainest_isa(), "--seconds", "0.5", "--format", "json", "--seed", "3"});
  CAPTURE(result.out);
  CAPTURE(result.err);
  REQUIRE(result.code == 0);
  const json said = json::parse(result.out);
  CHECK(said["passed"] == true);
  CHECK(said["failed_checks"] == 0);
  CHECK(said["seed"] == 3);
  CHECK(said["seconds"].is_number_float());
  CHECK(said["failures"].empty());
  CHECK(said["machine"].contains("cpu"));
  CHECK(said["machine"]["command"].get<std::string>().find("--seed 3") != std::string::npos);
  CHECK(said["left_out"].size() == 1);
  REQUIRE(said["bookkeeping"].size() % std::size(all_operations) == 0);
  for (const json& row : said["bookkeeping"]) {
    CHECK(row["cases"].get<int>() >= 8);
    CHECK(row["failed"] == 0);
  }
  CHECK(said["attention"].size() > 2);
  std::int64_t compared = 0;
  for (const json& row : said["attention"]) {
    for (const promise about : all_promises) {
      CHECK(row[std::string(to_string(about))]["failed"] == 0);
      compared += row[std::string(to_string(about))]["compared"].get<std::int64_t>();
    }
    for (const char* worst : {"error_over_bound_f32_out", "error_over_bound_16_bit_out"}) {
      if (row[worst].is_null()) continue;
      CHECK(row[worst]["share"].get<double>() <= 1);
      const std::string kind = row["kernel"] == "merge_states" ? "merge:" : "attention:";
      CHECK(row[worst]["case"].get<std::string>().rfind(kind, 0) == 0);
    }
  }
  for (const json& row : said["bookkeeping"]) compared += row["cases"].get<std::int64_t>();
  CHECK(said["checks"] == compared);
}

TEST_CASE("a case can be run again by its name, in every format") {
  for (const char* name : {"append:7", "gather:3", "copy:4", "convert:5", "swap:6", "merge:2", "attention:1"}) {
    for (const char* format : {"text", "md", "json"}) {
      const run_result result = run({"--device", "cpu", "--case", name, "--format", format});
      CAPTURE(name);
      CAPTURE(format);
      CAPTURE(result.out);
      CHECK(result.code == 0);
      CHECK(result.out.find("held") != (std::string(format) == "json" ? 0 : std::string::npos));
    }
  }
}

TEST_CASE("the text of a report is at most 100 columns wide, whatever failed and whatever kernels are called") {
  report said;
  for (const char* kernel : {"cpu avx2 f32 vectors", "cuda prefill bf16 d128 copy transform and a long name"}) {
    attention_row& row = said.row("cuda:0", std::string(no_isa), kernel);
    row.of_f32 = {0.5, "attention:4999"};
    for (const promise about : all_promises) row.of(about) = {100000, 99999};
    said.row("cpu", "avx512_bf16", kernel).of(promise::bounds) = {99999, 0};
  }
  for (const operation what : all_operations) said.row("cpu", "avx512_bf16", what).cases = {100000, 99999};
  said.add({"cpu", "avx512_bf16", "append", "bytes", "append:7",
            "words and words and words and words and words and "
            "words and words and words and words"});
  std::istringstream lines(text_of(said, output_format::text));
  int num_lines = 0;
  for (std::string line; std::getline(lines, line); ++num_lines) CHECK_MESSAGE(line.size() <= 100, line);
  CHECK(num_lines > 20);
}

TEST_CASE("a backend without a flaw passes, and one with a flaw fails with a case that shows it again") {
  {
    const flawed_target plain(flaw::none);
    const report said = attention_report(plain.list);
    CHECK_MESSAGE(said.passed(), text_of(said, output_format::text));
  }
  for (const flaw value : {flaw::mask_one_too_far, flaw::wrong_head_map, flaw::reads_next_block_in_pool,
                           flaw::writes_past_head, flaw::half_precision_logits}) {
    const flawed_target broken(value);
    const report said = attention_report(broken.list);
    CAPTURE(to_string(value));
    REQUIRE(!said.passed());
    REQUIRE(!said.failures.empty());
    const failure& first = said.failures.front();
    CHECK(first.device == "cpu");
    CHECK(first.what == "attention");  // the flawed backend names no kernels
    report again;
    run_settings settings;
    settings.only = parse_case(first.case_name);
    run_checks(settings, broken.list, again);
    CHECK(!again.passed());
    for (const output_format format : {output_format::text, output_format::md, output_format::json}) {
      const std::string text = text_of(again, format);
      CHECK_MESSAGE(text.find("--case " + first.case_name) != std::string::npos, text);
    }
    CHECK(json::parse(text_of(again, output_format::json))["passed"] == false);
  }
}

namespace {

/// Attention whose results waver by one bit; append spoils a byte, copy leaves out the last pair, swap refuses, merge
/// spoils a sign.
class wavering_backend final : public bifolio::backend {
 public:
  explicit wavering_backend(bifolio::backend& real) : real_(real) {}
  [[nodiscard]] bifolio::device where() const noexcept override { return real_.where(); }
  [[nodiscard]] std::string description() const override { return "wavering"; }
  [[nodiscard]] errc health() const noexcept override { return real_.health(); }
  [[nodiscard]] bifolio::memory_resource& memory() noexcept override { return real_.memory(); }
  [[nodiscard]] bifolio::memory_resource& staging_memory() noexcept override { return real_.staging_memory(); }
  [[nodiscard]] errc upload(void* dst, const void* src, std::size_t n, bifolio::stream_ref s) noexcept override {
    return real_.upload(dst, src, n, s);
  }
  [[nodiscard]] errc download(void* dst, const void* src, std::size_t n, bifolio::stream_ref s) noexcept override {
    return real_.download(dst, src, n, s);
  }
  [[nodiscard]] errc synchronize(bifolio::stream_ref s) noexcept override { return real_.synchronize(s); }
  [[nodiscard]] bifolio::event make_event() override { return real_.make_event(); }
  [[nodiscard]] errc record(bifolio::event& point, bifolio::stream_ref s) noexcept override {
    return real_.record(point, s);
  }
  [[nodiscard]] errc wait(const bifolio::event& point, bifolio::stream_ref s) noexcept override {
    return real_.wait(point, s);
  }
  [[nodiscard]] errc append(const bifolio::append_params& p, bifolio::stream_ref s) noexcept override {
    const errc code = real_.append(p, s);
    if (code == errc::ok) *static_cast<std::byte*>(p.kv.k) ^= std::byte{1};
    return code;
  }
  [[nodiscard]] errc gather(const bifolio::gather_params& p, bifolio::stream_ref s) noexcept override {
    return real_.gather(p, s);
  }
  [[nodiscard]] errc copy_blocks(std::span<const bifolio::kv_cache_view> layers,
                                 std::span<const bifolio::block_copy> copies, bifolio::stream_ref s) noexcept override {
    return real_.copy_blocks(layers, copies.first(copies.empty() ? 0 : copies.size() - 1), s);
  }
  [[nodiscard]] errc convert_blocks(const bifolio::kv_cache_view& src, const bifolio::kv_cache_view& dst,
                                    std::span<const bifolio::block_copy> copies,
                                    bifolio::stream_ref s) noexcept override {
    return real_.convert_blocks(src, dst, copies, s);
  }
  [[nodiscard]] errc swap_blocks(std::span<const bifolio::kv_cache_view>, std::span<const bifolio::kv_cache_view>,
                                 std::span<const bifolio::block_copy>, bifolio::stream_ref) noexcept override {
    return errc::unsupported;
  }
  void plan_attention(bifolio::attention_plan& plan, const bifolio::attention_spec& spec,
                      const bifolio::host_step_view& batch, std::int64_t num_blocks, bifolio::stream_ref s) override {
    real_.plan_attention(plan, spec, batch, num_blocks, s);
  }
  [[nodiscard]] errc attention(const bifolio::attention_plan& plan, const bifolio::attention_params& params,
                               bifolio::stream_ref s) noexcept override {
    const errc code = real_.attention(plan, params, s);
    if (code != errc::ok || params.batch.num_tokens == 0) return code;
    // The last bit of the first output, in two of three calls.
    if (++num_calls_ % 3 != 0) *static_cast<std::byte*>(params.out.data) ^= std::byte{1};
    return code;
  }
  [[nodiscard]] errc merge_states(const bifolio::merge_params& p, bifolio::stream_ref s) noexcept override {
    const errc code = real_.merge_states(p, s);
    // The sign of the first output.
    if (code == errc::ok) static_cast<std::byte*>(p.out.data)[size_of(p.out.type) - 1] ^= std::byte{0x80};
    return code;
  }

 private:
  bifolio::backend& real_;
  int num_calls_ = 0;
};

}  // namespace

TEST_CASE("bits that waver and bytes that are wrong are reported under their own names") {
  flawed_target broken(flaw::none);
  broken.list[0].main.owned = std::make_unique<wavering_backend>(broken.real.main.get());
  report said;
  run_settings settings;
  settings.seconds = 0.01;
  run_checks(settings, broken.list, said);
  REQUIRE(!said.passed());
  const auto failed = [&](promise about) {
    std::int64_t count = 0;
    for (const attention_row& row : said.attention) count += row.of(about).num_failed;
    return count;
  };
  CHECK(failed(promise::repeats) > 0);
  CHECK(said.row("cpu", plainest_isa(), "merge_states").of(promise::bounds).num_failed > 0);
  CHECK(failed(promise::blocks) + failed(promise::neighbours) + failed(promise::chunks) > 0);
  for (const cache_row& row : said.cache) {
    CAPTURE(to_string(row.what));
    const bool sound = row.what == operation::gather || row.what == operation::convert;
    CHECK((row.cases.num_failed == 0) == sound);
  }
  CHECK(std::any_of(said.failures.begin(), said.failures.end(), [](const failure& one) {
    return one.what == "swap" && one.text.find("refused with unsupported") != std::string::npos;
  }));
  CHECK(text_of(said, output_format::text).find("FAILED") != std::string::npos);
}

TEST_CASE("a kernel that no case reached fails a strict report alone") {
  report said;
  said.not_reached = {"cpu: a kernel"};
  CHECK(said.passed());
  CHECK(text_of(said, output_format::text).find("not reached: cpu: a kernel") != std::string::npos);
  said.strict = true;
  CHECK(!said.passed());
}

TEST_CASE("--help names every option, --list every target") {
  const run_result help = run({"--help"});
  CHECK(help.code == 0);
  for (const char* option :
       {"--format", "--seconds", "--device", "--isa", "--seed", "--case", "--strict", "--list", "--no-progress"}) {
    CHECK_MESSAGE(help.out.find(option) != std::string::npos, option);
  }
  const run_result list = run({"--list", "--device", "cpu"});
  CHECK(list.code == 0);
  for (const cpu_isa isa : bifolio::supported_isas()) {
    CHECK(list.out.find("cpu " + std::string(to_string(isa)) + ":") != std::string::npos);
  }
}

TEST_CASE("options that cannot be used end with 2 and say what is allowed") {
  check_refused({"--format", "xml"}, "text, md and json");
  check_refused({"--seconds", "0"}, "above 0 and up to 86400");
  check_refused({"--seconds", "nan"}, "above 0 and up to 86400");
  check_refused({"--seconds", "soon"}, "86400");
  check_refused({"--device", "tpu"}, "all, cpu, cuda and cuda:N");
  check_refused({"--isa", "mmx"}, "this machine supports ");
  check_refused({"--case", "attention"},
                "KIND:N with KIND one of attention, append, gather, copy, convert, swap, merge");
  check_refused({"--case", "attention:99999", "--device", "cpu"}, "allowed are attention:0 to attention:");
  check_refused({"--case", "swap:-1"}, "a number from 0 to");
  check_refused({"--device", "cuda:999"}, "does not have");
  check_refused({"--frobnicate"}, "--frobnicate");
}
