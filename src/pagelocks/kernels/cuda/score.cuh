// Scores of one group of up to eight pages by one warp: packed records and a KV head's queries -> log-masses.
//
// All products run on tensor cores, and each leaves its result where the next one wants its operand.  With lane = 4 g + x:
//
//   t = V^T q   int8 x int4 -> int32: heads by columns.  A head's query is a 16-bit integer in two bytes, the rows g
//               and g + 8 of one operand, in steps of 2^-15 of the largest or 2^-14.  Nibbles stay biased by 8; the
//               sums start at -8 sum(q).  The order of the head dimension is the records' own: a lane's 16 bytes of a
//               column are its operands as they lie, and the query is permuted to match.
//   t c         fp16 x fp16 -> fp32: heads by tokens, with t in units of logits.  Even tokens come in the first half of
//               the operand's depth and go to rows g, odd ones in the second half and to rows g + 8.
//   q . mu      int8 x int8 -> int32: heads by eight pages.
//
// The exponentials of a page's 16 tokens are summed without subtracting their maximum: deviations from a centroid are
// centred, so their largest is not below zero.  fp16 keeps 11 bits of t and of c, which is enough for logits that are
// not large.  Where a sum says that they are (or that one left fp16 or fp32), the group is computed again with the
// maximum subtracted and 22 bits of t.
//
// Needs: HEAD_DIM, GROUP, RANK, RECORD_BYTES, CENTROID, COLUMNS, COLUMN_BYTES, COEFFICIENTS, BASIS_SCALE,
// COEFFICIENT_SCALE, HEADS_A_BLOCK; FP16 or not.

constexpr int GROUP_PAGES = 8;
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int TILES = (GROUP + 7) / 8;         // of eight query heads
constexpr int PAGE_BYTES = HEADS_A_BLOCK * RECORD_BYTES;
constexpr float LARGEST_SUM = 1e9f;            // of exponentials in base 2: no logit above 30
constexpr float QUERY_STEPS = 32512.f;         // 127 * 256: both bytes stay within -128 ... 127 up to here

struct Query {
  u32 part[TILES][CHUNKS][4];  // of head g: high bytes, low bytes, of even and then of odd dimensions
  int bias[TILES][2];          // where the sums of V^T q start: high bytes', low bytes'
  float unit[TILES];           // logits, in base 2, per unit of integer query times key
};

// This lane's quarter of the query of head 8 tile + g; `queries` are the KV head's own, GROUP of them.
DEVICE void fetch_query(u32 (&raw)[HEAD_DIM / 8], const u16* queries, int tile) {
  const int query_head = tile * 8 + (lane_id() >> 2);
  const u16* from = queries + (query_head < GROUP ? query_head : 0) * HEAD_DIM + (lane_id() & 3) * (HEAD_DIM / 4);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const uint4 eight = ((const uint4*)from)[i];
    raw[4 * i] = eight.x, raw[4 * i + 1] = eight.y, raw[4 * i + 2] = eight.z, raw[4 * i + 3] = eight.w;
  }
}

// `raw` is what fetch_query fetched of the first tile.
DEVICE void load_query(Query& q, u32 (&raw)[HEAD_DIM / 8], const u16* queries, float scale) {
  const int g = lane_id() >> 2;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    if (t > 0) fetch_query(raw, queries, t);
    const bool real = t * 8 + g < GROUP;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      if (!real) raw[i] = 0;
      largest = fmaxf(largest, fmaxf(fabsf(element_low(raw[i])), fabsf(element_high(raw[i]))));
    }
    largest = quad_max(largest);
    // A power of two, so that a bf16 entry within 2^-7 of the largest is an integer already.
    int exponent = 14 - ((__float_as_int(largest) >> 23) - 127);
    float inverse = power_of_two(exponent);
    if (largest * inverse > QUERY_STEPS) inverse = power_of_two(exponent - 1);
    int high_sum = 0, low_sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 high = 0, low = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 pair = raw[chunk * 4 + i];
          int value = __float2int_rn((odd ? element_high(pair) : element_low(pair)) * inverse);
          int rest = (int)(signed char)(value & 0xff);
          int top = (value - rest) >> 8;
          high |= (u32)(top & 0xff) << (8 * i);
          low |= (u32)(rest & 0xff) << (8 * i);
          high_sum += top;
          low_sum += rest;
        }
        q.part[t][chunk][2 * odd] = high;
        q.part[t][chunk][2 * odd + 1] = low;
      }
    }
    high_sum += __shfl_xor_sync(FULL, high_sum, 1);
    high_sum += __shfl_xor_sync(FULL, high_sum, 2);
    low_sum += __shfl_xor_sync(FULL, low_sum, 1);
    low_sum += __shfl_xor_sync(FULL, low_sum, 2);
    q.bias[t][0] = -8 * high_sum, q.bias[t][1] = -8 * low_sum;
    q.unit[t] = scale * LOG2E / inverse;
  }
}

