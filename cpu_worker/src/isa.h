// SPDX-License-Identifier: Apache-2.0
//
// Which instruction sets this CPU and this kernel offer.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "sglang_ft/ring.h"

namespace ft {

// The best ISA that can be used by this process. Asks the kernel for AMX tile data on the way.
ft_isa detect_isa();

// An ISA is available when it is not above the detected one: each level contains those below it.
inline bool available(ft_isa isa, ft_isa detected) { return isa <= detected; }

const char* isa_name(ft_isa isa);
std::optional<ft_isa> isa_from_name(std::string_view name);

}  // namespace ft
