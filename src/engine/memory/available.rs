//! Available memory of this node.

use std::path::Path;

use hpctrain_base::control_groups::{Version, groups};

/// Returns the bytes of available memory as reported by the kernel, limited by the control groups
/// of this process. `None` if neither is known. `freed` bytes of files in memory count as available;
/// for a control group as far as it is charged for such files, since it may not be for these.
pub fn available(freed: usize) -> Option<usize> {
    available_below(Path::new("/"), freed)
}

fn available_below(root: &Path, freed: usize) -> Option<usize> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).ok();
    let node = meminfo
        .as_deref()
        .and_then(|text| field(text, "MemAvailable:"))
        .map(|kib| (kib * 1024).saturating_add(freed));
    let left = groups(root, "memory").into_iter().filter_map(|(version, group)| {
        let files = match version {
            Version::One => FILES_1,
            Version::Two => FILES_2,
        };
        left_in(&group, &files, freed)
    });
    left.chain(node).min()
}

/// The files of a version of control groups.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// The key in `memory.stat` of inactive file pages, which the kernel reclaims first.
    idle: &'static str,
    /// The key in `memory.stat` of files in memory.
    in_memory: &'static str,
}

const FILES_1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    idle: "total_inactive_file",
    in_memory: "total_shmem",
};
const FILES_2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    idle: "inactive_file",
    in_memory: "shmem",
};

/// Returns the bytes left under a group's limit once `freed` bytes of files in memory are removed,
/// or `None` if it has no limit.
fn left_in(group: &Path, files: &Files, freed: usize) -> Option<usize> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<usize>().ok();
    let limit = number(files.limit)?;
    let usage = number(files.usage)?;
    let stat = read("memory.stat").unwrap_or_default();
    let idle = field(&stat, files.idle).unwrap_or(0);
    let freed = freed.min(field(&stat, files.in_memory).unwrap_or(0));
    Some(limit.saturating_sub(usage.saturating_sub(idle).saturating_sub(freed)))
}

/// Returns the number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<usize> {
    let words = text.lines().map(str::split_whitespace);
    words
        .filter_map(|mut words| (words.next() == Some(name)).then(|| words.next())?)
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_files(files: &[(&str, &str)]) -> Option<usize> {
        in_files_without(files, 0)
    }

    fn in_files_without(files: &[(&str, &str)], freed: usize) -> Option<usize> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        available_below(root.path(), freed)
    }

    const NODE: (&str, &str) = ("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:  50 kB\n");

    #[test]
    fn the_smallest_limit_counts() {
        assert_eq!(in_files(&[]), None);
        assert_eq!(in_files(&[NODE]), Some(50 << 10));
        let two = [
            NODE,
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.current", "5000\n"),
            ("sys/fs/cgroup/job/memory.max", "20000\n"),
            ("sys/fs/cgroup/job/memory.current", "9000\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 1000\n"),
        ];
        assert_eq!(in_files(&two), Some(12_000));
        let one = [
            NODE,
            ("proc/self/cgroup", "3:cpu,cpuacct:/x\n9:memory:/host/path\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "30000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "40000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 20000\n"),
        ];
        assert_eq!(in_files(&one), Some(10_000));
        // No limit is written as the largest number.
        let unlimited = [
            NODE,
            ("proc/self/cgroup", "9:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "40000\n"),
        ];
        assert_eq!(in_files(&unlimited), Some(50 << 10));
    }

    /// Another group may be charged for files in memory that are removed.
    #[test]
    fn a_group_has_more_room_only_without_files_that_it_is_charged_for() {
        assert_eq!(in_files_without(&[NODE], 5000), Some((50 << 10) + 5000));
        for (freed, expected) in [(0, 12_000), (2000, 14_000), (5000, 15_000)] {
            let two = [
                NODE,
                ("proc/self/cgroup", "0::/job\n"),
                ("sys/fs/cgroup/job/memory.max", "20000\n"),
                ("sys/fs/cgroup/job/memory.current", "9000\n"),
                ("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 1000\nshmem 3000\n"),
            ];
            assert_eq!(in_files_without(&two, freed), Some(expected));
            let one = [
                NODE,
                ("proc/self/cgroup", "9:memory:/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "20000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
                (
                    "sys/fs/cgroup/memory/memory.stat",
                    "shmem 1\ntotal_inactive_file 1000\ntotal_shmem 3000\n",
                ),
            ];
            assert_eq!(in_files_without(&one, freed), Some(expected));
        }
    }
}
