/* Sixteen values at a time, in the vector types of GCC and Clang, and how signs lie in bits; see
   sign_packing.py, whose layout this is. Bits are gathered by a multiplication, which wants a
   little-endian machine. */

#include <stdint.h>
#include <string.h>

#define WIDTH 16
#define LARGEST 4096 /* values of a block, as sign_packing_native.py says */

typedef float values __attribute__((vector_size(4 * WIDTH)));
typedef int32_t words __attribute__((vector_size(4 * WIDTH)));
typedef int8_t bytes __attribute__((vector_size(WIDTH)));

/* Written so that compilers see one broadcast. */
static inline words all(int32_t word) { return word - (words){0}; }

static inline values each(float value) { return value - (values){0}; }

static inline words word_of(float value)
{
    int32_t word;
    memcpy(&word, &value, sizeof word);
    return all(word);
}

/* What will be read, and written, some steps from now is asked for: the processor's own reading ahead
   ends with each page. Values past the end are not touched by it. */
#define AHEAD 512
static inline void will_read(const float *from) { __builtin_prefetch(from + AHEAD, 0); }

static inline void will_write(float *to) { __builtin_prefetch(to + AHEAD, 1); }

/* The first `count` values at `from`, zeros behind them. */
static inline values load(const float *from, int64_t count)
{
    values out = {0};
    if (count >= WIDTH)
        memcpy(&out, from, sizeof out);
    else if (count > 0)
        memcpy(&out, from, count * sizeof(float));
    return out;
}

static inline void store(values what, float *to, int64_t count)
{
    if (count >= WIDTH)
        memcpy(to, &what, sizeof what);
    else if (count > 0)
        memcpy(to, &what, count * sizeof(float));
}

/* Plus or minus a scale, by two bytes of bits. */
static inline values signed_scale(const uint8_t *bits, float scale)
{
    const words place = {0x80,   0x40,   0x20,   0x10,   0x8,   0x4,   0x2,   0x1,
                         0x8000, 0x4000, 0x2000, 0x1000, 0x800, 0x400, 0x200, 0x100};
    uint16_t both; /* the first byte is the low one */
    memcpy(&both, bits, sizeof both);
    return (values)(word_of(scale) ^ (((all(both) & place) != 0) & all((int32_t)0x80000000)));
}

/* The bits of a block whose minuses are bytes of 0 or 1: byte k goes to bit 7 - k of the highest. */
static inline void squeeze(const int8_t *minus, uint8_t *bits, int64_t block)
{
    for (int64_t i = 0; i < block / 8; i++) {
        uint64_t eight;
        memcpy(&eight, minus + 8 * i, sizeof eight);
        bits[i] = eight * 0x8040201008040201u >> 56;
    }
}

static inline float mean_of(values sum, int64_t count)
{
    float mean = 0;
    for (int j = 0; j < WIDTH; j++)
        mean += sum[j];
    return mean / (count > 1 ? count : 1);
}
