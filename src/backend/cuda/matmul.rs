//! Matrix products by cuBLASLt: planned once a shape, then repeated.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaContext;

use super::libraries::check;
use super::memory::Element;
use super::toolkit::{self, CublasLt};
use crate::error::{Error, Result};

/// Bytes of scratch that an algorithm may use: NVIDIA's recommendation for the largest devices.
pub const WORKSPACE: usize = 32 << 20;

/// Bytes that the address of a bias must be a multiple of. No preference of cuBLASLt speaks of it, and algorithms may read it
/// by vectors (<https://github.com/pytorch/pytorch/issues/194497>).
pub const BIAS_ALIGNMENT: u64 = 16;

/// Elements that the rows of logits are padded to a multiple of. From one row to the next there must be a multiple of 16 bytes, or no
/// algorithm that copies tiles by TMA, or by vectors into tensor cores, can be taken; at multiples of 128 bytes, which these are in
/// f32 and bf16, no row of a tile touches a cache line more than it fills. Strides count, the number of columns may be any: PyTorch's
/// compiler, too, pads strides alone for NVIDIA's GPUs, to 128 bytes (<https://github.com/pytorch/pytorch/pull/120758>).
pub const ROW: usize = 128;

/// Arithmetic of f32 products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// With all bits.
    Full,
    /// On tensor cores, operands rounded to TF32's 10 bits.
    Tf32,
}

/// Operation on a product before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A vector is added to every row: its address.
    Bias(u64),
    /// The vector is added, unless its address is null; the sum is kept at `kept`, and its GELU stored.
    Gelu {
        /// As of [`Epilogue::Bias`].
        bias: u64,
        /// Address of a matrix like the result.
        kept: u64,
    },
    /// It is multiplied by the derivative of GELU at the kept sum.
    GeluBackward {
        /// As of [`Epilogue::Gelu`].
        kept: u64,
    },
}

