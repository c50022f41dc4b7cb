// Rotary position embeddings (Su et al., 2021) in place: in each of the first `heads` heads of a row, elements i and i
// + half are rotated by angle i of the row's position, or back by it. Rows are `stride` elements apart and have
// position row % time. The table has the cosines of the `half` angles of each position, then the sines, as float. Grid:
// any; block: any.
#include "common.cuh"

extern "C" __global__ void rotary(const float* table, elem* x, int rows, int time, int heads, int half, int stride,
                                  int back) {
  long long pairs = (long long)heads * half, n = rows * pairs, threads = (long long)gridDim.x * blockDim.x;
  for (long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x; at < n; at += threads) {
    long long row = at / pairs;
    int pair = int(at % pairs), head = pair / half, i = pair % half;
    const float* angles = table + row % time * 2 * half;
    float c = angles[i], s = back ? -angles[half + i] : angles[half + i];
    elem* first = x + row * stride + head * 2 * half + i;
    float a = to_float(first[0]), b = to_float(first[half]);
    first[0] = from_float<elem>(a * c - b * s), first[half] = from_float<elem>(b * c + a * s);
  }
}
