// Build: complete pages -> their records, in one layer or in all of them.
//
//     mu = mean(k_i);  D = rows(k_i - mu);  D D^T = U S^2 U^T;  C = U_r S_r;  V = D^T U_r S_r^-1
//
// A warp builds two (page, KV head) at a time.  The 16 x 16 eigenproblem is solved by one-sided Jacobi rotations on
// the columns of a Cholesky factor of D D^T, pivots largest first, which is most of the way there: three sweeps
// instead of eight or more on D D^T itself, and half the digits lost.  One column a lane, two matrices a warp: a
// rotation needs one exchange between two lanes.  The length of D^T u is taken as the singular value. A record depends
// on its page's keys alone: neither the warp's other page nor the batch changes a bit of it.
//
// Needs: PAGES_A_BLOCK, HEAD_DIM, KV_HEADS, RANK, RECORD_BYTES, CENTROID, COLUMNS, COLUMN_BYTES, COEFFICIENTS,
// BASIS_SCALE, COEFFICIENT_SCALE, WARPS, SHARED_BYTES; FP16 or not.

struct Params {
  const u16* const* keys;    // (layers): each (blocks, tokens, KV_HEADS, HEAD_DIM), strided
  u8* const* records;        // (layers): each (blocks, pages a block, KV_HEADS, RECORD_BYTES)
  const int* pages;          // physical pages to build
  const int* count;          // how many
  i64 block_stride, token_stride, head_stride;  // of keys, elements
  i64 block_bytes;
  int layers;
};

constexpr int EACH = HEAD_DIM / 32;         // dimensions a lane
constexpr int STRIDE = HEAD_DIM + 4;        // floats; keeps rows off one another's banks
constexpr int MAX_SWEEPS = 8;
constexpr float SMALL = 1e-4f;              // cosine of two columns that are left as they are
// Where a sweep met none larger, what it leaves is of the order of its square.
constexpr float LAST = 0.1f;
// A singular value below this, beside the largest, is rounding: no direction.
constexpr float LOST = 1e-3f;
constexpr float ZERO_COLUMN = 4.76837158203125e-7f;  // 2^-21 of the largest deviation: rounding noise

struct Page {
  float deviations[PAGE][STRIDE];
  float matrix[PAGE][PAGE + 1];             // the Gram matrix, then the eigenvectors
  __align__(16) u8 record[RECORD_BYTES];
};

static_assert(2 * WARPS * sizeof(Page) <= SHARED_BYTES, "the wrapper asks for less shared memory than is used");

DEVICE int exponent_of(float largest) {     // of the power of two above it, as frexp has it
  if (largest == 0.f) return 0;
  int bits = __float_as_int(largest);
  if (bits >> 23) return (bits >> 23) - 126;
  return (__float_as_int(largest * 18446744073709551616.f) >> 23) - 126 - 64;  // subnormal
}
DEVICE float times_power_of_two(float value, int exponent) {  // exact, also where 2^exponent is no float
  int half = exponent / 2;
  return value * power_of_two(half) * power_of_two(exponent - half);
}

