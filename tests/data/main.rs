//! Data: shards, imports, files of other programs, mixtures, local copies, checksums, sample
//! weights.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod bounded;
mod errors;
mod hostile;
mod images;
mod layouts;
mod mix;
mod numpy;
mod odd_hdf5;
mod read;
mod sample_weights;
mod samples;
mod sandbox;
mod stage;
mod tables;
mod text;
mod verify;
mod vocabularies;

/// Creates an HDF5 file, replacing one that may exist. That one is not truncated: a child that
/// another test has just forked may still hold its descriptor, and with it HDF5's lock.
fn create_hdf5(path: impl AsRef<std::path::Path>) -> hdf5::File {
    let _ = std::fs::remove_file(path.as_ref());
    hdf5::File::create(path).unwrap()
}
