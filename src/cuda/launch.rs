//! Launches of kernels.

use std::ffi::c_void;

use cudarc::driver::result::launch_kernel;

use super::launch_dims::Grid;
use super::libraries::check;
use super::memory::{Element, View, ViewMut};
use super::nvrtc::Variant;
use super::{Cuda, CudaInts};
use hpctrain_base::error::Result;

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
    /// Converts a size that a kernel takes as `int`.
    fn from(size: usize) -> Self {
        Self::Int(i32::try_from(size).expect("sizes beyond 2^31 are passed as Arg::Long"))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

impl Arg {
    /// Converts a size that a kernel takes as `long long`.
    pub fn long(size: usize) -> Self {
        Self::Long(size as i64)
    }
}

impl Cuda {
    /// Returns the variant of `source` for this rank's precision.
    pub(super) fn variant(&self, source: &'static str) -> Variant {
        Variant { source, narrow: self.element() == Element::Bf16, head: None }
    }

    /// Queues the kernel `name` of `source` in the compute stream.
    pub(super) fn launch(
        &self,
        source: &'static str,
        name: &'static str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        self.launch_variant(self.variant(source), name, grid, args)
    }

    /// Queues the kernel `name` of `source` for tensors of `element`, which need not be the element
    /// of this rank's precision: losses are computed in f32.
    pub(super) fn launch_for(
        &self,
        element: Element,
        source: &'static str,
        name: &'static str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        let narrow = element == Element::Bf16;
        self.launch_variant(Variant { source, narrow, head: None }, name, grid, args)
    }

    /// Queues the kernel `name` of a given variant in the compute stream. A grid without blocks,
    /// such as one over zero rows, has nothing to compute, and drivers refuse it.
    pub(super) fn launch_variant(
        &self,
        variant: Variant,
        name: &'static str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        if grid.is_empty() {
            return Ok(());
        }
        self.0.placement_log.kernel(name, grid);
        grid.check(name)?;
        self.bind()?;
        let function = self.0.kernel_modules.function(variant, name, grid.shared)?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(pointer).collect();
        let stream = self.0.compute.cu_stream();
        // SAFETY: the function's module lives as long as the kernel modules; the arguments are
        // those that the kernel declares, which the backend's tests have run with bounds checks;
        // every address belongs to a buffer whose memory is not reused on this stream before the
        // kernel.
        let queued = unsafe {
            launch_kernel(
                function.cu_function(),
                grid.blocks,
                grid.threads,
                grid.shared,
                stream,
                &mut pointers,
            )
        };
        self.0.counters.add_launch();
        check(&format!("launch {name}"), queued)
    }
}

/// Returns the address of an argument's value.
fn pointer(arg: &Arg) -> *mut c_void {
    match arg {
        Arg::Pointer(value) | Arg::UnsignedLong(value) => {
            std::ptr::from_ref(value).cast_mut().cast()
        }
        Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Unsigned(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
        Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
    }
}
