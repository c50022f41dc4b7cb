//! Sharded HDF5 data: shards, sample order, prefetching, import, verification.
