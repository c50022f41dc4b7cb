//! The GPUs of this node.

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};

use super::Precision;
use super::libraries::{check, driver};
use hpctrain_base::error::{Error, Result};

/// Advice where a process may not use a GPU beside another one.
const SHARING: &str = "its compute mode keeps this process out, as another one has it or none may: nvidia-smi -c DEFAULT lets several use it";

/// One GPU.
#[derive(Clone)]
pub struct Device {
    /// Its number among those that this process sees.
    ordinal: usize,
    handle: sys::CUdevice,
    /// Made when the device is used: it takes memory there and time, and in the exclusive mode no
    /// other process may have one.
    context: OnceLock<Arc<CudaContext>>,
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
    /// GPU number `ordinal` of those this process sees. Makes no context there.
    ///
    /// # Errors
    /// There is no such GPU, or the driver fails.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = devices()?;
        if ordinal >= count {
            return Err(Error::input(format!(
                "there is no GPU {ordinal}: this process sees {count}"
            ))
            .hint("set run.device to one of them, or auto; CUDA_VISIBLE_DEVICES hides GPUs"));
        }
        let handle = check(&format!("find GPU {ordinal}"), result::device::get(ordinal as i32))?;
        let mut pci = [0u8; 32];
        // SAFETY: the buffer is as long as said, and the driver gave the handle.
        let told =
            unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, handle) };
        check("tell its place on the bus", told.result())?;
        let id = check("tell its id", result::device::get_uuid(handle))?;
        let capability = |name| check("tell its capability", attribute(handle, name));
        Ok(Self {
            id: id.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect(),
            name: check("tell its name", result::device::get_name(handle))?,
            pci: String::from_utf8_lossy(&pci).trim_end_matches('\0').to_lowercase(),
            capability: (
                capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: the driver gave the handle.
            memory: check("tell its memory", unsafe { result::device::total_mem(handle) })?,
            context: OnceLock::new(),
            ordinal,
            handle,
        })
    }

    /// The driver's context for it, which is this thread's from now on.
    pub(super) fn context(&self) -> Result<&Arc<CudaContext>> {
        if self.context.get().is_none() {
            let opened = CudaContext::new(self.ordinal);
            let is_taken =
                matches!(opened, Err(DriverError(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE)));
            let opened = check(&format!("open GPU {}", self.ordinal), opened);
            let opened =
                opened.map_err(|error| if is_taken { error.hint(SHARING) } else { error })?;
            // Another thread's is as good: both are the device's primary context.
            drop(self.context.set(opened));
        }
        let context = self.context.get().expect("set above");
        check("be chosen", context.bind_to_thread())?;
        Ok(context)
    }

    /// Bytes of free memory.
    ///
    /// # Errors
    /// The driver failed.
    pub fn free_memory(&self) -> Result<usize> {
        Ok(check("tell its free memory", self.context()?.mem_get_info())?.0)
    }

    /// Target architecture of kernels: the device's own, with the features that only its generation
    /// has.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Multiprocessors.
    ///
    /// # Errors
    /// The driver failed.
    pub fn multiprocessors(&self) -> Result<usize> {
        let count =
            attribute(self.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(check("count its multiprocessors", count)? as usize)
    }

    /// Whether it can compute in `precision`.
    pub(super) fn check_precision(&self, precision: Precision) -> Result<()> {
        let (major, minor) = self.capability;
        if major >= 8 || matches!(precision, Precision::F32(_)) {
            return Ok(());
        }
        let message = format!(
            "precision.dtype = bf16 needs compute capability 8.0; {} has {major}.{minor}",
            self.name
        );
        Err(Error::input(message).hint("set precision.dtype=f32"))
    }
}

/// A property of a device that the driver gave.
fn attribute(device: sys::CUdevice, name: CUdevice_attribute) -> Result<i32, DriverError> {
    // SAFETY: the driver gave the handle, and writes one integer.
    unsafe { result::device::get_attribute(device, name) }
}
