//! `log.placement`: logs the device of each kind of buffer, kernel and matmul, once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use super::launch_dims::Grid;
use hpctrain_device::{Gemm, MemoryKind, format_bytes};

/// A kind of event that is logged once.
#[derive(PartialEq, Eq, Hash)]
enum Kind {
    Buffer(MemoryKind, usize),
    Kernel(&'static str, (u32, u32, u32)),
    Product([usize; 3]),
}

/// Logs each kind once.
pub struct PlacementLog {
    /// The name and the PCI address of the device.
    device: String,
    /// The kinds logged so far, or `None` if nothing is logged.
    logged: Option<Mutex<HashSet<Kind>>>,
}

impl PlacementLog {
    /// Creates a log, which does nothing unless `wanted`.
    pub fn new(device: String, wanted: bool) -> Self {
        Self { device, logged: wanted.then(Mutex::default) }
    }

    /// Logs a buffer of `bytes` bytes.
    pub fn buffer(&self, what: MemoryKind, bytes: usize) {
        self.log_once(Kind::Buffer(what, bytes), || {
            format!("buffer of {} for {}", format_bytes(bytes), what.name())
        });
    }

    /// Logs the launch of a kernel.
    pub fn kernel(&self, name: &'static str, grid: Grid) {
        let Grid { blocks, threads, shared } = grid;
        self.log_once(Kind::Kernel(name, blocks), || {
            format!("kernel {name}, blocks {blocks:?} of {threads:?} threads, {shared} B of shared memory")
        });
    }

    /// Logs a matmul.
    pub fn product(&self, shape: Gemm) {
        let Gemm { m, n, k, .. } = shape;
        self.log_once(Kind::Product([m, n, k]), || format!("matmul {m}×{n}×{k} by cuBLASLt"));
    }

    fn log_once(&self, kind: Kind, text: impl FnOnce() -> String) {
        if let Some(logged) = &self.logged
            && logged.lock().unwrap_or_else(PoisonError::into_inner).insert(kind)
        {
            log::info!("placement: {} on {}", text(), self.device);
        }
    }
}
