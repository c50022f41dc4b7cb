//! NVRTC and cuBLASLt, each in a version that the driver supports.
//!
//! Several versions may be installed: Python packages may bring a newer version than the driver
//! supports. A driver refuses kernels of libraries with a newer major version, with errors that
//! name neither, so the first file with a supported major version is used.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as driver;
use cudarc::nvrtc::sys as nvrtc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::library::{Library, open_first};
use hpctrain_device::library_functions;

/// The hint if a library is missing.
const HINT: &str = "install CUDA's run-time libraries, or name their folder in LD_LIBRARY_PATH; \
     pip install nvidia-cuda-nvrtc nvidia-cublas has both";

library_functions! {
    /// The functions of NVRTC.
    pub(super) Nvrtc {
        version = "nvrtcVersion"(*mut c_int, *mut c_int) -> nvrtc::nvrtcResult;
        create = "nvrtcCreateProgram"(
            *mut nvrtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> nvrtc::nvrtcResult;
        compile = "nvrtcCompileProgram"(nvrtc::nvrtcProgram, c_int, *const *const c_char) -> nvrtc::nvrtcResult;
        log_size = "nvrtcGetProgramLogSize"(nvrtc::nvrtcProgram, *mut usize) -> nvrtc::nvrtcResult;
        log = "nvrtcGetProgramLog"(nvrtc::nvrtcProgram, *mut c_char) -> nvrtc::nvrtcResult;
        cubin_size = "nvrtcGetCUBINSize"(nvrtc::nvrtcProgram, *mut usize) -> nvrtc::nvrtcResult;
        cubin = "nvrtcGetCUBIN"(nvrtc::nvrtcProgram, *mut c_char) -> nvrtc::nvrtcResult;
        destroy = "nvrtcDestroyProgram"(*mut nvrtc::nvrtcProgram) -> nvrtc::nvrtcResult;
    }
}

library_functions! {
    /// The functions of cuBLASLt.
    pub(super) CublasLt {
        version = "cublasLtGetVersion"() -> usize;
        create = "cublasLtCreate"(*mut lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        destroy = "cublasLtDestroy"(lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        create_layout = "cublasLtMatrixLayoutCreate"(
            *mut lt::cublasLtMatrixLayout_t, lt::cudaDataType, u64, u64, i64
        ) -> lt::cublasStatus_t;
        destroy_layout = "cublasLtMatrixLayoutDestroy"(lt::cublasLtMatrixLayout_t) -> lt::cublasStatus_t;
        create_description = "cublasLtMatmulDescCreate"(
            *mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType
        ) -> lt::cublasStatus_t;
        destroy_description = "cublasLtMatmulDescDestroy"(lt::cublasLtMatmulDesc_t) -> lt::cublasStatus_t;
        describe = "cublasLtMatmulDescSetAttribute"(
            lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t, *const c_void, usize
        ) -> lt::cublasStatus_t;
        create_preference = "cublasLtMatmulPreferenceCreate"(*mut lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        destroy_preference = "cublasLtMatmulPreferenceDestroy"(lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        prefer = "cublasLtMatmulPreferenceSetAttribute"(
            lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize
        ) -> lt::cublasStatus_t;
        heuristic = "cublasLtMatmulAlgoGetHeuristic"(
            lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t,
            lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatmulPreference_t, c_int,
            *mut lt::cublasLtMatmulHeuristicResult_t, *mut c_int
        ) -> lt::cublasStatus_t;
        check_algorithm = "cublasLtMatmulAlgoCheck"(
            lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t,
            lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t,
            *mut lt::cublasLtMatmulHeuristicResult_t
        ) -> lt::cublasStatus_t;
        matmul = "cublasLtMatmul"(
            lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t,
            *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t,
            *mut c_void, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut c_void, usize,
            lt::cudaStream_t
        ) -> lt::cublasStatus_t;
    }
}

/// A major and a minor version.
pub type Version = (u32, u32);

/// A library's functions and its version.
pub struct FoundLibrary<T> {
    /// The functions of the library.
    pub functions: T,
    /// The version of the library.
    pub version: Version,
}

impl<T> FoundLibrary<T> {
    /// Returns the version as a string, such as `13.0`.
    pub fn version(&self) -> String {
        named(self.version)
    }
}

fn named((major, minor): Version) -> String {
    format!("{major}.{minor}")
}

/// A library to find.
struct Wanted {
    name: &'static str,
    use_for: &'static str,
    /// The file names of the development and of the run-time packages.
    files: [&'static str; 4],
}

/// Returns NVRTC.
///
/// # Errors
/// Returns an error if the library is missing, lacks a function, or is too new for the driver.
pub fn nvrtc() -> Result<&'static FoundLibrary<Nvrtc>> {
    static FOUND: OnceLock<Result<FoundLibrary<Nvrtc>>> = OnceLock::new();
    const WANTED: Wanted = Wanted {
        name: "NVRTC",
        use_for: "which compiles the GPU kernels, was not found: libnvrtc.so",
        files: ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"],
    };
    let found = FOUND.get_or_init(|| {
        first(&WANTED, driver_version(), |library| {
            // SAFETY: NVRTC's functions have had these types since they were introduced.
            let functions = unsafe { Nvrtc::load(library, |function| lacks(&WANTED, function)) }?;
            let mut major = 0;
            let mut minor = 0;
            // SAFETY: writes two integers.
            let status = unsafe { (functions.version)(&mut major, &mut minor) };
            status.result().map_err(|e| Error::device(format!("NVRTC failed: {e:?}")))?;
            Ok(FoundLibrary { functions, version: (major as u32, minor as u32) })
        })
    });
    found.as_ref().map_err(Clone::clone)
}

/// Returns cuBLASLt.
///
/// # Errors
/// Returns an error under the conditions of [`nvrtc()`].
pub fn cublaslt() -> Result<&'static FoundLibrary<CublasLt>> {
    static FOUND: OnceLock<Result<FoundLibrary<CublasLt>>> = OnceLock::new();
    const WANTED: Wanted = Wanted {
        name: "cuBLASLt",
        use_for: "which multiplies matrices on the GPU, was not found: libcublasLt.so",
        files: ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"],
    };
    let found = FOUND.get_or_init(|| {
        first(&WANTED, driver_version(), |library| {
            // SAFETY: cuBLASLt's functions have had these types since they were introduced.
            let functions =
                unsafe { CublasLt::load(library, |function| lacks(&WANTED, function)) }?;
            // SAFETY: takes nothing.
            let number = unsafe { (functions.version)() } as u32;
            // Since version 11 the number is 10000·major + 100·minor + patch.
            Ok(FoundLibrary { functions, version: (number / 10_000, number % 10_000 / 100) })
        })
    });
    found.as_ref().map_err(Clone::clone)
}

/// Returns the CUDA version that the driver supports, or `None` without a driver. It need not have
/// found a GPU.
fn driver_version() -> Option<Version> {
    // SAFETY: only looks whether the library can be opened.
    if !unsafe { driver::is_culib_present() } {
        return None;
    }
    let mut found = 0;
    // SAFETY: the driver is there and writes one integer.
    unsafe { driver::cuDriverGetVersion(&mut found) }.result().ok()?;
    let found = u32::try_from(found).ok()?;
    Some((found / 1000, found % 1000 / 10))
}

fn lacks(wanted: &Wanted, function: &str) -> Error {
    Error::input(format!("{} has no {function}", wanted.name)).hint(HINT)
}

/// Returns the first of the library's files whose major version the driver supports, or the first
/// of all without a driver.
fn first<T>(
    wanted: &Wanted,
    driver: Option<Version>,
    look: impl Fn(&Library) -> Result<FoundLibrary<T>>,
) -> Result<FoundLibrary<T>> {
    let mut too_new = None;
    for file in wanted.files {
        // SAFETY: NVIDIA's libraries do nothing when they are opened.
        let Some(opened) = (unsafe { open_first(&[file]) }) else { continue };
        let found = look(&opened)?;
        match driver {
            Some(driver) if found.version.0 > driver.0 => {
                log::debug!("{} {} is too new for the driver", file, found.version());
                too_new.get_or_insert(refusal(wanted.name, found.version, driver));
            }
            _ => {
                // It stays open as long as the process.
                std::mem::forget(opened);
                return Ok(found);
            }
        }
    }
    Err(too_new
        .unwrap_or_else(|| Error::input(format!("{}, {}", wanted.name, wanted.use_for)).hint(HINT)))
}

/// Returns the error for a library that is too new for the driver.
fn refusal(name: &str, (major, minor): Version, driver: Version) -> Error {
    let release = match major {
        13 => " (580 or later)",
        12 => " (525 or later)",
        _ => "",
    };
    let known = driver.0;
    Error::input(format!(
        "{name} {major}.{minor} requires a GPU driver of CUDA {major}{release}, but this one supports CUDA {}",
        named(driver)
    ))
    .hint(format!(
        "update the driver, or install libraries of CUDA {known} (pip install nvidia-cuda-nvrtc-cu{known} nvidia-cublas-cu{known}) \
         and name their folders first in LD_LIBRARY_PATH"
    ))
}
