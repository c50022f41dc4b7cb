//! Matmuls by cuBLASLt, planned once per shape.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaContext;

use super::libraries::check;
use super::library_versions::{self, CublasLt};
use super::matmul_desc::{BEST_ALIGNMENT, BIAS_ALIGNMENT, Epilogue, MatmulDesc};
use super::memory::Element;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{ChosenAlgorithm, MatmulAlgorithm, MatmulKey};

/// The bytes of workspace that an algorithm may use: NVIDIA's recommendation for the largest
/// devices.
pub const WORKSPACE: usize = 32 << 20;

/// The number of elements to whose multiple the rows of logits are padded. Row strides must be
/// multiples of 16 bytes for algorithms that copy tiles by TMA or load vectors into tensor cores;
/// with multiples of 128 bytes, which these are in f32 and bf16, rows of a tile touch no extra
/// cache lines. Only strides matter, not the number of columns: PyTorch's compiler also pads only
/// strides on NVIDIA GPUs, to 128 bytes (<https://github.com/pytorch/pytorch/pull/120758>).
pub const ROW: usize = 128;

/// The arithmetic of f32 matmuls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Full f32 precision.
    Full,
    /// Tensor cores, with operands rounded to TF32 (10 bits of mantissa).
    Tf32,
}

/// A matmul that cuBLASLt is ready to run.
struct Plan {
    library: &'static CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The plans of matmuls so far, and the algorithms chosen by autotuning.
#[derive(Default)]
struct Plans {
    /// `None` for a matmul for which cuBLASLt knows no algorithm.
    made: HashMap<MatmulKey, Option<Plan>>,
    chosen: HashMap<MatmulKey, MatmulAlgorithm>,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by cuBLASLt and destroyed once; nothing can be done about failures.
        unsafe {
            for layout in self.layouts {
                (self.library.destroy_layout)(layout);
            }
            (self.library.destroy_description)(self.description);
        }
    }
}

/// cuBLASLt on one device.
pub struct Matmul {
    library: &'static CublasLt,
    context: Arc<CudaContext>,
    handle: sys::cublasLtHandle_t,
    arithmetic: Arithmetic,
    plans: Mutex<Plans>,
}

// SAFETY: cuBLASLt's handles may be used from any thread; the plans are behind a lock.
unsafe impl Send for Matmul {}
// SAFETY: as above.
unsafe impl Sync for Matmul {}

impl Matmul {
    /// Opens cuBLASLt on the device of `context`, which is made the thread's current one: otherwise
    /// the library would use the first device.
    ///
    /// # Errors
    /// Returns an error if the library is missing or fails.
    pub fn new(context: &Arc<CudaContext>, arithmetic: Arithmetic) -> Result<Self> {
        let library = &library_versions::cublaslt()?.functions;
        check("be chosen", context.bind_to_thread())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        unsafe { (library.create)(&mut handle) }.result().map_err(|e| failed("begin", e))?;
        Ok(Self { library, context: context.clone(), handle, arithmetic, plans: Mutex::default() })
    }

