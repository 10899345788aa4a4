// Score: a page's packed summary and a row's queries -> the page's log-mass for every query head.
//
//     s_g(j) = logsumexp_i( (q_g . mu_j + (V_j^T q_g) . c_i) * scale )                                        (Eq. 4)
//
// A page's records of the block's KV heads lie together, so one bulk copy brings them; small copies cost as much as
// large ones.  One warp does nothing but copy, a group of eight pages to a stage of a ring, in the order of the pages: so
// the first stages are there while the others still come, and memory is asked for more as soon as a stage is free.
// Teams of HEADS_A_BLOCK warps, one a KV head, take the groups in turn.  What a warp does with a group is in score.cuh.
// What is left of a row's part goes in groups of four, which take half the time.
//
// Needs, beside what score.cuh does: PAGES_A_BLOCK, KV_HEADS, WARPS (without the one that copies), STAGES.

struct Params {
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u8* records;         // (blocks, pages a block, KV_HEADS, RECORD_BYTES)
  const int* block_table;    // (rows, blocks of a row)
  const int* start;          // (rows + 1): running total of the rows' pages
  const ScorePart* parts;    // (blocks of the grid), from plan, as is
  const int* first_blocks;   // (blocks of the grid, 32)
  float* log_mass;           // (KV_HEADS, capacity, GROUP), natural log
  float2* partial;           // (KV_HEADS, GROUP, slots): maximum and sum, in base 2; slot (block + row) * SUBS + team
  const u8* keys;            // the layer's keys
  i64 query_stride, block_bytes;  // elements; bytes
  i64 key_block_bytes;
  i64 table_stride, capacity, slots;
  float scale;
};

constexpr int SUBS = WARPS / HEADS_A_BLOCK;    // teams: warps that share a KV head
constexpr int STAGE_BYTES = GROUP_PAGES * PAGE_BYTES;

// The pages of a row that lie in this block's part.
struct Piece {
  int first;      // where the row's pages start among all rows'
  int page, end;  // within the row
  int whole;      // groups of eight pages; groups of four follow
  DEVICE_MEMBER void find(const Params& p, const ScorePart& part, int row) {
    if (row == part.row) {  // plan has looked already
      first = part.low - part.page, page = part.page, end = part.end;
    } else {
      first = load_kept(p.start + row);
      page = 0, end = min(part.high, load_kept(p.start + row + 1)) - first;
    }
    whole = (end - page) / GROUP_PAGES;
  }
  DEVICE_MEMBER int groups() const { return whole + (end - begin_of(whole) + GROUP_PAGES / 2 - 1) / (GROUP_PAGES / 2); }
  DEVICE_MEMBER int begin_of(int group) const {
    return page + min(group, whole) * GROUP_PAGES + max(0, group - whole) * (GROUP_PAGES / 2);
  }
  DEVICE_MEMBER int pages_of(int group) const {
    return min(group < whole ? GROUP_PAGES : GROUP_PAGES / 2, end - begin_of(group));
  }
};

// Where the group with this number, of all that the block has had, lies in the ring, and its two barriers.  One that
// announces a stage's records is of one team alone: who waits for a phase must not be more than one behind, and teams pass
// over each other's.
struct Place {
  static constexpr u32 BARRIERS = STAGES * SUBS;
  u32 stage, full, full_parity, empty_parity;
  DEVICE_MEMBER Place(u32 group) {
    stage = group % STAGES, empty_parity = group / STAGES & 1 ^ 1;  // a new ring's stages are empty
    full = group % BARRIERS, full_parity = group / BARRIERS & 1;
  }
};

// One warp: copies the part's records to the ring; when the last are on their way, lets the next kernel start.
DEVICE void copy_records(const Params& p, const ScorePart& part, int first_block, u32 ring, u32 full, u32 empty) {
  const int lane = lane_id();
  const u64 policy = pass_policy();
  u32 group = 0;
  for (int row = part.row; row < part.limit; row++) {
    Piece piece;
    piece.find(p, part, row);
    auto block_of = [&](int page) {  // of this lane's page
      const bool real = page + lane < piece.end;
      return real ? load_kept(p.block_table + row * p.table_stride + (page + lane) / PAGES_A_BLOCK) : 0;
    };
    int next = row == part.row ? first_block : block_of(piece.page);
    for (int page = piece.page; page < piece.end; page += 32) {
      const int count = min(32, piece.end - page), block = next;
      next = block_of(page + 32);  // so that the next copies need not wait for it
      const i64 first_head = (i64)(page + lane) % PAGES_A_BLOCK * KV_HEADS + blockIdx.y * HEADS_A_BLOCK;
      const u8* from = p.records + block * p.block_bytes + first_head * RECORD_BYTES;
      // Attention will read some of these pages' keys, somewhere in all of the card's memory: have their addresses
      // translated meanwhile, once where neighbours lie together.
      const u64 key = (u64)(p.keys + block * p.key_block_bytes);
      const u32 region = (u32)(key >> 21), before = __shfl_up_sync(FULL, region, 1);
      if (lane < count && (lane == 0 || region != before)) asm volatile("prefetch.global.L2 [%0];" ::"l"(key));
#pragma unroll 1
      for (int begin = 0, pages; begin < count; begin += pages, group++) {
        const int at = lane - begin;
        pages = min(page + begin < piece.begin_of(piece.whole) ? GROUP_PAGES : GROUP_PAGES / 2, count - begin);
        const Place place(group);
        barrier_wait(empty + 8 * place.stage, place.empty_parity);
        if (lane == 0) barrier_expect(full + 8 * place.full, pages * PAGE_BYTES);
        __syncwarp();
        if (at >= 0 && at < pages)
          copy_bulk(ring + place.stage * STAGE_BYTES + at * PAGE_BYTES, from, PAGE_BYTES, full + 8 * place.full, policy);
      }
    }
  }
  let_next_kernel_start();
}

