// Selection of one row and KV head by the blocks of a cluster; select.cu and select_attend.cu differ in what they do
// with the pages.
//
//     share(j) = mean_g softmax_j s_g(j)                                                                      (Eq. 5)
//
// The sink pages, the best others by share, the recent pages: `budget_pages` in all, ascending, ties to the lower page.
// A page whose log-mass is +inf or NaN comes before any other and stays out of the denominators.
//
// Each block has a range of the pages.  Shares become integers that sort alike, and the threshold is found by radix,
// digits from the top: each block adds its histogram to the first block's, and that one finds the digit and tells the
// others (all reading its histogram would queue).  It stops as soon as a bin is wanted whole.  Two counts, handed to
// every block, then give every chosen page its place.  Blocks speak through asynchronous stores that count on the
// receiver's mbarrier: a cluster barrier would fence all of memory, five times over.  A row of few pages is its first
// block's alone: what the others would save is less than what it takes to meet them.
//
// Needs: PAGES_A_BLOCK, GROUP, KV_HEADS, LEAST_PAGES, SUBS and SCORE_PARTS (score's warps a KV head and blocks), THREADS,
// KEYS (that fit shared memory), CLUSTER, BUDGET_PAGES.

constexpr int DIGITS = 3;
constexpr int BINS = 2048;                              // of the last digit; the first two have half as many
constexpr int ALONE = 1024;                             // pages that one block takes alone
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = GROUP < WARPS ? GROUP : WARPS;  // query heads whose partial sums are merged at a time
constexpr int PIECES = WARPS / COLUMNS;                 // warps that merge one head's
constexpr int LANES = PIECES * 32;                      // of all warps that merge one head's
// Loads that a thread has on their way at a time, as many as its registers hold: partial sums, and pages' log-masses
// before and after those are there.  One after the other they took 0.7 us each.
constexpr int PARTS = least(CLUSTER > 1 ? 20 : 8, (SCORE_PARTS * SUBS + LANES - 1) / LANES);
constexpr int EARLY = GROUP <= 8 ? 2 : 0;
constexpr int AHEAD = least(8, most(1, (CLUSTER > 1 ? 64 : 16) / GROUP));
constexpr int TABLE = KEYS / PAGES_A_BLOCK + 2;         // entries of the block table beside the keys

// What selection needs of a kernel's parameters.
struct Scored {
  const float* log_mass;     // (KV_HEADS, capacity, GROUP)
  const float2* partial;     // (KV_HEADS, GROUP, slots)
  const int* start;          // (rows + 1)
  const int* block_table;    // (rows, blocks of a row)
  u32* keys;                 // (KV_HEADS, capacity): shares as keys, where shared memory is too small for them
  i64 table_stride, capacity, slots;
  int rows, parts;           // parts: score's blocks for each set of KV heads
  int sink_pages, recent_pages;
};

struct Selection {                  // shared memory
  u32 keys[KEYS > 0 ? KEYS : 1];
  u32 table[TABLE];
  __align__(16) u32 total[DIGITS][BINS];  // in the first block: the cluster's histograms
  __align__(16) u32 local[DIGITS][BINS];  // this block's
  __align__(16) uint4 found[DIGITS];  // the digit, pages above it, pages inside it
  u64 counts[CLUSTER];              // of each block: pages above the threshold, and at it
  u64 histogram_ready[DIGITS], found_ready[DIGITS], counts_ready;  // mbarriers
  u64 warp_pairs[WARPS];
  u32 warps[WARPS];
  float2 pieces[GROUP][PIECES];
  float offset[GROUP];              // what turns a log-mass, in base 2, into the head's part of a share
};

// Exclusive sum over the block, and the total.
DEVICE u64 scan(u64 value, u64* warps, u64& total) {
  const int lane = lane_id(), warp = threadIdx.x >> 5;
  u64 sum = value;
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    u64 below = __shfl_up_sync(FULL, sum, k);
    if (lane >= k) sum += below;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u64 all = lane < WARPS ? warps[lane] : 0;  // every warp adds up the warps
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    u64 below = __shfl_up_sync(FULL, all, k);
    if (lane >= k) all += below;
  }
  total = __shfl_sync(FULL, all, 31);
  u64 before = __shfl_sync(FULL, all, warp > 0 ? warp - 1 : 0);
  return (warp > 0 ? before : 0) + sum - value;
}

