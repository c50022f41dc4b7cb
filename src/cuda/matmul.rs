//! Matrix products by cuBLASLt: planned once a shape, then repeated.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaContext;

use super::libraries::check;
use super::library_versions::{self, CublasLt};
use super::matmul_desc::{BEST_ALIGNMENT, BIAS_ALIGNMENT, Epilogue, Product};
use super::memory::Element;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Algorithm, Chosen, ProductKind};

/// Bytes of scratch that an algorithm may use: NVIDIA's recommendation for the largest devices.
pub const WORKSPACE: usize = 32 << 20;

/// Elements that the rows of logits are padded to a multiple of. From one row to the next there
/// must be a multiple of 16 bytes, or no algorithm that copies tiles by TMA, or by vectors into
/// tensor cores, can be taken; at multiples of 128 bytes, which these are in f32 and bf16, no row
/// of a tile touches a cache line more than it fills. Strides count, the number of columns may be
/// any: PyTorch's compiler, too, pads strides alone for NVIDIA's GPUs, to 128 bytes
/// (<https://github.com/pytorch/pytorch/pull/120758>).
pub const ROW: usize = 128;

/// Arithmetic of f32 products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// With all bits.
    Full,
    /// On tensor cores, operands rounded to TF32's 10 bits.
    Tf32,
}

/// A product that cuBLASLt is ready to run.
struct Plan {
    library: &'static CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Products so far, and choices for some of them and others.
#[derive(Default)]
struct Plans {
    /// None of a product for which cuBLASLt knows no algorithm.
    made: HashMap<ProductKind, Option<Plan>>,
    chosen: HashMap<ProductKind, Algorithm>,
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
    /// On the device of `context`. Without a context of the thread the library would take the first
    /// device.
    ///
    /// # Errors
    /// The library is not there, or fails.
    pub fn new(context: &Arc<CudaContext>, arithmetic: Arithmetic) -> Result<Self> {
        let library = &library_versions::cublaslt()?.functions;
        check("be chosen", context.bind_to_thread())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        unsafe { (library.create)(&mut handle) }.result().map_err(|e| failed("begin", e))?;
        Ok(Self { library, context: context.clone(), handle, arithmetic, plans: Mutex::default() })
    }

    /// Whether cuBLASLt knows an algorithm for a product. The first time it is asked, and a fused
    /// GELU that it does not know is warned of.
    ///
    /// # Errors
    /// The library or the device failed.
    pub fn knows(&self, product: &Product) -> Result<bool> {
        if product.is_empty() {
            return Ok(true);
        }
        Ok(self.planned(&mut self.plans(), self.kind(product))?.is_some())
    }

    /// The version of the library, as it counts itself.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.library.version)() }
    }

    /// All products so far that it knows an algorithm for, in order.
    pub fn seen(&self) -> Vec<ProductKind> {
        let plans = self.plans();
        let mut seen: Vec<_> =
            plans.made.iter().filter(|(_, plan)| plan.is_some()).map(|(kind, _)| *kind).collect();
        seen.sort_unstable();
        seen
    }

    /// From now on these products go by these algorithms, and others by the library's best guess.
    pub fn choose(&self, chosen: &[Chosen]) {
        let mut plans = self.plans();
        plans.chosen =
            chosen.iter().map(|Chosen { product, algorithm, .. }| (*product, *algorithm)).collect();
        // They are made anew.
        plans.made.retain(|_, plan| plan.is_none());
    }

    /// Algorithms that cuBLASLt proposes for a product, at most so many, its best guess first; none
    /// if it knows none.
    ///
    /// # Errors
    /// The library or the device failed.
    pub fn proposals(&self, kind: &ProductKind, most: usize) -> Result<Vec<Algorithm>> {
        check("be chosen", self.context.bind_to_thread())?;
        let proposed = self.describe(kind).and_then(|plan| self.proposed(&plan, kind, most));
        match proposed {
            Ok(proposed) => {
                Ok(proposed.into_iter().map(|algorithm| Algorithm(algorithm.data)).collect())
            }
            Err(e) if is_refusal(&e) => Ok(vec![]),
            Err(e) => Err(failed(&format!("multiply {kind}"), e)),
        }
    }

