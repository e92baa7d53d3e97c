// SPDX-License-Identifier: Apache-2.0
#include "attention_suites.hpp"

#include <bifolio/error.hpp>

namespace bifolio::bench {
namespace {

// What one H200 is measured on: each class of shapes that models have, and the neighbours of the published rows.
constexpr const char* h200[] = {
    // Decode: heads x batch x context, and batches between the round numbers.
    "--q-heads 32 --kv-heads 8,32 --batch 1,64 --context 1024,8192",
    "--q-heads 32 --kv-heads 8,32 --batch 8,32,256 --context 4096",
    "--q-heads 8 --kv-heads 1 --batch 1,64 --context 1024,8192",
    "--q-heads 8 --kv-heads 1 --batch 8,32,256 --context 4096",
    "--q-heads 64 --kv-heads 8 --batch 1,8,64 --context 8192",
    "--batch 12,18,24 --context 4096",
    "--batch 1 --context 131072 --kv-heads 8,32",
    "--batch 1 --context 131072 --q-heads 8 --kv-heads 1",
    "--batch 256 --context 1024",
    "--q-heads 64 --kv-heads 2 --batch 8 --context 4096",
    // Decode: head_dims, blocks, types, layouts.
    "--head-dim 64,80,96,112,192,256,512 --batch 1,8,64 --context 8192",
    "--block-size 1,8,48,64,128 --batch 8 --context 4096",
    "--dtype f32 --kv-dtype f32 --batch 1,8,64 --context 8192",
    "--dtype f16 --kv-dtype f16 --batch 8 --context 4096",
    "--layout nhd,x_split --batch 1,8,64 --context 8192",
    // Decode: codes.
    "--kv-dtype e4m3,i8-token --batch 1,64 --context 1024,8192",
    "--kv-dtype e4m3,i8-token --batch 8,256 --context 4096",
    "--kv-dtype e4m3,i8-token --batch 1 --context 131072",
    "--kv-dtype bf16,e4m3,i8-token --q-heads 64 --batch 128 --context 2048",
    "--kv-dtype e4m3 --q-heads 64 --batch 64 --context 8192",
    "--kv-dtype e4m3 --head-dim 64,96,192,256 --batch 64 --context 8192",
    "--kv-dtype e5m2,i8,e4m3-token --batch 64 --context 8192",
    "--kv-dtype u8-token,bf16/e4m3-token --batch 1,64 --context 8192",
    "--kv-dtype u8-token --q-heads 64 --batch 128 --context 2048",
    "--kv-dtype u8-token --head-dim 64,96,256 --batch 64 --context 8192",
    "--kv-dtype e4m3 --seqs 32x1/128:32768",
    // Decode: multi-head latent attention.
    "--q-heads 16,32,64,128 --kv-heads 1 --head-dim 576 --latent-dim 512 --block-size 64 --batch 128 --context 4096",
    "--q-heads 16,128 --kv-heads 1 --head-dim 576 --latent-dim 512 --batch 1,8,64 --context 8192",
    "--q-heads 128 --kv-heads 1 --head-dim 576 --latent-dim 512 --batch 128 --query-len 2 --context 4096",
    "--q-heads 16 --kv-heads 1 --head-dim 576 --latent-dim 512 --seqs 128x1/128:8192",
    "--q-heads 16,64,128 --kv-heads 1 --head-dim 576 --latent-dim 512 --block-size 64 --batch 128 --context 4096 "
    "--kv-dtype e4m3-record",
    // Decode: options and unequal lengths.
    "--window 1023 --batch 1,64 --context 8192",
    "--soft-cap 30 --batch 8,64 --context 8192",
    "--alibi --batch 8,64 --context 8192",
    "--deterministic --batch 1,64 --context 8192",
    "--deterministic --head-dim 96,192,256,512 --batch 64 --context 8192",
    "--deterministic --dtype f32 --kv-dtype f32 --batch 1,8,64 --context 8192",
    "--seqs 32x1/128:32768",
    "--seqs 32x1/128:32768 --deterministic",
    "--seqs 256x1/128:8192",
    // A few new tokens on a long context: drafts, chunks.
    "--batch 1,8 --query-len 2,5,16,64,256 --context 8192",
    "--query-len 16,256 --context 131072",
    "--query-len 512 --batch 1,8 --context 8192",
    "--query-len 512 --context 32768",
    // Prefill.
    "--query-len 2048 --context 2048 --batch 1,8",
    "--query-len 8192 --context 8192 --block-size 1,8,16,48,64,128",
    "--query-len 32768 --context 32768",
    "--query-len 8192 --context 8192 --kv-heads 32",
    "--query-len 8192 --context 8192 --q-heads 40,48,56 --kv-heads 8",
    "--query-len 8192 --context 8192 --head-dim 64,80,96,256,512",
    "--query-len 8192 --context 8192 --window 1023",
    "--query-len 8192 --context 8192 --soft-cap 30",
    "--query-len 8192 --context 8192 --alibi",
    "--query-len 8192 --context 8192 --non-causal",
    "--query-len 2048 --context 2048 --head-dim 512",
    "--query-len 2048 --context 2048 --deterministic --head-dim 128,96,192,256,512",
    "--query-len 2048,8192 --context 8192 --deterministic --dtype f32 --kv-dtype f32",
    "--query-len 8192 --context 8192 --kv-dtype e4m3,i8,e4m3-token,i8-token,u8-token,e4m3/e4m3-token",
    "--query-len 2048 --context 2048 --kv-dtype e4m3,e4m3-token,u8-token --batch 1,8",
    "--query-len 2048 --context 2048 --kv-dtype e4m3,e4m3-token,u8-token --head-dim 64,96",
    "--query-len 8192 --context 8192 --dtype f16 --kv-dtype e4m3",
    "--query-len 128 --context 8192 --kv-dtype e4m3,e4m3-token,u8-token",
    "--query-len 2048 --context 2048 --dtype f32 --kv-dtype f32",
    "--query-len 8192 --context 8192 --dtype f32 --kv-dtype f32 --head-dim 64,128",
    "--query-len 5,16,64,512 --context 8192 --dtype f32 --kv-dtype f32",
    // Mixed batches.
    "--seqs 1x2048/2048,63x1/4096",
    "--seqs 2x512/4096,1x2048/2048,30x1/512:8192",
    "--seqs 1x512/8192,31x1/8192",
    "--seqs 4x1024/1024,100x1/2000",
    "--seqs 1x300/4000,20x1/3000",
    "--seqs 8x64/1024:8192,56x1/256:4096",
    "--seqs 1x4096/4096,200x1/128:2048",
    "--seqs 3x700/700:6000,12x1/16384",
    "--seqs 1x128/32768,16x1/1024:32768",
};

// What CPUs are measured on: decode of every type and group, layouts, widths and block sizes, a few query tokens,
// prefill.
constexpr const char* cpu[] = {
    "--dtype f32 --kv-dtype f32 --kv-heads 32,8,4 --context 4096,16384",
    "--dtype f16 --kv-dtype f16 --kv-heads 32,8,4 --context 4096,16384",
    "--dtype bf16 --kv-dtype bf16 --kv-heads 32,8,4 --context 4096,16384",
    "--kv-dtype e4m3,e5m2,i8,e4m3-token,i8-token,u8-token --kv-heads 32,8,4 --context 16384",
    "--dtype f16 --kv-dtype e4m3,i8-token --kv-heads 32,8,4 --context 16384",
    "--kv-dtype e4m3,i8-token --batch 8 --context 4096",
    "--q-heads 1,4,8,16 --kv-heads 1 --head-dim 576 --latent-dim 512 --context 16384",
    "--batch 8 --context 1024,4096",
    "--seqs 8x1/37:32768",
    // Layouts, widths, blocks.
    "--dtype f32 --kv-dtype f32 --layout nhd,x_split --context 16384",
    "--dtype f16 --kv-dtype f16 --layout nhd,x_split --context 16384",
    "--layout nhd,x_split --context 16384",
    "--layout x_split --batch 8 --context 4096",
    "--head-dim 64,72,80,96,112,120,256 --context 16384",
    "--dtype f16 --kv-dtype f16 --head-dim 64,80,256 --context 16384",
    "--block-size 1,32,64,128 --context 16384",
    "--dtype f16 --kv-dtype f16 --block-size 1 --context 16384",
    // A few new tokens on a long context.
    "--query-len 2,4,8,16,32,64,128,256 --context 8192",
    "--dtype f16 --kv-dtype f16 --query-len 4,8,64 --context 8192",
    // Prefill.
    "--dtype f32 --kv-dtype f32 --query-len 512,2048 --context 2048",
    "--dtype f16 --kv-dtype f16 --query-len 512,2048 --context 2048",
    "--dtype bf16 --kv-dtype bf16 --query-len 512,2048 --context 2048",
    "--query-len 8192 --context 8192",
    "--kv-dtype e4m3,i8-token --query-len 512 --context 2048",
};

struct suite {
  std::string_view name;
  std::span<const char* const> lines;
};
constexpr suite suites[] = {{"h200", h200}, {"cpu", cpu}};

}  // namespace

std::span<const char* const> suite_lines(std::string_view name) {
  for (const suite& s : suites) {
    if (s.name == name) return s.lines;
  }
  throw error(errc::invalid_argument, "--suite '" + std::string(name) + "' is not one of " + suite_names());
}

std::string suite_names() {
  std::string names;
  for (const suite& s : suites) names += (names.empty() ? "" : ", ") + std::string(s.name);
  return names;
}

}  // namespace bifolio::bench