// Before the first use of `s`; the cluster must meet before `select_row`.
DEVICE void prepare_selection(Selection& s, int rank) {
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < DIGITS * BINS / 4; i += THREADS) {
    if (rank == 0) ((uint4*)s.total)[i] = zeros;
    if (CLUSTER > 1) ((uint4*)s.local)[i] = zeros;
  }
  if (threadIdx.x == 0) {
    for (int digit = 0; digit < DIGITS; digit++) {
      barrier_init(shared_address(&s.histogram_ready[digit]), CLUSTER * WARPS);
      barrier_init(shared_address(&s.found_ready[digit]), 1);
      barrier_expect(shared_address(&s.found_ready[digit]), sizeof(uint4));
    }
    barrier_init(shared_address(&s.counts_ready), 1);
    barrier_expect(shared_address(&s.counts_ready), CLUSTER * sizeof(u64));
    barrier_fence();
  }
  __syncwarp();  // what follows is a barrier of the cluster, which wants whole warps
}

// Inclusive sum over a warp.
DEVICE u32 warp_scan(u32 value) {
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    const u32 below = __shfl_up_sync(FULL, value, k);
    if (lane_id() >= k) value += below;
  }
  return value;
}

// The largest digit with at least `need` keys at or above it, the keys above it, and those inside it; in every thread.
template <int COUNT> DEVICE uint4 find_digit(Selection& s, const u32* histogram, u32 need) {
  constexpr int SEGMENT = COUNT / WARPS, EACH = SEGMENT / 32;  // bins of a warp and of a lane, from the top
  static_assert(EACH * 32 * WARPS == COUNT, "warps divide the bins");
  const int lane = lane_id(), warp = threadIdx.x >> 5;
  u32 mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += histogram[COUNT - 1 - (warp * SEGMENT + lane * EACH + i)];
  mine = __reduce_add_sync(FULL, mine);
  if (lane == 0) s.warps[warp] = mine;
  __syncthreads();
  // Every warp finds the segment, and the bin in it: it costs less than to be told.
  const u32 segment = lane < WARPS ? s.warps[lane] : 0, to_segment = warp_scan(segment);
  const int which = __ffs(__ballot_sync(FULL, to_segment >= need)) - 1;
  u32 above = __shfl_sync(FULL, to_segment - segment, which), count[EACH], own = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) own += count[i] = histogram[COUNT - 1 - (which * SEGMENT + lane * EACH + i)];
  const u32 to_lane = above + warp_scan(own);
  const int holder = __ffs(__ballot_sync(FULL, to_lane >= need)) - 1;
  above = to_lane - own;
  u32 bin = COUNT - 1 - (which * SEGMENT + lane * EACH), inside = count[0];
#pragma unroll
  for (int i = 1; i < EACH; i++) {
    if (above + inside < need) above += inside, inside = count[i], bin--;
  }
  return make_uint4(__shfl_sync(FULL, bin, holder), __shfl_sync(FULL, above, holder), __shfl_sync(FULL, inside, holder), 0);
}

