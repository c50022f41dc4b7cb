//! NVIDIA's libraries, which are looked for at run time: the driver, NVRTC, cuBLASLt, and NCCL
//! where it is wanted.
//!
//! A call into a library that is not there would panic, so every use begins here.

use std::ffi::CStr;

use cudarc::driver;

use super::library_versions;
use hpctrain_base::error::{Error, Result};

/// The oldest driver that runs kernels compiled here, as `cuDriverGetVersion` counts: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// A library's version for people: 13000 is 13.0.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Whether this node has a driver at all, working or not.
pub fn driver_is_there() -> bool {
    // SAFETY: only looks whether the library can be opened.
    unsafe { driver::sys::is_culib_present() }
}

/// The CUDA version that the driver speaks, such as `13.0`.
///
/// # Errors
/// There is no driver, it finds no device, or it is too old.
pub fn driver() -> Result<String> {
    if !driver_is_there() {
        return Err(Error::input("no CUDA driver: libcuda.so.1 is not there")
            .hint("run on a node with a GPU, or set run.device=cpu"));
    }
    driver::result::init().map_err(|e| {
        Error::input(format!("the CUDA driver finds no GPU: {}", message(e)))
            .hint("look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device=cpu")
    })?;
    let mut found = 0;
    // SAFETY: the driver is there and writes one integer.
    let asked = unsafe { driver::sys::cuDriverGetVersion(&mut found) };
    check("ask the driver's version", asked.result())?;
    if found < OLDEST_DRIVER {
        return Err(Error::input(format!(
            "the GPU driver speaks CUDA {}, and {} is needed",
            version(found),
            version(OLDEST_DRIVER)
        ))
        .hint("update the driver (525 or later), or set run.device=cpu"));
    }
    Ok(version(found))
}

/// NVRTC's version, such as `13.0`.
///
/// # Errors
/// The library is not there, or too new for the driver.
pub fn nvrtc() -> Result<String> {
    Ok(library_versions::nvrtc()?.version())
}

/// cuBLASLt's version, such as `13.0`.
///
/// # Errors
/// As [`nvrtc()`].
pub fn cublaslt() -> Result<String> {
    Ok(library_versions::cublaslt()?.version())
}

/// The driver's text of an error: `CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected`.
pub fn message(error: driver::DriverError) -> String {
    let text = |text: Result<&CStr, driver::DriverError>| {
        text.ok().map(|text| text.to_string_lossy().into_owned())
    };
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(what)) => format!("{name}: {what}"),
        _ => format!("{:?}", error.0),
    }
}

/// Names the action that the driver refused: `action` is a phrase such as `"launch adamw"`.
///
/// # Errors
/// If `result` is one.
pub fn check<T>(action: &str, result: Result<T, driver::DriverError>) -> Result<T> {
    result.map_err(|e| Error::device(format!("the GPU could not {action}: {}", message(e))))
}
