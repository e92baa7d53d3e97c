// SPDX-License-Identifier: Apache-2.0
// Device types: their names, the backends registered for them, and the options that those understand.
#include "common/engine/backend_registry.hpp"

#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/pretended_device.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;
using detail::backend_registration;
using detail::register_backend;

// The cases run in the order of this file: what one registers, the next ones see.

TEST_CASE("devices read back, and other texts are refused with the allowed ones") {
  CHECK(parse_device("cpu") == device{});
  CHECK(parse_device("cuda") == device{device_type::cuda, 0});
  CHECK(parse_device("cuda:0") == device{device_type::cuda, 0});
  CHECK(parse_device("cuda:2147483647") == device{device_type::cuda, 2147483647});
  for (const device where : {device{}, device{device_type::cuda, 0}, device{device_type::cuda, 12}}) {
    CHECK(parse_device(to_string(where)) == where);
  }
  for (const char* text : {"", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:+1", "cuda:1x", "cuda: 1", "cuda:2147483648",
                           "cuda:99999999999999999999", "gpu"}) {
    try {
      (void)parse_device(text);
      FAIL("accepted " << text);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      CHECK(std::string(problem.what()) ==
            "device '" + std::string(text) + "' is not one of cpu, cuda, cuda:N with N >= 0");
    }
  }
}

constexpr device_type third_type{7};
constexpr device_type fourth_type{8};
constexpr std::string_view third_options[] = {"num_threads"};

constexpr backend_registration third{{third_type, "third", true, ""},
                                     [](device where, const backend_options&) -> std::unique_ptr<backend> {
                                       return std::make_unique<pretended_device>(where);
                                     },
                                     third_options};

/// Code and sentence of the refusal; ok and "accepted" without one.
struct answer {
  errc code = errc::ok;
  std::string sentence = "accepted";
};
answer answer_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const error& problem) {
    return {problem.code(), problem.what()};
  }
  return {};
}
answer opening(device where, const backend_options& options = {}) {
  return answer_of([&] { (void)make_backend(where, options); });
}

TEST_CASE("a device type that nobody registered is refused with those that are known") {
  const answer unknown = opening({third_type, 0});
  CHECK(unknown.code == errc::invalid_argument);
  CHECK(unknown.sentence == "the device type 7 is not one of cpu (0), cuda (1)");
  CHECK(to_string(device{third_type, 2}) == "device type 7:2");
  const answer index = opening({device_type::cpu, 3});
  CHECK(index.code == errc::invalid_argument);
  CHECK(index.sentence == "the index of the device 'cpu' is 3; it must be 0");
}

TEST_CASE("a device whose library is not linked is unsupported, and the sentence names the library") {
  const answer missing = opening({device_type::cuda, 1});  // this program links the core alone
  CHECK(missing.code == errc::unsupported);
  CHECK(missing.sentence ==
        "the device 'cuda:1' needs the library bifolio::cuda, which this program was not linked with");
}

TEST_CASE("a registration that cannot be right is refused and leaves nothing behind") {
  backend_registration bad = third;
  bad.factory = nullptr;
  answer said = answer_of([&] { register_backend(bad); });
  CHECK(said.code == errc::invalid_argument);
  CHECK(said.sentence == "the factory of the device type third (7) is null; known device types are cpu (0), cuda (1)");

  for (const std::string_view name : {"", "Third", "third:1", "third one"}) {
    bad = third;
    bad.device.name = name;
    said = answer_of([&] { register_backend(bad); });
    CHECK(said.code == errc::invalid_argument);
    CHECK(said.sentence.find("device name '" + std::string(name) + "'") != std::string::npos);
  }

  constexpr std::string_view unknown_options[] = {"num_threads", "num_wheels"};
  bad = third;
  bad.options = unknown_options;
  said = answer_of([&] { register_backend(bad); });
  CHECK(said.code == errc::invalid_argument);
  CHECK(said.sentence ==
        "the backend of third understands the option 'num_wheels', which is no field of backend_options");

  // Another's number, another's name, and a device that has a backend.
  for (const detail::device_row& taken : {detail::device_row{device_type::cuda, "third", true, ""},
                                          detail::device_row{third_type, "cuda", true, ""}, detail::cpu_row}) {
    bad = third;
    bad.device = taken;
    said = answer_of([&] { register_backend(bad); });
    CHECK(said.code == errc::already_exists);
    CHECK(said.sentence.find("known are cpu (0), cuda (1)") != std::string::npos);
  }
  CHECK(opening({third_type, 0}).code == errc::invalid_argument);
  CHECK(answer_of([] { (void)parse_device("third"); }).code == errc::invalid_argument);
}

