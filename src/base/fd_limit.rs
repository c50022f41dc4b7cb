//! Files that a process may have open: the limit of the system, and the parts of it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More open files than this program ever wants.
const ENOUGH: u64 = 1 << 16;

/// Parts of the limit that are given out: to the shards for training and those for validation, two
/// files each, to the files of a checkpoint, and for all else.
const PARTS: u64 = 8;

/// Fewest files that are kept open.
const FEWEST: usize = 4;

/// Raises the number of files that this process may open as far as its user may. That the system
/// refuses costs no more than files that are opened again more often.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(ENOUGH, |maximum| maximum.min(ENOUGH));
    if current.is_some_and(|current| current < wanted) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
}

/// Files that one user of them may keep open, `most` if the limit leaves room for them.
pub fn share(most: usize) -> usize {
    part(getrlimit(Resource::Nofile).current, most)
}

fn part(limit: Option<u64>, most: usize) -> usize {
    let room = limit.map_or(most, |limit| usize::try_from(limit / PARTS).unwrap_or(most));
    room.clamp(FEWEST, most.max(FEWEST))
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
