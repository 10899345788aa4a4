// Select: log-masses -> the pages that each row and KV head attends, as physical pages.
//
//     share(j) = mean_g softmax_j s_g(j)                                                                      (Eq. 5)
//
// The sink pages, the best others by share, the recent pages: `budget_pages` in all, ascending, ties to the lower page.
// A page whose log-mass is +inf or NaN comes before any other and stays out of the denominators.
//
// One row and head is one cluster of blocks, each with a range of the pages.  Shares become integers that sort alike,
// and the threshold is found by radix, digits from the top: each block adds its histogram to the first block's through
// distributed shared memory, and that one finds the digit and tells the others (all reading its histogram would
// queue). It stops as soon as a bin is wanted whole.  Two counts, handed to every block, then give every chosen page
// its place. A row of few pages is its first block's alone: what the others would save is less than what it takes to
// meet them.
//
// Needs: PAGES_A_BLOCK, GROUP, KV_HEADS, SUBS (as in score.cu), THREADS, KEYS (that fit shared memory), SHARED_BYTES.

struct Params {
  const float* log_mass;     // (KV_HEADS, capacity, GROUP)
  const float2* partial;     // (KV_HEADS, GROUP, slots)
  const int* start;          // (rows + 1)
  const int* lengths;        // (rows)
  const int* block_table;    // (rows, blocks of a row)
  int* pages;                // (rows, KV_HEADS, budget_pages): physical pages
  int* logical;              // the same as page numbers of the row, or null
  u32* keys;                 // (KV_HEADS, capacity): shares as keys, where shared memory is too small for them
  i64 table_stride, capacity, slots;
  int rows, parts, least_pages;  // parts and least_pages as in score.cu
  int budget_pages, sink_pages, recent_pages;
};

constexpr int DIGITS = 3;
constexpr int BINS = 2048;                              // of the last digit; the first two have half as many
constexpr int MAX_BLOCKS = 16;
constexpr int ALONE = 2 * THREADS;                      // pages that one block takes alone
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = GROUP < WARPS ? GROUP : WARPS;  // query heads whose partial sums are merged at a time
constexpr int PIECES = WARPS / COLUMNS;                 // warps that merge one head's

DEVICE u32 cluster_size() { u32 n; asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n)); return n; }
DEVICE u32 cluster_rank() { u32 n; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(n)); return n; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 remote(const void* shared, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}
DEVICE void remote_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE void remote_add(u32 address, u32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

struct Shared {
  u32 local[BINS];                  // this block's histogram
  u32 total[DIGITS][BINS];          // in the first block: the cluster's
  u32 counts[MAX_BLOCKS][2];        // pages of each block above the threshold, and at it
  u32 warps[WARPS];
  u64 warp_pairs[WARPS];
  float2 pieces[GROUP][PIECES];
  float top[GROUP], inverse[GROUP];
  u32 found[3];                     // the digit, pages above it, pages inside it
};

static_assert(sizeof(Shared) + KEYS * 4 <= SHARED_BYTES, "the wrapper asks for less shared memory than is used");

// Exclusive sum over the block, and the total.
template <class T> DEVICE T scan(T value, T* warps, T& total) {
  const int lane = lane_id(), warp = threadIdx.x >> 5;
  T sum = value;
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    T below = __shfl_up_sync(FULL, sum, k);
    if (lane >= k) sum += below;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  T all = lane < WARPS ? warps[lane] : 0;  // every warp adds up the warps
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    T below = __shfl_up_sync(FULL, all, k);
    if (lane >= k) all += below;
  }
  total = __shfl_sync(FULL, all, 31);
  T before = __shfl_sync(FULL, all, warp > 0 ? warp - 1 : 0);
  return (warp > 0 ? before : 0) + sum - value;
}

