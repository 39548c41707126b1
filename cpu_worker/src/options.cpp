// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <string_view>

#include "isa.h"
#include "topology.h"

namespace ft {
namespace {

constexpr unsigned kMaxThreads = 1024;

long parse_long(const std::string& flag, const std::string& text, long least, long most) {
  try {
    size_t used = 0;
    long value = std::stol(text, &used);
    if (used == text.size() && value >= least && value <= most) return value;
  } catch (const std::exception&) {
  }
  throw std::invalid_argument(flag + " " + text + ": expected a number from " + std::to_string(least) +
                              " to " + std::to_string(most));
}

ft_isa parse_isa(const std::string& name) {
  if (auto isa = isa_from_name(name)) return *isa;
  throw std::invalid_argument("--isa " + name + ": expected auto, scalar, avx2, avx512, avx512_bf16 or amx");
}

void set_option(Options& options, const std::string& flag, const std::string& value) {
  constexpr long kMaxInt = 0x7fffffff;
  if (flag == "--ring-fd") {
    options.ring_fd = int(parse_long(flag, value, 0, kMaxInt));
  } else if (flag == "--pool-fd") {
    options.pool_fd = int(parse_long(flag, value, 0, kMaxInt));
  } else if (flag == "--parent-pid") {
    options.parent_pid = int(parse_long(flag, value, 1, kMaxInt));
  } else if (flag == "--threads") {
    options.threads = unsigned(parse_long(flag, value, 0, kMaxThreads));
  } else if (flag == "--cores") {
    options.cores = value.empty() ? std::vector<int>{} : parse_cores(value);
  } else if (flag == "--isa") {
    options.isa = parse_isa(value);
  } else {
    throw std::invalid_argument("unknown option " + flag);
  }
}

}  // namespace

const char* const kUsage =
    "cpu_worker: runs the experts of a Mixture-of-Experts model; started by sglang_ft, not by hand.\n"
    "\n"
    "  --ring-fd N      file descriptor of the ring (memfd, mapped read-write)\n"
    "  --pool-fd N      file descriptor of the expert pool (memfd, mapped read-only)\n"
    "  --parent-pid N   process id of the owner; the worker leaves when it is gone\n"
    "  --threads N      threads; 0: all physical cores but one or two (default 0)\n"
    "  --cores LIST     cores to pin the threads to, like 0-5,8 (default: by topology)\n"
    "  --isa NAME       auto, scalar, avx2, avx512, avx512_bf16 or amx (default auto)\n"
    "  --version        print versions and the best instruction set of this CPU\n";

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i++) {
    std::string flag = argv[i];
    if (flag == "--version") {
      options.version = true;
    } else if (flag == "--help") {
      options.help = true;
    } else if (i + 1 < argc) {
      set_option(options, flag, argv[++i]);
    } else {
      throw std::invalid_argument(flag + ": unknown option or missing value");
    }
  }
  if (options.version || options.help) return options;
  if (options.ring_fd < 0 || options.pool_fd < 0 || options.parent_pid == 0)
    throw std::invalid_argument("--ring-fd, --pool-fd and --parent-pid are required");
  return options;
}

}  // namespace ft
