// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A stream of the test's own, which does not wait for the default one.

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <bifolio/device.hpp>

namespace bifolio::test {

class own_stream {
 public:
  own_stream() { REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }
  ~own_stream() { (void)cudaStreamDestroy(stream_); }
  own_stream(const own_stream&) = delete;
  own_stream& operator=(const own_stream&) = delete;
  [[nodiscard]] stream_ref ref() const { return {stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace bifolio::test
