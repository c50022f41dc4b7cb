//! The GPUs of this node.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute};

use super::Precision;
use super::libraries::{check, driver};
use crate::error::{Error, Result};

/// One GPU.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    /// Unique identifier of the GPU, or of a slice of it.
    pub id: String,
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// Its place on the bus, such as `0000:4e:00.0`.
    pub pci: String,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: usize,
}

/// Number of GPUs that this process sees.
///
/// # Errors
/// As [`driver`].
pub fn devices() -> Result<usize> {
    driver()?;
    let count = check("count GPUs", CudaContext::device_count())?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Device {
    /// GPU number `ordinal` of those this process sees.
    ///
    /// # Errors
    /// There is no such GPU, or the driver fails.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = devices()?;
        if ordinal >= count {
            return Err(Error::input(format!("there is no GPU {ordinal}: this process sees {count}"))
                .hint("set run.device to one of them, or auto; CUDA_VISIBLE_DEVICES hides GPUs"));
        }
        let context = check(&format!("open GPU {ordinal}"), CudaContext::new(ordinal))?;
        let mut pci = [0u8; 32];
        // SAFETY: the buffer is as long as said, and the device is the context's.
        let told = unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, context.cu_device()) };
        check("tell its place on the bus", told.result())?;
        Ok(Self {
            id: check("tell its id", context.uuid())?.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect(),
            name: check("tell its name", context.name())?,
            pci: String::from_utf8_lossy(&pci).trim_end_matches('\0').to_lowercase(),
            capability: check("tell its capability", context.compute_capability())?,
            memory: check("tell its memory", context.total_mem())?,
            context,
        })
    }

    /// The driver's context for it.
    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Bytes of free memory.
    ///
    /// # Errors
    /// The driver failed.
    pub fn free_memory(&self) -> Result<usize> {
        Ok(check("tell its free memory", self.context.mem_get_info())?.0)
    }

    /// Target architecture of kernels: the device's own, with the features that only its generation has.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Multiprocessors.
    ///
    /// # Errors
    /// The driver failed.
    pub fn multiprocessors(&self) -> Result<usize> {
        let count = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(check("count its multiprocessors", count)? as usize)
    }

    /// Whether it can compute in `precision`.
    pub(super) fn check_precision(&self, precision: Precision) -> Result<()> {
        let (major, minor) = self.capability;
        if major >= 8 || matches!(precision, Precision::F32(_)) {
            return Ok(());
        }
        let message =
            format!("precision.compute = bf16 needs compute capability 8.0; {} has {major}.{minor}", self.name);
        Err(Error::input(message).hint("set precision.compute=f32"))
    }
}
