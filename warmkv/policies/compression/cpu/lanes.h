// Sixteen floats at a time, and the memory that threads compute in.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace {

// What a thread computes with. It is kept, as far as it is not large: to map pages anew takes longer than to fill them.
class Memory {
 public:
  float* of(int64_t size) {
    if (size > floats || (floats > KEPT && size <= KEPT)) {
      std::free(data);
      floats = 0;
      data = static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64));
      if (!data) throw std::bad_alloc();
      floats = size;
    }
    return data;
  }
  ~Memory() { std::free(data); }

 private:
  static constexpr int64_t KEPT = 1 << 22;
  float* data = nullptr;
  int64_t floats = 0;
};
thread_local Memory memory;

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
constexpr int64_t WIDTH = 16;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

inline Lanes load(const float* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof(x)); }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

template <typename Combine>
inline float reduce(Lanes x, Combine combine) {
  x = combine(x, __builtin_shuffle(x, Bits{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  x = combine(x, __builtin_shuffle(x, Bits{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  x = combine(x, __builtin_shuffle(x, Bits{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  x = combine(x, __builtin_shuffle(x, Bits{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return x[0];
}

// exp(x) for x <= 0 within 2 ulp: 2^n times a polynomial of what is left (Cephes, expf). 0 below -87.
inline Lanes exponential(Lanes x) {
  const Lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer n, in the low bits
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Bits power = ((Bits)shifted + 127) << 23;  // the low bits of 12582912 are 0
  return x < -87.0f ? Lanes{} : p * (Lanes)power;
}

constexpr int64_t WEIGHED = 2 * WIDTH;  // logits at a time

// Replace `count` logits, a multiple of WEIGHED, by exp(logit - largest), largest being at least `before`; return their
// sum.
inline float weigh(float* logits, int64_t count, float before, float& largest) {
  Lanes most[2] = {load(logits), load(logits + WIDTH)}, sums[2] = {};
  for (int64_t j = WEIGHED; j < count; j += WEIGHED)
    for (int64_t i = 0; i < 2; i++) most[i] = larger(most[i], load(logits + j + i * WIDTH));
  largest = std::max(before, reduce(larger(most[0], most[1]), larger));
  for (int64_t j = 0; j < count; j += WEIGHED)
    for (int64_t i = 0; i < 2; i++) {
      const Lanes weight = exponential(load(logits + j + i * WIDTH) - largest);
      store(logits + j + i * WIDTH, weight);
      sums[i] += weight;
    }
  return reduce(sums[0] + sums[1], [](Lanes a, Lanes b) { return a + b; });
}

inline int64_t weighed(int64_t count) { return (count + WEIGHED - 1) / WEIGHED * WEIGHED; }

template <int STEP>
inline void exchange(Lanes (&rows)[WIDTH]) {
  Bits low, high;
  for (int i = 0; i < WIDTH; i++) {
    low[i] = i & STEP ? WIDTH + i - STEP : i;
    high[i] = i & STEP ? WIDTH + i : i + STEP;
  }
  for (int i = 0; i < WIDTH; i++)
    if (!(i & STEP)) {
      const Lanes a = rows[i], b = rows[i + STEP];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + STEP] = __builtin_shuffle(a, b, high);
    }
}

// Transpose up to 16 rows of up to 16 floats; there are zeros in the place of those that lack.
inline void transpose(const float* from, int64_t from_row, int64_t count, int64_t width, float* to, int64_t to_row) {
  Lanes rows[WIDTH];
  if (count == WIDTH && width == WIDTH)
    for (int64_t j = 0; j < WIDTH; j++) rows[j] = load(from + j * from_row);
  else
    for (int64_t j = 0; j < WIDTH; j++) {
      rows[j] = Lanes{};
      if (j < count) std::memcpy(&rows[j], from + j * from_row, sizeof(float) * width);
    }
  exchange<8>(rows), exchange<4>(rows), exchange<2>(rows), exchange<1>(rows);
  for (int64_t i = 0; i < WIDTH; i++)
    if (i < width) store(to + i * to_row, rows[i]);
}

}  // namespace
