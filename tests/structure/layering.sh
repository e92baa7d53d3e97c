#!/usr/bin/env bash
# layering.sh <source dir>
#
# Which folder may include which. Reads the #include lines of include/bifolio and src; a public header counts as part of
# the folder that implements it.
set -euo pipefail
cd "$1"
find include/bifolio src \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.h' \) | sort | xargs awk '
  BEGIN {
    # Folder: the folders whose headers its files may include, besides its own.
    allowed["base"]      = ""
    allowed["cache"]     = "base"
    allowed["scheduler"] = "base cache"
    allowed["engine"]    = "base attention"
    allowed["attention"] = "base engine"
    allowed["events"]    = "base cache"
    allowed["model"]     = "base cache scheduler engine attention"
    allowed["c"]         = "base cache scheduler engine attention model cpu"
    allowed["storage"]   = "base cache scheduler engine attention"
    allowed["cpu"]       = "base engine attention"
    allowed["cuda"]      = "base engine attention"

    # Folder: its public headers, those in detail/ included.
    headers["base"]      = "buffer copy_audit device dtype error export host_device kv_layout log memory_resource metrics prefetch stats step tensor_view types version"
    headers["cache"]     = "block_pool block_table content_key eviction_policy kv_cache_config kv_cache_manager prefix_cache " \
                           "block_chunk block_queues group_manager kv_events layer_groups manager_core prefix_index sequence"
    headers["scheduler"] = "request scheduler"
    headers["engine"]    = "backend cache_engine calibration event executor rotate_append trace"
    headers["attention"] = "attention"
    headers["model"]     = "model_cache"
    headers["cpu"]       = "cpu cpu_isas"
    headers["cuda"]      = "cuda"
    headers["events"]    = "kv_event_publisher"

    # Package: the files or folders that may include it.
    package["omp.h"]                = "src/cpu/openmp_executor.cpp"
    package["xsimd/"]               = "src/cpu/kernels/simd/simd.hpp"
    package["tbb/ oneapi/tbb/"]     = "src/common/ src/cpu/tbb_executor.cpp"
    package["doctest"]              = "tests/"
    package["zmq.hpp"]              = "src/events/"
    package["nvtx3/"]               = "src/cuda/"
    # Weak symbols: kernels of different ISAs must share no inline function.
    kernel_free_of = "^(algorithm|vector|string|map|iostream|sstream)$"

    for (folder in headers) {
      n = split(headers[folder], names, " ")
      for (i = 1; i <= n; i++) home[names[i]] = folder
    }
  }
  # The folder of an included header or of a file.
  function folder_of(path,   parts, name) {
    if (path ~ /^bifolio\/c\//) return ""
    if (path ~ /^bifolio\//) {
      name = path; sub(/^bifolio\/(detail\/)?/, "", name); sub(/\.hpp$/, "", name)
      return path == "bifolio/bifolio.hpp" ? "umbrella" : name in home ? home[name] : "unknown"
    }
    split(path, parts, "/")
    if (parts[1] == "common") return parts[2]
    if (parts[1] == "cpu" || parts[1] == "cuda" || parts[1] == "c" || parts[1] == "events") return parts[1]
    return ""
  }
  function contains(list, word) { return index(" " list " ", " " word " ") > 0 }
  function starts(path, prefixes,   list, n, i) {
    n = split(prefixes, list, " ")
    for (i = 1; i <= n; i++) if (index(path, list[i]) == 1) return 1
    return 0
  }
  function complain(text) { print FILENAME ":" FNR ": " text; bad = 1 }

  FNR == 1 {
    files++
    path = FILENAME; sub(/^(include|src)\//, "", path)
    folder = folder_of(path)
    if (folder == "unknown") complain("this public header belongs to no folder; enter it in tests/structure/layering.sh")
    else if (folder != "" && folder != "umbrella" && !(folder in allowed)) complain("the folder " folder " is not one of the tree")
  }
  /^[ \t]*#[ \t]*include/ {
    target = $0
    sub(/^[^<"]*[<"]/, "", target); sub(/[>"].*/, "", target)
    to = folder_of(target)
    if (to != "" && to != folder && folder != "umbrella" && !contains(allowed[folder], to))
      complain(folder " must not include " target " (" to ")")
    for (p in package) if (starts(target, p) && !starts(FILENAME, package[p])) complain(target " belongs to " package[p])
    if (target ~ kernel_free_of && FILENAME ~ /^src\/cpu\/kernels\//) complain("kernels include no <" target ">: weak symbols")
  }
  /omp_set_num_threads/ { complain("the library never changes the threads of its program") }
  END {
    print files " files looked at"
    exit bad || files < 20
  }'