impl Epilogue {
    /// cuBLASLt's name for it.
    fn kind(self) -> sys::cublasLtEpilogue_t {
        match self {
            Epilogue::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias(_) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { bias: 0, .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::Gelu { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluBackward { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// The address of a vector to add.
    fn bias(self) -> Option<u64> {
        match self {
            Epilogue::Bias(bias) | Epilogue::Gelu { bias, .. } => Some(bias).filter(|bias| *bias != 0),
            _ => None,
        }
    }

    /// The address of the sum kept between forward and backward.
    fn kept(self) -> Option<u64> {
        match self {
            Epilogue::Gelu { kept, .. } | Epilogue::GeluBackward { kept } => Some(kept),
            _ => None,
        }
    }
}

/// An operand or the result: address and element type.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Its address on the device.
    pub pointer: u64,
    /// Element type.
    pub element: Element,
}

/// `c = op(a)·op(b) (+ from)`, all row-major; the letters as in [`Gemm`](crate::backend::Gemm).
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Sizes and transpositions.
    pub shape: crate::backend::Gemm,
    /// Elements from a row of a, b and c, as they are stored, to the next.
    pub strides: [usize; 3],
    /// Left operand.
    pub a: Matrix,
    /// Right operand.
    pub b: Matrix,
    /// Result.
    pub c: Matrix,
    /// Address of a matrix like the result, to which the product is added where its shape says so; the result itself, or apart.
    pub from: u64,
    /// Operation on the result before it is stored.
    pub epilogue: Epilogue,
}

/// All that an algorithm's choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    strides: [usize; 3],
    flags: [bool; 4],
    epilogue: u32,
    elements: [Element; 3],
    /// Bytes that the addresses of a, b, and of c and the matrix added to it, are multiples of. Of the bias cuBLASLt cannot be told:
    /// [`BIAS_ALIGNMENT`] holds for all.
    alignments: [u32; 3],
}

/// The place in [`Key::flags`] of the one for a GELU whose input is kept.
const KEEPS: usize = 3;

impl Key {
    /// For people.
    fn describe(&self) -> String {
        let ([m, n, k], [a, b, c]) = (self.sizes, self.elements.map(Element::name));
        format!("{m}×{n}×{k} of {a} and {b} in {c}")
    }
}

impl Product {
    /// Whether there is nothing to compute.
    fn is_empty(&self) -> bool {
        self.shape.m == 0 || self.shape.n == 0
    }

    fn key(&self) -> Key {
        let Self { shape, strides, a, b, c, from, epilogue } = *self;
        let alignment = |pointer: u64| 1 << pointer.trailing_zeros().min(8);
        Key {
            sizes: [shape.m, shape.n, shape.k],
            strides,
            flags: [shape.ta, shape.tb, shape.acc, epilogue.kept().is_some()],
            epilogue: epilogue.kind() as u32,
            elements: [a.element, b.element, c.element],
            alignments: [a.pointer, b.pointer, c.pointer | from].map(alignment),
        }
    }
}

/// A product that cuBLASLt is ready to run.
struct Plan {
    library: &'static CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
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
    /// None of a product for which cuBLASLt knows no algorithm.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
}

// SAFETY: cuBLASLt's handles may be used from any thread; the plans are behind a lock.
unsafe impl Send for Matmul {}
// SAFETY: as above.
unsafe impl Sync for Matmul {}

impl Matmul {
    /// On the device of `context`. Without a context of the thread the library would take the first device.
    ///
    /// # Errors
    /// The library is not there, or fails.
    pub fn new(context: &Arc<CudaContext>, arithmetic: Arithmetic) -> Result<Self> {
        let library = &toolkit::cublaslt()?.functions;
        check("be chosen", context.bind_to_thread())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle.
        unsafe { (library.create)(&mut handle) }.result().map_err(|e| failed("begin", e))?;
        Ok(Self { library, context: context.clone(), handle, arithmetic, plans: Mutex::default() })
    }

    /// Whether cuBLASLt knows an algorithm for a product. The first time it is asked, and a fused GELU that it does not know is
    /// warned of.
    ///
    /// # Errors
    /// The library or the device failed.
    pub fn knows(&self, product: &Product) -> Result<bool> {
        if product.is_empty() {
            return Ok(true);
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.planned(&mut plans, product.key())?.is_some())
    }

    /// The plan of a product, made the first time.
    fn planned<'a>(&self, plans: &'a mut HashMap<Key, Option<Plan>>, key: Key) -> Result<&'a mut Option<Plan>> {
        match plans.entry(key) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => {
                check("be chosen", self.context.bind_to_thread())?;
                let plan = match self.plan(&key) {
                    Ok(plan) => Some(plan),
                    Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => None,
                    Err(e) => return Err(failed(&format!("multiply {}", key.describe()), e)),
                };
                if plan.is_none() && key.flags[KEEPS] {
                    log::warn!(
                        "cuBLASLt knows no algorithm to multiply {} with GELU: the two run one after the other",
                        key.describe()
                    );
                }
                Ok(new.insert(plan))
            }
        }
    }

    /// Queues a product on `stream`; `workspace` is the address of [`WORKSPACE`] bytes that nothing else on other
    /// streams uses.
    ///
    /// # Errors
    /// The library knows no algorithm, or the device failed.
    pub fn run(&self, product: &Product, workspace: u64, stream: sys::cudaStream_t) -> Result<()> {
        let Product { shape, a, b, c, from, epilogue, .. } = *product;
        if product.is_empty() {
            return Ok(());
        }
        check("be chosen", self.context.bind_to_thread())?;
        let key = product.key();
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(plan) = self.planned(&mut plans, key)? else {
            let message = format!("cuBLASLt knows no algorithm to multiply {}", key.describe());
            return Err(Error::device(message).hint("try another version of cuBLASLt, or set precision.compute=f32"));
        };
        let (alpha, beta) = (1.0f32, if shape.acc { 1.0f32 } else { 0.0 });
        let address = |matrix: Matrix| matrix.pointer as *const c_void;
        // SAFETY: the plan's descriptors live as long as the lock is held, and cuBLASLt copies them; the addresses are
        // of device memory as large as the layouts say. Row-major c = a·b is column-major cᵀ = bᵀ·aᵀ.
        let done = unsafe {
            use sys::cublasLtMatmulDescAttributes_t as Attribute;
            if let Some(bias) = epilogue.bias() {
                assert!(bias.is_multiple_of(BIAS_ALIGNMENT), "a bias at {bias:#x}");
                let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                describe(self.library, plan.description, attribute, &bias).map_err(|e| failed("take a bias", e))?;
            }
            if let Some(kept) = epilogue.kept() {
                let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
                describe(self.library, plan.description, attribute, &kept)
                    .map_err(|e| failed("keep the input of GELU", e))?;
            }
            let [left, right, out] = plan.layouts;
            let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
            let to = c.pointer as *mut c_void;
            (self.library.matmul)(
                self.handle,
                plan.description,
                scalar(&alpha),
                address(b),
                left,
                address(a),
                right,
                scalar(&beta),
                from as *const c_void,
                out,
                to,
                out,
                &plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream,
            )
        };
        done.result().map_err(|e| failed(&format!("multiply {}", key.describe()), e))
    }

    /// Asks cuBLASLt for its best algorithm.
    fn plan(&self, key: &Key) -> Result<Plan, CublasError> {
        let Key { sizes: [m, n, k], strides, flags: [ta, tb, _, keeps], epilogue, elements: [a, b, c], alignments } =
            *key;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let compute = match (a, self.arithmetic) {
            (Element::F32, Arithmetic::Tf32) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let operation = |transposed: bool| i32::from(transposed);
        let library = self.library;
        let layout = |element, rows: usize, columns: usize, stride: usize| {
            let mut layout = std::ptr::null_mut();
            // SAFETY: writes the layout.
            unsafe { (library.create_layout)(&mut layout, kind(element), rows as u64, columns as u64, stride as i64) }
                .result()?;
            Ok::<_, CublasError>(layout)
        };
        let mut description = std::ptr::null_mut();
        // SAFETY: writes the description.
        unsafe { (library.create_description)(&mut description, compute, sys::cudaDataType::CUDA_R_32F) }.result()?;
        // As stored, seen column-major: b is (k×n)ᵀ = n×k, or k×n if it is stored transposed.
        let layouts = [
            if tb { layout(b, k, n, strides[1])? } else { layout(b, n, k, strides[1])? },
            if ta { layout(a, m, k, strides[0])? } else { layout(a, k, m, strides[0])? },
            layout(c, n, m, strides[2])?,
        ];
        // SAFETY: the algorithm is replaced below, before it is used.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan = Plan { library, description, layouts, algorithm };
        // SAFETY: attributes are given as the integers that cuBLASLt documents; descriptors are alive.
        unsafe {
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(tb))?;
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(ta))?;
            describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if keeps {
                describe(library, description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(n as i64))?;
            }
            let mut preference = std::ptr::null_mut();
            (library.create_preference)(&mut preference).result()?;
            let prefer = |attribute, value: &[u8]| {
                (library.prefer)(preference, attribute, value.as_ptr().cast(), value.len()).result()
            };
            // The order of sums must not depend on who comes first: no reduction in place. Partial sums are kept in
            // f32, also where the result is bf16.
            let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            let chosen = prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE.to_ne_bytes())
                .and_then(|()| prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes.to_ne_bytes()))
                .and_then(|()| {
                    let [of_a, of_b, of_c] = alignments.map(u32::to_ne_bytes);
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &of_b)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &of_a)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &of_c)?;
                    prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &of_c)
                })
                .and_then(|()| {
                    let [left, right, out] = layouts;
                    let (mut best, mut found) = (std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>(), 0);
                    (library.heuristic)(
                        self.handle,
                        description,
                        left,
                        right,
                        out,
                        out,
                        preference,
                        1,
                        &mut best,
                        &mut found,
                    )
                    .result()?;
                    if found == 0 {
                        return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
                    }
                    best.state.result()?;
                    Ok(best.algo)
                });
            (library.destroy_preference)(preference);
            plan.algorithm = chosen?;
        }
        Ok(plan)
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
    unsafe { (library.describe)(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }.result()
}

fn kind(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

fn failed(action: &str, error: CublasError) -> Error {
    Error::device(format!("cuBLASLt could not {action}: {:?}", error.0))
}
