//! The `hpctrain` program.

fn main() {}
