// Score: a page's packed summary and a row's queries -> the page's log-mass for every query head.
//
//     s_g(j) = logsumexp_i( (q_g . mu_j + (V_j^T q_g) . c_i) * scale )                                        (Eq. 4)
//
// A page's records of the block's KV heads lie together, so one bulk copy brings them; small copies cost as much as
// large ones.  HEADS_A_BLOCK warps, one a KV head, share a ring of stages of eight pages; the last of them to be done
// with a stage fills it again, so none ever waits for another.  All products run on tensor cores, and each leaves its
// result where the next one wants its operand.  With lane = 4 g + x:
//
//   t = V^T q   int8 x int4 -> int32: heads by columns.  A head's query is a 16-bit integer in two bytes, the rows g
//               and g + 8 of one operand, in steps of 2^-15 of the largest or 2^-14.  Nibbles stay biased by 8; the
//               sums start at -8 sum(q).  The order of the head dimension is the records' own: a lane's 16 bytes of a
//               column are its operands as they lie, and the query is permuted to match.
//   C t         fp16 x fp16 -> fp32: tokens by heads, with t in units of logits and split into two halves, which are
//               the two halves of the operand's depth, so that the product keeps 22 bits of it.
//   q . mu      int8 x int8 -> int32: eight pages by heads.
//
// The exponentials of a page's 16 tokens are summed without subtracting their maximum: deviations from a centroid are
// centred, so their largest is not below zero, and fp32 holds what is left.  Where it does not (a sum outside
// 1e-30 ... 1e30, or t beyond fp16), the group is computed again with the maximum subtracted.
//
// Needs: PAGES_A_BLOCK, HEAD_DIM, GROUP, KV_HEADS, RANK, RECORD_BYTES, CENTROID, COLUMNS, COLUMN_BYTES, COEFFICIENTS,
// BASIS_SCALE, COEFFICIENT_SCALE, LEAST_PAGES, WARPS, HEADS_A_BLOCK, STAGES; FP16 or
// not.

struct Params {
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u8* records;         // (blocks, pages a block, KV_HEADS, RECORD_BYTES)
  const int* block_table;    // (rows, blocks of a row)
  const int* start;          // (rows + 1): running total of the rows' pages
  float* log_mass;           // (KV_HEADS, capacity, GROUP), natural log
  float2* partial;           // (KV_HEADS, GROUP, slots): maximum and sum, in base 2; slot (block + row) * SUBS + warp
  const u8* keys;            // the layer's keys, or null
  i64 query_stride, block_bytes;  // elements; bytes
  i64 key_block_bytes;
  i64 table_stride, capacity, slots;
  int rows, parts;
  float scale;
};

constexpr int GROUP_PAGES = 8;
constexpr int SUBS = WARPS / HEADS_A_BLOCK;    // warps that share a KV head
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int TILES = (GROUP + 7) / 8;         // of eight query heads
constexpr int PAGE_BYTES = HEADS_A_BLOCK * RECORD_BYTES;
constexpr int STAGE_BYTES = GROUP_PAGES * PAGE_BYTES;
constexpr float QUERY_STEPS = 32512.f;         // 127 * 256: both bytes stay within -128 ... 127 up to here

// A walk over the groups of eight pages that one warp handles, across the rows of its block's part.
struct Walk {
  int row, page, end;  // the next group is pages page ... of row, none at or past end
  DEVICE_MEMBER void enter(const Params& p, int low, int high, int sub) {
    int first = p.start[row], last = p.start[row + 1];
    page = (low > first ? low : first) - first + GROUP_PAGES * sub;
    end = (high < last ? high : last) - first;
  }
  // Moves on until there is a group; row >= limit where there is none.
  DEVICE_MEMBER void settle(const Params& p, int low, int high, int sub, int limit) {
    while (page >= end) {
      if (++row >= limit) return;
      enter(p, low, high, sub);
    }
  }
};

DEVICE int block_of(const Params& p, const Walk& walk, int limit) {  // this lane's page of the group
  int page = walk.page + lane_id();
  bool mine = walk.row < limit && lane_id() < GROUP_PAGES && page < walk.end;
  return mine ? p.block_table[walk.row * p.table_stride + page / PAGES_A_BLOCK] : -1;
}

