/* Block-sparse attention on a CPU: flash attention (arXiv 2205.14135) in tiles of some queries and
   a block of keys, in float32. Scores lie transposed, (keys, queries), so that what belongs to a
   query is a vector's lane; exponentials are to base 2. See attention_native.py. */

#include <math.h>
#include <stdlib.h>

#include "products.h"

#define LN2 0.69314718f
#define LOG2E 1.44269504f

typedef struct {
    /* (batch * heads, length, size), of float32 or bfloat16 */
    const void *q, *k, *v, *grad;
    void *out, *grad_q;
    /* float32: (batch * heads, queries): the largest score, the sum of exponentials, and the
       logarithm of that of all; (batch * key heads, key blocks, block, padded size) */
    float *top, *sum, *log_sum, *grad_k, *grad_v;
    /* of the tiles, by row and by column, as layout_tiles.py says; (masks, block, rows) */
    const int64_t *row_ptr, *column_ptr;
    const int32_t *columns, *row_masks, *rows_of, *column_masks, *patterns;
    const uint8_t *table;
    int64_t batch, heads, group, queries, keys, size, rows, block, half;
    float scale;
} task;

/* What a thread works in. */
typedef struct {
    float *query, *query_across, *grad, *grad_across; /* (rows, padded size), (size, rows) */
    float *key, *value;                               /* (block, padded size) */
    float *scores, *slopes;                           /* (block, rows) */
    float *result;                                    /* (rows, padded size) */
    float *top, *sum;                                 /* (rows): or log-sum, and delta */
    int64_t padded, step; /* floats from row to row, if a row is of a size, and if of rows */
    void *all;
} room;

static room room_for(const task *t)
{
    room r;
    /* A step that isn't a power of two: columns are spread over the sets of a cache. */
    r.padded = (t->size + 15) / 16 * 16, r.step = t->rows + 16;
    const int64_t tall = t->rows * r.padded, wide = t->size * r.step,
                  keys = t->block * r.padded, scores = t->block * r.step;
    float *at = r.all = aligned_alloc(64, sizeof(float) * (3 * tall + 2 * wide + 2 * keys +
                                                           2 * scores + 2 * r.step));
    r.query = at, at += tall;
    r.grad = at, at += tall;
    r.result = at, at += tall;
    r.query_across = at, at += wide;
    r.grad_across = at, at += wide;
    r.key = at, at += keys;
    r.value = at, at += keys;
    r.scores = at, at += scores;
    r.slopes = at, at += scores;
    r.top = at, at += r.step;
    r.sum = at;
    return r;
}

/* Rows of float32 or bfloat16 as float32, with zeros at the end of each. */
static void widen(const task *t, const void *from, int64_t start, int64_t count, float *to,
                  int64_t step)
{
    const float *whole = (const float *)from + start * t->size;
    const uint16_t *half = (const uint16_t *)from + start * t->size;
    for (int64_t i = 0; i < count; i++, to += step, whole += t->size, half += t->size) {
        if (t->half)
            for (int64_t j = 0; j < t->size; j++) {
                const uint32_t bits = (uint32_t)half[j] << 16;
                memcpy(to + j, &bits, sizeof bits);
            }
        else
            memcpy(to, whole, t->size * sizeof(float));
        for (int64_t j = t->size; j < step; j++)
            to[j] = 0;
    }
}

/* The rows, `factor` times, rounded to the nearest float32 or bfloat16. */
static void narrow(const task *t, const float *from, int64_t step, void *to, int64_t start,
                   int64_t count, float factor)
{
    float *whole = (float *)to + start * t->size;
    uint16_t *half = (uint16_t *)to + start * t->size;
    for (int64_t i = 0; i < count; i++, from += step, whole += t->size, half += t->size)
        for (int64_t j = 0; j < t->size; j++) {
            const float value = from[j] * factor;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (!t->half)
                whole[j] = value;
            else
                half[j] = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
        }
}

/* Rows of a tile of queries as columns, `factor` times. */
static void turn(const task *t, const room *r, const float *from, float *to, float factor)
{
    for (int64_t j = 0; j < t->size; j++)
        for (int64_t i = 0; i < t->rows; i++)
            to[j * r->step + i] = from[i * r->padded + j] * factor;
}

INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows of queries as (rows, padded size), with zeros past the last query, and as columns. */
static void take_rows(const task *t, const room *r, const void *from, int64_t head, int64_t row,
                      float *to, float *across, float factor)
{
    const int64_t start = row * t->rows, count = least(t->rows, t->queries - start);
    widen(t, from, head * t->queries + start, count, to, r->padded);
    memset(to + count * r->padded, 0, (t->rows - count) * r->padded * sizeof(float));
    turn(t, r, to, across, factor);
}

