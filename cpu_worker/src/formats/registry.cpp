// SPDX-License-Identifier: Apache-2.0
#include "all.h"

namespace ft {
namespace {

#define FT_INFO(Format) {Format::kId, Format::kName, Format::kAlignment, Format::role_bytes, Format::fits},
constexpr FormatInfo kFormats[] = {FT_FOR_EACH_FORMAT(FT_INFO)};
#undef FT_INFO

}  // namespace

const FormatInfo* find_format(uint32_t id) {
  for (const FormatInfo& format : kFormats)
    if (format.id == id) return &format;
  return nullptr;
}

}  // namespace ft