struct Query {
  u32 part[TILES][CHUNKS][4];  // of head g: high bytes, low bytes, of even and then of odd dimensions
  int bias[TILES][4];          // where the sums of V^T q start
  float unit[TILES];           // logits, in base 2, per unit of integer query times key: of head g,
  float units[TILES][2];       // of heads 2 x and 2 x + 1
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
  const int g = lane_id() >> 2, x = lane_id() & 3;
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
    q.bias[t][0] = q.bias[t][1] = -8 * high_sum;
    q.bias[t][2] = q.bias[t][3] = -8 * low_sum;
    q.unit[t] = scale * LOG2E / inverse;
    q.units[t][0] = __shfl_sync(FULL, q.unit[t], 8 * x);
    q.units[t][1] = __shfl_sync(FULL, q.unit[t], 8 * x + 4);
  }
}

// Sums over this lane's two tokens, 2 g and 2 g + 1, of 2^(logit - peak) for heads 8 t + 2 x and + 1; peak is 0 unless
// SAFE.
template <bool SAFE>
DEVICE void score_page(float (&sums)[TILES][2], float (&peaks)[TILES][2], const Query& q, const u8* record) {
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
    for (int i = 0; i < 4; i++) sum[t][i] = q.bias[t][i];
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
  u32 first = __byte_perm(bytes, 0x64646464u, 0x4140), second = __byte_perm(bytes, 0x64646464u, 0x4342);
  asm("sub.f16x2 %0, %0, %1;" : "+r"(first) : "r"(0x64806480u));
  asm("sub.f16x2 %0, %0, %1;" : "+r"(second) : "r"(0x64806480u));
  u32 steps;  // scales of the two tokens
  if constexpr (COEFFICIENT_SCALE % 4 == 0) {
    steps = *(const u32*)(record + COEFFICIENT_SCALE + 4 * g);
  } else {
    const u16* two = (const u16*)(record + COEFFICIENT_SCALE) + 2 * g;
    steps = two[0] | (u32)two[1] << 16;
  }
  float step0 = low_half(steps), step1 = high_half(steps);
  u32 scales;  // of the two columns
  if constexpr (RANK % 2 == 0) {
    scales = *(const u32*)(record + BASIS_SCALE + 2 * (2 * x < RANK ? 2 * x : 0));
  } else {
    const u16* all = (const u16*)(record + BASIS_SCALE);
    scales = all[c0] | (u32)all[c1] << 16;
  }
  const float unit = power_of_two((int)*(const u16*)record - 32768);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const float f = SAFE ? 1.f / 32768.f : unit * q.unit[t];  // SAFE keeps t well inside fp16
    float t0 = 2 * x < RANK ? (float)(sum[t][0] * 256 + sum[t][2]) * (low_half(scales) * f) : 0.f;
    float t1 = 2 * x + 1 < RANK ? (float)(sum[t][1] * 256 + sum[t][3]) * (high_half(scales) * f) : 0.f;
    const u32 high = floats_to_halves(t0, t1), low = floats_to_halves(t0 - low_half(high), t1 - high_half(high));
    float z[4] = {};
    mma_halves(z, first, second, first, second, high, low);
    if constexpr (SAFE) {
#pragma unroll
      for (int i = 0; i < 4; i++) z[i] *= 32768.f * unit * q.units[t][i & 1];
    }
    z[0] *= step0, z[1] *= step0, z[2] *= step1, z[3] *= step1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      peaks[t][h] = 0.f;
      if constexpr (SAFE) {
        peaks[t][h] = fminf(fmaxf(octet_max(fmaxf(z[h], z[2 + h])), -1e38f), 1e38f);
        z[h] -= peaks[t][h], z[2 + h] -= peaks[t][h];
      }
      sums[t][h] = exp2_fast(z[h]) + exp2_fast(z[2 + h]);
    }
  }
}

