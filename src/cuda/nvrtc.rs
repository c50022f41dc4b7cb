//! Kernels: their sources are embedded in the binary, compiled by NVRTC for the device, and cached
//! on disk.
//!
//! A kernel is compiled on first use and stored in the user's cache directory under a hash of
//! everything on which it depends. The ranks of a node compile it once.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUfunction_attribute_enum;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::{Ptx, sys};
use sha2::{Digest, Sha256};

use super::libraries::{self, check};
use super::library_versions::{self, Nvrtc};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::user_dirs;

/// A file in `kernels/`.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// The name, such as `adamw.cu`.
    pub name: &'static str,
    /// CUDA C++ that includes only [`HEADERS`].
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:literal)*) => { [$(KernelSource { name: $name, text: include_str!(concat!("kernels/", $name)) }),*] };
}

/// The bytes of dynamic shared memory that a block may have without an attribute: 48 KiB, less
/// those that a kernel declares statically.
const DEFAULT_SHARED: u32 = 40 << 10;

/// The headers that kernels include.
pub const HEADERS: [KernelSource; 6] =
    sources!["attention.cuh" "common.cuh" "ptx.cuh" "rows.cuh" "sum.cuh" "vector.cuh"];

/// All kernel sources.
pub const KERNELS: [KernelSource; 31] = sources![
    "activation.cu" "adamw.cu" "add.cu" "attention.cu" "attention_backward.cu" "channel_norm.cu"
    "checksum.cu" "column_sum.cu" "contrastive.cu" "convert.cu" "cross_entropy.cu" "dot_interaction.cu" "dropout.cu"
    "embedding.cu" "embedding_backward.cu" "im2col_pool.cu" "ipc.cu" "lamb.cu" "lerp.cu" "multiply.cu"
    "norm.cu" "norm_backward.cu" "optimizer_elementwise.cu" "reduce_terms.cu" "regression.cu"
    "rotary.cu" "sgd.cu" "softmax.cu" "strided_copy.cu" "sum.cu" "swiglu.cu"
];

/// A variant of a source to compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The name of the source.
    pub source: &'static str,
    /// Whether tensors are bf16 instead of f32.
    pub narrow: bool,
    /// The head width, if the kernel is specialised for one.
    pub head: Option<usize>,
}

/// Compiles `variant` for an architecture such as `sm_90a`, and returns the cubin.
///
/// # Errors
/// Returns an error if NVRTC or the source is missing, or if it does not compile. The message has
/// the compiler's log.
pub fn compile(variant: Variant, architecture: &str) -> Result<Vec<u8>> {
    let library = &library_versions::nvrtc()?.functions;
    let source = source(variant.source)?;
    let text =
        |text: &str| CString::new(text).map_err(|_| Error::internal("a zero byte in a kernel"));
    let headers = HEADERS.iter().map(|header| text(header.text)).collect::<Result<Vec<_>>>()?;
    let names = HEADERS.iter().map(|header| text(header.name)).collect::<Result<Vec<_>>>()?;
    let options = options(variant, architecture)
        .iter()
        .map(|option| text(option))
        .collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| {
        strings.iter().map(|text| text.as_ptr()).collect::<Vec<*const c_char>>()
    };
    let code = text(source.text)?;
    let name = text(source.name)?;
    let mut program = std::ptr::null_mut();
    let failed = |action: &str, status: sys::nvrtcResult| {
        Error::device(format!("NVRTC could not {action}: {status:?}"))
    };
    // SAFETY: all strings end in zero and outlive the call; there are as many headers as names.
    let status = unsafe {
        let headers = pointers(&headers);
        let names = pointers(&names);
        let count = headers.len() as i32;
        (library.create)(
            &mut program,
            code.as_ptr(),
            name.as_ptr(),
            count,
            headers.as_ptr(),
            names.as_ptr(),
        )
    };
    if status != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(failed("begin", status));
    }
    let _end = End(library, program);
    // SAFETY: the program lives until `_end`, the options until the call returns.
    let compiled = unsafe {
        let options = pointers(&options);
        (library.compile)(program, options.len() as i32, options.as_ptr())
    };
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        let log = output(program, library.log_size, library.log);
        let log = log.unwrap_or_default();
        let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
        return Err(Error::device(format!(
            "kernel {} does not compile for {architecture}: {}",
            source.name,
            log.trim()
        )));
    }
    output(program, library.cubin_size, library.cubin)
        .map_err(|status| failed("return the cubin", status))
}

/// Returns an output of NVRTC for a program, after querying its length.
fn output(
    program: sys::nvrtcProgram,
    size: unsafe extern "C" fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
    get: unsafe extern "C" fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
) -> Result<Vec<u8>, sys::nvrtcResult> {
    let done =
        |status| if status == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(status) };
    let mut len = 0;
    // SAFETY: the program is alive, and the length is written to.
    done(unsafe { size(program, &mut len) })?;
    let mut bytes = vec![0u8; len];
    // SAFETY: as many bytes are written as the library has just said.
    done(unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
    Ok(bytes)
}

/// Destroys a program of NVRTC when dropped.
struct End(&'static Nvrtc, sys::nvrtcProgram);

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: created by NVRTC and ended once.
        unsafe { (self.0.destroy)(&mut self.1) };
    }
}

fn source(name: &str) -> Result<KernelSource> {
    let source = KERNELS.into_iter().find(|source| source.name == name);
    source.ok_or_else(|| Error::internal(format!("there is no kernel {name}")))
}

fn options(variant: Variant, architecture: &str) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
    options.extend(variant.narrow.then(|| "-DBF16".into()));
    options.extend(variant.head.map(|head| format!("-DHEAD={head}")));
    options
}

