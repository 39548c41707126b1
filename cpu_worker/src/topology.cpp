// SPDX-License-Identifier: Apache-2.0
#include "topology.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <stdexcept>

namespace ft {
namespace {

std::string cpu_file(int cpu, const char* name) {
  return "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/" + name;
}

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Highest clock in kHz; 0 when the kernel does not say, as in most virtual machines.
long max_frequency(int cpu) {
  std::string text = read_line(cpu_file(cpu, "cpufreq/cpuinfo_max_freq"));
  return text.empty() ? 0 : std::stol(text);
}

int parse_number(const std::string& text) {
  if (text.empty() || text.size() > 5 || text.find_first_not_of("0123456789") != std::string::npos)
    throw std::invalid_argument("'" + text + "' is not a core number");
  return std::stoi(text);
}

}  // namespace

std::vector<int> parse_cores(const std::string& text) {
  std::vector<int> cores;
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string item = text.substr(at, end - at);
    size_t dash = item.find('-');
    int first = parse_number(item.substr(0, dash));
    int last = dash == std::string::npos ? first : parse_number(item.substr(dash + 1));
    if (last < first || last >= CPU_SETSIZE)
      throw std::invalid_argument("'" + item + "' is not a range of cores");
    for (int core = first; core <= last; core++) cores.push_back(core);
    at = end + 1;
  }
  return cores;
}

std::vector<int> physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::set<std::string> seen;
  std::vector<int> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = read_line(cpu_file(cpu, "topology/thread_siblings_list"));
    if (siblings.empty() || seen.insert(siblings).second) cores.push_back(cpu);
  }
  std::reverse(cores.begin(), cores.end());
  std::stable_sort(cores.begin(), cores.end(),
                   [](int a, int b) { return max_frequency(a) > max_frequency(b); });
  return cores;
}

unsigned default_threads(unsigned num_physical_cores) {
  if (num_physical_cores <= 2) return std::max(num_physical_cores, 1u);
  return num_physical_cores - (num_physical_cores <= 8 ? 1 : 2);
}

}  // namespace ft