// Log-mass, in base 2, of page g of a group for heads 8 t + 2 x and + 1.  False where a sum left the range in which it
// can be trusted.
template <bool SAFE> DEVICE bool score_group(float (&mass)[TILES][2], const Query& q, const u8* group) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  float sums[TILES][2][2], peaks[TILES][2];  // of pages 0-3 and of 4-7: a quarter of each, of page g & 3
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    float sum[4][TILES][2], peak[4][TILES][2];
#pragma unroll
    for (int page = 0; page < 4; page++) score_page<SAFE>(sum[page], peak[page], q, group + (4 * half + page) * PAGE_BYTES);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float a = halve(sum[0][t][h], sum[1][t][h], g & 1, 4), b = halve(sum[2][t][h], sum[3][t][h], g & 1, 4);
        const float both = halve(a, b, g & 2, 8);
        if (half == 0) sums[t][h][0] = both; else sums[t][h][1] = both;
        if constexpr (SAFE) {
          const float low = g & 1 ? peak[1][t][h] : peak[0][t][h], high = g & 1 ? peak[3][t][h] : peak[2][t][h];
          if (g >> 2 == half) peaks[t][h] = g & 2 ? high : low;
        } else {
          peaks[t][h] = 0.f;
        }
      }
    }
  }
  int high[TILES][4], low[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) high[t][i] = low[t][i] = 0;
  }
  const u8* mean = group + g * PAGE_BYTES + CENTROID + x * (HEAD_DIM / 4);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const uint2 eight = *(const uint2*)(mean + 8 * chunk);
    const u32 pages[4] = {__byte_perm(eight.x, eight.y, 0x6420), 0, __byte_perm(eight.x, eight.y, 0x7531), 0};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      mma_bytes_signed(high[t], pages, q.part[t][chunk][0], q.part[t][chunk][2]);
      mma_bytes_signed(low[t], pages, q.part[t][chunk][1], q.part[t][chunk][3]);
    }
  }
  const u32 header = *(const u32*)(group + g * PAGE_BYTES);  // exponent and centroid scale
  const float unit = power_of_two((int)(header & 0xffffu) - 32768) * high_half(header);
  bool good = true;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = halve(sums[t][h][0], sums[t][h][1], g & 4, 16);
      float value = (float)(high[t][h] * 256 + low[t][h]) * (unit * q.units[t][h]) + (peaks[t][h] + log2_fast(sum));
      if constexpr (SAFE) value = fminf(fmaxf(value, -1.4e38f), 1.4e38f);  // finite keys and queries: no infinity
      mass[t][h] = (header & 0xffffu) == 0 ? INF : value;                    // no summary: to be read exactly
      good = good && sum > 1e-30f && sum < 1e30f && fabsf(value) < 1e30f;
    }
  }
  return good;
}

struct Mass {
  float of[TILES][2];
};

