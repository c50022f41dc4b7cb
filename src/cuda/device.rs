//! The GPUs of this node.

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};

use super::libraries::{check, driver};
use super::peak;
use hpctrain_base::error::{Error, Result};

/// The lowest compute capability (major, minor) that the kernels support: they use bf16, and blocks
/// of up to 99 KiB of shared memory.
const LOWEST_CAPABILITY: (i32, i32) = (8, 0);

/// The hint if the compute mode does not let another process use the GPU.
const SHARING: &str = "its compute mode is exclusive and another process uses it, or it is prohibited: nvidia-smi -c DEFAULT lets processes share it";

/// A GPU.
#[derive(Clone)]
pub struct Device {
    /// The index among the GPUs that this process sees.
    ordinal: usize,
    handle: sys::CUdevice,
    /// The context, created on first use: it takes device memory and time, and in exclusive mode no
    /// other process may have one.
    context: OnceLock<Arc<CudaContext>>,
    /// The UUID of the GPU, or of a MIG instance.
    pub id: String,
    /// The name, such as `NVIDIA H200`.
    pub name: String,
    /// The PCI address, such as `0000:4e:00.0`.
    pub pci: String,
    /// The major and minor compute capability.
    pub capability: (i32, i32),
    /// The bytes of memory.
    pub memory: usize,
}

/// Returns the number of GPUs that this process sees.
///
/// # Errors
/// Returns an error under the conditions of [`driver`].
pub fn devices() -> Result<usize> {
    driver()?;
    let count = check("count GPUs", CudaContext::device_count())?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Device {
    /// Opens GPU number `ordinal` of those that this process sees, without creating a context.
    ///
    /// # Errors
    /// Returns an error if there is no such GPU, or if the driver fails.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = devices()?;
        if ordinal >= count {
            return Err(Error::input(format!(
                "there is no GPU {ordinal}: this process sees {count}"
            ))
            .hint("set run.device to one of them or to auto; CUDA_VISIBLE_DEVICES hides GPUs"));
        }
        let handle = check(&format!("find GPU {ordinal}"), result::device::get(ordinal as i32))?;
        let mut pci = [0u8; 32];
        // SAFETY: the buffer is `pci.len()` bytes long, and the driver gave the handle.
        let status =
            unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, handle) };
        check("report its PCI address", status.result())?;
        let id = check("report its UUID", result::device::get_uuid(handle))?;
        let capability = |name| check("report its compute capability", attribute(handle, name));
        Ok(Self {
            id: id.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect(),
            name: check("report its name", result::device::get_name(handle))?,
            pci: String::from_utf8_lossy(&pci).trim_end_matches('\0').to_lowercase(),
            capability: (
                capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: the driver gave the handle.
            memory: check("report its memory", unsafe { result::device::total_mem(handle) })?,
            context: OnceLock::new(),
            ordinal,
            handle,
        })
    }

    /// Returns its context, and makes it the current one of the calling thread.
    pub(super) fn context(&self) -> Result<&Arc<CudaContext>> {
        if self.context.get().is_none() {
            let opened = CudaContext::new(self.ordinal);
            let is_taken =
                matches!(opened, Err(DriverError(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE)));
            let opened = check(&format!("open GPU {}", self.ordinal), opened);
            let opened =
                opened.map_err(|error| if is_taken { error.hint(SHARING) } else { error })?;
            // If another thread was faster, its context is the same: the device's primary context.
            drop(self.context.set(opened));
        }
        let context = self.context.get().expect("set above");
        check("be chosen", context.bind_to_thread())?;
        Ok(context)
    }

    /// Returns the bytes of free memory.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn free_memory(&self) -> Result<usize> {
        Ok(check("report its free memory", self.context()?.mem_get_info())?.0)
    }

    /// Returns the target architecture of kernels: that of the device, with architecture-specific
    /// features.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Returns the bytes per second (bus bandwidth) that an all-reduce of several such devices in a
    /// node should exceed, if its model is known to have links to all of them.
    pub fn bus_bandwidth(&self) -> Option<u64> {
        peak::bus_bandwidth(&self.name)
    }

    /// Returns the number of multiprocessors.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn multiprocessors(&self) -> Result<usize> {
        let count =
            attribute(self.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(check("count its multiprocessors", count)? as usize)
    }

    /// Returns the bytes of the L2 cache.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn l2_bytes(&self) -> Result<usize> {
        let bytes = attribute(self.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        Ok(check("report its L2 cache", bytes)? as usize)
    }

    /// Checks that the kernels support its compute capability.
    ///
    /// # Errors
    /// Returns an error if the GPU is older than the Ampere generation.
    pub fn check_capability(&self) -> Result<()> {
        if self.capability >= LOWEST_CAPABILITY {
            return Ok(());
        }
        let (major, minor) = self.capability;
        let (least, minor_of_least) = LOWEST_CAPABILITY;
        let message = format!(
            "{} has compute capability {major}.{minor}, but {least}.{minor_of_least} is required",
            self.name
        );
        Err(Error::input(message)
            .hint("use a GPU of the Ampere generation or later, or set run.device=cpu"))
    }
}

/// Returns an attribute of a device.
fn attribute(device: sys::CUdevice, name: CUdevice_attribute) -> Result<i32, DriverError> {
    // SAFETY: the driver gave the handle, and writes one integer.
    unsafe { result::device::get_attribute(device, name) }
}
