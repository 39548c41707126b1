// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include "isa.h"
#include "testing.h"
#include "topology.h"

using namespace testing;

namespace {

std::string error_of(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "cpu_worker");
  try {
    ft::parse_options(int(arguments.size()), const_cast<char**>(arguments.data()));
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

void good_options_are_taken() {
  const char* arguments[] = {"cpu_worker", "--ring-fd", "3",       "--pool-fd", "4",     "--parent-pid", "77",
                             "--threads",  "5",         "--cores", "0-2,8",     "--isa", "avx2"};
  ft::Options o = ft::parse_options(int(std::size(arguments)), const_cast<char**>(arguments));
  CHECK(o.ring_fd == 3 && o.pool_fd == 4 && o.parent_pid == 77 && o.threads == 5 && o.isa == FT_ISA_AVX2);
  CHECK((o.cores == std::vector<int>{0, 1, 2, 8}));
}

void bad_options_are_named() {
  CHECK(error_of({"--ring-fd", "x"}).find("--ring-fd") != std::string::npos);
  CHECK(error_of({"--isa", "sse"}).find("avx512_bf16") != std::string::npos);
  CHECK(error_of({"--cores", "3-1"}).find("3-1") != std::string::npos);
  CHECK(error_of({"--cores", "a"}).find("'a'") != std::string::npos);
  CHECK(error_of({"--cores", "1,,2"}) != "");
  CHECK(error_of({"--speed", "1"}).find("--speed") != std::string::npos);
  CHECK(error_of({"--threads"}).find("--threads") != std::string::npos);
  CHECK(error_of({"--threads", "-1"}) != "");
  CHECK(error_of({}).find("required") != std::string::npos);
  CHECK(error_of({"--version"}) == "");
}

void topology_leaves_room() {
  CHECK(!ft::physical_cores().empty());
  CHECK(ft::default_threads(1) == 1 && ft::default_threads(2) == 2 && ft::default_threads(8) == 7 &&
        ft::default_threads(16) == 14);
}

void isa_names_go_both_ways() {
  for (uint32_t isa = FT_ISA_AUTO; isa <= FT_ISA_AMX; isa++)
    CHECK(ft::isa_from_name(ft::isa_name(ft_isa(isa))) == ft_isa(isa), isa);
  CHECK(!ft::isa_from_name("AVX2"));
}

}  // namespace

int main() {
  good_options_are_taken();
  bad_options_are_named();
  topology_leaves_room();
  isa_names_go_both_ways();
  return report("options", 4);
}