// The same with the maxima subtracted, which hardly any group needs: out of line, with a query of its own, so that it
// takes no registers from the usual way.
static __device__ __noinline__ Mass score_group_again(const u16* queries, float scale, const u8* group) {
  Query q;
  u32 raw[HEAD_DIM / 8];
  fetch_query(raw, queries, 0);
  load_query(q, raw, queries, scale);
  Mass mass;
  score_group<true>(mass.of, q, group);
  return mass;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) score_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(8) u64 barriers[SUBS][STAGES];
  __shared__ u32 done[SUBS][STAGES];
  const int warp = threadIdx.x >> 5, lane = lane_id();
  const int in_block = warp % HEADS_A_BLOCK, sub = warp / HEADS_A_BLOCK, head = blockIdx.y * HEADS_A_BLOCK + in_block;
  u8* ring = shared + sub * (STAGES * STAGE_BYTES);
  const u32 barrier = shared_address(&barriers[sub][0]);  // of stage s: 8 s bytes on
  if (in_block == 0 && lane < STAGES) barrier_init(barrier + 8 * lane, 1), done[sub][lane] = 0;
  barrier_fence();
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int total = p.start[p.rows];
  if (total == 0) return;
  const int parts = parts_of(total, p.parts);
  if ((int)blockIdx.x >= parts) return;
  const int low = part_begin(total, blockIdx.x, parts), high = part_begin(total, blockIdx.x + 1, parts);
  const int first_row = row_of(p.start, p.rows, low), limit = row_of(p.start, p.rows, high - 1) + 1;

  Walk ahead{first_row, 0, 0};
  ahead.enter(p, low, high, sub);
  ahead.settle(p, low, high, sub, limit);
  int block = in_block == 0 ? block_of(p, ahead, limit) : -1;
  auto queries_of = [&](int row) { return p.query + row * p.query_stride + head * (GROUP * HEAD_DIM); };
  Query q;
  u32 raw[HEAD_DIM / 8];
  fetch_query(raw, queries_of(first_row), 0);  // ahead of the copies, behind which it would wait
  // Copies the group that `ahead` is at, if that is for this warp to do, and moves on; the next may be for it to do.
  auto refill = [&](int stage, bool mine, bool next) {
    if (ahead.row >= limit) return;
    if (mine) {
      const int pages = ahead.end - ahead.page < GROUP_PAGES ? ahead.end - ahead.page : GROUP_PAGES;
      if (lane == 0) barrier_expect(barrier + 8 * stage, pages * PAGE_BYTES);
      __syncwarp();
      if (lane < pages) {
        const int slot = (ahead.page + lane) % PAGES_A_BLOCK;
        const i64 first_head = slot * KV_HEADS + blockIdx.y * HEADS_A_BLOCK;
        const u8* from = p.records + block * p.block_bytes + first_head * RECORD_BYTES;
        copy_bulk(shared_address(ring + stage * STAGE_BYTES + lane * PAGE_BYTES), from, PAGE_BYTES, barrier + 8 * stage);
        // Attention will read some of these pages' keys, somewhere in all of the card's memory: have their addresses
        // translated meanwhile, once where neighbours lie together.
        const u64 key = (u64)(p.keys + block * p.key_block_bytes);
        const u32 region = (u32)(key >> 21), before = __shfl_up_sync((1u << pages) - 1, region, 1);
        if (p.keys && (lane == 0 || region != before)) asm volatile("prefetch.global.L2 [%0];" ::"l"(key));
      }
    }
    ahead.page += GROUP_PAGES * SUBS;
    ahead.settle(p, low, high, sub, limit);
    if (next) block = block_of(p, ahead, limit);  // one group early: the next copy need not wait for it
  };
  auto is_last = [&](int stage) {  // of the warps that read this stage
    u32 before = 0;
    if (lane == 0) {
      asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
                   : "=r"(before) : "r"(shared_address(&done[sub][stage])), "r"(HEADS_A_BLOCK - 1) : "memory");
    }
    return __shfl_sync(FULL, before, 0) == HEADS_A_BLOCK - 1;
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++)  // by turns, so that none waits for one block after the other
    refill(s, in_block == s % HEADS_A_BLOCK, s == STAGES - 1 || in_block == (s + 1) % HEADS_A_BLOCK);

  Walk now{first_row, 0, 0};
  now.enter(p, low, high, sub);
  if (now.page < now.end) load_query(q, raw, queries_of(first_row), p.scale);

  int stage = 0;
  u32 parity = 0;
  for (; now.row < limit; now.row++) {
    now.enter(p, low, high, sub);
    float peak[TILES][2], sum[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) peak[t][0] = peak[t][1] = -INF, sum[t][0] = sum[t][1] = 0.f;
    const u16* queries = queries_of(now.row);
    if (now.row > first_row && now.page < now.end) {
      fetch_query(raw, queries, 0);
      load_query(q, raw, queries, p.scale);
    }
    float* out = p.log_mass + ((i64)head * p.capacity + p.start[now.row]) * GROUP;
    for (; now.page < now.end; now.page += GROUP_PAGES * SUBS) {
      barrier_wait(barrier + 8 * stage, parity);
      const u8* group = ring + stage * STAGE_BYTES + in_block * RECORD_BYTES;
      float mass[TILES][2];
      bool good = score_group<false>(mass, q, group);
      const int g = lane >> 2, x = lane & 3;
      const bool real = now.page + g < now.end;
      if (!__all_sync(FULL, good || !real)) {
        const Mass again = score_group_again(queries, p.scale, group);
#pragma unroll
        for (int t = 0; t < TILES; t++) mass[t][0] = again.of[t][0], mass[t][1] = again.of[t][1];
      }
      __syncwarp();
      refill(stage, is_last(stage), true);
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (!real) continue;
      float* to = out + (i64)(now.page + g) * GROUP + 2 * x;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if constexpr (GROUP % 2 == 0) {
          if (8 * t + 2 * x < GROUP) *(float2*)(to + 8 * t) = make_float2(mass[t][0] * LN2, mass[t][1] * LN2);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (GROUP % 2 && 8 * t + 2 * x + h < GROUP) to[8 * t + h] = mass[t][h] * LN2;
          if (mass[t][h] < INF) {  // not a page to be read exactly
            const float top = fmaxf(peak[t][h], mass[t][h]);
            sum[t][h] = sum[t][h] * exp2_fast(peak[t][h] - top) + exp2_fast(mass[t][h] - top);
            peak[t][h] = top;
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int query_head = 8 * t + 2 * (lane & 3) + h;
        const float top = octet_max(peak[t][h]);
        const float all = octet_sum(peak[t][h] > -INF ? sum[t][h] * exp2_fast(peak[t][h] - top) : 0.f);
        if (lane < 4 && query_head < GROUP) {
          i64 slot = (i64)(blockIdx.x + now.row) * SUBS + sub;
          p.partial[(i64)(head * GROUP + query_head) * p.slots + slot] = make_float2(top, all);
        }
      }
    }
  }
}
