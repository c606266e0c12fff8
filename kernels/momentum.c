/* Momenta that travel in one bit a value; see momentum.py, whose words these are.

   Nothing that has as many values as the model is made: what is encoded is computed where it is
   encoded, and once more where its rest is taken. */

#include <math.h>

#include "signs.h"

static inline values note(values total, int8_t *minus)
{
    bytes negative = __builtin_convertvector(((words)total >> 31) & all(1), bytes);
    memcpy(minus, &negative, sizeof negative);
    return (values)((words)total & all(0x7fffffff));
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* error + beta mu + (1 - beta) g, or error + g where there is no mu. */
static inline values momentum(const float *g, const float *mu, const float *error, float beta,
                              int64_t count)
{
    values x = load(g, count);
    will_read(g);
    will_read(error);
    if (mu) {
        will_read(mu);
        x = each(beta) * load(mu, count) + each(1 - beta) * x;
    }
    return load(error, count) + x;
}

/* `g` has `size` values, `mu` and `error` whole blocks. */
void pack_momentum(const float *restrict g, const float *restrict mu, const float *restrict error,
                   uint8_t *restrict bits, float *restrict scales, int64_t size, int64_t block,
                   float beta)
{
    int8_t minus[LARGEST];
    for (int64_t at = 0; at < size; at += block) {
        const int64_t count = least(block, size - at);
        values sum = {0}, other = {0};
        memset(minus, 0, block);
        for (int64_t i = 0; i < count; i += 2 * WIDTH) {
            const float *m = mu ? mu + at + i : 0;
            sum += note(momentum(g + at + i, m, error + at + i, beta, count - i), minus + i);
            if (i + WIDTH < count)
                other += note(momentum(g + at + i + WIDTH, m ? m + WIDTH : 0,
                                       error + at + i + WIDTH, beta, count - i - WIDTH),
                              minus + i + WIDTH);
        }
        *scales++ = mean_of(sum + other, count);
        squeeze(minus, bits, block);
        bits += block / 8;
    }
}

/* The error that the codes of pack_momentum leave, in place. */
void rest_of_momentum(const float *restrict g, const float *restrict mu, float *restrict error,
                      const uint8_t *restrict bits, const float *restrict scales, int64_t size,
                      int64_t block, float beta)
{
    for (int64_t at = 0; at < size; at += block, scales++, bits += block / 8) {
        const int64_t count = least(block, size - at);
        for (int64_t i = 0; i < count; i += WIDTH) {
            const float *m = mu ? mu + at + i : 0;
            values total = momentum(g + at + i, m, error + at + i, beta, count - i);
            store(total - signed_scale(bits + i / 8, *scales), error + at + i, count - i);
        }
    }
}

/* owned + the mean of what the ranks' codes say; a rank's bits and scales are a stride apart. */
static inline values average(const uint8_t *bits, const float *scales, const float *owned,
                             int64_t ranks, int64_t bytes_apart, int64_t scales_apart,
                             int64_t count)
{
    values sum = {0};
    for (int64_t rank = 0; rank < ranks; rank++)
        sum += signed_scale(bits + rank * bytes_apart, scales[rank * scales_apart]);
    return load(owned, count) + sum / each(ranks);
}

void pack_average(const uint8_t *restrict received, const float *restrict strengths,
                  const float *restrict owned, const int32_t *restrict counts,
                  uint8_t *restrict bits, float *restrict scales, int64_t blocks, int64_t block,
                  int64_t ranks, int64_t bytes_apart, int64_t scales_apart)
{
    int8_t minus[LARGEST];
    for (int64_t n = 0; n < blocks; n++, received += block / 8, strengths++, owned += block) {
        values sum = {0};
        memset(minus, 0, block);
        for (int64_t i = 0; i < counts[n]; i += WIDTH) {
            const int64_t count = counts[n] - i;
            values total = average(received + i / 8, strengths, owned + i, ranks, bytes_apart,
                                   scales_apart, count);
            if (count < WIDTH)
                for (int64_t j = count; j < WIDTH; j++)
                    total[j] = 0;
            sum += note(total, minus + i);
        }
        *scales++ = mean_of(sum, counts[n]);
        squeeze(minus, bits, block);
        bits += block / 8;
    }
}

void rest_of_average(const uint8_t *restrict received, const float *restrict strengths,
                     float *restrict owned, const int32_t *restrict counts,
                     const uint8_t *restrict bits, const float *restrict scales, int64_t blocks,
                     int64_t block, int64_t ranks, int64_t bytes_apart, int64_t scales_apart)
{
    for (int64_t n = 0; n < blocks; n++, received += block / 8, strengths++, owned += block,
                 bits += block / 8, scales++)
        for (int64_t i = 0; i < counts[n]; i += WIDTH) {
            values total = average(received + i / 8, strengths, owned + i, ranks, bytes_apart,
                                   scales_apart, counts[n] - i);
            store(total - signed_scale(bits + i / 8, *scales), owned + i, counts[n] - i);
        }
}

/* p -= rate (mu / unbias1 / (sqrt(nu / unbias2) + eps) + decay p), the quotient 0 where nu is 0;
   into `out`, which may be p, or what is added to p if `whole` is 0. */
void precondition(const float *p, const float *mu, const float *nu, float *out, int64_t size,
                  float rate, float decay, float per_unbias1, float per_root2, float eps,
                  int32_t whole)
{
    for (int64_t i = 0; i < size; i++) {
        float direction = mu[i] * per_unbias1 / (sqrtf(nu[i]) * per_root2 + eps);
        float update = -rate * ((nu[i] > 0 ? direction : 0) + decay * p[i]);
        out[i] = whole ? p[i] + update : update;
    }
}
