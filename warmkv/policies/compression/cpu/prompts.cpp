// Causal attention of a chunk of queries behind its prefix on CPUs, block by block with an online softmax
// (FlashAttention-2, Dao 2023, algorithm 1), its products by oneDNN's kernels, which torch exports.

#include <omp.h>

#include "lanes.h"

namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, const bool add_c, const float* a,
            const float* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace {

struct Call {
  const float *q, *k, *v;
  float* out;
  int64_t kv_heads, group, n, m, dim, q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row;
  float scale;
  int64_t window;
  int threads;
};

constexpr int64_t QUERIES = 128;         // of all heads that share keys, in a block
constexpr int64_t PACKED = 1 << 20;      // floats of keys that are transposed at a time, unless those of a head are more
constexpr int64_t KEYS = 256;            // of a block, whose logits stay in the second cache

class Attention {
 public:
  explicit Attention(const Call& call)
      : call(call),
        blocks((call.n - 1) / std::max(WIDTH, QUERIES / call.group) + 1),
        queries((call.n + blocks - 1) / blocks),
        rows(queries * call.group),
        start(call.m - call.n),
        seen(first_seen(0) / KEYS),
        key_blocks((call.m + KEYS - 1) / KEYS - seen),
        heads(std::clamp<int64_t>(PACKED / (key_blocks * call.dim * KEYS), 1, call.kv_heads)),
        own(2 * rows * call.dim + rows * KEYS + 2 * rows),
        keys(memory.of(heads * (key_blocks + 1) * call.dim * KEYS + call.threads * own)),
        last(keys + heads * key_blocks * call.dim * KEYS),
        scratch(last + heads * call.dim * KEYS) {}

  // Returns false where oneDNN has no kernel.
  bool run() {
    bool failed = false;
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
      for (int64_t first = 0; first < call.kv_heads; first += heads) {
        const int64_t end = std::min(call.kv_heads, first + heads);
#pragma omp for collapse(2)
        for (int64_t head = first; head < end; head++)
          for (int64_t block = 0; block < key_blocks; block++) pack(head, block);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t head = first; head < end; head++)
          for (int64_t block = 0; block < blocks; block++) try {
              attend(head, block * queries, scratch + omp_get_thread_num() * own);
            } catch (...) {  // which must not leave the loop
#pragma omp atomic write
              failed = true;
            }
      }
      at::native::cpublas::brgemm_release(false);
    }
    return !failed;
  }

 private:
  const Call& call;
  const int64_t blocks;         // of queries, as equal as can be
  const int64_t queries, rows;  // of a block: for each query head, and of all heads that share keys
  const int64_t start;          // position of the first query
  const int64_t seen;           // blocks of keys before the first that a query sees
  const int64_t key_blocks;     // behind these
  const int64_t heads;          // whose keys are transposed at a time
  const int64_t own;            // floats of a thread's scratch
  float* const keys;  // of each head and block transposed, as the second factor of a product; zeros where there are none
  float* const last;  // values of each head's last block, likewise
  float* const scratch;

  int64_t first_seen(int64_t query) const {
    return call.window ? std::max<int64_t>(0, start + query + 1 - call.window) : 0;
  }

  float* columns(int64_t head, int64_t block) {
    return keys + (head % heads * key_blocks + block) * call.dim * KEYS;
  }
  float* last_values(int64_t head) { return last + head % heads * KEYS * call.dim; }

  void pack(int64_t head, int64_t block) {
    const int64_t dim = call.dim, from_key = (seen + block) * KEYS, count = std::min(KEYS, call.m - from_key);
    float* to = columns(head, block);
    const float* from = call.k + head * call.k_head + from_key * call.k_row;
    for (int64_t j = 0; j < weighed(count); j += WIDTH)
      for (int64_t c = 0; c < dim; c += WIDTH)
        transpose(from + j * call.k_row + c, call.k_row, std::clamp<int64_t>(count - j, 0, WIDTH),
                  std::min(WIDTH, dim - c), to + c * KEYS + j, KEYS);
    if (block < key_blocks - 1) return;
    float* values = last_values(head);
    std::memset(values + count * dim, 0, sizeof(float) * (weighed(count) - count) * dim);
    for (int64_t j = 0; j < count; j++)
      std::memcpy(values + j * dim, call.v + head * call.v_head + (from_key + j) * call.v_row, sizeof(float) * dim);
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
      const int64_t width = std::min(KEYS, weighed(start + first + count - at * KEYS));  // later keys are not seen
      brgemm(rows, width, dim, dim, KEYS, KEYS, false, packed, columns(head, at - seen), logits, false);
      for (int64_t row = 0; row < rows; row++) {
        const int64_t i = row % queries;
        float* weights = logits + row * KEYS;
        const int64_t low = std::max<int64_t>(0, first_seen(first + i) - at * KEYS);
        const int64_t high = i < count ? std::min(width, start + first + i + 1 - at * KEYS) : 0;
        if (high <= low) {
          std::fill_n(weights, width, 0.0f);
          continue;
        }
        std::fill(weights, weights + low, HIDDEN);
        std::fill(weights + high, weights + width, HIDDEN);
        float largest;
        const float sum = weigh(weights, width, most[row], largest);
        const float factor = std::exp(most[row] - largest);
        if (factor < 1.0f)
          for (int64_t c = 0; c < dim; c++) sums[row * dim + c] *= factor;
        total[row] = total[row] * factor + sum;
        most[row] = largest;
      }
      const bool ends = at == seen + key_blocks - 1;
      const float* values = ends ? last_values(head) : call.v + head * call.v_head + at * KEYS * call.v_row;
      brgemm(rows, dim, width, KEYS, ends ? dim : call.v_row, dim, true, logits, values, sums, false);
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
  try {
    return !Attention(call).run();
  } catch (...) {
    return 1;
  }
}