    /// Whether cuBLASLt computes a product by an algorithm, with the workspace that there is.
    ///
    /// # Errors
    /// The library or the device failed.
    pub fn takes(&self, kind: &ProductKind, algorithm: Algorithm) -> Result<bool> {
        check("be chosen", self.context.bind_to_thread())?;
        // Nothing is read there, but a null address may be a reason to refuse.
        let Some(epilogue) = Epilogue::of(kind.epilogue, BIAS_ALIGNMENT, BEST_ALIGNMENT as u64)
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
        let (status, told) = unsafe {
            let mut told = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let check = self.library.check_algorithm;
            (
                check(self.handle, plan.description, left, right, out, out, &algorithm, &mut told),
                told,
            )
        };
        Ok(status.result().and(told.state.result()).is_ok() && told.workspaceSize <= WORKSPACE)
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kind(&self, product: &Product) -> ProductKind {
        product.kind(self.arithmetic == Arithmetic::Tf32)
    }

    /// The plan of a product, made the first time.
    fn planned<'a>(&self, plans: &'a mut Plans, kind: ProductKind) -> Result<&'a mut Option<Plan>> {
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
                if plan.is_none() && kind.keeps {
                    log::warn!(
                        "cuBLASLt knows no algorithm to multiply {kind} with GELU: the two run one after the other"
                    );
                }
                Ok(new.insert(plan))
            }
        }
    }

    /// Queues a product on `stream`; `workspace` is the address of [`WORKSPACE`] bytes that nothing
    /// else on other streams uses.
    ///
    /// # Errors
    /// The library knows no algorithm, or the device failed.
    pub fn run(&self, product: &Product, workspace: u64, stream: sys::cudaStream_t) -> Result<()> {
        if product.is_empty() {
            return Ok(());
        }
        check("be chosen", self.context.bind_to_thread())?;
        let kind = self.kind(product);
        let mut plans = self.plans();
        let Some(plan) = self.planned(&mut plans, kind)? else {
            let message = format!("cuBLASLt knows no algorithm to multiply {kind}");
            return Err(Error::device(message)
                .hint("try another version of cuBLASLt, or set precision.dtype=f32"));
        };
        self.queue(plan, product, workspace, stream)
            .map_err(|e| failed(&format!("multiply {kind}"), e))
    }

    /// As [`Matmul::run`], by an algorithm that was proposed for such a product, `times` over.
    /// Whether the library could.
    ///
    /// # Errors
    /// The device failed.
    pub fn run_by(
        &self,
        algorithm: Algorithm,
        product: &Product,
        workspace: u64,
        stream: sys::cudaStream_t,
        times: usize,
    ) -> Result<bool> {
        check("be chosen", self.context.bind_to_thread())?;
        let kind = self.kind(product);
        let queued = self.describe(&kind).and_then(|mut plan| {
            plan.algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm.0 };
            (0..times).try_for_each(|_| self.queue(&plan, product, workspace, stream))
        });
        match queued {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED => {
                Err(failed(&format!("multiply {kind}"), e))
            }
            // Some algorithms are proposed and then refused, with several codes.
            Err(e) => {
                log::debug!(
                    "cuBLASLt proposes an algorithm to multiply {kind} and refuses it: {:?}",
                    e.0
                );
                Ok(false)
            }
        }
    }

    /// Tells the addresses of an epilogue.
    fn point(&self, plan: &Plan, epilogue: Epilogue) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(bias) = epilogue.bias() {
            assert!(bias.is_multiple_of(BIAS_ALIGNMENT), "a bias at {bias:#x}");
            // SAFETY: the attribute is an address. Nobody else describes the plan meanwhile: it is
            // the caller's, or behind the lock.
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
        product: &Product,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<(), CublasError> {
        let Product { shape, a, b, c, from, epilogue, .. } = *product;
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

    /// A product with the algorithm that was chosen for it, or with cuBLASLt's best guess.
    fn plan(&self, kind: &ProductKind, chosen: Option<&Algorithm>) -> Result<Plan, CublasError> {
        let mut plan = self.describe(kind)?;
        plan.algorithm = match chosen {
            Some(algorithm) => sys::cublasLtMatmulAlgo_t { data: algorithm.0 },
            None => self.proposed(&plan, kind, 1)?[0],
        };
        Ok(plan)
    }

    /// A product as cuBLASLt sees it, without an algorithm.
    fn describe(&self, kind: &ProductKind) -> Result<Plan, CublasError> {
        let ProductKind {
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
        let layout = |element, rows: usize, columns: usize, stride: usize| {
            let mut layout = std::ptr::null_mut();
            // SAFETY: writes the layout.
            unsafe {
                (library.create_layout)(
                    &mut layout,
                    element,
                    rows as u64,
                    columns as u64,
                    stride as i64,
                )
            }
            .result()?;
            Ok::<_, CublasError>(layout)
        };
        let mut description = std::ptr::null_mut();
        // SAFETY: writes the description.
        unsafe {
            (library.create_description)(&mut description, compute, sys::cudaDataType::CUDA_R_32F)
        }
        .result()?;
        // As stored, seen column-major: b is (k×n)ᵀ = n×k, or k×n if it is stored transposed.
        let layouts = [
            if tb { layout(b, k, n, strides[1])? } else { layout(b, n, k, strides[1])? },
            if ta { layout(a, m, k, strides[0])? } else { layout(a, k, m, strides[0])? },
            layout(c, n, m, strides[2])?,
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

    /// Asks cuBLASLt for its best algorithms: at least one, at most so many.
    fn proposed(
        &self,
        plan: &Plan,
        kind: &ProductKind,
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
        // The order of sums must not depend on who comes first: no reduction in place. Partial sums
        // are kept in f32, also where the result is bf16.
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
                    // SAFETY: there is room for so many results, and descriptors are alive.
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

/// Sets one attribute of a product.
///
/// # Safety
/// The description is alive and T is the attribute's type.
unsafe fn describe<T>(
    library: &CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: of the caller.
    unsafe {
        (library.describe)(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
    .result()
}

/// The type of elements of so many bytes.
fn element(bytes: usize) -> sys::cudaDataType {
    match Element::of(bytes) {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// The error where cuBLASLt knows no algorithm.
const NONE: CublasError = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);

fn is_refusal(error: &CublasError) -> bool {
    error.0 == NONE.0
}

fn failed(action: &str, error: CublasError) -> Error {
    Error::device(format!("cuBLASLt could not {action}: {:?}", error.0))
}
