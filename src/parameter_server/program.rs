//! The program of a process and the device it computes on, which must be the same in all processes
//! for bitwise reproducible results.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// The number of bytes of the executable that are read at a time.
const CHUNK: usize = 1 << 20;

/// Everything that determines the exact bits of what a process computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The version of this package.
    pub version: String,
    /// The checksum of the executable file; empty if it cannot be read.
    pub build: String,
    /// The device, with its instruction set or libraries.
    pub device: String,
}

impl Program {
    /// Returns the program of this process, which computes on `device`.
    pub fn here(device: String) -> Self {
        static BUILD: LazyLock<String> =
            LazyLock::new(|| checksum(Path::new("/proc/self/exe")).unwrap_or_default());
        Self { version: env!("CARGO_PKG_VERSION").into(), build: BUILD.clone(), device }
    }

    /// Describes the difference from the program that a run started with, if there is one.
    pub fn difference(&self, run: &Self) -> Option<String> {
        let named = |one: &Self| format!("{} (build {})", one.version, one.build);
        if (&self.version, &self.build) != (&run.version, &run.build) {
            return Some(format!("it is hpctrain {}, the run uses {}", named(self), named(run)));
        }
        (self.device != run.device)
            .then(|| format!("it computes on {}, the run on {}", self.device, run.device))
    }
}

/// Returns the checksum (CRC-32) of a file, in hexadecimal digits.
fn checksum(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut sum = crc32fast::Hasher::new();
    let mut piece = vec![0; CHUNK];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(format!("{:08x}", sum.finalize())),
            bytes => sum.update(&piece[..bytes]),
        }
    }
}

/// The role of a process that has a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It updates parameters.
    Server,
    /// It computes gradients.
    Worker,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Worker => "worker",
        })
    }
}

/// The programs that a run started with: the executable of the coordinator, and for each role the
/// device of its first process.
#[derive(Debug)]
pub struct Programs {
    coordinator: Program,
    devices: BTreeMap<Role, String>,
}

impl Programs {
    /// Creates the programs of a run that this process coordinates.
    pub fn begin() -> Self {
        Self { coordinator: Program::here(String::new()), devices: BTreeMap::new() }
    }

    /// Returns the known devices of the run by role.
    pub fn devices(&self) -> &BTreeMap<Role, String> {
        &self.devices
    }

    /// Describes the difference of a new process's program from the run's, if there is one. The
    /// first process of a role sets the device of that role.
    pub fn difference(&mut self, role: Role, program: &Program) -> Option<String> {
        let device = self.devices.get(&role).unwrap_or(&program.device).clone();
        let difference = program.difference(&Program { device, ..self.coordinator.clone() });
        if difference.is_none() {
            self.devices.entry(role).or_insert_with(|| program.device.clone());
        }
        difference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        let here = Program::here("CPU (AVX-512)".into());
        assert_eq!(here.build.len(), 8);
        assert_eq!(here.difference(&Program::here("CPU (AVX-512)".into())), None);
        let other = Program::here("CPU (AVX2)".into());
        assert_eq!(
            other.difference(&here).unwrap(),
            "it computes on CPU (AVX2), the run on CPU (AVX-512)"
        );
        let rebuilt = Program { build: "00000000".into(), ..other };
        assert!(rebuilt.difference(&here).unwrap().contains("(build 00000000), the run uses"));

        let mut programs = Programs::begin();
        assert!(programs.difference(Role::Worker, &rebuilt).is_some());
        assert_eq!(programs.difference(Role::Worker, &here), None);
        assert_eq!(programs.difference(Role::Server, &Program::here("CPU (AVX2)".into())), None);
        assert_eq!(programs.difference(Role::Worker, &here), None);
        assert!(programs.difference(Role::Worker, &Program::here("CPU (AVX2)".into())).is_some());
    }
}
