//! The `hpctrain` program.

fn main() {
    std::process::exit(hpctrain::cli::run());
}
