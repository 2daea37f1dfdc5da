// SPDX-License-Identifier: Apache-2.0
// The filter gradient, channels first: see depthwise_conv2d_filter_planes.cpp.
#pragma once
#include "depthwise_conv2d_geometry.h"

namespace exactqat {

// The sums of all blocks of output rows, sums[blocks][taps][outputs], or false where this is no way to make them.
bool sum_filter_planes(const Geometry& g, const float* input, const float* gradient, double* sums);
inline bool sum_filter_planes(const Geometry&, const double*, const double*, double*) { return false; }

}  // namespace exactqat
