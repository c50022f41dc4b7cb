//! Reads RAPL energy counters of CPU packages and their DRAM, which Linux provides below
//! /sys/class/powercap (Intel, and AMD from family 17h on).

use std::fs;
use std::path::{Path, PathBuf};

/// The directory of the counters, and the variable that overrides it, for example with the host's
/// in a container.
const ROOT: &str = "/sys/class/powercap";
const ROOT_VARIABLE: &str = "HPCTRAIN_POWERCAP_ROOT";

/// Returns the directory of the counters.
pub fn root() -> PathBuf {
    std::env::var_os(ROOT_VARIABLE).map_or_else(|| ROOT.into(), PathBuf::from)
}

/// The counters of all CPU packages, and of their DRAM where it has a separate counter.
pub struct Rapl {
    zones: Vec<Zone>,
}

/// A counter that wraps.
struct Zone {
    path: PathBuf,
    /// The last value, in µJ.
    last: u64,
    /// The value after which it wraps to 0, in µJ.
    range: u64,
    joules: f64,
}

impl Rapl {
    /// Opens the counters below `root`.
    pub fn open(root: &Path) -> Result<Self, String> {
        let mut zones = Vec::new();
        let mut entries: Vec<PathBuf> = fs::read_dir(root)
            .map_err(|e| format!("{}: {e}", root.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        entries.sort();
        for path in entries {
            if is_counted(&path) {
                let range = read(&path.join("max_energy_range_uj"))?;
                let path = path.join("energy_uj");
                zones.push(Zone { last: read(&path)?, path, range, joules: 0.0 });
            }
        }
        if zones.is_empty() {
            return Err(format!(
                "{} has no RAPL counters; virtual machines hide them",
                root.display()
            ));
        }
        Ok(Self { zones })
    }

    /// Returns the joules since the counters were opened.
    pub fn joules(&mut self) -> Result<f64, String> {
        for zone in &mut self.zones {
            let now = read(&zone.path)?;
            let used = if now >= zone.last {
                now - zone.last
            } else {
                (zone.range - zone.last.min(zone.range)) + now
            };
            zone.joules += used as f64 * 1e-6;
            zone.last = now;
        }
        Ok(self.zones.iter().map(|zone| zone.joules).sum())
    }
}

/// Returns true if a zone is a package, or DRAM, which packages do not include. `core` and `uncore`
/// are parts of packages, `psys` includes packages, and `intel-rapl-mmio` has the same packages
/// again.
fn is_counted(zone: &Path) -> bool {
    let is_rapl = zone
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("intel-rapl:"));
    let name = fs::read_to_string(zone.join("name")).unwrap_or_default();
    is_rapl && (name.starts_with("package-") || name.trim() == "dram")
}

fn read(path: &Path) -> Result<u64, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    text.trim().parse().map_err(|_| format!("{}: {} is not a number", path.display(), text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a counter as Linux provides it.
    fn plant(root: &Path, zone: &str, name: &str, energy: u64) {
        let zone = root.join(zone);
        fs::create_dir_all(&zone).unwrap();
        fs::write(zone.join("name"), format!("{name}\n")).unwrap();
        fs::write(zone.join("max_energy_range_uj"), "262143328850\n").unwrap();
        fs::write(zone.join("energy_uj"), format!("{energy}\n")).unwrap();
    }

    #[test]
    fn packages_and_dram_count_and_wrap() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        plant(root, "intel-rapl:0", "package-0", 262_143_328_000);
        plant(root, "intel-rapl:0:0", "core", 5);
        plant(root, "intel-rapl:0:1", "dram", 1_000_000);
        plant(root, "intel-rapl:1", "psys", 5);
        plant(root, "intel-rapl-mmio:0", "package-0", 5);
        let mut rapl = Rapl::open(root).unwrap();
        assert_eq!(rapl.joules(), Ok(0.0));
        // 850 µJ to the end of the range, and 2 J more. Zones that are parts of others do not
        // count.
        plant(root, "intel-rapl:0", "package-0", 2_000_000);
        for zone in ["intel-rapl:0:0", "intel-rapl:1", "intel-rapl-mmio:0"] {
            plant(root, zone, "core", 9_000_000);
        }
        plant(root, "intel-rapl:0:1", "dram", 1_500_000);
        let joules = rapl.joules().unwrap();
        assert!((joules - 2.50085).abs() < 1e-9, "{joules}");
        plant(root, "intel-rapl:0", "package-0", 3_000_000);
        assert!((rapl.joules().unwrap() - 3.50085).abs() < 1e-9);
    }

    #[test]
    fn the_reason_is_given_where_there_are_none() {
        let root = tempfile::tempdir().unwrap();
        let why = |root: &Path| Rapl::open(root).err().unwrap();
        assert!(why(&root.path().join("missing")).contains("missing: No such file"));
        plant(root.path(), "intel-rapl:1", "psys", 5);
        assert!(why(root.path()).contains("has no RAPL counters"));
        plant(root.path(), "intel-rapl:0", "package-0", 5);
        fs::write(root.path().join("intel-rapl:0/energy_uj"), "much").unwrap();
        assert!(why(root.path()).contains("energy_uj: much is not a number"));
        fs::remove_file(root.path().join("intel-rapl:0/energy_uj")).unwrap();
        assert!(why(root.path()).contains("energy_uj: No such file"));
    }
}
