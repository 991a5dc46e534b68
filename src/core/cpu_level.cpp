#include "core/cpu_level.h"

namespace sbtrain {

// What the compiler's options were: this file is compiled like all others, cpu_check.cpp is not.
#if !defined(__x86_64__)
const int kCpuLevel = 0;
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)
const int kCpuLevel = 4;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__BMI__) && defined(__BMI2__)
const int kCpuLevel = 3;
#elif defined(__SSE4_2__) && defined(__POPCNT__)
const int kCpuLevel = 2;
#else
const int kCpuLevel = 1;
#endif

}  // namespace sbtrain