// Sums over this lane's four tokens, 4 x to 4 x + 3, of 2^(logit - peak) for head 8 t + g; peak is 0 unless SAFE.
template <bool SAFE>
DEVICE void score_page(float (&sums)[TILES], float (&peaks)[TILES], const Query& q, const u8* record) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  u32 codes[CHUNKS];
  const u8* column = record + COLUMNS + (g < RANK ? g : RANK - 1) * COLUMN_BYTES + x * (HEAD_DIM / 8);
  if constexpr (CHUNKS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < CHUNKS / 4; i++) {
      uint4 four = ((const uint4*)column)[i];
      codes[4 * i] = four.x, codes[4 * i + 1] = four.y, codes[4 * i + 2] = four.z, codes[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) codes[i] = ((const u32*)column)[i];
  }
  int sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[t][i] = q.bias[t][i / 2];
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    u32 even = codes[chunk] & 0x0f0f0f0fu, odd = (codes[chunk] >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_bytes_unsigned(sum[t], q.part[t][chunk], even, odd);
  }
  // Coefficients of columns 2 x, 2 x + 1 for tokens 2 g and 2 g + 1, as fp16: a byte beside 0x64 is 1024 + byte.
  const int c0 = 2 * x < RANK ? 2 * x : RANK - 1, c1 = 2 * x + 1 < RANK ? 2 * x + 1 : RANK - 1;
  const u8* entries = record + COLUMNS + COEFFICIENTS + 2 * g;
  u32 bytes = __byte_perm(*(const u16*)(entries + c0 * COLUMN_BYTES), *(const u16*)(entries + c1 * COLUMN_BYTES), 0x5140);
  bytes ^= 0x80808080u;
  u32 first = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
  u32 second = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u);
  const u16* steps = (const u16*)(record + COEFFICIENT_SCALE);  // scales of the tokens
  if constexpr (!SAFE) {
    u32 two;
    if constexpr (COEFFICIENT_SCALE % 4 == 0) {
      two = ((const u32*)steps)[g];
    } else {
      two = steps[2 * g] | (u32)steps[2 * g + 1] << 16;
    }
    first = multiply_halves(first, low_twice(two)), second = multiply_halves(second, high_twice(two));
  }
  u32 scales;  // of the two columns
  if constexpr (RANK % 2 == 0) {
    scales = *(const u32*)(record + BASIS_SCALE + 2 * (2 * x < RANK ? 2 * x : 0));
  } else {
    const u16* all = (const u16*)(record + BASIS_SCALE);
    scales = all[c0] | (u32)all[c1] << 16;
  }
  // 2^exponent.  Where it is no float the quick way's sum is not a number, or too large.
  const u32 exponent = *(const u16*)record;
  const float unit = SAFE ? power_of_two((int)exponent - 32768) : __int_as_float((exponent << 23) + 0x3f800000u);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const float f = SAFE ? 1.f / 32768.f : unit * q.unit[t];  // SAFE keeps t well inside fp16
    const float t0 = RANK == 8 || 2 * x < RANK ? (float)(sum[t][0] * 256 + sum[t][2]) * (low_half(scales) * f) : 0.f;
    const float t1 = RANK == 8 || 2 * x + 1 < RANK ? (float)(sum[t][1] * 256 + sum[t][3]) * (high_half(scales) * f) : 0.f;
    const u32 high = floats_to_halves(t0, t1);
    float z[4] = {};  // tokens 4 x, 4 x + 2, 4 x + 1, 4 x + 3
    mma_halves(z, high, 0, 0, high, first, second);
    peaks[t] = 0.f;
    if constexpr (SAFE) {
      const u32 low = floats_to_halves(t0 - low_half(high), t1 - high_half(high));
      mma_halves(z, low, 0, 0, low, first, second);
      float peak = -INF;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 4 * x + 2 * (i & 1) + i / 2;
        z[i] *= 32768.f * unit * q.unit[t] * half_to_float(steps[token]);
        peak = fmaxf(peak, z[i]);
      }
      peaks[t] = fminf(fmaxf(quad_max(peak), -1e38f), 1e38f);
