// The ops of ops/short_conv.h on the CPU.
#pragma once

#include "ops/short_conv.h"

namespace sbtrain::ops::cpu {

void short_conv_forward(Stream& s, const ShortConvForward& t, const ShortConvWeights& w);
void short_conv_backward(Stream& s, const ShortConvBackward& t, const ShortConvWeights& dw,
                         const ShortConvWeights& w);
void short_conv_decode(Stream& s, const ShortConvDecode& t, const ShortConvWeights& w);

}  // namespace sbtrain::ops::cpu
