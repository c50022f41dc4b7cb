// Sliding windows over images, channels last: im2col for convolutions, and pooling. One thread computes an element of a
// result, and adds in a fixed order, without atomics. Grid: any; block: any.
#include "common.cuh"

// The fields of Im2colShape, which are passed as separate arguments.
struct Window {
  int batch, height, width, channels, rows, columns, down, right, above, left, high, wide;
};

#define WINDOW                                                                                                     \
  int batch, int height, int width, int channels, int rows, int columns, int down, int right, int above, int left, \
      int high, int wide
#define THE_WINDOW \
  Window { batch, height, width, channels, rows, columns, down, right, above, left, high, wide }

// Calls `body` for every number below n, spread over the threads of the grid.
template <class F>
__device__ __forceinline__ void spread(long long n, F body) {
  long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) body(i);
}

// The position of an element in b × rows × columns × `channels` elements.
struct Place {
  long long image;
  int row, column, channel;

  __device__ __forceinline__ Place(long long at, int rows, int columns, int channels)
      : image(at / channels / columns / rows),
        row(int(at / channels / columns % rows)),
        column(int(at / channels % columns)),
        channel(int(at % channels)) {}
};

// Returns the offset of an element of the images.
__device__ __forceinline__ long long in_images(const Window& w, long long image, int row, int column, int channel) {
  return ((image * w.height + row) * w.width + column) * w.channels + channel;
}

// Returns the rows (or columns) of the image in the window at a place: [first, last).
__device__ __forceinline__ void seen(int place, int stride, int padding, int size, int len, int& first, int& last) {
  first = place * stride - padding, last = first + size;
  if (first < 0) first = 0;
  if (last > len) last = len;
}

// Returns the places whose windows contain a row (or column): [first, last).
__device__ __forceinline__ void seeing(int at, int stride, int padding, int size, int places, int& first, int& last) {
  int from = at + padding - size + 1;
  first = from <= 0 ? 0 : (from + stride - 1) / stride;
  last = (at + padding) / stride + 1;
  if (last > places) last = places;
}

extern "C" __global__ void unfold(const elem* x, elem* y, int first, int taken, WINDOW) {
  Window w = THE_WINDOW;
  long long row = (long long)w.rows * w.columns * taken;
  spread((long long)w.batch * w.high * w.wide * row, [&](long long at) {
    int channel = int(at % taken), j = int(at / taken % w.columns), i = int(at / taken / w.columns % w.rows);
    long long place = at / row;
    int column = int(place % w.wide) * w.right - w.left + j;
    int line = int(place / w.wide % w.high) * w.down - w.above + i;
    long long image = place / w.wide / w.high;
    bool inside = line >= 0 && line < w.height && column >= 0 && column < w.width;
    y[at] = inside ? x[in_images(w, image, line, column, first + channel)] : from_float<elem>(0.0f);
  });
}

// dx += the gradients of its copies.
extern "C" __global__ void fold(const elem* dy, elem* dx, int first, int taken, WINDOW) {
  Window w = THE_WINDOW;
  spread((long long)w.batch * w.height * w.width * taken, [&](long long at) {
    const Place of(at, w.height, w.width, taken);
    int top, bottom, begin, end;
    seeing(of.row, w.down, w.above, w.rows, w.high, top, bottom);
    seeing(of.column, w.right, w.left, w.columns, w.wide, begin, end);
    float sum = 0.0f;
    for (int h = top; h < bottom; h++)
      for (int v = begin; v < end; v++) {
        int i = of.row + w.above - h * w.down, j = of.column + w.left - v * w.right;
        sum += to_float(dy[((((of.image * w.high + h) * w.wide + v) * w.rows + i) * w.columns + j) * taken + of.channel]);
      }
    elem* to = dx + in_images(w, of.image, of.row, of.column, first + of.channel);
    *to = from_float<elem>(to_float(*to) + sum);
  });
}

// Returns the position of the first of the largest elements in the window at (h, v).
__device__ __forceinline__ long long largest(const elem* x, const Window& w, long long image, int h, int v, int channel) {
  int top, bottom, begin, end;
  seen(h, w.down, w.above, w.rows, w.height, top, bottom);
  seen(v, w.right, w.left, w.columns, w.width, begin, end);
  long long at = -1;
  for (int line = top; line < bottom; line++)
    for (int column = begin; column < end; column++) {
      long long place = in_images(w, image, line, column, channel);
      if (at < 0 || to_float(x[place]) > to_float(x[at])) at = place;
    }
  return at;
}

extern "C" __global__ void max_pool(const elem* x, elem* y, WINDOW) {
  Window w = THE_WINDOW;
  spread((long long)w.batch * w.high * w.wide * w.channels, [&](long long at) {
    const Place of(at, w.high, w.wide, w.channels);
    y[at] = x[largest(x, w, of.image, of.row, of.column, of.channel)];
  });
}

extern "C" __global__ void max_pool_backward(const elem* x, const elem* dy, elem* dx, WINDOW) {
  Window w = THE_WINDOW;
  spread((long long)w.batch * w.height * w.width * w.channels, [&](long long at) {
    const Place of(at, w.height, w.width, w.channels);
    int top, bottom, begin, end;
    seeing(of.row, w.down, w.above, w.rows, w.high, top, bottom);
    seeing(of.column, w.right, w.left, w.columns, w.wide, begin, end);
    float sum = 0.0f;
    for (int h = top; h < bottom; h++)
      for (int v = begin; v < end; v++)
        if (largest(x, w, of.image, h, v, of.channel) == at)
          sum += to_float(dy[((of.image * w.high + h) * w.wide + v) * w.channels + of.channel]);
    dx[at] = from_float<elem>(sum);
  });
}

// Returns the number of elements in the window at (h, v), without padding.
__device__ __forceinline__ int count(const Window& w, int h, int v) {
  int top, bottom, begin, end;
  seen(h, w.down, w.above, w.rows, w.height, top, bottom);
  seen(v, w.right, w.left, w.columns, w.width, begin, end);
  return (bottom - top) * (end - begin);
}

extern "C" __global__ void average_pool(const elem* x, elem* y, WINDOW) {
  Window w = THE_WINDOW;
  spread((long long)w.batch * w.high * w.wide * w.channels, [&](long long at) {
    const Place of(at, w.high, w.wide, w.channels);
    int top, bottom, begin, end;
    seen(of.row, w.down, w.above, w.rows, w.height, top, bottom);
    seen(of.column, w.right, w.left, w.columns, w.width, begin, end);
    float sum = 0.0f;
    for (int line = top; line < bottom; line++)
      for (int column = begin; column < end; column++)
        sum += to_float(x[in_images(w, of.image, line, column, of.channel)]);
    y[at] = from_float<elem>(sum / count(w, of.row, of.column));
  });
}

extern "C" __global__ void average_pool_backward(const elem* dy, elem* dx, WINDOW) {
  Window w = THE_WINDOW;
  spread((long long)w.batch * w.height * w.width * w.channels, [&](long long at) {
    const Place of(at, w.height, w.width, w.channels);
    int top, bottom, begin, end;
    seeing(of.row, w.down, w.above, w.rows, w.high, top, bottom);
    seeing(of.column, w.right, w.left, w.columns, w.wide, begin, end);
    float sum = 0.0f;
    for (int h = top; h < bottom; h++)
      for (int v = begin; v < end; v++)
        sum += to_float(dy[((of.image * w.high + h) * w.wide + v) * w.channels + of.channel]) / count(w, h, v);
    dx[at] = from_float<elem>(sum);
  });
}
