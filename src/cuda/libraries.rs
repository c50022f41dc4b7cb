//! NVIDIA's libraries, loaded at run time: the driver, NVRTC, cuBLASLt, and NCCL if it is used.
//!
//! A call into a missing library would panic, so the functions here must be called first.

use std::ffi::CStr;

use cudarc::driver;

use super::library_versions;
use hpctrain_base::error::{Error, Result};

/// The oldest supported driver, in the encoding of `cuDriverGetVersion`: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// Formats a version: 13000 is `13.0`.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Returns true if this node has a driver, working or not.
pub fn driver_is_there() -> bool {
    // SAFETY: only looks whether the library can be opened.
    unsafe { driver::sys::is_culib_present() }
}

/// Initialises the driver, and returns the CUDA version that it supports, such as `13.0`.
///
/// # Errors
/// Returns an error if there is no driver, it finds no device, or it is too old.
pub fn driver() -> Result<String> {
    if !driver_is_there() {
        return Err(Error::input("no CUDA driver: libcuda.so.1 was not found")
            .hint("run on a node with a GPU, or set run.device=cpu"));
    }
    driver::result::init().map_err(|e| {
        Error::input(format!("the CUDA driver finds no GPU: {}", message(e)))
            .hint("check nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device=cpu")
    })?;
    let mut found = 0;
    // SAFETY: the driver is there and writes one integer.
    let asked = unsafe { driver::sys::cuDriverGetVersion(&mut found) };
    check("report the driver's version", asked.result())?;
    if found < OLDEST_DRIVER {
        return Err(Error::input(format!(
            "the GPU driver supports CUDA {}, but {} is required",
            version(found),
            version(OLDEST_DRIVER)
        ))
        .hint("update the driver (525 or later), or set run.device=cpu"));
    }
    Ok(version(found))
}

/// Returns NVRTC's version, such as `13.0`.
///
/// # Errors
/// Returns an error if the library is missing or too new for the driver.
pub fn nvrtc() -> Result<String> {
    Ok(library_versions::nvrtc()?.version())
}

/// Returns cuBLASLt's version, such as `13.0`.
///
/// # Errors
/// Returns an error under the conditions of [`nvrtc()`].
pub fn cublaslt() -> Result<String> {
    Ok(library_versions::cublaslt()?.version())
}

/// Returns the driver's text of an error: `CUDA_ERROR_NO_DEVICE: no CUDA-capable device is
/// detected`.
pub fn message(error: driver::DriverError) -> String {
    let text = |text: Result<&CStr, driver::DriverError>| {
        text.ok().map(|text| text.to_string_lossy().into_owned())
    };
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(what)) => format!("{name}: {what}"),
        _ => format!("{:?}", error.0),
    }
}

/// Adds to a driver's error what was attempted. `action` is a phrase such as `"launch adamw"`.
///
/// # Errors
/// Returns an error if `result` is one.
pub fn check<T>(action: &str, result: Result<T, driver::DriverError>) -> Result<T> {
    result.map_err(|e| Error::device(format!("the GPU could not {action}: {}", message(e))))
}