TEST_CASE("a third backend is a registration: it is parsed, printed and opened like the others") {
  std::vector<std::thread> threads;  // as libraries do that are loaded at once
  for (int i = 0; i < 4; ++i) threads.emplace_back([] { register_backend(third); });
  for (std::thread& thread : threads) thread.join();
  CHECK_NOTHROW(register_backend(third));

  CHECK(parse_device("third") == device{third_type, 0});
  CHECK(parse_device("third:5") == device{third_type, 5});
  CHECK(to_string(device{third_type, 5}) == "third:5");
  const auto opened = make_backend(parse_device("third:5"));
  CHECK(opened->where() == device{third_type, 5});
  CHECK(opened->description() == "pretended");

  const answer text = answer_of([] { (void)parse_device("fourth"); });
  CHECK(text.sentence == "device 'fourth' is not one of cpu, cuda, cuda:N, third, third:N with N >= 0");
  CHECK(opening({fourth_type, 0}).sentence == "the device type 8 is not one of cpu (0), cuda (1), third (7)");

  static constexpr backend_registration rival{third.device, third.factory, {}};
  const answer again = answer_of([] { register_backend(rival); });
  CHECK(again.code == errc::already_exists);
  CHECK(again.sentence ==
        "a backend of the device type third (7) is registered already; known are cpu (0), cuda (1), third (7)");
}

TEST_CASE("an option that a backend does not understand is refused by name, one that it does is taken") {
  const auto lanes = make_executor(executor_kind::serial);
  struct setting {
    const char* name;
    backend_options options;
  };
  std::vector<setting> settings(5);
  settings[0].name = "num_threads";
  settings[0].options.num_threads = 1;
  settings[1].name = "executor_choice";
  settings[1].options.executor_choice = executor_kind::serial;
  settings[2].name = "own_executor";
  settings[2].options.own_executor = lanes.get();
  settings[3].name = "isa";
  settings[3].options.isa = default_isa();
  settings[4].name = "host_memory";
  settings[4].options.host_memory = &default_host_memory();
  for (const setting& one : settings) {
    CAPTURE(std::string(one.name));
    CHECK(opening({}, one.options).code == errc::ok);
    const answer said = opening({third_type, 1}, one.options);
    if (std::string(one.name) == "num_threads") {
      CHECK(said.code == errc::ok);
      continue;
    }
    CHECK(said.code == errc::invalid_argument);
    CHECK(said.sentence == "the device 'third:1' does not understand the option " + std::string(one.name) +
                               "; it understands num_threads");
  }
}

TEST_CASE("the sixteenth device type is the last one") {
  static std::vector<std::string> names;  // borrowed by the rows
  static std::vector<backend_registration> more;
  names.reserve(16);
  more.reserve(16);
  for (int i = 3; i < 17; ++i) {
    names.push_back("more" + std::to_string(i));
    more.push_back({{static_cast<device_type>(100 + i), names.back(), false, ""}, third.factory, {}});
    const answer said = answer_of([] { register_backend(more.back()); });
    if (i < 16) {
      CHECK(said.code == errc::ok);
      CHECK(parse_device(names.back()).type == more.back().device.type);
    } else {
      CHECK(said.code == errc::failed_precondition);
      CHECK(said.sentence == "the device type 'more16' is one too many; there is room for 16");
    }
  }
}

}  // namespace