/// A loaded function.
#[derive(Clone)]
struct Loaded {
    function: CudaFunction,
    /// The bytes of dynamic shared memory that its blocks may have.
    shared: u32,
}

/// The kernels of one device, compiled on first use.
pub struct KernelModules {
    context: Arc<CudaContext>,
    architecture: String,
    /// The cache directory, or `None` if none is writable.
    folder: Option<PathBuf>,
    modules: Mutex<HashMap<Variant, Arc<CudaModule>>>,
    functions: Mutex<HashMap<(Variant, &'static str), Loaded>>,
}

impl KernelModules {
    /// Creates an empty set of kernels. For `architecture` see [`compile`].
    ///
    /// # Errors
    /// Returns an error if NVRTC is missing.
    pub fn new(context: &Arc<CudaContext>, architecture: String) -> Result<Self> {
        let folder = cache_folder(&libraries::nvrtc()?);
        let modules = Mutex::default();
        let functions = Mutex::default();
        Ok(Self { context: context.clone(), architecture, folder, modules, functions })
    }

    /// Returns the function `name` of a variant, with up to `shared` bytes of dynamic shared memory
    /// per block.
    ///
    /// # Errors
    /// Returns an error if it does not compile or load.
    pub fn function(
        &self,
        variant: Variant,
        name: &'static str,
        shared: u32,
    ) -> Result<CudaFunction> {
        let known = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(variant, name))
            .cloned();
        let mut loaded = match known {
            Some(known) if shared <= known.shared => return Ok(known.function),
            Some(known) => known,
            None => {
                let function = self.module(variant)?.load_function(name);
                Loaded {
                    function: check(&format!("find {name} in {}", variant.source), function)?,
                    shared: DEFAULT_SHARED,
                }
            }
        };
        if shared > loaded.shared {
            let attribute =
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check(
                &format!("give {name} {shared} bytes"),
                loaded.function.set_attribute(attribute, shared as i32),
            )?;
            loaded.shared = shared;
        }
        let function = loaded.function.clone();
        self.functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((variant, name), loaded);
        Ok(function)
    }

    fn module(&self, variant: Variant) -> Result<Arc<CudaModule>> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&variant) {
            return Ok(module.clone());
        }
        let load = |image| {
            let loaded = self.context.load_module(Ptx::from_binary(image));
            check(&format!("load {} for {}", variant.source, self.architecture), loaded)
        };
        let module = match self.image(variant, DiskCache::Allowed)? {
            (image, Origin::Disk) => load(image).or_else(|e| {
                log::warn!("{e}: recompiling the cached kernel");
                load(self.image(variant, DiskCache::Ignored)?.0)
            }),
            (image, Origin::Compiler) => load(image),
        }?;
        modules.insert(variant, module.clone());
        Ok(module)
    }

    /// Returns the cubin, from disk if it is cached and `cache` allows it. The ranks of a node
    /// compile it once, under a file lock.
    fn image(&self, variant: Variant, cache: DiskCache) -> Result<(Vec<u8>, Origin)> {
        let Some(folder) = &self.folder else {
            return Ok((compile(variant, &self.architecture)?, Origin::Compiler));
        };
        let path = folder.join(format!("{}.cubin", key(variant, &self.architecture)?));
        let on_disk =
            || if cache == DiskCache::Allowed { unsealed(&fs::read(&path).ok()?) } else { None };
        if let Some(image) = on_disk() {
            return Ok((image, Origin::Disk));
        }
        let lock = user_dirs::lock_file(&path.with_extension("lock")).ok();
        // Without file locks a kernel may be compiled more than once, but nothing breaks.
        let _locked = lock.as_ref().is_some_and(|lock| lock.lock().is_ok());
        if let Some(image) = on_disk() {
            return Ok((image, Origin::Disk));
        }
        let image = compile(variant, &self.architecture)?;
        keep(&path, &image)
            .unwrap_or_else(|e| log::debug!("kernel not cached in {}: {e}", path.display()));
        Ok((image, Origin::Compiler))
    }
}

/// Whether a cached cubin may be used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DiskCache {
    Allowed,
    Ignored,
}

/// The origin of a cubin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Disk,
    Compiler,
}

/// The bytes of the SHA-256 before a cubin on disk.
const SEAL: usize = 32;

/// Writes a cubin behind its hash, atomically.
fn keep(path: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&Sha256::digest(image))?;
    file.write_all(image)?;
    file.persist(path).map(drop).map_err(|e| e.error)
}

/// Returns the cubin of a file, or `None` if its hash differs: a crash may have truncated it.
fn unsealed(sealed: &[u8]) -> Option<Vec<u8>> {
    let (seal, image) = sealed.split_at_checked(SEAL)?;
    (Sha256::digest(image)[..] == *seal).then(|| image.to_vec())
}

/// Returns the cache key of a variant: a hash of everything on which it depends except the
/// compiler's version.
fn key(variant: Variant, architecture: &str) -> Result<String> {
    let mut hash = Sha256::new();
    for KernelSource { name, text } in HEADERS.into_iter().chain([source(variant.source)?]) {
        hash.update(name);
        hash.update(text);
    }
    options(variant, architecture).iter().for_each(|option| hash.update(option));
    Ok(hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the directory of kernels compiled by this version of NVRTC, in a cache directory of the
/// user, or `None` if there is no writable one.
fn cache_folder(nvrtc: &str) -> Option<PathBuf> {
    // The name differs from that of caches without hashes.
    let kernels = format!("sealed-kernels-{nvrtc}");
    user_dirs::cache_roots().into_iter().find_map(|(root, name)| {
        let folder = user_dirs::below(&root, &[&name, &kernels])
            .inspect_err(|e| log::debug!("no kernel cache: {e}"))
            .ok()?;
        tempfile::tempfile_in(&folder).is_ok().then_some(folder)
    })
}
