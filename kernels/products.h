/* Products of small matrices of float32 in the cache, and what softmax needs, in the vector types
   of GCC and Clang. A vector is as wide as the machine's. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if defined(__AVX__) && !defined(__AVX512F__)
#define ACROSS 2 /* vectors of the result side by side: 4 rows of them fit the 16 registers */
#else
#define ACROSS 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float values __attribute__((vector_size(4 * WIDTH)));
typedef int32_t words __attribute__((vector_size(4 * WIDTH)));

INLINE values each(float value)
{
    return value - (values){0};
}

INLINE values load(const float *from)
{
    values out;
    memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store(values what, float *to)
{
    memcpy(to, &what, sizeof what);
}

INLINE values chosen(words where, values a, values b)
{
    return (values)(((words)a & where) | ((words)b & ~where));
}

/* 2^x, 0 below -126; a minimax polynomial of the fraction, -0.5 to 0.5, to 2e-9. */
INLINE values exp2_of(values x)
{
    const values shift = each(0x1.8p23f);
    values sum = x + shift, f = x - (sum - shift), y = each(1.53458118e-4f);
    y = y * f + each(1.33999312e-3f);
    y = y * f + each(9.61848896e-3f);
    y = y * f + each(5.55032878e-2f);
    y = y * f + each(2.40226469e-1f);
    y = y * f + each(6.93147206e-1f);
    y = y * f + each(1.0f);
    y = (values)((words)y + ((words)sum << 23));
    return (values)((words)y & ~(x < each(-126.0f)));
}

/* `down` rows and `across` vectors of a product; see `product`. */
INLINE void piece(const int down, const int across, int64_t depth, const float *a, int64_t a_row,
                  int64_t a_column, const float *b, int64_t b_row, float *c, int64_t c_row,
                  int add)
{
    values sum[8][4];
    for (int i = 0; i < down; i++)
        for (int j = 0; j < across; j++)
            sum[i][j] = add ? load(c + i * c_row + j * WIDTH) : (values){0};
    for (int64_t l = 0; l < depth; l++, a += a_column, b += b_row) {
        values right[4];
        for (int j = 0; j < across; j++)
            right[j] = load(b + j * WIDTH);
        for (int i = 0; i < down; i++) {
            const values left = each(a[i * a_row]);
            for (int j = 0; j < across; j++)
                sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < down; i++)
        for (int j = 0; j < across; j++)
            store(sum[i][j], c + i * c_row + j * WIDTH);
}

INLINE void strip(const int down, const int across, int64_t height, int64_t depth, const float *a,
                  int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                  int64_t c_row, int add)
{
    int64_t i = 0;
    for (; i + down <= height; i += down)
        piece(down, across, depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row,
              add);
    for (; i < height; i++)
        piece(1, across, depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row,
              add);
}

/* c (height × width) = a b, or += if `add`; a is (height × depth), b (depth × width), whose rows
   are contiguous, and the width is one of whole vectors. */
INLINE void product(int64_t height, int64_t width, int64_t depth, const float *a, int64_t a_row,
                    int64_t a_column, const float *b, int64_t b_row, float *c, int64_t c_row,
                    int add)
{
    int64_t j = 0;
    for (; j + ACROSS * WIDTH <= width; j += ACROSS * WIDTH)
        strip(4, ACROSS, height, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    for (; j + 2 * WIDTH <= width; j += 2 * WIDTH)
        strip(4, 2, height, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    for (; j < width; j += WIDTH)
        strip(8, 1, height, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
}
