// Attention of one query per row on CPUs: each row is read once, block by block, with an online softmax as in prompts.cpp.

#include <type_traits>

#include <omp.h>

#include "lanes.h"

namespace {

struct Call {
  const float *q, *key, *value;
  float *const *k, *const *v, *out;
  const int64_t *entries, *lengths, *places;
  int64_t rows, group, dim, q_place, q_head, key_place, value_place;
  float scale;
  int threads;
};

// One query per row and head of its group, to the entries of that row, among them the new token's.
class Attention {
 public:
  explicit Attention(const Call& call)
      : call(call),
        own((WIDTH * call.dim + call.group * (2 * call.dim + KEYS + 2)) / WIDTH * WIDTH + WIDTH),
        scratch(memory.of(call.threads * own)) {}

  void run() {
#pragma omp parallel for schedule(dynamic) num_threads(call.threads) if (call.threads > 1)
    for (int64_t row = 0; row < call.rows; row++) attend(row, scratch + omp_get_thread_num() * own);
  }

 private:
  static constexpr int64_t KEYS = 128;  // whose logits are weighed at a time
  const Call& call;
  const int64_t own;  // floats of a thread's scratch
  float* const scratch;

  void attend(int64_t row, float* scratch) {
    const int64_t dim = call.dim, group = call.group, length = call.lengths[row], place = call.places[row];
    float *tile = scratch, *query = tile + WIDTH * dim, *sums = query + group * dim, *logits = sums + group * dim,
          *most = logits + group * KEYS, *total = most + group;
    for (int64_t g = 0; g < group; g++)
      for (int64_t c = 0; c < dim; c++) query[g * dim + c] = call.q[place * call.q_place + g * call.q_head + c] * call.scale;
    std::fill_n(sums, group * dim, 0.0f);
    std::fill_n(most, group, HIDDEN);
    std::fill_n(total, group, 0.0f);
    float *k = call.k[row], *v = call.v[row];
    const int64_t entry = call.entries[row];
    std::memcpy(k + entry * dim, call.key + place * call.key_place, sizeof(float) * dim);
    std::memcpy(v + entry * dim, call.value + place * call.value_place, sizeof(float) * dim);
    for (int64_t at = 0; at < length; at += KEYS, k += KEYS * dim, v += KEYS * dim) {
      const int64_t count = std::min(KEYS, length - at), next = std::min(KEYS, length - at - count);
      for (int64_t j = 0; j < count; j += WIDTH) {
        fetch(v + j * dim, std::min(WIDTH, count - j));
        for (int64_t c = 0; c < dim; c += WIDTH)
          transpose(k + j * dim + c, dim, std::min(WIDTH, count - j), WIDTH, tile + c * WIDTH, WIDTH);
        by_heads([&](auto heads, int64_t g) { dot(heads, query + g * dim, tile, logits + g * KEYS + j); });
      }
      for (int64_t g = 0; g < group; g++) {
        float* weights = logits + g * KEYS;
        std::fill(weights + count, weights + weighed(count), HIDDEN);
        float largest;
        const float sum = weigh(weights, weighed(count), most[g], largest);
        const float factor = std::exp(most[g] - largest);
        for (int64_t c = 0; c < dim; c++) sums[g * dim + c] *= factor;
        total[g] = total[g] * factor + sum;
        most[g] = largest;
      }
      for (int64_t j = 0; j < count; j += WIDTH) {
        fetch(k + (KEYS + j) * dim, std::min(WIDTH, next - j));
        by_heads([&](auto heads, int64_t g) {
          add(heads, logits + g * KEYS + j, v + j * dim, std::min(WIDTH, count - j), sums + g * dim);
        });
      }
    }
    float* out = call.out + place * group * dim;
    for (int64_t g = 0; g < group; g++)
      for (int64_t c = 0; c < dim; c++) out[g * dim + c] = length ? sums[g * dim + c] / total[g] : 0.0f;
  }

