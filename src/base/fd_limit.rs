//! The limit on open files of a process, and its division among users.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More open files than this program ever needs.
const ENOUGH: u64 = 1 << 16;

/// The number of parts that the limit is divided into: the shards for training and those for
/// validation use two files each, and there are the files of a checkpoint, and all others.
const PARTS: u64 = 8;

/// The fewest files that are kept open.
const FEWEST: usize = 4;

/// Raises the limit on open files as far as this user may. If that fails, files are only reopened
/// more often.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(ENOUGH, |maximum| maximum.min(ENOUGH));
    if current.is_some_and(|current| current < wanted) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
}

/// Returns how many files one of their users may keep open: `most`, if the limit allows it.
pub fn share(most: usize) -> usize {
    part(getrlimit(Resource::Nofile).current, most)
}

fn part(limit: Option<u64>, most: usize) -> usize {
    let available = limit.map_or(most, |limit| usize::try_from(limit / PARTS).unwrap_or(most));
    available.clamp(FEWEST, most.max(FEWEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_shared() {
        assert_eq!(
            [part(None, 256), part(Some(1 << 20), 256), part(Some(1024), 256)],
            [256, 256, 128]
        );
        assert_eq!(
            [part(Some(256), 256), part(Some(8), 256), part(Some(1024), 2)],
            [32, FEWEST, FEWEST]
        );
    }
}
