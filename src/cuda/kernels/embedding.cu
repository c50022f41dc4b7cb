// y[row] = token_table[tokens[row] - first] + position_table[row % time], which may be null. The token table has
// `words` rows; tokens without a row give zeros. Grid: any; block: any.
#include "vector.cuh"

extern "C" __global__ void embedding(const unsigned* tokens, const elem* token_table, const elem* position_table,
                                     elem* y, int rows, int time, int width, int first, int words) {
  long long n = (long long)rows * width;
  bool by_pack = width % Pack<elem>::SIZE == 0 && aligned(token_table) && aligned(position_table) && aligned(y);
  each<elem>(
      n, by_pack,
      [&](long long i) {
        int row = int(i / width), column = int(i % width);
        float word[Pack<elem>::SIZE] = {}, place[Pack<elem>::SIZE] = {};
        unsigned at = tokens[row] - unsigned(first);
        if (at < unsigned(words)) load_pack(word, token_table + (long long)at * width + column);
        if (position_table) load_pack(place, position_table + (long long)(row % time) * width + column);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) word[k] += place[k];
        store_pack(y + i, word);
      },
      [&](long long i) {
        int row = int(i / width), column = int(i % width);
        unsigned at = tokens[row] - unsigned(first);
        float word = at < unsigned(words) ? to_float(token_table[(long long)at * width + column]) : 0.0f;
        if (position_table) word += to_float(position_table[(long long)(row % time) * width + column]);
        y[i] = from_float<elem>(word);
      });
}