    /// Returns true if cuBLASLt knows an algorithm for a matmul. The answer is cached, and a
    /// warning is logged if a fused GELU or residual is not supported.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    pub fn is_supported(&self, product: &MatmulDesc) -> Result<bool> {
        if product.is_empty() {
            return Ok(true);
        }
        Ok(self.planned(&mut self.plans(), self.kind(product))?.is_some())
    }

    /// Returns the version number of the library.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.library.version)() }
    }

    /// Returns all matmuls so far for which it knows an algorithm, sorted.
    pub fn planned_kinds(&self) -> Vec<MatmulKey> {
        let plans = self.plans();
        let mut seen: Vec<_> =
            plans.made.iter().filter(|(_, plan)| plan.is_some()).map(|(kind, _)| *kind).collect();
        seen.sort_unstable();
        seen
    }

    /// Sets the algorithms of these matmuls. All others use the first choice of cuBLASLt's
    /// heuristic.
    pub fn set_algorithms(&self, chosen: &[ChosenAlgorithm]) {
        let mut plans = self.plans();
        plans.chosen = chosen
            .iter()
            .map(|ChosenAlgorithm { product, algorithm, .. }| (*product, *algorithm))
            .collect();
        // Plans are remade on demand.
        plans.made.retain(|_, plan| plan.is_none());
    }

    /// Returns up to `most` algorithms that cuBLASLt's heuristic proposes for a matmul, the best
    /// guess first. It is empty if cuBLASLt knows none.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    pub fn proposals(&self, kind: &MatmulKey, most: usize) -> Result<Vec<MatmulAlgorithm>> {
        check("be chosen", self.context.bind_to_thread())?;
        let proposed = self.describe(kind).and_then(|plan| self.proposed(&plan, kind, most));
        match proposed {
            Ok(proposed) => {
                Ok(proposed.into_iter().map(|algorithm| MatmulAlgorithm(algorithm.data)).collect())
            }
            Err(e) if is_refusal(&e) => Ok(vec![]),
            Err(e) => Err(failed(&format!("multiply {kind}"), e)),
        }
    }

    /// Returns true if cuBLASLt supports a matmul with this algorithm and the available workspace.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    pub fn supports(&self, kind: &MatmulKey, algorithm: MatmulAlgorithm) -> Result<bool> {
        check("be chosen", self.context.bind_to_thread())?;
        // Nothing is read there, but cuBLASLt may reject a null address.
        let Some(epilogue) =
            Epilogue::from_code(kind.epilogue, BIAS_ALIGNMENT, BEST_ALIGNMENT as u64)
        else {
            return Ok(false);
        };
        let described =
            self.describe(kind).and_then(|plan| self.point(&plan, epilogue).map(|()| plan));
        let plan = described.map_err(|e| failed(&format!("describe {kind}"), e))?;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm.0 };
        let [left, right, out] = plan.layouts;
        // SAFETY: the result is written to; plain numbers, for which zeros are valid. The
        // descriptors are alive.
        let (status, result) = unsafe {
            let mut result = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let check = self.library.check_algorithm;
            (
                check(
                    self.handle,
                    plan.description,
                    left,
                    right,
                    out,
                    out,
                    &algorithm,
                    &mut result,
                ),
                result,
            )
        };
        Ok(status.result().and(result.state.result()).is_ok() && result.workspaceSize <= WORKSPACE)
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kind(&self, product: &MatmulDesc) -> MatmulKey {
        product.kind(self.arithmetic == Arithmetic::Tf32)
    }

    /// Returns the plan of a matmul, creating it on first use.
    fn planned<'a>(&self, plans: &'a mut Plans, kind: MatmulKey) -> Result<&'a mut Option<Plan>> {
        let Plans { made, chosen } = plans;
        match made.entry(kind) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => {
                check("be chosen", self.context.bind_to_thread())?;
                let plan = match self.plan(&kind, chosen.get(&kind)) {
                    Ok(plan) => Some(plan),
                    Err(e) if is_refusal(&e) => None,
                    Err(e) => return Err(failed(&format!("multiply {kind}"), e)),
                };
                if plan.is_none() {
                    warn_if_fused(&kind);
                }
                Ok(new.insert(plan))
            }
        }
    }

    /// Queues a matmul on `stream`. `workspace` is the address of [`WORKSPACE`] bytes that no other
    /// stream uses.
    ///
    /// # Errors
    /// Returns an error if the library knows no algorithm, or if the device fails.
    pub fn run(
        &self,
        product: &MatmulDesc,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<()> {
        if self.run_if_supported(product, workspace, stream)? {
            return Ok(());
        }
        let message = format!("cuBLASLt knows no algorithm to multiply {}", self.kind(product));
        Err(Error::device(message)
            .hint("try another version of cuBLASLt, or set precision.dtype=f32"))
    }

    /// Queues a matmul like [`Matmul::run`]. Returns false, with nothing queued, if cuBLASLt does
    /// not support it. The answer is cached for [`Matmul::is_supported`], which may be wrong before
    /// the first call: the heuristic gets neither the factor of the matrix that is added nor its
    /// address.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn run_if_supported(
        &self,
        product: &MatmulDesc,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<bool> {
        if product.is_empty() {
            return Ok(true);
        }
        check("be chosen", self.context.bind_to_thread())?;
        let kind = self.kind(product);
        let mut plans = self.plans();
        let planned = self.planned(&mut plans, kind)?;
        let Some(plan) = planned else { return Ok(false) };
        match self.queue(plan, product, workspace, stream) {
            Ok(()) => Ok(true),
            Err(e) if is_refusal(&e) => {
                warn_if_fused(&kind);
                *planned = None;
                Ok(false)
            }
            Err(e) => Err(failed(&format!("multiply {kind}"), e)),
        }
    }

    /// Queues matmuls of one kind with an algorithm that was proposed for it. Returns false if
    /// cuBLASLt refuses the algorithm.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn run_with<'a>(
        &self,
        algorithm: MatmulAlgorithm,
        kind: &MatmulKey,
        products: impl IntoIterator<Item = &'a MatmulDesc>,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<bool> {
        check("be chosen", self.context.bind_to_thread())?;
        let queued = self.describe(kind).and_then(|mut plan| {
            plan.algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm.0 };
            products
                .into_iter()
                .try_for_each(|product| self.queue(&plan, product, workspace, stream))
        });
        match queued {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED => {
                Err(failed(&format!("multiply {kind}"), e))
            }
            // cuBLASLt proposes some algorithms and then refuses them, with various codes.
            Err(e) => {
                log::debug!(
                    "cuBLASLt proposes an algorithm to multiply {kind} and refuses it: {:?}",
                    e.0
                );
                Ok(false)
            }
        }
    }

    /// Sets the addresses of an epilogue.
    fn point(&self, plan: &Plan, epilogue: Epilogue) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(bias) = epilogue.bias() {
            assert!(bias.is_multiple_of(BIAS_ALIGNMENT), "a bias at {bias:#x}");
            // SAFETY: the attribute is an address. Nothing else changes the plan meanwhile: it
            // belongs to the caller, or is behind the lock.
            unsafe {
                describe(
                    self.library,
                    plan.description,
                    Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    &bias,
                )
            }?;
        }
        if let Some(kept) = epilogue.kept() {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            // SAFETY: as above.
            unsafe { describe(self.library, plan.description, attribute, &kept) }?;
        }
        Ok(())
    }

    fn queue(
        &self,
        plan: &Plan,
        product: &MatmulDesc,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<(), CublasError> {
        let MatmulDesc { shape, a, b, c, from, epilogue, .. } = *product;
        let alpha = 1.0f32;
        let beta = if shape.acc { 1.0f32 } else { 0.0 };
        self.point(plan, epilogue)?;
        // SAFETY: the addresses are of device memory as large as the layouts say; cuBLASLt copies
        // the descriptors. Row-major c = a·b is column-major cᵀ = bᵀ·aᵀ.
        unsafe {
            let [left, right, out] = plan.layouts;
            let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
            (self.library.matmul)(
                self.handle,
                plan.description,
                scalar(&alpha),
                b.pointer as *const c_void,
                left,
                a.pointer as *const c_void,
                right,
                scalar(&beta),
                from as *const c_void,
                out,
                c.pointer as *mut c_void,
                out,
                &plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream,
            )
        }
        .result()
    }

    /// Creates the plan of a matmul with its chosen algorithm, or with the heuristic's first.
    fn plan(
        &self,
        kind: &MatmulKey,
        chosen: Option<&MatmulAlgorithm>,
    ) -> Result<Plan, CublasError> {
        let mut plan = self.describe(kind)?;
        plan.algorithm = match chosen {
            Some(algorithm) => sys::cublasLtMatmulAlgo_t { data: algorithm.0 },
            None => self.proposed(&plan, kind, 1)?[0],
        };
        Ok(plan)
    }

    /// Creates the cuBLASLt descriptors of a matmul, without an algorithm.
    fn describe(&self, kind: &MatmulKey) -> Result<Plan, CublasError> {
        let MatmulKey {
            sizes: [m, n, k],
            strides,
            transposed: [ta, tb],
            epilogue,
            keeps,
            bytes,
            tf32,
            ..
        } = *kind;
        let [a, b, c] = bytes.map(element);
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = match tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let operation = |transposed: bool| i32::from(transposed);
        let library = self.library;
        let mut description = std::ptr::null_mut();
        // SAFETY: writes the description.
        unsafe {
            (library.create_description)(&mut description, compute, sys::cudaDataType::CUDA_R_32F)
        }
        .result()?;
        // As stored, seen column-major: b is (k×n)ᵀ = n×k, or k×n if it is stored transposed.
        let layouts = [
            create_layout(library, b, if tb { [k, n] } else { [n, k] }, strides[1])?,
            create_layout(library, a, if ta { [m, k] } else { [k, m] }, strides[0])?,
            create_layout(library, c, [n, m], strides[2])?,
        ];
        // SAFETY: plain numbers; replaced before it is used.
        let algorithm = unsafe { std::mem::zeroed() };
        let plan = Plan { library, description, layouts, algorithm };
        // SAFETY: attributes are given as the integers that cuBLASLt documents; descriptors are
        // alive.
        unsafe {
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(tb))?;
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(ta))?;
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if keeps {
                describe(
                    library,
                    description,
                    Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
                    &(n as i64),
                )?;
            }
        }
        Ok(plan)
    }

    /// Returns the best algorithms of cuBLASLt's heuristic: at least one, at most `most`.
    fn proposed(
        &self,
        plan: &Plan,
        kind: &MatmulKey,
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let library = self.library;
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes the preference.
        unsafe { (library.create_preference)(&mut preference) }.result()?;
        let prefer = |attribute, value: &[u8]| {
            // SAFETY: attributes are given as the integers that cuBLASLt documents; the preference
            // is alive.
            unsafe { (library.prefer)(preference, attribute, value.as_ptr().cast(), value.len()) }
                .result()
        };
        // In-place reductions are excluded: the order of sums must not depend on the order in which
        // blocks finish. Partial sums are f32 even if the result is bf16.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        // SAFETY: the results are plain numbers, for which zeros are valid.
        let mut results =
            vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; most];
        let mut found = 0;
        let asked =
            prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE.to_ne_bytes())
                .and_then(|()| {
                    prefer(
                        Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                        &schemes.to_ne_bytes(),
                    )
                })
                .and_then(|()| {
                    let [of_a, of_b, of_c] = kind.alignments.map(u32::to_ne_bytes);
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &of_b)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &of_a)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &of_c)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &of_c)
                })
                .and_then(|()| {
                    let ([left, right, out], first) = (plan.layouts, results.as_mut_ptr());
                    let handle = self.handle;
                    let described = plan.description;
                    let most = most as c_int;
                    // SAFETY: there is room for `most` results, and descriptors are alive.
                    unsafe {
                        (library.heuristic)(
                            handle, described, left, right, out, out, preference, most, first,
                            &mut found,
                        )
                    }
                    .result()
                });
        // SAFETY: created above and destroyed once.
        unsafe { (library.destroy_preference)(preference) };
        asked?;
        results.truncate(usize::try_from(found).unwrap_or(0));
        let refusal = results.first().map_or(Err(NONE), |first| first.state.result());
        let sound: Vec<_> =
            results.iter().filter(|one| one.state.result().is_ok()).map(|one| one.algo).collect();
        if sound.is_empty() { refusal.and(Err(NONE)) } else { Ok(sound) }
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: created by cuBLASLt and destroyed once.
            unsafe { (self.library.destroy)(self.handle) };
        }
    }
}

