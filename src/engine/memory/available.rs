//! Memory that this node can still give.

use std::path::Path;

/// Bytes that may still be taken: the memory that the kernel reports as available, limited by the control groups of
/// this process. None where neither is known.
pub fn available() -> Option<usize> {
    available_below(Path::new("/"))
}

fn available_below(root: &Path) -> Option<usize> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path.strip_prefix("/").unwrap_or(path)));
    let meminfo = read(Path::new("/proc/meminfo")).ok();
    let node = meminfo.as_deref().and_then(|text| field(text, "MemAvailable:")).map(|kib| kib * 1024);
    // Lines such as "0::/user.slice" (version 2) and "9:memory:/job_7" (version 1).
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let left = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let files = match controllers {
            "" => FILES_2,
            _ if controllers.split(',').any(|controller| controller == "memory") => FILES_1,
            _ => return None,
        };
        // A limit of any group above holds as well. In a container the path may be one of the host.
        let groups = Path::new(path).ancestors().filter_map(|path| path.strip_prefix("/").ok());
        groups.filter_map(|group| left_in(&Path::new(files.mount).join(group), &files, read)).min()
    });
    left.chain(node).min()
}

/// Files of a version of control groups.
struct Files {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// In `memory.stat`: pages of files that nobody used lately, which the kernel gives up first.
    idle: &'static str,
}

const FILES_1: Files = Files {
    mount: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    idle: "total_inactive_file",
};
const FILES_2: Files =
    Files { mount: "/sys/fs/cgroup", limit: "memory.max", usage: "memory.current", idle: "inactive_file" };

/// Bytes left under a group's limit; none without a limit.
fn left_in(group: &Path, files: &Files, read: impl Fn(&Path) -> std::io::Result<String>) -> Option<usize> {
    let number = |name: &str| read(&group.join(name)).ok()?.trim().parse::<usize>().ok();
    let (limit, usage) = (number(files.limit)?, number(files.usage)?);
    let idle = read(&group.join("memory.stat")).ok().and_then(|text| field(&text, files.idle)).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(idle)))
}

/// The number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<usize> {
    let words = text.lines().map(str::split_whitespace);
    words.filter_map(|mut words| (words.next() == Some(name)).then(|| words.next())?).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_files(files: &[(&str, &str)]) -> Option<usize> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        available_below(root.path())
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
        // No limit, written as the largest number there is.
        let unlimited = [
            NODE,
            ("proc/self/cgroup", "9:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "40000\n"),
        ];
        assert_eq!(in_files(&unlimited), Some(50 << 10));
    }
}
