//! Tests that relaunch themselves under `mpirun`.

use std::process::{Command, ExitStatus};
use std::time::Duration;

use super::launch;

/// The variable that is set in a relaunched test, which is a rank.
pub const ROLE: &str = "HPCTRAIN_TEST_RANK_OF";

pub fn is_rank_of(test: &str) -> bool {
    std::env::var(ROLE).is_ok_and(|role| role == test)
}

/// Runs `test` of this program on some ranks. Returns how it ended and what it printed; fails after
/// `seconds`.
pub fn mpirun(
    test: &str,
    ranks: usize,
    ranks_per_node: usize,
    seconds: u64,
) -> (ExitStatus, String) {
    mpirun_with(test, ranks, ranks_per_node, seconds, &[])
}

/// Does the same as [`mpirun`], with environment variables.
pub fn mpirun_with(
    test: &str,
    ranks: usize,
    ranks_per_node: usize,
    seconds: u64,
    variables: &[(&str, &str)],
) -> (ExitStatus, String) {
    let mut command = command(test, ranks, ranks_per_node);
    let ended =
        launch::start(command.envs(variables.iter().copied())).finish(Duration::from_secs(seconds));
    (ended.status, ended.stdout + &ended.stderr)
}

/// Returns a command that runs `test` of this program on some ranks.
pub fn command(test: &str, ranks: usize, ranks_per_node: usize) -> Command {
    // With another name no test would run, and the result would be a success.
    assert_eq!(launch::test_name(), test);
    let mut command = launch::mpirun(ranks);
    command.env("HPCTRAIN_RANKS_PER_NODE", ranks_per_node.to_string());
    command.arg(std::env::current_exe().unwrap()).env(ROLE, test);
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
}
