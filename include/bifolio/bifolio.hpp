// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything public. A program that cares for its compile time includes the single headers instead.

#if __cplusplus < 202002L
#error "bifolio needs C++20: compile with -std=c++20"
#else

#include <bifolio/attention.hpp>
#include <bifolio/backend.hpp>
#include <bifolio/block_pool.hpp>
#include <bifolio/block_table.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/calibration.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/copy_audit.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/cuda.hpp>
#include <bifolio/device.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <bifolio/event.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/kv_event_publisher.hpp>
#include <bifolio/kv_events.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/log.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/metrics.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/request.hpp>
#include <bifolio/rotate_append.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <bifolio/trace.hpp>
#include <bifolio/types.hpp>
#include <bifolio/version.hpp>

#endif