#pragma unroll
      for (int i = 0; i < 4; i++) z[i] -= peaks[t];
    }
    sums[t] = (exp2_fast(z[0]) + exp2_fast(z[1])) + (exp2_fast(z[2]) + exp2_fast(z[3]));
  }
}

// Log-masses, in base 2, of pages x and x + 4 of a group, of which the first `pages` count, for head 8 t + g.  False
// where one of them cannot be trusted.
template <bool SAFE> DEVICE bool score_group(float (&mass)[TILES][2], const Query& q, const u8* group, int pages) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  float sums[TILES][2], peaks[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) sums[t][1] = 1.f, peaks[t][1] = 0.f;  // where there are four pages
#pragma unroll 1
  for (int half = 0; half < (pages > GROUP_PAGES / 2 ? 2 : 1); half++) {
    float sum[4][TILES], peak[4][TILES];
    if constexpr (SAFE) {
#pragma unroll 1
      for (int i = 0; i < 4; i++) {
        float one[TILES], top[TILES];
        score_page<SAFE>(one, top, q, group + (4 * half + i) * PAGE_BYTES);
#pragma unroll
        for (int k = 0; k < 4; k++) {  // sum[i] would lie in local memory, and the quick way would write it too
#pragma unroll
          for (int t = 0; t < TILES; t++)
            if (i == k) sum[k][t] = one[t], peak[k][t] = top[t];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) score_page<SAFE>(sum[i], peak[i], q, group + (4 * half + i) * PAGE_BYTES);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const float a = halve(sum[0][t], sum[1][t], x & 1, 1), b = halve(sum[2][t], sum[3][t], x & 1, 1);
      const float all = halve(a, b, x & 2, 2);
      const float low = x & 1 ? peak[1][t] : peak[0][t], high = x & 1 ? peak[3][t] : peak[2][t];
      const float top = SAFE ? x & 2 ? high : low : 0.f;
      if (half) sums[t][1] = all, peaks[t][1] = top; else sums[t][0] = all, peaks[t][0] = top;
    }
  }
  int centre[TILES][4];  // pages x and x + 4: high bytes, low bytes
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) centre[t][i] = 0;
  }
  // Its columns 2 x and 2 x + 1 are pages x and x + 4.
  const u8* mean = group + (g / 2 + g % 2 * 4) * PAGE_BYTES + CENTROID + x * (HEAD_DIM / 4);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const uint2 eight = *(const uint2*)(mean + 8 * chunk);
    const u32 even = __byte_perm(eight.x, eight.y, 0x6420), odd = __byte_perm(eight.x, eight.y, 0x7531);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_bytes_signed(centre[t], q.part[t][chunk], even, odd);
  }
  bool good = true;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 header = *(const u32*)(group + (4 * h + x) * PAGE_BYTES);  // exponent and centroid scale
    const float unit = power_of_two((int)(header & 0xffffu) - 32768) * high_half(header);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float value = (float)(centre[t][h] * 256 + centre[t][2 + h]) * (unit * q.unit[t]);
      value += peaks[t][h] + log2_fast(sums[t][h]);
      if constexpr (SAFE) value = fminf(fmaxf(value, -1.4e38f), 1.4e38f);  // finite keys and queries: no infinity
      mass[t][h] = (header & 0xffffu) == 0 ? INF : value;                    // no summary: to be read exactly
      const bool trusted = sums[t][h] > 1e-30f && sums[t][h] < LARGEST_SUM && fabsf(value) < 1e30f;
      good = good && (trusted || 4 * h + x >= pages);
    }
  }
  return good;
}