/// Sets an attribute of a matmul descriptor.
///
/// # Safety
/// The description is alive and T is the attribute's type.
unsafe fn describe<T>(
    library: &CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        (library.describe)(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
    .result()
}

/// Creates the descriptor of a column-major matrix.
fn create_layout(
    library: &CublasLt,
    element: sys::cudaDataType,
    [rows, columns]: [usize; 2],
    stride: usize,
) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let (rows, columns) = (rows as u64, columns as u64);
    let mut layout = std::ptr::null_mut();
    // SAFETY: writes the layout.
    unsafe { (library.create_layout)(&mut layout, element, rows, columns, stride as i64) }
        .result()?;
    Ok(layout)
}

/// Returns the element type with a size of `bytes` bytes.
fn element(bytes: usize) -> sys::cudaDataType {
    match Element::with_size(bytes) {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// The error if cuBLASLt knows no algorithm.
const NONE: CublasError = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);

fn is_refusal(error: &CublasError) -> bool {
    error.0 == NONE.0
}

/// Logs a warning if a matmul that cuBLASLt does not support has another operation fused to it,
/// which then runs as a second kernel.
fn warn_if_fused(kind: &MatmulKey) {
    let fused = match kind {
        MatmulKey { keeps: true, .. } => "fused GELU",
        MatmulKey { out_of_place: true, .. } => "a fused residual",
        _ => return,
    };
    log::warn!(
        "cuBLASLt knows no algorithm to multiply {kind} with {fused}: they run as two kernels"
    );
}

fn failed(action: &str, error: CublasError) -> Error {
    Error::device(format!("cuBLASLt could not {action}: {:?}", error.0))
}
