//! `log.placement`: the device of each buffer, kernel and product, every kind once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use super::launch_dims::Grid;
use hpctrain_device::{Gemm, MemoryKind, readable};

/// A kind that is logged once.
#[derive(PartialEq, Eq, Hash)]
enum Kind {
    Buffer(MemoryKind, usize),
    Kernel(&'static str, (u32, u32, u32)),
    Product([usize; 3]),
}

/// The kinds logged so far.
pub struct PlacementLog {
    /// Name and place of the device.
    device: String,
    /// None if nothing is to be logged.
    told: Option<Mutex<HashSet<Kind>>>,
}

impl PlacementLog {
    /// An empty journal, which logs only if `wanted`.
    pub fn new(device: String, wanted: bool) -> Self {
        Self { device, told: wanted.then(Mutex::default) }
    }

    /// A buffer of so many bytes.
    pub fn buffer(&self, what: MemoryKind, bytes: usize) {
        self.tell(Kind::Buffer(what, bytes), || {
            format!("buffer of {} for {}", readable(bytes), what.name())
        });
    }

    /// A launch.
    pub fn kernel(&self, name: &'static str, grid: Grid) {
        let Grid { blocks, threads, shared } = grid;
        self.tell(Kind::Kernel(name, blocks), || {
            format!("kernel {name}, blocks {blocks:?} of {threads:?} threads, {shared} B of shared memory")
        });
    }

    /// A matrix product.
    pub fn product(&self, shape: Gemm) {
        let Gemm { m, n, k, .. } = shape;
        self.tell(Kind::Product([m, n, k]), || format!("product {m}×{n}×{k} by cuBLASLt"));
    }

    fn tell(&self, kind: Kind, text: impl FnOnce() -> String) {
        if let Some(told) = &self.told
            && told.lock().unwrap_or_else(PoisonError::into_inner).insert(kind)
        {
            log::info!("placement: {} on {}", text(), self.device);
        }
    }
}