// Log-masses of page i; zeros past the last.
DEVICE void load_masses(float (&masses)[GROUP], const float* from, int i, int count) {
  const float* mine = from + (i64)i * GROUP;
  if constexpr (GROUP % 4 == 0) {
#pragma unroll
    for (int g = 0; g < GROUP; g += 4) {
      const float4 four = i < count ? *(const float4*)(mine + g) : make_float4(0.f, 0.f, 0.f, 0.f);
      masses[g] = four.x, masses[g + 1] = four.y, masses[g + 2] = four.z, masses[g + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int g = 0; g < GROUP; g++) masses[g] = i < count ? mine[g] : 0.f;
  }
}

// A row that is here has more pages than the budget, so more than enough that are neither sink nor recent: blocks wait for
// exactly as many.  Calls put(place, page, physical page) for each chosen page, place by place from some thread of some block.  Blocks
// that have no part in it (rank >= blocks) must not call this.  `start` and `pages` are
// the row's and `scored` all rows', from p.start.
template <class Put>
DEVICE void select_row(const Scored& p, Selection& s, int row, int start, int pages, int scored, int head, int length, int rank,
                       int blocks, Put put) {
  const int lane = lane_id(), warp = threadIdx.x >> 5, held = (length + PAGE - 1) / PAGE;
  const bool alone = CLUSTER == 1 || blocks == 1;
  const int begin = alone ? 0 : (int)((u32)pages * rank / CLUSTER);
  const int end = alone ? pages : (int)((u32)pages * (rank + 1) / CLUSTER), count = end - begin;
  const bool near = count <= KEYS;
  u32* keys = near ? s.keys : p.keys + head * p.capacity + start + begin;
  const float* mass = p.log_mass + ((i64)head * p.capacity + start + begin) * GROUP;
  const int* row_table = p.block_table + row * p.table_stride;

  // Loads, all on their way before the first is waited for.  First what `score` saw of the row, of one query head.
  const int parts = parts_of(scored, p.parts);
  const int first = part_of(scored, start, parts), last = part_of(scored, start + pages - 1, parts);
  const int piece = warp / COLUMNS, slots = (last - first + 1) * SUBS;
  const float2* seen = p.partial + (i64)head * GROUP * p.slots + (i64)(first + row) * SUBS;
  float2 part[PARTS];
  auto load_parts = [&](int g, int from) {
    const float2* mine = seen + g * p.slots + from;
    const int left = piece < PIECES ? slots - from : 0;
#pragma unroll
    for (int k = 0; k < PARTS; k++) part[k] = k * LANES < left ? mine[k * LANES] : make_float2(-INF, 0.f);
  };
  load_parts(warp % COLUMNS, piece * 32 + lane);
  float early[EARLY ? EARLY : 1][GROUP];
#pragma unroll
  for (int k = 0; k < EARLY; k++) load_masses(early[k], mass, threadIdx.x + k * THREADS, count);
  const int first_entry = begin / PAGES_A_BLOCK;
  if (near) {
#pragma unroll 1
    for (int i = threadIdx.x; i <= (end - 1) / PAGES_A_BLOCK - first_entry; i += THREADS)
      copy_async_4(shared_address(&s.table[i]), row_table + first_entry + i);
    copy_async_commit();
  }

  // Each query head's maximum and sum over the row's pages.
  for (int g = warp % COLUMNS; g < GROUP && piece < PIECES; g += COLUMNS) {
    float top = -INF, sum = 0.f;
    for (int from = piece * 32 + lane; from - lane < slots; from += PARTS * LANES) {
      if (g != warp % COLUMNS || from != piece * 32 + lane) load_parts(g, from);
      float highest = top;
#pragma unroll
      for (int k = 0; k < PARTS; k++) highest = fmaxf(highest, part[k].x);
      const float base = highest > -INF ? highest : 0.f;
      sum *= exp2_fast(top - base);
#pragma unroll
      for (int k = 0; k < PARTS; k++) sum += part[k].y * exp2_fast(part[k].x - base);
      top = highest;
    }
    const float highest = warp_max(top), base = highest > -INF ? highest : 0.f;
    sum = warp_sum(sum * exp2_fast(top - base));
    if (lane == 0) s.pieces[g][piece] = make_float2(highest, sum);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < GROUP; g += THREADS) {
    float top = -INF, sum = 0.f;
#pragma unroll
    for (int i = 0; i < PIECES; i++) top = fmaxf(top, s.pieces[g][i].x);
#pragma unroll
    for (int i = 0; i < PIECES; i++) sum += s.pieces[g][i].x > -INF ? s.pieces[g][i].y * exp2_fast(s.pieces[g][i].x - top) : 0.f;
    s.offset[g] = sum > 0.f ? -top - log2_fast(sum * GROUP) : -INF;
  }
  __syncthreads();

  // Keys: 0 for pages that are not chosen by share, else the share's bits plus 1.
  auto set_key = [&](int i, const float (&masses)[GROUP]) {
    if (i >= count) return;
    const int page = begin + i;
    const bool fixed = page < p.sink_pages || page >= held - p.recent_pages;
    bool unknown = false;
    float share = 0.f;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      unknown = unknown || !(masses[g] < INF);
      share += exp2_fast(masses[g] * LOG2E + s.offset[g]);
    }
    keys[i] = fixed ? 0u : unknown ? __float_as_uint(INF) + 1 : __float_as_uint(fminf(share, 2.f)) + 1;
  };
#pragma unroll
  for (int k = 0; k < EARLY; k++) set_key(threadIdx.x + k * THREADS, early[k]);
#pragma unroll 1
  for (int first = threadIdx.x + EARLY * THREADS; first < count; first += AHEAD * THREADS) {
    float some[AHEAD][GROUP];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) load_masses(some[k], mass, first + k * THREADS, count);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) set_key(first + k * THREADS, some[k]);
  }
  __syncthreads();

  // The threshold, by digits of 10, 10 and 11 bits.
  u32 need = BUDGET_PAGES - p.sink_pages - p.recent_pages, prefix = 0, shift = 31;
