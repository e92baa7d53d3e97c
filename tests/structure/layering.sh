#!/usr/bin/env bash
# layering.sh <source dir>
#
# Arrows point down: vocabulary <- memory <- {cache logic, device seam}, and the last two meet only in step.hpp. Reads
# the #include lines of include/bifolio and src, and takes each file to the room that its name says.
set -euo pipefail
cd "$1"
find include/bifolio src -name '*.hpp' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.h' | sort | xargs awk '
  function base(path) { sub(/.*\//, "", path); sub(/\.[a-z]*$/, "", path); return path }
  # The room of a public header or of the src/common file of that name. Anything new in src/common is cache logic,
  # which has the most to lose; a new public header must be entered here.
  function room_of(name) {
    if (name ~ /^(types|dtype|error|device|tensor_view|kv_layout|export|version)$/) return "vocabulary"
    if (name ~ /^(memory_resource|buffer)$/) return "memory"
    if (name ~ /^(step|stats|log)$/) return "meeting"
    if (name ~ /^(block_pool|block_table|content_key|prefix_cache|request|sequence|kv_cache_manager|scheduler|request_intake)$/) return "logic"
    if (name ~ /^(executor|backend|attention|cache_engine|cuda)$/) return "seam"
    if (name == "bifolio") return "umbrella"
    return ""
  }
  function may(from, to) {
    if (to == "umbrella") return 0
    if (from == to || from == "umbrella" || to == "vocabulary") return 1
    if (from == "vocabulary") return 0
    if (to == "memory") return from != "meeting" || 1
    if (from == "memory") return 0
    if (to == "meeting") return 1
    return 0
  }
  function complain(text) { print FILENAME ":" FNR ": " text; bad = 1 }

  FNR == 1 {
    files++
    name = base(FILENAME)
    if (FILENAME ~ /^include\//) {
      room = room_of(name)
      if (room == "") complain("this public header is in no room; enter it in tests/structure/layering.sh")
    } else if (FILENAME ~ /^src\/common\//) {
      room = room_of(name)
      helper = room == ""
      # Argument checks, kernel arguments and the registry of backends serve the seam; checked integers serve everyone.
      if (name ~ /^(attention_.*|footprint|validate.*|kernel_args|backend_registry)$/) room = "seam"
      else if (name == "checked") room = "vocabulary"
      else if (helper) room = "logic"
    } else {
      room = "seam"  # src/cpu, src/cuda
    }
  }
  /^[ \t]*#[ \t]*include/ {
    target = $0
    sub(/^[^<"]*[<"]/, "", target); sub(/[>"].*/, "", target)
    if (target ~ /^bifolio\//) {
      to = room_of(base(target))
      if (to != "" && !may(room, to)) complain(room " must not include " target " (" to ")")
    }
    # make_backend, in src/common/backend.cpp, is the one place that knows the CPU backend.
    if (target ~ /^cpu\// && FILENAME != "src/common/backend.cpp" && FILENAME ~ /^(src\/(common|cuda)|include)\// ) complain("only src/cpu includes " target)
    if (target ~ /^cuda\// && FILENAME ~ /^(src\/(common|cpu)|include)\//) complain("only src/cuda includes " target)
    if (target == "omp.h" && FILENAME != "src/cpu/openmp_executor.cpp") complain("OpenMP belongs to src/cpu/openmp_executor.cpp")
    if (target ~ /^xsimd/ && FILENAME != "src/cpu/kernels/simd.hpp") complain("xsimd belongs to src/cpu/kernels/simd.hpp")
    if (target ~ /^(oneapi\/)?tbb/ && FILENAME !~ /^src\/common\// && FILENAME != "src/cpu/tbb_executor.cpp")
      complain("oneTBB belongs to src/common and src/cpu/tbb_executor.cpp")
    if (target ~ /^doctest/) complain("doctest belongs to tests/")
    if (target ~ /^(algorithm|vector|string|map|iostream|sstream)$/ && FILENAME ~ /^src\/cpu\/kernels\//)
      complain("kernels use no containers, <algorithm> or streams: weak symbols")
  }
  /omp_set_num_threads/ { complain("the library never changes the threads of its program") }
  END {
    print files " files looked at"
    exit bad || files < 20
  }'
