//! The kernel of ordered sums, which adds the terms that other ranks have sent.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, result};

use super::launch_dims::Grid;
use super::libraries::check;
use super::nvrtc::{KernelModules, Variant};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{MAX_SUM_TERMS, OrderedSum};

/// The kernel, loaded on a device.
pub struct OrderedSumKernel(CudaFunction);

impl OrderedSumKernel {
    /// Loads the kernel, which may synchronise the device.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot be compiled or loaded.
    pub fn load(programs: &Arc<KernelModules>) -> Result<Self> {
        let variant = Variant { source: "reduce_terms.cu", narrow: false, head: None };
        Ok(Self(programs.function(variant, "fold_terms", 0)?))
    }

    /// Queues a sum in a stream.
    ///
    /// # Errors
    /// Returns an error if the device fails, or the sum has more than [`MAX_SUM_TERMS`] terms.
    pub fn launch(
        &self,
        stream: &CudaStream,
        OrderedSum { own, number, others }: OrderedSum<'_>,
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
        let words = own.words() as i64;
        let stride = words;
        // Both are at most `MAX_SUM_TERMS`.
        let number = number as i32;
        let ranks = ranks as i32;
        let mut args: [*mut c_void; 6] = [
            std::ptr::from_ref(&from).cast_mut().cast(),
            std::ptr::from_ref(&to).cast_mut().cast(),
            std::ptr::from_ref(&words).cast_mut().cast(),
            std::ptr::from_ref(&stride).cast_mut().cast(),
            std::ptr::from_ref(&number).cast_mut().cast(),
            std::ptr::from_ref(&ranks).cast_mut().cast(),
        ];
        let Grid { blocks, threads, shared } = Grid::over(own.words());
        // SAFETY: the kernel takes two addresses, two lengths and two integers; `own` has `words`
        // words, and `others` has as many for each other term.
        let queued = unsafe {
            result::launch_kernel(
                self.0.cu_function(),
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
