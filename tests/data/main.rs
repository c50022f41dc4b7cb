//! Data: shards, imports, files of other programs, mixing, staging, checksums, weights of samples.
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
