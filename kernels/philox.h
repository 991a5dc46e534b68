// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and its
// normal numbers, compiled for the host and for the device with equal bits on both.
//
// The normal numbers use nothing but additions, products, quotients and square roots in double
// precision, which IEEE 754 rounds in one way, and their own logarithm and cosine. A compiler may
// still fuse a product with the sum that takes it, which changes the rounding; so every product
// here that a sum takes is an fma() by name, and there is no other pair to fuse.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SBTRAIN_HOST_DEVICE __host__ __device__ inline
#else
#define SBTRAIN_HOST_DEVICE inline
#endif

namespace sbtrain::kernels {

struct PhiloxCounter {
  uint32_t x[4];
};
struct PhiloxKey {
  uint32_t x[2];
};

// A stream of numbers, indexed by element: the key, and the upper half of the counter.
struct PhiloxStream {
  PhiloxKey key;
  uint32_t counter_high[2];
};

SBTRAIN_HOST_DEVICE PhiloxCounter philox4x32(PhiloxCounter c, PhiloxKey k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c.x[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c.x[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.x[1] ^ k.x[0], static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.x[3] ^ k.x[1], static_cast<uint32_t>(p0)}};
    k.x[0] += 0x9E3779B9;
    k.x[1] += 0xBB67AE85;
  }
  return c;
}

SBTRAIN_HOST_DEVICE PhiloxCounter philox_block(const PhiloxStream& stream, uint64_t element) {
  return philox4x32({{static_cast<uint32_t>(element), static_cast<uint32_t>(element >> 32),
                      stream.counter_high[0], stream.counter_high[1]}},
                    stream.key);
}

// The natural logarithm of x in [2^-54, 1], with an error of at most one unit in the last place:
// the method of fdlibm's e_log.c (Sun Microsystems, 1993). With x = 2^k (1 + f), 1 + f in
// [sqrt(1/2), sqrt(2)), and s = f / (2 + f), log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)).
SBTRAIN_HOST_DEVICE double philox_log(double x) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(bits));
  // Moves the bits so that the exponent changes at sqrt(1/2) instead of at 1.
  constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  constexpr uint64_t kOne = 0x3ff0000000000000;
  bits += kOne - kSqrtHalf;
  const auto k = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  bits = (bits & 0x000fffffffffffff) + kSqrtHalf;
  double mantissa = 0;
  memcpy(&mantissa, &bits, sizeof(mantissa));

  const double f = mantissa - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double r = fma(z, 1.479819860511658591e-01, 1.531383769920937332e-01);
  r = fma(z, r, 1.818357216161805012e-01);
  r = fma(z, r, 2.222219843214978396e-01);
  r = fma(z, r, 2.857142874366239149e-01);
  r = fma(z, r, 3.999999999940941908e-01);
  r = fma(z, r, 6.666666666666735130e-01);
  const double half_f = 0.5 * f;
  const double sum = fma(half_f, f, z * r);  // f^2/2 + R
  const double low = fma(s, sum, k * 1.90821492927058770002e-10);
  // k times the upper part of log(2) is exact: that part ends in 20 zeros.
  return fma(k, 6.93147180369123816490e-01, f - fma(half_f, f, -low));
}

// cos(2 pi u) for u in [0, 1), a multiple of 2^-53, with an error below 2^-52: the distance to the
// nearest quarter is exact, and the polynomials are fdlibm's (k_sin.c, k_cos.c).
SBTRAIN_HOST_DEVICE double philox_cos_turns(double u) {
  const int quarter = static_cast<int>(fma(4.0, u, 0.5));
  const double t = 6.283185307179586476925 * fma(-0.25, static_cast<double>(quarter), u);
  const double z = t * t;
  double c = fma(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09);
  c = fma(z, c, -2.75573143513906633035e-07);
  c = fma(z, c, 2.48015872894767294178e-05);
  c = fma(z, c, -1.38888888888741095749e-03);
  c = fma(z, c, 4.16666666666666019037e-02);
  c = fma(z, c, -0.5);
  c = fma(z, c, 1.0);
  double s = fma(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08);
  s = fma(z, s, 2.75573137070700676789e-06);
  s = fma(z, s, -1.98412698298579493134e-04);
  s = fma(z, s, 8.33333333332248946124e-03);
  s = fma(z, s, -1.66666666666666324348e-01);
  s = fma(t * z, s, t);
  // cos, -sin, -cos and sin of the distance, quarter by quarter.
  const double value = (quarter & 1) != 0 ? s : c;
  return ((quarter + 1) & 2) != 0 ? -value : value;
}

// A number of mean 0 and standard deviation 1 from 106 of the block's bits (Box and Muller, "A note
// on the generation of random normal deviates", 1958).
SBTRAIN_HOST_DEVICE double philox_normal(const PhiloxStream& stream, uint64_t element) {
  const PhiloxCounter b = philox_block(stream, element);
  const auto k1 = static_cast<double>(uint64_t{b.x[0]} << 21 | b.x[1] >> 11);
  const auto k2 = static_cast<double>(uint64_t{b.x[2]} << 21 | b.x[3] >> 11);
  const double radius = sqrt(-2.0 * philox_log((k1 + 0.5) * 0x1.0p-53));
  return radius * philox_cos_turns(k2 * 0x1.0p-53);
}

}  // namespace sbtrain::kernels

#undef SBTRAIN_HOST_DEVICE