// The largest digit with at least `need` keys at or above it, with the counts above and inside it, to every block's
// s.found; in the first block, which has the cluster's histogram.
template <int COUNT> DEVICE void find_digit(Shared& s, const u32* histogram, u32 need, int blocks) {
  constexpr int EACH = COUNT / THREADS;  // consecutive bins a thread, from the top
  static_assert(EACH >= 1 && EACH * THREADS == COUNT, "threads divide the bins");
  u32 count[EACH], mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) count[i] = histogram[COUNT - 1 - (threadIdx.x * EACH + i)];
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += count[i];
  u32 total, above = scan<u32>(mine, s.warps, total);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (above < need && need <= above + count[i]) {  // one thread
      const u32 found[3] = {COUNT - 1 - (threadIdx.x * EACH + i), above, count[i]};
      for (int block = 0; block < blocks; block++) {
#pragma unroll
        for (int k = 0; k < 3; k++) remote_store(remote(&s.found[k], block), found[k]);
      }
    }
    above += count[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 raw[];
  Shared& s = *(Shared*)raw;
  const int lane = lane_id(), warp = threadIdx.x >> 5;
  const int cluster = (int)cluster_size(), rank = (int)cluster_rank();
  const int item = blockIdx.x / cluster, row = item / KV_HEADS, head = item % KV_HEADS;
  let_next_kernel_start();
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    s.local[i] = 0;
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++) s.total[digit][i] = 0;
  }
  if (threadIdx.x < 3) s.found[threadIdx.x] = 0;
  __syncwarp();
  cluster_arrive();  // waited for before another block's memory is touched
  wait_for_previous_kernel();
  const int start = p.start[row], pages = p.start[row + 1] - start;
  const int blocks = pages <= ALONE ? 1 : cluster;
  if (pages == 0 || rank >= blocks) {  // a row that attends everything, or one that needs fewer blocks
    cluster_wait();
    return;
  }
  auto meet = [&] {
    __syncwarp();  // the cluster's barriers want whole warps, also after code that parted them
    if (blocks == 1) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
  };
  const int length = p.lengths[row], held = (length + PAGE - 1) / PAGE;

  // Each query head's maximum and sum over the row's pages, from what the blocks of `score` saw.
  {
    const int total = p.start[p.rows];
    const int useful = (total + p.least_pages - 1) / p.least_pages, parts = p.parts < useful ? p.parts : useful;
    const int first = part_of(total, start, parts), last = part_of(total, start + pages - 1, parts);
    const int piece = warp / COLUMNS, count = (last - first + 1) * SUBS;
    for (int g = warp % COLUMNS; g < GROUP && piece < PIECES; g += COLUMNS) {
      const float2* seen = p.partial + (i64)(head * GROUP + g) * p.slots + (i64)(first + row) * SUBS;
      float top = -INF, sum = 0.f;
#pragma unroll 4
      for (int i = piece * 32 + lane; i < count; i += PIECES * 32) top = fmaxf(top, seen[i].x);
      const float highest = warp_max(top), base = highest > -INF ? highest : 0.f;
#pragma unroll 4
      for (int i = piece * 32 + lane; i < count; i += PIECES * 32) sum += seen[i].y * exp2_fast(seen[i].x - base);
      sum = warp_sum(sum);
      if (lane == 0) s.pieces[g][piece] = make_float2(highest, sum);
    }
  }
  __syncthreads();
  for (int g = threadIdx.x; g < GROUP; g += THREADS) {
    float top = -INF, sum = 0.f;
    for (int i = 0; i < PIECES; i++) top = fmaxf(top, s.pieces[g][i].x);
    for (int i = 0; i < PIECES; i++) sum += s.pieces[g][i].x > -INF ? s.pieces[g][i].y * exp2_fast(s.pieces[g][i].x - top) : 0.f;
    s.top[g] = top > -INF ? top : 0.f;
    s.inverse[g] = sum > 0.f ? 1.f / (sum * GROUP) : 0.f;
  }
  __syncthreads();

  // Keys: 0 for pages that are not chosen by share, else the share's bits plus 1.
  const int begin = (int)((i64)pages * rank / blocks), end = (int)((i64)pages * (rank + 1) / blocks), count = end - begin;
  u32* keys = count <= KEYS ? (u32*)(raw + sizeof(Shared)) : p.keys + head * p.capacity + start + begin;
  const float* mass = p.log_mass + ((i64)head * p.capacity + start + begin) * GROUP;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += THREADS) {
    float share = 0.f;
    bool unknown = false;
    auto add = [&](float value, int g) {
      value *= LOG2E;
      unknown = unknown || !(value < INF);
      share += exp2_fast(value - s.top[g]) * s.inverse[g];
    };
    if constexpr (GROUP % 4 == 0) {
#pragma unroll
      for (int g = 0; g < GROUP; g += 4) {
        float4 four = *(const float4*)(mass + (i64)i * GROUP + g);
        add(four.x, g), add(four.y, g + 1), add(four.z, g + 2), add(four.w, g + 3);
      }
    } else {
      for (int g = 0; g < GROUP; g++) add(mass[(i64)i * GROUP + g], g);
    }
    const int page = begin + i;
    const bool fixed = page < p.sink_pages || page >= held - p.recent_pages;
    keys[i] = fixed ? 0u : unknown ? __float_as_uint(INF) + 1 : __float_as_uint(fminf(share, 2.f)) + 1;
  }
  __syncthreads();

  // The threshold, by digits of 10, 10 and 11 bits.
  u32 need = p.budget_pages - p.sink_pages - p.recent_pages, prefix = 0, shift = 31;
  for (int digit = 0; digit < DIGITS; digit++) {
    const int bits = digit < 2 ? 10 : 11, bins = 1 << bits;
    const u32 above_shift = shift;
    shift -= bits;
    for (int i = threadIdx.x; i - lane < count; i += THREADS) {
      const u32 key = i < count ? keys[i] : 0u;
      const bool in = key != 0 && (digit == 0 || key >> above_shift == prefix);
      const u32 among = __ballot_sync(FULL, in);
      if (!among) continue;
      const u32 bin = key >> shift & (bins - 1), common = __shfl_sync(FULL, bin, __ffs(among) - 1);
      if (__all_sync(FULL, !in || bin == common)) {  // shares are often alike: one addition for all of them
        if (lane == 0) atomicAdd(&s.local[common], __popc(among));
      } else if (in) {
        atomicAdd(&s.local[bin], 1);
      }
    }
    __syncthreads();
    __syncwarp();
    if (digit == 0) cluster_wait();
    if (blocks == 1) {
      for (int i = threadIdx.x; i < bins; i += THREADS) s.total[digit][i] = s.local[i], s.local[i] = 0;
    } else {
      const u32 histogram = remote(s.total[digit], 0);
      for (int i = threadIdx.x; i < bins; i += THREADS) {
        const u32 some = s.local[i];
        if (some) remote_add(histogram + 4 * i, some), s.local[i] = 0;
      }
    }
    meet();
    if (rank == 0) {
      if (digit < 2) find_digit<BINS / 2>(s, s.total[digit], need, blocks); else find_digit<BINS>(s, s.total[digit], need, blocks);
    }
    meet();
    prefix = prefix << bits | s.found[0];
    need -= s.found[1];
    if (s.found[2] == need) break;  // the whole bin is wanted
  }

  // Each thread takes consecutive pages; two counts before it give the place of what it chooses.
  const int each = (count + THREADS - 1) / THREADS;
  const int from = min((int)threadIdx.x * each, count), to = min(from + each, count);
  u32 above = 0, at = 0;
  for (int i = from; i < to; i++) {
    u32 top = keys[i] >> shift;
    above += keys[i] != 0 && top > prefix;
    at += keys[i] != 0 && top == prefix;
  }
  u64 total, before = scan<u64>(above | (u64)at << 32, s.warp_pairs, total);
  if (threadIdx.x < blocks) {
    remote_store(remote(&s.counts[rank][0], threadIdx.x), (u32)total);
    remote_store(remote(&s.counts[rank][1], threadIdx.x), (u32)(total >> 32));
  }
  meet();  // the last time that a block's memory is another's business
  for (int r = 0; r < rank; r++) before += s.counts[r][0] + ((u64)s.counts[r][1] << 32);
  const int* table = p.block_table + row * p.table_stride;
  const i64 out = (i64)item * p.budget_pages;
  auto put = [&](int place, int page) {
    if (place >= p.budget_pages) return;  // only if the row's length is not the one that was planned
    p.pages[out + place] = table[page / PAGES_A_BLOCK] * PAGES_A_BLOCK + page % PAGES_A_BLOCK;
    if (p.logical) p.logical[out + place] = page;
  };
  u32 chosen_above = (u32)before, seen_at = (u32)(before >> 32);
  for (int i = from; i < to; i++) {
    u32 key = keys[i], top = key >> shift;
    if (key == 0 || top < prefix) continue;
    if (top > prefix || seen_at < need) put(p.sink_pages + chosen_above + min(seen_at, need), begin + i);
    if (top > prefix) chosen_above++; else seen_at++;
  }
  if (rank == 0) {
    for (int i = threadIdx.x; i < p.sink_pages; i += THREADS) put(i, i);
    for (int i = threadIdx.x; i < p.recent_pages; i += THREADS) put(p.budget_pages - p.recent_pages + i, held - p.recent_pages + i);
  }
}
