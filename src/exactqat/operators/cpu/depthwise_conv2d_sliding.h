// SPDX-License-Identifier: Apache-2.0
// Channels first, without rearranging planes: see depthwise_conv2d_sliding.cpp.
#pragma once
#include "depthwise_conv2d_geometry.h"

namespace exactqat {

// All planes of a result, or false where this is no way to make them.
template <class T>
bool slide_forward(const Geometry& g, const T* input, const T* filter, T* output);

// For multiplier 1.
template <class T>
bool slide_backward(const Geometry& g, const T* gradient, const T* filter, T* output);

}  // namespace exactqat
