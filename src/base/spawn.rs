//! Starts named threads, with a hint if the system cannot start one.

use std::path::Path;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use rustix::process::{Resource, getrlimit};

use crate::control_groups::groups;
use crate::error::{Error, Result};

/// Starts a thread.
///
/// # Errors
/// Returns an error if the thread cannot be started. Its hint names the limits on threads that
/// apply.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(|e| refused(name, &e))
}

/// Starts a thread in a scope.
///
/// # Errors
/// Returns an error in the same cases as [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, work).map_err(|e| refused(name, &e))
}

/// Returns the error of a thread that could not be started.
fn refused(name: &str, e: &std::io::Error) -> Error {
    let error = Error::input(format!("cannot start the thread {name}: {e}"));
    if e.kind() != std::io::ErrorKind::WouldBlock {
        return error;
    }
    let limits = limits(Path::new("/"), getrlimit(Resource::Nproc).current);
    if limits.is_empty() {
        return error.hint(
            "the system cannot start another thread: check kernel.threads-max and kernel.pid_max",
        );
    }
    error.hint(format!(
        "raise the limit on processes and threads ({}), or lower run.threads",
        limits.join(", ")
    ))
}

/// Returns the limits on the number of threads with their values: `ulimit -u`, and those of control
/// groups.
fn limits(root: &Path, ulimit: Option<u64>) -> Vec<String> {
    let of_user = ulimit.map(|limit| format!("ulimit -u is {limit}"));
    let of_groups = groups(root, "pids").into_iter().filter_map(|(_, group)| {
        let path = group.join("pids.max");
        // "max" without a limit.
        let limit: u64 = std::fs::read_to_string(&path).ok()?.trim().parse().ok()?;
        Some(format!("{} is {limit}", path.display()))
    });
    of_user.into_iter().chain(of_groups).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_on_threads_are_named() {
        let root = tempfile::tempdir().unwrap();
        assert!(limits(root.path(), None).is_empty());
        for (name, text) in [
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/pids.max", "32\n"),
            ("sys/fs/cgroup/pids.max", "max\n"),
        ] {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let of_group =
            format!("{} is 32", root.path().join("sys/fs/cgroup/job/pids.max").display());
        assert_eq!(limits(root.path(), Some(7)), ["ulimit -u is 7".to_string(), of_group]);
    }
}
