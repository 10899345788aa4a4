// Score: a page's packed summary and a row's queries -> the page's log-mass for every query head.
//
//     s_g(j) = logsumexp_i( (q_g . mu_j + (V_j^T q_g) . c_i) * scale )                                        (Eq. 4)
//
// A page's records of the block's KV heads lie together, so one bulk copy brings them; small copies cost as much as
// large ones.  HEADS_A_BLOCK warps, one a KV head, share a ring of stages of eight pages; the last of them to be done
// with a stage fills it again, so none ever waits for another.  What a warp does with eight pages is in score.cuh.
//
// Needs, beside what score.cuh does: PAGES_A_BLOCK, KV_HEADS, LEAST_PAGES, WARPS, STAGES.

struct Params {
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u8* records;         // (blocks, pages a block, KV_HEADS, RECORD_BYTES)
  const int* block_table;    // (rows, blocks of a row)
  const int* start;          // (rows + 1): running total of the rows' pages
  float* log_mass;           // (KV_HEADS, capacity, GROUP), natural log
  float2* partial;           // (KV_HEADS, GROUP, slots): maximum and sum, in base 2; slot (block + row) * SUBS + warp
  const u8* keys;            // the layer's keys
  i64 query_stride, block_bytes;  // elements; bytes
  i64 key_block_bytes;
  i64 table_stride, capacity, slots;
  int rows, parts;
  float scale;
};

constexpr int SUBS = WARPS / HEADS_A_BLOCK;    // warps that share a KV head
constexpr int STAGE_BYTES = GROUP_PAGES * PAGE_BYTES;

// A walk over the groups of eight pages that one warp handles, across the rows of its block's part.
struct Walk {
  int row, page, end;  // the next group is pages page ... of row, none at or past end
  DEVICE_MEMBER void enter(const Params& p, int low, int high, int sub) {
    int first = load_kept(p.start + row), last = load_kept(p.start + row + 1);
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
  return mine ? load_kept(p.block_table + walk.row * p.table_stride + page / PAGES_A_BLOCK) : -1;
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
  wait_for_previous_kernel();
  const int total = load_kept(p.start + p.rows);
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
        if (lane == 0 || region != before) asm volatile("prefetch.global.L2 [%0];" ::"l"(key));
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
  let_next_kernel_start();
}