#pragma unroll 1
  for (int digit = 0; digit < DIGITS; digit++) {
    const int bits = digit < 2 ? 10 : 11, bins = 1 << bits;
    const u32 above_shift = shift;
    shift -= bits;
    u32* histogram = blocks == 1 ? s.total[digit] : s.local[digit];
#pragma unroll 1
    for (int i = threadIdx.x; i - lane < count; i += THREADS) {
      const u32 key = i < count ? keys[i] : 0u;
      const bool in = key != 0 && (digit == 0 || key >> above_shift == prefix);
      const u32 among = __ballot_sync(FULL, in);
      if (!among) continue;
      const u32 bin = key >> shift & (bins - 1), common = __shfl_sync(FULL, bin, __ffs(among) - 1);
      if (__all_sync(FULL, !in || bin == common)) {  // shares are often alike: one addition for all of them
        if (lane == 0) atomicAdd(&histogram[common], __popc(among));
      } else if (in) {
        atomicAdd(&histogram[bin], 1);
      }
    }
    __syncthreads();
    if (CLUSTER > 1 && blocks > 1) {
      const u32 to = remote(s.total[digit], 0), ready = remote(&s.histogram_ready[digit], 0);
      u32 sent = 0;
#pragma unroll 2
      for (int i = threadIdx.x; i < bins; i += THREADS) {  // whole warps: threads divide the bins
        const u32 some = histogram[i];
        if (some) add_async(to + 4 * i, some, ready);
        sent += __popc(__ballot_sync(FULL, some != 0));
      }
      if (lane == 0) barrier_expect_remote(ready, 4 * sent);
    }
    uint4 found;
    if (rank == 0) {
      if (CLUSTER > 1 && blocks > 1) barrier_wait(shared_address(&s.histogram_ready[digit]), 0);
      found = digit < 2 ? find_digit<BINS / 2>(s, s.total[digit], need) : find_digit<BINS>(s, s.total[digit], need);
      if (threadIdx.x > 0 && threadIdx.x < blocks)
        store_async(remote(&s.found[digit], threadIdx.x), found, remote(&s.found_ready[digit], threadIdx.x));
    } else {
      barrier_wait(shared_address(&s.found_ready[digit]), 0);
      found = s.found[digit];
    }
    prefix = prefix << bits | found.x;
    need -= found.y;
    if (found.z == need) break;  // the whole bin is wanted
  }

  // Each thread takes consecutive pages, an odd number because of the banks; two counts before it give the place of what
  // it chooses.
  const int each = (count + THREADS - 1) / THREADS | 1;
  const int from = min((int)threadIdx.x * each, count), to = min(from + each, count);
  u32 above = 0, at = 0;
#pragma unroll 2
  for (int i = from; i < to; i++) {
    u32 top = keys[i] >> shift;
    above += keys[i] != 0 && top > prefix;
    at += keys[i] != 0 && top == prefix;
  }
  copy_async_wait<0>();  // the block table; scan has a barrier
  u64 total, before = scan(above | (u64)at << 32, s.warp_pairs, total);
  if (CLUSTER > 1 && blocks > 1) {
    if (threadIdx.x < blocks) store_async(remote(&s.counts[rank], threadIdx.x), total, remote(&s.counts_ready, threadIdx.x));
    barrier_wait(shared_address(&s.counts_ready), 0);
    const u64 its = lane < rank ? s.counts[lane] : 0;
    before += __reduce_add_sync(FULL, (u32)its) + ((u64)__reduce_add_sync(FULL, (u32)(its >> 32)) << 32);
  }
  auto physical = [&](u32 entry, int page) { return (int)entry * PAGES_A_BLOCK + page % PAGES_A_BLOCK; };
  if (rank == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.sink_pages + p.recent_pages; i += THREADS) {
      const bool sink = i < p.sink_pages;
      const int page = sink ? i : held - p.recent_pages + i - p.sink_pages;
      put(sink ? i : BUDGET_PAGES - p.recent_pages + i - p.sink_pages, page, physical(row_table[page / PAGES_A_BLOCK], page));
    }
  }
  u32 chosen_above = (u32)before, seen_at = (u32)(before >> 32);
#pragma unroll 1
  for (int i = from; i < to; i++) {
    u32 key = keys[i], top = key >> shift;
    if (key == 0 || top < prefix) continue;
    if (top > prefix || seen_at < need) {
      const int page = begin + i, entry = page / PAGES_A_BLOCK;
      put(p.sink_pages + chosen_above + min(seen_at, need), page, physical(near ? s.table[entry - first_entry] : row_table[entry], page));
    }
    if (top > prefix) chosen_above++; else seen_at++;
  }
}