  // Have entries that are read soon on their way from memory meanwhile.
  void fetch(const float* first, int64_t count) {
    for (int64_t c = 0; c < count * call.dim; c += WIDTH) __builtin_prefetch(first + c, 0, 2);
  }

  // Call for as many heads at once as there are registers for.
  template <typename Function>
  void by_heads(Function function) {
    int64_t g = 0;
    for (; g + 4 <= call.group; g += 4) function(std::integral_constant<int, 4>{}, g);
    if (call.group - g == 3) function(std::integral_constant<int, 3>{}, g);
    if (call.group - g == 2) function(std::integral_constant<int, 2>{}, g);
    if (call.group - g == 1) function(std::integral_constant<int, 1>{}, g);
  }

  // Logits of 16 entries, whose keys are the columns of a tile.
  template <int HEADS>
  void dot(std::integral_constant<int, HEADS>, const float* query, const float* tile, float* logits) {
    Lanes sums[HEADS][2] = {};
    for (int64_t c = 0; c < call.dim; c += 2)
      for (int64_t half = 0; half < 2; half++) {
        const Lanes keys = load(tile + (c + half) * WIDTH);
        for (int64_t g = 0; g < HEADS; g++) sums[g][half] += query[g * call.dim + c + half] * keys;
      }
    for (int64_t g = 0; g < HEADS; g++) store(logits + g * KEYS, sums[g][0] + sums[g][1]);
  }

  template <int HEADS>
  void add(std::integral_constant<int, HEADS> heads, const float* weights, const float* v, int64_t count, float* sums) {
    int64_t c = 0;
    for (; c + 2 * WIDTH <= call.dim; c += 2 * WIDTH) add<HEADS, 2>(weights, v + c, count, sums + c);
    if (c < call.dim) add<HEADS, 1>(weights, v + c, count, sums + c);
  }

  // Two entries at a time, since each sum waits for the one before it.
  template <int HEADS, int PARTS>
  void add(const float* weights, const float* v, int64_t count, float* sums) {
    Lanes even[HEADS][PARTS], odd[HEADS][PARTS] = {};
    for (int64_t g = 0; g < HEADS; g++)
      for (int64_t i = 0; i < PARTS; i++) even[g][i] = load(sums + g * call.dim + i * WIDTH);
    for (int64_t j = 0; j < count / 2 * 2; j += 2, v += 2 * call.dim)
      for (int64_t i = 0; i < PARTS; i++) {
        const Lanes first = load(v + i * WIDTH), second = load(v + call.dim + i * WIDTH);
        for (int64_t g = 0; g < HEADS; g++) {
          even[g][i] += weights[g * KEYS + j] * first;
          odd[g][i] += weights[g * KEYS + j + 1] * second;
        }
      }
    for (int64_t g = 0; g < HEADS; g++)
      for (int64_t i = 0; i < PARTS; i++) {
        if (count % 2) even[g][i] += weights[g * KEYS + count - 1] * load(v + i * WIDTH);
        store(sums + g * call.dim + i * WIDTH, even[g][i] + odd[g][i]);
      }
  }
};

}  // namespace

// Put what is at each row's place of key and value [places, dim] to its entry of k and v, and attend the query at its
// place of q [places, group, dim] to its first `lengths` entries. k and v are the addresses of rows [n, dim] without
// gaps; out [places, group, dim] has none either, and 0 in rows without entries. dim is a multiple of 16, channels are
// contiguous. Returns 0, or 1 without memory; nothing has changed then.
extern "C" int warmkv_attend_rows(const float* q, const float* key, const float* value, float* const* k,
                                  float* const* v, float* out, const int64_t* entries, const int64_t* lengths,
                                  const int64_t* places, int64_t rows, int64_t group, int64_t dim, int64_t q_place,
                                  int64_t q_head, int64_t key_place, int64_t value_place, double scale, int threads) {
  const Call call{q,    key,   value, k,       v,      out,       entries,     lengths,                   places,
                  rows, group, dim,   q_place, q_head, key_place, value_place, static_cast<float>(scale), threads};
  try {
    Attention(call).run();
    return 0;
  } catch (...) {
    return 1;
  }
}
