// SPDX-License-Identifier: Apache-2.0
#include "conformance/attention_table_parts.hpp"

namespace bifolio::test {

std::vector<batch_seq> usual_batch() { return {{1, 70}, {33, 50}, {1, 1}, {20, 20}, {1, 129}}; }

std::vector<named_option> all_options() {
  return {
      {"no option", [](attention_case&) {}},
      {"no LSE", [](attention_case& c) { c.lse = false; }},
      {"scale", [](attention_case& c) { c.scale = 0.7f; }},
      {"negative scale", [](attention_case& c) { c.scale = -0.3f; }},
      {"tiny scale", [](attention_case& c) { c.scale = 1e-20f; }},
      {"window left", [](attention_case& c) { c.window_left = 20; }},
      {"window left 0", [](attention_case& c) { c.window_left = 0; }},
      {"window left of a block", [](attention_case& c) { c.window_left = 15; }},
      {"window left beyond the sequence", [](attention_case& c) { c.window_left = 100000; }},
      {"largest windows",
       [](attention_case& c) {
         c.causal = false;
         c.window_left = c.window_right = 0x7fffffff;
       }},
      {"causal with window right", [](attention_case& c) { c.window_right = 4; }},
      {"not causal", [](attention_case& c) { c.causal = false; }},
      {"not causal, window right",
       [](attention_case& c) {
         c.causal = false;
         c.window_right = 4;
       }},
      {"not causal, window right 0",
       [](attention_case& c) {
         c.causal = false;
         c.window_right = 0;
       }},
      {"not causal, windows on both sides",
       [](attention_case& c) {
         c.causal = false;
         c.window_left = 17;
         c.window_right = 6;
       }},
      {"soft cap", [](attention_case& c) { c.soft_cap = 1.5f; }},
      {"soft cap far above the logits", [](attention_case& c) { c.soft_cap = 50; }},
      {"ALiBi", [](attention_case& c) { c.alibi = true; }},
      {"ALiBi, not causal",
       [](attention_case& c) {
         c.alibi = true;
         c.causal = false;
       }},
      {"sinks", [](attention_case& c) { c.sinks = true; }},
      {"bias", [](attention_case& c) { c.bias = bias_kind::full; }},
      {"bias of f16",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.bias_type = dtype::f16;
       }},
      {"bias of bf16, not causal",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.bias_type = dtype::bf16;
         c.causal = false;
       }},
      {"bias of one head", [](attention_case& c) { c.bias = bias_kind::one_head; }},
      {"bias of one token, window left",
       [](attention_case& c) {
         c.bias = bias_kind::one_token;
         c.window_left = 45;
       }},
      {"bias of one row for all", [](attention_case& c) { c.bias = bias_kind::one_row; }},
      {"bias that hides keys and rows", [](attention_case& c) { c.bias = bias_kind::masked; }},
      {"bias that hides keys and rows, sinks",
       [](attention_case& c) {
         c.bias = bias_kind::masked;
         c.sinks = true;
       }},
      {"bias of the lowest number", [](attention_case& c) { c.bias = bias_kind::lowest; }},
      {"bias of the lowest f16, not causal",
       [](attention_case& c) {
         c.bias = bias_kind::lowest;
         c.bias_type = dtype::f16;
         c.causal = false;
       }},
      {"bias after a soft cap",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.soft_cap = 1.5f;
       }},
      {"everything at once",
       [](attention_case& c) {
         c.scale = 0.4f;
         c.soft_cap = 4;
         c.alibi = c.sinks = true;
         c.window_left = 60;
       }},
      {"everything at once, with a bias",
       [](attention_case& c) {
         c.scale = 0.4f;
         c.soft_cap = 4;
         c.alibi = c.sinks = true;
         c.window_left = 60;
         c.bias = bias_kind::full;
         c.bias_type = dtype::f16;
       }},
  };
}

}  // namespace bifolio::test