/* A block of keys, where it lies if it can be used there. */
static const float *take_keys(const task *t, const room *r, const void *from, int64_t head,
                              int64_t block, int64_t count, float *to)
{
    const int64_t start = head * t->keys + block * t->block;
    if (!t->half && t->size == r->padded)
        return (const float *)from + start * t->size;
    widen(t, from, start, count, to, r->padded);
    return to;
}

/* Transposed: (keys, queries). */
static void score(const task *t, const room *r, const float *keys, int64_t count,
                  const float *across, int32_t mask, float *to)
{
    product(count, t->rows, t->size, keys, r->padded, 1, across, r->step, to, r->step, 0);
    if (mask < 0)
        return;
    const uint8_t *seen = t->table + mask * t->block * t->rows;
    for (int64_t j = 0; j < count; j++, seen += t->rows, to += r->step)
        for (int64_t i = 0; i < t->rows; i++)
            to[i] = seen[i] ? to[i] : -INFINITY;
}

/* Scores to exponentials, less the largest so far; the sums and the result are held to it too. */
static void soften(const task *t, const room *r, int64_t count)
{
    float factors[WIDTH];
    for (int64_t i = 0; i < t->rows; i += WIDTH) {
        const values old = load(r->top + i);
        values top = old, sum = {0};
        for (int64_t j = 0; j < count; j++) {
            const values score = load(r->scores + j * r->step + i);
            top = chosen(score > top, score, top);
        }
        const values base = chosen(top == each(-INFINITY), each(0), top);
        for (int64_t j = 0; j < count; j++) {
            float *at = r->scores + j * r->step + i;
            const values power = exp2_of(load(at) - base);
            sum += power;
            store(power, at);
        }
        const values factor = exp2_of(old - base);
        store(top, r->top + i);
        store(load(r->sum + i) * factor + sum, r->sum + i);
        store(factor, factors);
        for (int64_t j = 0; j < WIDTH; j++)
            for (int64_t l = 0; l < r->padded; l += WIDTH) {
                float *at = r->result + (i + j) * r->padded + l;
                store(load(at) * factors[j], at);
            }
    }
}

static void forward_row(const task *t, const room *r, int64_t head, int64_t row)
{
    const int64_t tiles = (t->queries + t->rows - 1) / t->rows, start = row * t->rows,
                  own = head * t->queries + start, rows = least(t->rows, t->queries - start),
                  line = t->patterns[head % t->heads] * tiles + row;
    take_rows(t, r, t->q, head, row, r->query, r->query_across, t->scale * LOG2E);
    memset(r->result, 0, t->rows * r->padded * sizeof(float));
    for (int64_t i = 0; i < t->rows; i++)
        r->top[i] = -INFINITY, r->sum[i] = 0;
    for (int64_t at = t->row_ptr[line]; at < t->row_ptr[line + 1]; at++) {
        const int64_t block = t->columns[at],
                      count = least(t->block, t->keys - block * t->block);
        const float *keys = take_keys(t, r, t->k, head / t->group, block, count, r->key),
                    *seen = take_keys(t, r, t->v, head / t->group, block, count, r->value);
        score(t, r, keys, count, r->query_across, t->row_masks[at], r->scores);
        soften(t, r, count);
        product(t->rows, r->padded, count, r->scores, 1, r->step, seen, r->padded, r->result,
                r->padded, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        narrow(t, r->result + i * r->padded, r->padded, t->out, own + i, 1,
               r->sum[i] == 0 ? 0 : 1 / r->sum[i]);
        t->top[own + i] = r->top[i] * LN2, t->sum[own + i] = r->sum[i];
    }
}

/* Rows of tiles until none is left: `next`, which all threads share, is the number of the first
   that nobody has taken. */
void forward(const task *t, int64_t *next)
{
    const int64_t tiles = (t->queries + t->rows - 1) / t->rows, all = t->batch * t->heads * tiles;
    room r = room_for(t);
    for (int64_t n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < all;)
        forward_row(t, &r, n / tiles, tiles - 1 - n % tiles);
    free(r.all);
}

/* A tile of queries, for the gradients: with the log-sum to base 2, and delta (arXiv 2205.14135). */
static void take_queries(const task *t, const room *r, int64_t head, int64_t row)
{
    const int64_t own = head * t->queries + row * t->rows;
    take_rows(t, r, t->q, head, row, r->query, r->query_across, t->scale * LOG2E);
    take_rows(t, r, t->grad, head, row, r->grad, r->grad_across, 1);
    for (int64_t i = 0; i < t->rows; i++) {
        float log_sum = 0, delta = 0, *out = r->result;
        if (row * t->rows + i < t->queries) {
            log_sum = t->log_sum[own + i];
            widen(t, t->out, own + i, 1, out, r->padded);
            for (int64_t j = 0; j < t->size; j++)
                delta += out[j] * r->grad[i * r->padded + j];
        }
        /* 2^(-inf - 0) is 0 for what sees nothing. */
        r->top[i] = log_sum == -INFINITY ? 0 : log_sum * LOG2E, r->sum[i] = delta;
    }
    memset(r->result, 0, t->rows * r->padded * sizeof(float));
}

/* What a tile adds to the gradients of its queries, in r->result, and of its keys and values. */
static void add_gradients(const task *t, const room *r, int64_t head, int64_t block, int32_t mask,
                          int of_queries, int of_keys)
{
    const int64_t kept = head / t->group, count = least(t->block, t->keys - block * t->block),
                  blocks = (t->keys + t->block - 1) / t->block,
                  place = (kept * blocks + block) * t->block * r->padded;
    const float *keys = take_keys(t, r, t->k, kept, block, count, r->key),
                *seen = take_keys(t, r, t->v, kept, block, count, r->value);
    score(t, r, keys, count, r->query_across, mask, r->scores);
    product(count, t->rows, t->size, seen, r->padded, 1, r->grad_across, r->step, r->slopes,
            r->step, 0);
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < t->rows; i += WIDTH) {
            float *score = r->scores + j * r->step + i, *slope = r->slopes + j * r->step + i;
            const values power = exp2_of(load(score) - load(r->top + i));
            store(power, score);
            store(power * (load(slope) - load(r->sum + i)) * t->scale, slope);
        }
    if (of_queries)
        product(t->rows, r->padded, count, r->slopes, 1, r->step, keys, r->padded, r->result,
                r->padded, 1);
    if (of_keys) {
        product(count, r->padded, t->rows, r->slopes, r->step, 1, r->query, r->padded,
                t->grad_k + place, r->padded, 1);
        product(count, r->padded, t->rows, r->scores, r->step, 1, r->grad, r->padded,
                t->grad_v + place, r->padded, 1);
    }
}