// The page's deviations from its centroid, over 2^(exponent + second), into shared memory; the centroid into the
// record. Returns false where the page holds NaN or infinity.
DEVICE bool load_page(Page& page, const u16* keys, i64 token_stride, int& second) {
  const int lane = lane_id();
  float k[PAGE][EACH];
  float largest = 0.f;
  bool finite = true;
#pragma unroll
  for (int t = 0; t < PAGE; t++) {
    const u16* from = keys + t * token_stride + lane * EACH;
    if constexpr (EACH == 1) {
      k[t][0] = element_low(*from);
    } else {
      u32 pairs[(EACH + 1) / 2];
      if constexpr (EACH == 2) pairs[0] = *(const u32*)from;
      if constexpr (EACH == 4) *(uint2*)pairs = *(const uint2*)from;
      if constexpr (EACH == 8) *(uint4*)pairs = *(const uint4*)from;
#pragma unroll
      for (int i = 0; i < EACH / 2; i++) k[t][2 * i] = element_low(pairs[i]), k[t][2 * i + 1] = element_high(pairs[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      finite = finite && fabsf(k[t][i]) < INF;
      largest = fmaxf(largest, fabsf(k[t][i]));
    }
  }
  if (!__all_sync(FULL, finite)) return false;
  largest = warp_max(largest);
  const int exponent = exponent_of(largest);
  float mean[EACH], spread = 0.f, centre = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < PAGE; t++) {
      k[t][i] = times_power_of_two(k[t][i], -exponent);
      sum += k[t][i];
    }
    mean[i] = sum * (1.f / PAGE);
    centre = fmaxf(centre, fabsf(mean[i]));
#pragma unroll
    for (int t = 0; t < PAGE; t++) {
      k[t][i] -= mean[i];
      spread = fmaxf(spread, fabsf(k[t][i]));
    }
  }
  spread = warp_max(spread);
  second = exponent_of(spread);
#pragma unroll
  for (int t = 0; t < PAGE; t++) {
#pragma unroll
    for (int i = 0; i < EACH; i++) page.deviations[t][lane * EACH + i] = times_power_of_two(k[t][i], -second);
  }
  const u16 scale = float_to_half_up(warp_max(centre) * (1.f / 127.f));
  const float step = half_to_float(scale), inverse = 1.f / step;
#pragma unroll
  for (int i = 0; i < EACH; i++) page.record[CENTROID + lane * EACH + i] = (u8)(step > 0.f ? __float2int_rn(mean[i] * inverse) : 0);
  if (lane == 0) {
    *(u16*)page.record = (u16)(exponent + 32768);
    *(u16*)(page.record + 2) = scale;
  }
  return true;
}

// D D^T: a lane has half a row.
DEVICE void gram(Page& page) {
  const int row = lane_id() >> 1, first = (lane_id() & 1) * 8;
  float sum[8] = {};
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM; d += 4) {
    const float4 a = *(const float4*)&page.deviations[row][d];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 b = *(const float4*)&page.deviations[first + j][d];
      sum[j] += a.x * b.x, sum[j] += a.y * b.y, sum[j] += a.z * b.z, sum[j] += a.w * b.w;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j++) page.matrix[row][first + j] = sum[j];
}

// A factor L of two matrices L L^T, lanes 0-15 and 16-31: column i of L in lane i of its half, and in order of pivots.
DEVICE void cholesky(float (&column)[PAGE], Page& mine) {
  const int lane = lane_id(), i = lane & 15;
  float row[PAGE], left = mine.matrix[i][i];  // row i of L; what is left of the diagonal, below zero once used
  float first = 0.f;
#pragma unroll
  for (int k = 0; k < PAGE; k++) {
    float largest = left;
    int pivot = i;
#pragma unroll
    for (int step = 8; step; step >>= 1) {
      const float other = __shfl_xor_sync(FULL, largest, step);
      const int its = __shfl_xor_sync(FULL, pivot, step);
      if (other > largest || (other == largest && its < pivot)) largest = other, pivot = its;
    }
    if (k == 0) first = largest;
    const bool usable = largest > first * (LOST * LOST) && largest > 0.f;
    float sum = mine.matrix[pivot][i];
#pragma unroll
    for (int m = 0; m < k; m++) sum -= row[m] * __shfl_sync(FULL, row[m], (lane & 16) | pivot);
    row[k] = usable && left >= 0.f ? sum * rsqrtf(largest) : 0.f;
    left = i == pivot ? -1.f : left < 0.f ? left : fmaxf(left - row[k] * row[k], 0.f);
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < PAGE; k++) mine.matrix[i][k] = row[k];
  __syncwarp();
#pragma unroll
  for (int k = 0; k < PAGE; k++) column[k] = mine.matrix[k][i];
}