// One warp: scores its team's groups for one KV head.
DEVICE void score_records(const Params& p, const ScorePart& part, const u8* ring, u32 full, u32 empty) {
  const int warp = threadIdx.x >> 5, in_block = warp % HEADS_A_BLOCK, team = warp / HEADS_A_BLOCK;
  const int g = lane_id() >> 2, x = lane_id() & 3;
  const int head = blockIdx.y * HEADS_A_BLOCK + in_block;
  auto queries_of = [&](int row) { return p.query + row * p.query_stride + head * (GROUP * HEAD_DIM); };
  Query q;
  u32 raw[HEAD_DIM / 8];
  fetch_query(raw, queries_of(part.row), 0);  // ahead of the copies, behind which it would wait
  const u64 policy = keep_policy();
  u32 before = 0;  // groups of earlier rows
  for (int row = part.row; row < part.limit; row++) {
    Piece piece;
    piece.find(p, part, row);
    const int groups = piece.groups();
    int group = (team + SUBS - before % SUBS) % SUBS;
    const u16* queries = queries_of(row);
    if (group < groups) {
      if (row > part.row) fetch_query(raw, queries, 0);
      load_query(q, raw, queries, p.scale);
    }
    float peak[TILES], sum[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) peak[t] = -INF, sum[t] = 0.f;
    float* out = p.log_mass + ((i64)head * p.capacity + piece.first) * GROUP;
    for (; group < groups; group += SUBS) {
      const Place place(before + group);
      const int page = piece.begin_of(group), pages = piece.pages_of(group);
      barrier_wait(full + 8 * place.full, place.full_parity);
      const u8* records = ring + place.stage * STAGE_BYTES + in_block * RECORD_BYTES;
      float mass[TILES][2];
      if (!__all_sync(FULL, score_group<false>(mass, q, records, pages))) score_group<true>(mass, q, records, pages);
      barrier_arrive(empty + 8 * place.stage);  // every lane: a race checker does not see the others behind one
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (4 * h + x >= pages) continue;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (8 * t + g < GROUP) store_kept(out + (page + 4 * h + x) * GROUP + 8 * t + g, mass[t][h] * LN2, policy);
          if (mass[t][h] < INF) {  // not a page to be read exactly
            const float top = fmaxf(peak[t], mass[t][h]);
            sum[t] = sum[t] * exp2_fast(peak[t] - top) + exp2_fast(mass[t][h] - top);
            peak[t] = top;
          }
        }
      }
    }
    before += groups;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const float top = quad_max(peak[t]);
      const float all = quad_sum(peak[t] > -INF ? sum[t] * exp2_fast(peak[t] - top) : 0.f);
      if (x == 0 && 8 * t + g < GROUP) {
        const i64 slot = (i64)(blockIdx.x + row) * SUBS + team;
        p.partial[(i64)(head * GROUP + 8 * t + g) * p.slots + slot] = make_float2(top, all);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1) score_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 full[Place::BARRIERS], empty[STAGES];
  const bool copies = threadIdx.x >= 32 * WARPS;
  if (copies) {  // it need not wait until the others have started
    for (int i = lane_id(); i < Place::BARRIERS; i += 32) barrier_init(shared_address(&full[i]), 1);
    for (int i = lane_id(); i < STAGES; i += 32) barrier_init(shared_address(&empty[i]), 32 * HEADS_A_BLOCK);
    barrier_fence();
    __syncwarp();
    block_arrive<32 * WARPS + 32>();
  } else {
    block_wait<32 * WARPS + 32>();
  }
  wait_for_previous_kernel();
  int first_block = 0;
  if (copies) first_block = load_kept(p.first_blocks + 32 * blockIdx.x + lane_id());
  const int4* from = (const int4*)(p.parts + blockIdx.x);
  const int4 a = load_kept(from), b = load_kept(from + 1);
  const ScorePart part = {a.x, a.y, a.z, a.w, b.x, b.y};
  if (part.row == part.limit) return;
  if (copies) {
    copy_records(p, part, first_block, shared_address(ring), shared_address(full), shared_address(empty));
  } else {
    score_records(p, part, ring, shared_address(full), shared_address(empty));
  }
}
