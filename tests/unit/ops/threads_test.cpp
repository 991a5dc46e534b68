// Products give the same bits with every number of threads.
#include <gtest/gtest.h>
#include <omp.h>

#include <string>
#include <vector>

#include "core/philox.h"
#include "ops/cpu/blas.h"

namespace sbtrain::ops::cpu {
namespace {

struct Product {
  int64_t m, n, k;
  Transpose trans_a, trans_b;
  float alpha, beta;
};

std::vector<float> random(int64_t count, std::string_view name) {
  const Philox random(1, RandomPurpose::kTest, name);
  std::vector<float> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(random.uniform(i)) - 0.5f;
  return x;
}

class Threads : public testing::Test {
 protected:
  ~Threads() override { omp_set_num_threads(before_); }

 private:
  int before_ = omp_get_max_threads();
};

std::vector<float> multiply(const Product& p, const std::vector<float>& a,
                            const std::vector<float>& b, std::vector<float> c, int threads) {
  omp_set_num_threads(threads);
  gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, p.alpha, a.data(),
       p.trans_a == Transpose::kYes ? p.m : p.k, b.data(), p.trans_b == Transpose::kYes ? p.k : p.n,
       p.beta, c.data(), p.n);
  return c;
}

TEST_F(Threads, DoNotChangeTheBitsOfProducts) {
  struct Shape {
    int64_t m, n, k;
  };
  // Projections, heads and weight gradients of small models; decoding; edges of tiles, and sizes
  // close to those at which OpenBLAS changes its kernels.
  const std::vector<Shape> shapes = {
      {1024, 384, 128}, {256, 688, 128}, {384, 128, 1024}, {128, 344, 512}, {512, 1024, 64},
      {1, 4096, 256},   {3, 4096, 128},  {16, 1536, 96},   {49, 700, 300},  {97, 500, 128},
      {1024, 4, 128},   {4, 128, 1024},  {129, 129, 129},  {1000, 100, 37}, {500, 8, 512}};
  for (const Shape& shape : shapes) {
    const std::vector<float> a = random(shape.m * shape.k, "a");
    const std::vector<float> b = random(shape.k * shape.n, "b");
    const std::vector<float> c = random(shape.m * shape.n, "c");
    for (const Transpose trans_a : {Transpose::kNo, Transpose::kYes}) {
      for (const Transpose trans_b : {Transpose::kNo, Transpose::kYes}) {
        for (const bool adds : {false, true}) {
          const Product p{shape.m, shape.n, shape.k, trans_a, trans_b, 0.7f, adds ? 1.0f : 0.0f};
          const std::vector<float> one = multiply(p, a, b, c, 1);
          for (const int threads : {2, 3, 8}) {
            EXPECT_EQ(one, multiply(p, a, b, c, threads))
                << shape.m << " x " << shape.n << " x " << shape.k << " with " << threads
                << " threads, transposed " << static_cast<int>(trans_a) << static_cast<int>(trans_b)
                << ", adds " << adds;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::ops::cpu
