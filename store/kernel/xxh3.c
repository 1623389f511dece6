/* XXH3, the variant with 64 bits, without a seed and with the default secret.
 *
 * Written from the specification in the documentation of xxHash (doc/xxhash_spec.md, Yann Collet, version 0.2.0).
 * format/xxh3.py is the same in Python.
 */
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

enum { STRIPE = 64, LANES = 8, SECRET_SIZE = 192, BLOCK = STRIPE * ((SECRET_SIZE - STRIPE) / 8) };

static const uint8_t SECRET[SECRET_SIZE] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint32_t native_u32(const void *at) { uint32_t v; memcpy(&v, at, 4); return v; }

/* Both halves of the product of 128 bits, exclusive-ored. */
static inline uint64_t folded(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), other = a0 * b1 + (uint32_t)middle;
    return (other << 32 | (uint32_t)low) ^ (a1 * b1 + (middle >> 32) + (other >> 32));
#endif
}

static inline uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9u;
    return h ^ h >> 32;
}

static inline uint64_t avalanche_64(uint64_t h) { /* XXH64's */
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static inline uint64_t mixed(const uint8_t *at, const uint8_t *secret) {
    return folded(native_u64(at) ^ native_u64(secret), native_u64(at + 8) ^ native_u64(secret + 8));
}

static inline uint64_t of_16(const uint8_t *data, size_t size) {
    if (size > 8) {
        uint64_t low = native_u64(data) ^ native_u64(SECRET + 24) ^ native_u64(SECRET + 32);
        uint64_t high = native_u64(data + size - 8) ^ native_u64(SECRET + 40) ^ native_u64(SECRET + 48);
        return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size >= 4) {
        uint64_t h = (uint64_t)native_u32(data + size - 4) + ((uint64_t)native_u32(data) << 32);
        h ^= native_u64(SECRET + 8) ^ native_u64(SECRET + 16);
        h = (h ^ rotated(h, 49) ^ rotated(h, 24)) * 0x9FB21C651E98DF25u;
        h = (h ^ ((h >> 35) + size)) * 0x9FB21C651E98DF25u;
        return h ^ h >> 28;
    }
    if (!size) return avalanche_64(native_u64(SECRET + 56) ^ native_u64(SECRET + 64));
    uint32_t bytes = (uint32_t)data[0] << 16 | (uint32_t)data[size >> 1] << 24 | data[size - 1] | (uint32_t)size << 8;
    return avalanche_64(bytes ^ native_u32(SECRET) ^ native_u32(SECRET + 4));
}

static inline uint64_t of_128(const uint8_t *data, size_t size) {
    const uint8_t *end = data + size;
    uint64_t h = size * P64_1;
    if (size > 96) h += mixed(data + 48, SECRET + 96) + mixed(end - 64, SECRET + 112);
    if (size > 64) h += mixed(data + 32, SECRET + 64) + mixed(end - 48, SECRET + 80);
    if (size > 32) h += mixed(data + 16, SECRET + 32) + mixed(end - 32, SECRET + 48);
    return avalanche(h + mixed(data, SECRET) + mixed(end - 16, SECRET + 16));
}

static uint64_t of_240(const uint8_t *data, size_t size) {
    uint64_t h = size * P64_1;
    for (size_t i = 0; i < 8; i++) h += mixed(data + 16 * i, SECRET + 16 * i);
    h = avalanche(h);
    for (size_t i = 8; i < size / 16; i++) h += mixed(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(h + mixed(data + size - 16, SECRET + 136 - 17));
}

/* ---- more than 240 bytes: eight lanes, stripe by stripe */

#if defined(__x86_64__)
/* Two lanes in each register; every x86-64 processor has these instructions. */
static inline void add_stripe(__m128i lanes[4], const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(data + 16 * i));
        __m128i keyed = _mm_xor_si128(bytes, _mm_loadu_si128((const __m128i *)(secret + 16 * i)));
        __m128i product = _mm_mul_epu32(keyed, _mm_shuffle_epi32(keyed, _MM_SHUFFLE(0, 3, 0, 1)));
        lanes[i] = _mm_add_epi64(lanes[i], _mm_add_epi64(product, _mm_shuffle_epi32(bytes, _MM_SHUFFLE(1, 0, 3, 2))));
    }
}

