// The level of x86-64 that the program was compiled for, by the names of the psABI that compilers
// use too: v2 (SSE 4.2), v3 (AVX2, FMA, BMI; Intel since Haswell, AMD since Excavator), v4
// (AVX-512).
#pragma once

namespace sbtrain {

extern const int kCpuLevel;  // 1 to 4; 0 on other architectures

// An extension of that level which this processor lacks, such as "avx2"; null if it has all.
const char* missing_cpu_feature(int level);

// Ends the process with exit code 2 and a message if this processor lacks the level, where the
// first instruction of it would end the process by a signal that says nothing. It is compiled for
// any x86-64 and uses libc alone, so that it can be called before the libraries initialise
// themselves.
void require_cpu_level();

}  // namespace sbtrain