static void backward_row(const task *t, const room *r, int64_t head, int64_t row, int of_keys)
{
    const int64_t tiles = (t->queries + t->rows - 1) / t->rows, start = row * t->rows,
                  line = t->patterns[head % t->heads] * tiles + row;
    take_queries(t, r, head, row);
    for (int64_t at = t->row_ptr[line]; at < t->row_ptr[line + 1]; at++)
        add_gradients(t, r, head, t->columns[at], t->row_masks[at], 1, of_keys);
    narrow(t, r->result, r->padded, t->grad_q, head * t->queries + start,
           least(t->rows, t->queries - start), 1);
}

/* All gradients, by heads of keys. */
void backward(const task *t, int64_t *next)
{
    const int64_t tiles = (t->queries + t->rows - 1) / t->rows,
                  all = t->batch * t->heads / t->group;
    room r = room_for(t);
    for (int64_t n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < all;)
        for (int64_t head = n * t->group; head < (n + 1) * t->group; head++)
            for (int64_t row = 0; row < tiles; row++)
                backward_row(t, &r, head, row, 1);
    free(r.all);
}

/* The queries' gradients alone, by rows of tiles. */
void backward_queries(const task *t, int64_t *next)
{
    const int64_t tiles = (t->queries + t->rows - 1) / t->rows, all = t->batch * t->heads * tiles;
    room r = room_for(t);
    for (int64_t n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < all;)
        backward_row(t, &r, n / tiles, tiles - 1 - n % tiles, 0);
    free(r.all);
}

/* The gradients of keys and values alone, by blocks of keys; sums are those of `backward`, in the
   same order. */
void backward_keys(const task *t, int64_t *next)
{
    const int64_t blocks = (t->keys + t->block - 1) / t->block,
                  all = t->batch * t->heads / t->group * blocks;
    room r = room_for(t);
    for (int64_t n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < all;)
        for (int64_t head = n / blocks * t->group, i = 0; i < t->group; i++, head++) {
            const int64_t line = t->patterns[head % t->heads] * blocks + n % blocks;
            for (int64_t at = t->column_ptr[line]; at < t->column_ptr[line + 1]; at++) {
                take_queries(t, &r, head, t->rows_of[at]);
                add_gradients(t, &r, head, n % blocks, t->column_masks[at], 0, 1);
            }
        }
    free(r.all);
}
