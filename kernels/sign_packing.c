/* Signs packed and unpacked in one pass over memory; see sign_packing.py, whose layout this is.

   A block's sums stay in the cache until its scale is known. */

#include "signs.h"

/* x + error at vector i, 0 from count on; its signs go to minus. */
static inline values add(const float *x, const float *error, int8_t *minus, int64_t i, int32_t count)
{
    values a, b;
    will_read(x + i * WIDTH);
    will_read(error + i * WIDTH);
    memcpy(&a, x + i * WIDTH, sizeof a);
    memcpy(&b, error + i * WIDTH, sizeof b);
    a += b;
    if (count < (i + 1) * WIDTH)
        for (int j = 0; j < WIDTH; j++)
            if (i * WIDTH + j >= count)
                a[j] = 0;
    bytes negative = __builtin_convertvector(((words)a >> 31) & all(1), bytes);
    memcpy(minus + i * WIDTH, &negative, sizeof negative);
    return a;
}

/* What the scale leaves of a sum, 0 from count on. */
static inline void lose(values total, words scale, float *residual, int64_t i, int32_t count)
{
    will_write(residual + i * WIDTH);
    values lost = total - (values)(((words)total & all(0x80000000)) | scale);
    if (count < (i + 1) * WIDTH)
        for (int j = 0; j < WIDTH; j++)
            if (i * WIDTH + j >= count)
                lost[j] = 0;
    memcpy(residual + i * WIDTH, &lost, sizeof lost);
}

static inline values magnitude(values a) { return (values)((words)a & all(0x7fffffff)); }

/* While a block's residual is written the next one is read, so that memory is never idle. */
void pack(const float *restrict x, const float *restrict error, const int32_t *restrict counts,
          uint8_t *restrict bits, float *restrict scales, float *restrict residual, int64_t blocks,
          int64_t block)
{
    values totals[2][LARGEST / WIDTH];
    int8_t minus[LARGEST];
    words scale = all(0);
    const int64_t vectors = block / WIDTH;
    for (int64_t n = 0; n <= blocks; n++, x += block, error += block) {
        values *restrict now = totals[n % 2];
        const values *restrict last = totals[(n + 1) % 2];
        float *out = residual + (n - 1) * block;
        values sum = {0}, other = {0};
        if (vectors % 2 == 0 && n && n < blocks && counts[n - 1] == block && counts[n] == block)
            for (int64_t i = 0; i < vectors; i += 2) {
                now[i] = add(x, error, minus, i, INT32_MAX);
                now[i + 1] = add(x, error, minus, i + 1, INT32_MAX);
                sum += magnitude(now[i]);
                other += magnitude(now[i + 1]);
                lose(last[i], scale, out, i, INT32_MAX);
                lose(last[i + 1], scale, out, i + 1, INT32_MAX);
            }
        else {
            for (int64_t i = 0; n < blocks && i < vectors; i++) {
                now[i] = add(x, error, minus, i, counts[n]);
                *(i % 2 ? &other : &sum) += magnitude(now[i]); /* in the same order as above */
            }
            for (int64_t i = 0; n && i < vectors; i++)
                lose(last[i], scale, out, i, counts[n - 1]);
        }
        if (n == blocks)
            return;
        scales[n] = mean_of(sum + other, counts[n]);
        scale = word_of(scales[n]) & all(0x7fffffff);
        squeeze(minus, bits, block);
        bits += block / 8;
    }
}

void unpack(const uint8_t *bits, const float *scales, float *out, int64_t blocks, int64_t block)
{
    for (int64_t i = 0; i < blocks; i++)
        for (int64_t j = 0; j < block / WIDTH; j++, bits += 2, out += WIDTH)
            store(signed_scale(bits, scales[i]), out, WIDTH);
}