// Eigenvectors of two symmetric matrices, lanes 0-15 and 16-31, in order of eigenvalue, into matrix[rank][token].
DEVICE void eigenvectors(Page* pages) {
  const int lane = lane_id(), i = lane & 15;
  Page& mine = pages[lane >> 4];
  float column[PAGE];
  cholesky(column, mine);
  bool done = false;  // of this half's matrix: it may not depend on the other's
  float own = 0.f;    // squared length of the column, kept up to date through the rotations
  for (int sweep = 0; sweep < MAX_SWEEPS; sweep++) {
    own = 0.f;
#pragma unroll
    for (int k = 0; k < PAGE; k++) own += column[k] * column[k];
    float steepest = 0.f, largest = own;
#pragma unroll
    for (int k = 8; k; k >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, k));
    const float lost = largest * (LOST * LOST);
    for (int round = 0; round < PAGE - 1; round++) {
      // Round robin: i and j meet where i + j = round (mod 15); who would meet itself meets 15.
      int j = round - i + (round < i ? 15 : 0);
      if (i == 15) j = round * 8 % 15; else if (j == i) j = 15;
      const int partner = (lane & 16) | j;
      float other[PAGE], part[4] = {};
      const float its = __shfl_sync(FULL, own, partner);
#pragma unroll
      for (int k = 0; k < PAGE; k++) {
        other[k] = __shfl_sync(FULL, column[k], partner);
        part[k & 3] += column[k] * other[k];
      }
      const float both = (part[0] + part[1]) + (part[2] + part[3]);
      const float product = own * its, cosine = product > 0.f ? fabsf(both) * rsqrtf(product) : 0.f;
      if (own > lost && its > lost) steepest = fmaxf(steepest, cosine);
      const bool lower = i < j;
      const float zeta = __fdividef(lower ? its - own : own - its, 2.f * both);
      const float t = __fdividef(zeta >= 0.f ? 1.f : -1.f, fabsf(zeta) + sqrtf(1.f + zeta * zeta));
      const float c = rsqrtf(1.f + t * t), s = lower ? -c * t : c * t;
      if (!done && cosine > SMALL && t == t) {
        own = fmaxf(own + (lower ? -t : t) * both, 0.f);
#pragma unroll
        for (int k = 0; k < PAGE; k++) column[k] = c * column[k] + s * other[k];
      }
    }
    const u32 rough = __ballot_sync(FULL, steepest > LAST);
    done = done || !(rough & (lane < 16 ? 0xffffu : 0xffff0000u));
    if (__all_sync(FULL, done)) break;
  }
  float square = 0.f;
#pragma unroll
  for (int k = 0; k < PAGE; k++) square += column[k] * column[k];
  int place = 0;
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < PAGE; k++) {
    float its = __shfl_sync(FULL, square, (lane & 16) | k);
    place += its > square || (its == square && k < i);
    largest = fmaxf(largest, its);
  }
  const float inverse = square > largest * (LOST * LOST) ? rsqrtf(square) : 0.f;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < PAGE; k++) mine.matrix[place][k] = column[k] * inverse;
}

