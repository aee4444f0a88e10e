// Causal attention of a chunk of queries behind its prefix on CPUs, block by block with an online softmax
// (FlashAttention-2, Dao 2023, algorithm 1), its products by oneDNN's kernels, which torch exports.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include <omp.h>

namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, const bool add_c, const float* a,
            const float* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace {

struct Aligned {
  float* data;
  explicit Aligned(int64_t size)
      : data(static_cast<float*>(operator new(size * sizeof(float), std::align_val_t(64)))) {}
  ~Aligned() { operator delete(data, std::align_val_t(64)); }
  Aligned(const Aligned&) = delete;
};

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

// Replace the logits of a row by exp(logit - largest), largest being at least `before`; return their sum.
template <int64_t KEYS>
inline float weigh(float* logits, float before, float& largest) {
  Lanes most[4] = {load(logits), load(logits + WIDTH), load(logits + 2 * WIDTH), load(logits + 3 * WIDTH)};
  for (int64_t j = 4 * WIDTH; j < KEYS; j += 4 * WIDTH)
    for (int64_t i = 0; i < 4; i++) most[i] = larger(most[i], load(logits + j + i * WIDTH));
  largest = std::max(before, reduce(larger(larger(most[0], most[1]), larger(most[2], most[3])), larger));
  Lanes sums[2] = {Lanes{}, Lanes{}};
  for (int64_t j = 0; j < KEYS; j += 2 * WIDTH)
    for (int64_t i = 0; i < 2; i++) {
      const Lanes weight = exponential(load(logits + j + i * WIDTH) - largest);
      store(logits + j + i * WIDTH, weight);
      sums[i] += weight;
    }
  return reduce(sums[0] + sums[1], [](Lanes a, Lanes b) { return a + b; });
}

struct Call {
  const float *q, *k, *v;
  float* out;
  int64_t kv_heads, group, n, m, dim, q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row;
  float scale;
  int64_t window;
  int threads;
};

// `KEYS` are the keys of a block, whose logits stay in the second cache.
template <int64_t KEYS>
class Attention {
 public:
  explicit Attention(const Call& call)
      : call(call),
        queries(std::max<int64_t>(16, 128 / call.group)),
        rows(queries * call.group),
        start(call.m - call.n),
        key_blocks((call.m + KEYS - 1) / KEYS),
        keys(call.kv_heads * key_blocks * call.dim * KEYS),
        last(call.kv_heads * KEYS * call.dim),
        own(2 * rows * call.dim + rows * KEYS + 2 * rows),
        scratch(call.threads * own) {}

  // Returns false where oneDNN has no kernel.
  bool run() {
    const int64_t blocks = (call.n + queries - 1) / queries, seen = first_seen(0) / KEYS;
    bool failed = false;
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
#pragma omp for collapse(2)
      for (int64_t head = 0; head < call.kv_heads; head++)
        for (int64_t block = seen; block < key_blocks; block++) pack(head, block);
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t head = 0; head < call.kv_heads; head++)
        for (int64_t block = 0; block < blocks; block++) try {
            attend(head, block * queries, scratch.data + omp_get_thread_num() * own);
          } catch (...) {  // which must not leave the loop
#pragma omp atomic write
            failed = true;
          }
      at::native::cpublas::brgemm_release(false);
    }
    return !failed;
  }

 private:
  const Call& call;
  const int64_t queries, rows;  // of a block: for each query head, and of all heads that share keys
  const int64_t start;          // position of the first query
  const int64_t key_blocks;
  Aligned keys;  // of each head and block transposed, as the second factor of a product; zeros where there are no more
  Aligned last;  // values of each head's last block, likewise
  const int64_t own;  // floats of a thread's scratch
  Aligned scratch;

  int64_t first_seen(int64_t query) const {
    return call.window ? std::max<int64_t>(0, start + query + 1 - call.window) : 0;
  }

  void pack(int64_t head, int64_t block) {
    const int64_t dim = call.dim, count = std::min(KEYS, call.m - block * KEYS);
    float* to = keys.data + (head * key_blocks + block) * dim * KEYS;
    const float* from = call.k + head * call.k_head + block * KEYS * call.k_row;
    if (count < KEYS) std::memset(to, 0, sizeof(float) * dim * KEYS);
    for (int64_t c = 0; c < dim; c += WIDTH)
      for (int64_t j = 0; j < count; j++)
        for (int64_t i = c; i < std::min(dim, c + WIDTH); i++) to[i * KEYS + j] = from[j * call.k_row + i];
    if (block < key_blocks - 1) return;
    float* values = last.data + head * KEYS * dim;
    std::memset(values, 0, sizeof(float) * KEYS * dim);
    for (int64_t j = 0; j < count; j++)
      std::memcpy(values + j * dim, call.v + head * call.v_head + (block * KEYS + j) * call.v_row, sizeof(float) * dim);
  }

  void attend(int64_t head, int64_t first, float* scratch) {
    using at::native::cpublas::brgemm;
    const int64_t dim = call.dim, group = call.group, count = std::min(queries, call.n - first);
    float *packed = scratch, *sums = packed + rows * dim, *logits = sums + rows * dim, *most = logits + rows * KEYS,
          *total = most + rows;
    for (int64_t g = 0; g < group; g++)
      for (int64_t i = 0; i < queries; i++) {
        float* to = packed + (g * queries + i) * dim;
        const float* from = call.q + (head * group + g) * call.q_head + (first + i) * call.q_row;
        for (int64_t c = 0; c < dim; c++) to[c] = i < count ? from[c] * call.scale : 0.0f;
      }
    std::fill_n(most, rows, HIDDEN);
    std::fill_n(total, rows, 0.0f);
    std::fill_n(sums, rows * dim, 0.0f);
    for (int64_t at = first_seen(first) / KEYS; at * KEYS < start + first + count; at++) {
      const float* columns = keys.data + (head * key_blocks + at) * dim * KEYS;
      brgemm(rows, KEYS, dim, dim, KEYS, KEYS, false, packed, columns, logits, false);
      for (int64_t row = 0; row < rows; row++) {
        const int64_t i = row % queries;
        float* weights = logits + row * KEYS;
        const int64_t low = std::max<int64_t>(0, first_seen(first + i) - at * KEYS);
        const int64_t high = i < count ? std::min(KEYS, start + first + i + 1 - at * KEYS) : 0;
        if (high <= low) {
          std::fill_n(weights, KEYS, 0.0f);
          continue;
        }
        std::fill(weights, weights + low, HIDDEN);
        std::fill(weights + high, weights + KEYS, HIDDEN);
        float largest;
        const float sum = weigh<KEYS>(weights, most[row], largest);
        const float factor = std::exp(most[row] - largest);
        if (factor < 1.0f)
          for (int64_t c = 0; c < dim; c++) sums[row * dim + c] *= factor;
        total[row] = total[row] * factor + sum;
        most[row] = largest;
      }
      const bool ends = at == key_blocks - 1;
      const float* values = ends ? last.data + head * KEYS * dim : call.v + head * call.v_head + at * KEYS * call.v_row;
      brgemm(rows, dim, KEYS, KEYS, ends ? dim : call.v_row, dim, true, logits, values, sums, false);
    }
    for (int64_t g = 0; g < group; g++)
      for (int64_t i = 0; i < count; i++) {
        const int64_t row = g * queries + i;
        const float inverse = 1.0f / total[row];
        float* to = call.out + (head * group + g) * call.out_head + (first + i) * call.out_row;
        for (int64_t c = 0; c < dim; c++) to[c] = sums[row * dim + c] * inverse;
      }
  }
};

}  // namespace

// Attend q [kv_heads * group, n, dim], the last n of m positions, to k and v [kv_heads, m, dim]; out as q. Strides are
// in floats, of heads and positions; channels are contiguous. Each query sees the keys up to its own, the newest
// `window` of these, all if that is 0. Returns 0, or 1 where there is no kernel or no memory; `out` is then undefined.
extern "C" int warmkv_attend(const float* q, const float* k, const float* v, float* out, int64_t kv_heads,
                             int64_t group, int64_t n, int64_t m, int64_t dim, int64_t q_head, int64_t q_row,
                             int64_t k_head, int64_t k_row, int64_t v_head, int64_t v_row, int64_t out_head,
                             int64_t out_row, double scale, int64_t window, int threads) {
  const Call call{q,     k,      v,     out,    kv_heads, group,    n,       m,     dim,    q_head,
                  q_row, k_head, k_row, v_head, v_row,    out_head, out_row,
                  static_cast<float>(scale), window, threads};
  try {  // of a short prompt, less is computed in vain beyond the diagonal
    return !(m <= 512 ? Attention<128>(call).run() : Attention<256>(call).run());
  } catch (...) {
    return 1;
  }
}
