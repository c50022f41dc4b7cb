//! The kernel of ordered sums, which adds the terms that other ranks have sent.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, result};

use super::launch_dims::Grid;
use super::libraries::check;
use super::nvrtc::{KernelModules, Variant};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Element, MAX_SUM_TERMS, OrderedSum};

/// The kernels, loaded on a device.
pub struct OrderedSumKernel {
    f32: CudaFunction,
    bf16: CudaFunction,
}

impl OrderedSumKernel {
    /// Loads the kernels, which may synchronise the device.
    ///
    /// # Errors
    /// Returns an error if a kernel cannot be compiled or loaded.
    pub fn load(programs: &Arc<KernelModules>) -> Result<Self> {
        let load = |name| {
            let variant = Variant { source: "reduce_terms.cu", narrow: false, head: None };
            programs.function(variant, name, 0)
        };
        Ok(Self { f32: load("fold_terms")?, bf16: load("fold_terms_bf16")? })
    }

    /// Queues a sum in a stream.
    ///
    /// # Errors
    /// Returns an error if the device fails, or the sum has more than [`MAX_SUM_TERMS`] terms.
    pub fn launch(
        &self,
        stream: &CudaStream,
        OrderedSum { element, own, number, others }: OrderedSum<'_>,
    ) -> Result<()> {
        let ranks = others.words().checked_div(own.words()).map_or(1, |others| others + 1);
        assert!(
            others.words() == (ranks - 1) * own.words() && number < ranks,
            "term {number} of {ranks}"
        );
        if ranks > MAX_SUM_TERMS {
            return Err(Error::internal(format!(
                "an ordered sum of {ranks} terms, more than {MAX_SUM_TERMS}"
            )));
        }
        let from = others.address() as u64;
        let to = own.address() as u64;
        let (kernel, per_word) = match element {
            Element::F32 => (&self.f32, 1),
            Element::Bf16 => (&self.bf16, 2),
        };
        let elements = own.words() * per_word;
        let length = elements as i64;
        let stride = length;
        // Both are at most `MAX_SUM_TERMS`.
        let number = number as i32;
        let ranks = ranks as i32;
        let mut args: [*mut c_void; 6] = [
            std::ptr::from_ref(&from).cast_mut().cast(),
            std::ptr::from_ref(&to).cast_mut().cast(),
            std::ptr::from_ref(&length).cast_mut().cast(),
            std::ptr::from_ref(&stride).cast_mut().cast(),
            std::ptr::from_ref(&number).cast_mut().cast(),
            std::ptr::from_ref(&ranks).cast_mut().cast(),
        ];
        let Grid { blocks, threads, shared } = Grid::over(elements);
        // SAFETY: the kernel takes two addresses, two lengths and two integers; `own` has as many
        // elements, and `others` has as many for each other term.
        let queued = unsafe {
            result::launch_kernel(
                kernel.cu_function(),
                blocks,
                threads,
                shared,
                stream.cu_stream(),
                &mut args,
            )
        };
        check("add messages", queued)
    }
}
