//! Control groups (cgroups) of Linux, versions 1 and 2: the limits that a container or a job puts
//! on this process.

use std::path::{Path, PathBuf};

/// The version of a control group, which decides how the files of its limits are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Version 1, with a hierarchy for each controller.
    One,
    /// Version 2, with a single hierarchy.
    Two,
}

/// Returns the directories of all groups whose limits on a controller, such as `cpu`, apply to this
/// process: its group and those above it. `root` is `/` outside of tests.
pub fn groups(root: &Path, controller: &str) -> Vec<(Version, PathBuf)> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    // Lines such as "0::/user.slice" (version 2) and "9:memory:/job_7" (version 1).
    for (controllers, path) in
        text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'))
    {
        let (version, mount) = match controllers {
            "" => (Version::Two, root.join("sys/fs/cgroup")),
            _ if controllers.split(',').any(|one| one == controller) => {
                (Version::One, root.join("sys/fs/cgroup").join(controller))
            }
            _ => continue,
        };
        // In a container the path may be one of the host; the group at the mount is then the
        // container's.
        let above = Path::new(path).ancestors().filter_map(|path| path.strip_prefix("/").ok());
        found.extend(above.map(|group| (version, mount.join(group))));
    }
    found
}

/// The CPU time that a control group may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CpuQuota {
    /// The quota in thousandths of a CPU.
    pub thousandths: u64,
    /// The device and inode of the group, whose processes share the quota.
    pub group: (u64, u64),
}

/// Returns the smallest CPU quota that applies to this process, or `None` if there is none.
pub fn cpu_quota(root: &Path) -> Option<CpuQuota> {
    let quotas = groups(root, "cpu").into_iter().filter_map(|(version, group)| {
        let thousandths = match version {
            Version::One => {
                let number = |name: &str| {
                    std::fs::read_to_string(group.join(name)).ok()?.trim().parse().ok()
                };
                // Without a limit the file has -1, which does not parse.
                thousandths(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?)
            }
            Version::Two => {
                let text = std::fs::read_to_string(group.join("cpu.max")).ok()?;
                // Without a limit the file has "max 100000".
                let (quota, period) = text.trim().split_once(' ')?;
                thousandths(quota.parse().ok()?, period.parse().ok()?)
            }
        }?;
        let stat = rustix::fs::stat(&group).ok()?;
        Some(CpuQuota { thousandths, group: (stat.st_dev, stat.st_ino) })
    });
    quotas.min_by_key(|quota| quota.thousandths)
}

fn thousandths(quota: u64, period: u64) -> Option<u64> {
    quota.checked_mul(1000)?.checked_div(period)
}

impl CpuQuota {
    /// Returns the CPUs that one of `processes` processes may keep busy, rounded up.
    pub fn cpus(&self, processes: usize) -> usize {
        let each = self.thousandths.div_ceil(1000 * processes.max(1) as u64);
        usize::try_from(each).unwrap_or(usize::MAX).max(1)
    }
}

impl std::fmt::Display for CpuQuota {
    /// Formats the quota in CPUs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.thousandths as f64 / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        cpu_quota(root.path()).map(|quota| quota.thousandths)
    }

    #[test]
    fn the_smallest_quota_holds() {
        assert_eq!(quota(&[]), None);
        let two = [
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/pod/cpu.max", "250000 100000\n"),
            ("sys/fs/cgroup/cpu.max", "900000 100000\n"),
        ];
        assert_eq!(quota(&two), Some(2500));
        let one = [
            ("proc/self/cgroup", "9:memory:/m\n3:cpu,cpuacct:/host/path\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(quota(&one), Some(500));
        let unlimited = [one[0], ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"), one[2]];
        assert_eq!(quota(&unlimited), None);
        assert_eq!(quota(&[two[0], ("sys/fs/cgroup/pod/cpu.max", "100000 0\n")]), None);
    }

    #[test]
    fn processes_share_a_quota() {
        let quota = CpuQuota { thousandths: 2500, group: (0, 0) };
        assert_eq!([1, 2, 3, 9].map(|processes| quota.cpus(processes)), [3, 2, 1, 1]);
        assert_eq!(quota.to_string(), "2.5");
    }
}
