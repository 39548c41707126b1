// SPDX-License-Identifier: Apache-2.0
//
// Which cores the worker's threads are pinned to.
#pragma once

#include <string>
#include <vector>

namespace ft {

// "0-5,8" -> {0, 1, 2, 3, 4, 5, 8}. Throws std::invalid_argument.
std::vector<int> parse_cores(const std::string& text);

// One logical CPU of each physical core that this process may use, fastest kind first; among equals the
// highest numbers first, because interrupts and the server tend to sit on the lowest.
std::vector<int> physical_cores();

// All but one or two, which are left to the server; all when there are at most two.
unsigned default_threads(unsigned num_physical_cores);

}  // namespace ft