// Basis, coefficients and tail into the record.
DEVICE void finish_page(Page& page, int second) {
  const int lane = lane_id();
  float energy = 0.f, v[RANK][EACH];
#pragma unroll
  for (int c = 0; c < RANK; c++) {
#pragma unroll
    for (int i = 0; i < EACH; i++) v[c][i] = 0.f;
  }
#pragma unroll 4
  for (int t = 0; t < PAGE; t++) {
    float d[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) d[i] = page.deviations[t][lane * EACH + i], energy += d[i] * d[i];
#pragma unroll
    for (int c = 0; c < RANK; c++) {
      const float u = page.matrix[c][t];
#pragma unroll
      for (int i = 0; i < EACH; i++) v[c][i] += u * d[i];
    }
  }
  energy = warp_sum(energy);
  float lengths[RANK];
#pragma unroll
  for (int c = 0; c < RANK; c++) {
    float square = 0.f, largest = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) square += v[c][i] * v[c][i], largest = fmaxf(largest, fabsf(v[c][i]));
    square = warp_sum(square);
    const float length = sqrtf(square);
    lengths[c] = length > ZERO_COLUMN ? length : 0.f;
    energy -= lengths[c] > 0.f ? square : 0.f;
    const float inverse = lengths[c] > 0.f ? 1.f / length : 0.f;
    const u16 scale = float_to_half_up(warp_max(largest) * inverse * (1.f / 7.f));
    const float step = half_to_float(scale), steps = inverse / step;
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int code = step > 0.f ? __float2int_rn(v[c][i] * steps) : 0;
      code = code < -7 ? -7 : code > 7 ? 7 : code;
      codes |= (u32)(code + 8) << (4 * i);
    }
    u8* to = page.record + COLUMNS + c * COLUMN_BYTES;
    if constexpr (EACH == 1) {
      codes |= __shfl_xor_sync(FULL, codes, 1) << 4;
      if (!(lane & 1)) to[lane / 2] = (u8)codes;
    }
    if constexpr (EACH == 2) to[lane] = (u8)codes;
    if constexpr (EACH == 4) *(u16*)(to + 2 * lane) = (u16)codes;
    if constexpr (EACH == 8) *(u32*)(to + 4 * lane) = codes;
    if (lane == 0) *(u16*)(page.record + BASIS_SCALE + 2 * c) = scale;
  }
  if (lane == 0) *(float*)(page.record + 4) = times_power_of_two(fmaxf(energy, 0.f), 2 * second);
  if (lane < PAGE) {
    float entries[RANK], largest = 0.f;
#pragma unroll
    for (int c = 0; c < RANK; c++) {
      entries[c] = times_power_of_two(page.matrix[c][lane] * lengths[c], second);
      largest = fmaxf(largest, fabsf(entries[c]));
    }
    const u16 scale = float_to_half_up(largest * (1.f / 127.f));
    const float step = half_to_float(scale), inverse = 1.f / step;
    *(u16*)(page.record + COEFFICIENT_SCALE + 2 * lane) = scale;
#pragma unroll
    for (int c = 0; c < RANK; c++) {
      int code = step > 0.f ? __float2int_rn(entries[c] * inverse) : 0;
      code = code < -127 ? -127 : code > 127 ? 127 : code;
      page.record[COLUMNS + c * COLUMN_BYTES + COEFFICIENTS + lane] = (u8)code;
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) build_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 raw[];
  const int warp = threadIdx.x >> 5, lane = lane_id();
  Page* pages = (Page*)raw + 2 * warp;
  wait_for_previous_kernel();
  const int count = *p.count;
  const i64 total = (i64)count * KV_HEADS * p.layers;
  for (i64 first = 2 * ((i64)blockIdx.x * WARPS + warp); first < total; first += 2 * (i64)gridDim.x * WARPS) {
    bool usable[2] = {false, false};
    int second[2] = {0, 0};
    u8* to[2] = {nullptr, nullptr};
    for (int half = 0; half < 2; half++) {
      Page& page = pages[half];
      for (int i = lane; i < RECORD_BYTES / 4; i += 32) ((u32*)page.record)[i] = 0;
      const i64 at = first + half;
      if (at < total) {
        const int head = (int)(at % KV_HEADS), layer = (int)(at / KV_HEADS / count);
        const int physical = p.pages[at / KV_HEADS % count], slot = physical % PAGES_A_BLOCK;
        const i64 block = physical / PAGES_A_BLOCK;
        to[half] = p.records[layer] + block * p.block_bytes + (i64)(slot * KV_HEADS + head) * RECORD_BYTES;
        const u16* keys = p.keys[layer] + block * p.block_stride + (i64)slot * PAGE * p.token_stride + head * p.head_stride;
        __syncwarp();
        usable[half] = load_page(page, keys, p.token_stride, second[half]);
      }
      __syncwarp();
      if (usable[half]) {
        gram(page);
      } else {
        for (int i = lane; i < PAGE * (PAGE + 1); i += 32) (&page.matrix[0][0])[i] = 0.f;
      }
    }
    __syncwarp();
    eigenvectors(pages);
    __syncwarp();
    for (int half = 0; half < 2; half++) {
      if (usable[half]) finish_page(pages[half], second[half]);
      __syncwarp();
      if (to[half]) {
        for (int i = lane; i < RECORD_BYTES / 16; i += 32) ((uint4*)to[half])[i] = ((const uint4*)pages[half].record)[i];
      }
    }
    __syncwarp();
  }
}
