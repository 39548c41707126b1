// SPDX-License-Identifier: Apache-2.0
//
// The list of weight formats: a new one is a file in this folder and a line in each list here.
#pragma once

#include "bf16.h"
#include "fp16.h"
#include "fp32.h"

// Calls X(Format) for each.
#define FT_FOR_EACH_FORMAT(X) X(Bf16Format) X(Fp16Format) X(Fp32Format)
