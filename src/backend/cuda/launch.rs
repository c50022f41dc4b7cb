//! Starting kernels.

use std::ffi::c_void;

use cudarc::driver::result::launch_kernel;

use super::libraries::check;
use super::memory::{Element, View, ViewMut};
use super::program::Variant;
use super::{Cuda, CudaInts};
use crate::error::Result;

/// Threads of a block where the kernel leaves it open.
const THREADS: u32 = 256;

/// Blocks of a grid where the kernel leaves it open, at most: enough to fill any device several times.
const MOST_BLOCKS: usize = 4096;

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub enum Arg {
    /// A device address.
    Pointer(u64),
    /// `int`.
    Int(i32),
    /// `unsigned`.
    Unsigned(u32),
    /// `long long`.
    Long(i64),
    /// `unsigned long long`.
    UnsignedLong(u64),
    /// `float`.
    Float(f32),
}

impl From<View<'_>> for Arg {
    fn from(view: View<'_>) -> Self {
        Self::Pointer(view.pointer_or_null())
    }
}

impl From<&ViewMut<'_>> for Arg {
    fn from(view: &ViewMut<'_>) -> Self {
        view.shared().into()
    }
}

impl From<&CudaInts> for Arg {
    fn from(ints: &CudaInts) -> Self {
        Self::Pointer(ints.pointer())
    }
}

impl From<usize> for Arg {
    /// A size that a kernel counts in `int`.
    fn from(size: usize) -> Self {
        Self::Int(i32::try_from(size).expect("sizes beyond 2^31 are passed as Arg::Long"))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// Blocks, threads of a block, and bytes of shared memory that a block gets besides those that the kernel declares.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks.
    pub blocks: (u32, u32, u32),
    /// Threads of a block.
    pub threads: (u32, u32, u32),
    /// Bytes.
    pub shared: u32,
}

impl Grid {
    /// A grid of blocks in a row.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::plane(blocks, 1, (threads, 1, 1))
    }

    /// A grid of blocks in rows.
    pub fn plane(x: usize, y: usize, threads: (u32, u32, u32)) -> Self {
        Self { blocks: (x as u32, y as u32, 1), threads, shared: 0 }
    }

    /// For kernels that walk over `items` in strides of the grid.
    pub fn over(items: usize) -> Self {
        Self::new(items.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS), THREADS)
    }
}

impl Cuda {
    /// The compilation of `source` for this rank's precision.
    pub(super) fn variant(&self, source: &'static str) -> Variant {
        Variant { source, narrow: self.element() == Element::Bf16, head: None }
    }

    /// Queues the kernel `name` of `source`, one of the project's own.
    pub(super) fn launch(&self, source: &'static str, name: &'static str, grid: Grid, args: &[Arg]) -> Result<()> {
        self.launch_variant(self.variant(source), name, grid, args)
    }

    /// As [`Cuda::launch`], of a given compilation.
    pub(super) fn launch_variant(&self, variant: Variant, name: &'static str, grid: Grid, args: &[Arg]) -> Result<()> {
        self.0.journal.kernel(name, grid);
        let function = self.0.programs.function(variant, name, grid.shared)?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(pointer).collect();
        let stream = self.0.compute.cu_stream();
        // SAFETY: the function's module lives as long as the programs; the arguments are those that the kernel
        // declares, which the suite of the backend has run with checked bounds; every address is of a buffer whose
        // memory has no other user on this stream before the kernel.
        let queued = unsafe {
            launch_kernel(function.cu_function(), grid.blocks, grid.threads, grid.shared, stream, &mut pointers)
        };
        check(&format!("launch {name}"), queued)
    }
}

/// The address of an argument's value.
fn pointer(arg: &Arg) -> *mut c_void {
    match arg {
        Arg::Pointer(value) | Arg::UnsignedLong(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Unsigned(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
    }
}
