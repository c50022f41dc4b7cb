// Channel statistics and normalisation with them, for batch and group normalisation. Elements are samples × positions ×
// channels; `groups` of neighbouring channels share statistics.
#include "common.cuh"

struct Channels {
  int samples, places, channels, groups;

  __device__ __forceinline__ long long elements() const { return (long long)samples * places * channels; }

  // Returns the group of an element, counted over all samples.
  __device__ __forceinline__ long long group(long long at) const {
    return at / channels / places * groups + int(at % channels) / (channels / groups);
  }
};

#define CHANNELS int samples, int places, int channels, int groups
#define THE_CHANNELS Channels { samples, places, channels, groups }

// Calls body(i) for all i in 0..n, spread over the grid.
template <class F>
__device__ __forceinline__ void spread(long long n, F body) {
  long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) body(i);
}

// Returns the sample of a block in grids of `partial_sums`.
__device__ __forceinline__ int sample_of(const Channels& s) { return int(blockIdx.x / (gridDim.x / s.samples)); }

// partial[sample][chunk] = (Σ a, Σ b) over a chunk of places, each of `channels`, where add(element, channel, a, b) adds for a
// place. Block: (32, 8), grid: (samples·chunks, ceil(channels / 32)), the chunks of a sample one after the other: along x a
// grid may be long. Thread row y adds every eighth place; the eight sums meet in order.
template <class F>
__device__ __forceinline__ void partial_sums(float* partial, const Channels& s, int chunk, F add) {
  __shared__ float sums[2][8][33];
  int sample = sample_of(s), chunks = int(gridDim.x) / s.samples;
  int channel = blockIdx.y * 32 + threadIdx.x, first = (int(blockIdx.x) - sample * chunks) * chunk;
  int end = first + chunk < s.places ? first + chunk : s.places;
  float a = 0.0f, b = 0.0f;
  if (channel < s.channels)
    for (int place = first + threadIdx.y; place < end; place += 8)
      add(((long long)sample * s.places + place) * s.channels + channel, channel, a, b);
  sums[0][threadIdx.y][threadIdx.x] = a, sums[1][threadIdx.y][threadIdx.x] = b;
  __syncthreads();
  if (threadIdx.y < 2 && channel < s.channels) {
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += sums[threadIdx.y][i][threadIdx.x];
    long long at = (long long)blockIdx.x * 2 + threadIdx.y;
    partial[at * s.channels + channel] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(256) moments_partial(const elem* x, float* partial, int chunk, CHANNELS) {
  const Channels s = THE_CHANNELS;
  const elem* first = x + (long long)sample_of(s) * places * channels;
  partial_sums(partial, s, chunk, [&](long long at, int channel, float& a, float& b) {
    float apart = to_float(x[at]) - to_float(first[channel]);
    a += apart, b += apart * apart;
  });
}

extern "C" __global__ void __launch_bounds__(256)
    backward_partial(const elem* x, const elem* dy, const float* stats, float* partial, int chunk, CHANNELS) {
  const Channels s = THE_CHANNELS;
  partial_sums(partial, s, chunk, [&](long long at, int channel, float& a, float& b) {
    const float* of = stats + 2 * s.group(at);
    float d = to_float(dy[at]);
    a += d, b += d * ((to_float(x[at]) - of[0]) * of[1]);
  });
}

// out[sample] = the sums of its chunks, and before them the channels of its first place unless `x` is null.
// Grid: any; block: any.
extern "C" __global__ void finish(const elem* x, const float* partial, float* out, int chunks, CHANNELS) {
  int before = x ? channels : 0, both = 2 * channels;
  spread((long long)samples * (before + both), [&](long long i) {
    long long sample = i / (before + both);
    int at = int(i % (before + both)) - before;
    float sum = at < 0 ? to_float(x[sample * places * channels + at + before]) : 0.0f;
    for (int chunk = 0; at >= 0 && chunk < chunks; chunk++) sum += partial[(sample * chunks + chunk) * both + at];
    out[i] = sum;
  });
}

extern "C" __global__ void channel_norm(const elem* x, const float* stats, const elem* weight, const elem* bias, elem* y,
                                        CHANNELS) {
  const Channels s = THE_CHANNELS;
  spread(s.elements(), [&](long long at) {
    const float* of = stats + 2 * s.group(at);
    int channel = int(at % channels);
    y[at] = from_float<elem>((to_float(x[at]) - of[0]) * (of[1] * to_float(weight[channel])) + to_float(bias[channel]));
  });
}

extern "C" __global__ void channel_norm_backward(const elem* x, const elem* dy, const float* stats, const elem* weight,
                                                 const float* means, elem* dx, CHANNELS) {
  const Channels s = THE_CHANNELS;
  spread(s.elements(), [&](long long at) {
    const float *of = stats + 2 * s.group(at), *mean = means + 2 * s.group(at);
    float hat = (to_float(x[at]) - of[0]) * of[1], g = to_float(dy[at]) * to_float(weight[at % channels]);
    dx[at] = from_float<elem>(of[1] * (g - mean[0] - hat * mean[1]));
  });
}
