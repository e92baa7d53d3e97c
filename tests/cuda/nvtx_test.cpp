// SPDX-License-Identifier: Apache-2.0
// NVTX ranges, as a profiler gets them: this program is its own, through the pointer that NVTX asks for.
#include <doctest/doctest.h>
#include <nvtx3/nvToolsExt.h>

#include <bifolio/backend.hpp>
#include <bifolio/cuda.hpp>
#include <cstring>
#include <string>
#include <vector>

using namespace bifolio;

namespace {

struct seen_range {
  std::string name;
  std::int64_t payload = 0;
  bool closed = false;
};

struct profiler {
  std::vector<std::string> domains;
  std::vector<seen_range> ranges;
  std::vector<std::size_t> open;
} seen;

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  seen.domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(&seen);
}

int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  CHECK(domain == reinterpret_cast<nvtxDomainHandle_t>(&seen));
  CHECK(attributes->messageType == NVTX_MESSAGE_TYPE_ASCII);
  CHECK(attributes->payloadType == NVTX_PAYLOAD_TYPE_INT64);
  seen.open.push_back(seen.ranges.size());
  seen.ranges.push_back({attributes->message.ascii, attributes->payload.llValue});
  return static_cast<int>(seen.open.size()) - 1;
}

int NVTX_API pop(nvtxDomainHandle_t) {
  REQUIRE(!seen.open.empty());
  seen.ranges[seen.open.back()].closed = true;
  seen.open.pop_back();
  return static_cast<int>(seen.open.size());
}

int NVTX_API initialize(NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  const auto put = [&](unsigned int at, auto* function) {
    *table[at] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  put(NVTX_CBID_CORE2_DomainCreateA, &create_domain);
  put(NVTX_CBID_CORE2_DomainRangePushEx, &push);
  put(NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}

TEST_CASE("a profiler gets a range for each call, with its name and size, also of calls that are refused") {
  InitializeInjectionNvtx2_fnptr = &initialize;  // before the first range of the process
  const auto where = make_backend();
  const auto ranged = cuda::nvtx_backend(*where);
  CHECK(seen.domains == std::vector<std::string>{"bifolio"});
  CHECK(ranged->description() == where->description() + ", NVTX ranges");
  char bytes[8] = {};
  REQUIRE(ranged->upload(bytes, "1234567", sizeof bytes, {}) == errc::ok);
  CHECK(std::strcmp(bytes, "1234567") == 0);
  REQUIRE(ranged->synchronize({}) == errc::ok);
  attention_plan plan;
  CHECK_THROWS((ranged->plan_attention(plan, {}, {}, 0)));
  CHECK(ranged->attention(plan, {}) == errc::failed_precondition);

  REQUIRE(seen.ranges.size() == 4);
  const char* const names[] = {"upload", "synchronize", "plan_attention", "attention"};
  for (std::size_t i = 0; i < seen.ranges.size(); ++i) {
    CHECK(seen.ranges[i].name == names[i]);
    CHECK(seen.ranges[i].closed);
  }
  CHECK(seen.ranges[0].payload == 8);
  CHECK(seen.open.empty());
  (void)where->synchronize({});
  CHECK(seen.ranges.size() == 4);
}

}  // namespace