static inline void scramble(__m128i lanes[4], const uint8_t *secret) {
    const __m128i prime = _mm_set1_epi32((int)0x9E3779B1u);
    for (int i = 0; i < 4; i++) {
        __m128i x = _mm_xor_si128(lanes[i], _mm_srli_epi64(lanes[i], 47));
        x = _mm_xor_si128(x, _mm_loadu_si128((const __m128i *)(secret + 16 * i)));
        __m128i high = _mm_slli_epi64(_mm_mul_epu32(_mm_shuffle_epi32(x, _MM_SHUFFLE(0, 3, 0, 1)), prime), 32);
        lanes[i] = _mm_add_epi64(_mm_mul_epu32(x, prime), high);
    }
}
typedef __m128i Lane;
#else
static inline void add_stripe(uint64_t lanes[LANES], const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < LANES; i++) {
        uint64_t bytes = native_u64(data + 8 * i), keyed = bytes ^ native_u64(secret + 8 * i);
        lanes[i ^ 1] += bytes;
        lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t lanes[LANES], const uint8_t *secret) {
    for (int i = 0; i < LANES; i++) lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ native_u64(secret + 8 * i)) * P32_1;
}
typedef uint64_t Lane;
#endif

static uint64_t of_many(const uint8_t *data, size_t size) {
    const uint64_t first[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    Lane lanes[STRIPE / sizeof(Lane)];
    uint64_t last[LANES];
    memcpy(lanes, first, sizeof first);
    const uint8_t *at = data, *end = data + size;
    for (; end - at > BLOCK; at += BLOCK) {
        for (int i = 0; i < BLOCK / STRIPE; i++) add_stripe(lanes, at + STRIPE * i, SECRET + 8 * i);
        scramble(lanes, SECRET + SECRET_SIZE - STRIPE);
    }
    for (const uint8_t *secret = SECRET; end - at > STRIPE; at += STRIPE, secret += 8) add_stripe(lanes, at, secret);
    add_stripe(lanes, end - STRIPE, SECRET + SECRET_SIZE - STRIPE - 7);
    memcpy(last, lanes, sizeof last);
    uint64_t h = size * P64_1;
    for (int i = 0; i < LANES; i += 2)
        h += folded(last[i] ^ native_u64(SECRET + 11 + 8 * i), last[i + 1] ^ native_u64(SECRET + 19 + 8 * i));
    return avalanche(h);
}

uint64_t xxh3(const uint8_t *data, size_t size) {
    if (size <= 16) return of_16(data, size);
    if (size <= 128) return of_128(data, size);
    return size <= 240 ? of_240(data, size) : of_many(data, size);
}

/* xxh3_of_ranges(data, starts, ends, out): the hash of each range, into uint64[n]. */
PyObject *kernel_xxh3_of_ranges(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, starts, ends, out;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*", &data, &starts, &ends, &out)) return NULL;
    Py_ssize_t n = item_count(&starts, 8, "starts");
    bool good = n >= 0 && holds(&ends, n, 8, "ends") && holds(&out, n, 8, "out") &&
                ranges_fit(&starts, &ends, n, data.len);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        const uint8_t *bytes = data.buf, *from = starts.buf, *to = ends.buf;
        uint8_t *hashes = out.buf;
        for (Py_ssize_t i = 0; i < n; i++) {
            int64_t start = native_i64(from + 8 * i), end = native_i64(to + 8 * i);
            put_native_64(hashes + 8 * i, xxh3(bytes + start, (size_t)(end - start)));
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&out);
    if (!good) return NULL;
    Py_RETURN_NONE;
}
