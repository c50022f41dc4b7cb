//! Matrix products by cuBLASLt: planned once a shape, then repeated.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::libraries;
use super::memory::Element;
use crate::error::{Error, Result};

/// Bytes of scratch that an algorithm may use: NVIDIA's recommendation for the largest devices.
pub const WORKSPACE: usize = 32 << 20;

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

/// `c = op(a)·op(b) (+ c)`, all row-major; the letters as in [`Gemm`](crate::backend::Gemm).
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Sizes and transpositions.
    pub shape: crate::backend::Gemm,
    /// Left operand.
    pub a: Matrix,
    /// Right operand.
    pub b: Matrix,
    /// Result.
    pub c: Matrix,
    /// Operation on the result before it is stored.
    pub epilogue: Epilogue,
}

/// All that an algorithm's choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    flags: [bool; 4],
    epilogue: u32,
    elements: [Element; 3],
    /// Bytes that the addresses of a, b and c are multiples of.
    alignments: [u32; 3],
}

/// A product that cuBLASLt is ready to run.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by cuBLASLt and destroyed once; nothing can be done about failures.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}

/// cuBLASLt on one device.
pub struct Matmul {
    handle: sys::cublasLtHandle_t,
    arithmetic: Arithmetic,
    plans: Mutex<HashMap<Key, Plan>>,
}

// SAFETY: cuBLASLt's handles may be used from any thread; the plans are behind a lock.
unsafe impl Send for Matmul {}
// SAFETY: as above.
unsafe impl Sync for Matmul {}

impl Matmul {
    /// The device is that of the context bound to this thread.
    ///
    /// # Errors
    /// The library is not there, or fails.
    pub fn new(arithmetic: Arithmetic) -> Result<Self> {
        libraries::cublaslt()?;
        let handle = result::create_handle().map_err(|e| failed("begin", e))?;
        Ok(Self { handle, arithmetic, plans: Mutex::default() })
    }

    /// Queues a product on `stream`; `workspace` is the address of [`WORKSPACE`] bytes that nothing else on other
    /// streams uses.
    ///
    /// # Errors
    /// The library knows no algorithm, or the device failed.
    pub fn run(&self, product: &Product, workspace: u64, stream: sys::cudaStream_t) -> Result<()> {
        let Product { shape, a, b, c, epilogue } = *product;
        if shape.m == 0 || shape.n == 0 {
            return Ok(());
        }
        let alignment = |matrix: Matrix| 1 << matrix.pointer.trailing_zeros().min(8);
        let key = Key {
            sizes: [shape.m, shape.n, shape.k],
            flags: [shape.ta, shape.tb, shape.acc, epilogue.kept().is_some()],
            epilogue: epilogue.kind() as u32,
            elements: [a.element, b.element, c.element],
            alignments: [a, b, c].map(alignment),
        };
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => new.insert(self.plan(&key).map_err(|e| {
                failed(&format!("multiply {}×{}×{} of {:?}", shape.m, shape.n, shape.k, key.elements), e)
            })?),
        };
        let (alpha, beta) = (1.0f32, if shape.acc { 1.0f32 } else { 0.0 });
        let address = |matrix: Matrix| matrix.pointer as *const c_void;
        // SAFETY: the plan's descriptors live as long as the lock is held, and cuBLASLt copies them; the addresses are
        // of device memory as large as the layouts say. Row-major c = a·b is column-major cᵀ = bᵀ·aᵀ.
        let done = unsafe {
            use sys::cublasLtMatmulDescAttributes_t as Attribute;
            if let Some(bias) = epilogue.bias() {
                let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                describe(plan.description, attribute, &bias).map_err(|e| failed("take a bias", e))?;
            }
            if let Some(kept) = epilogue.kept() {
                let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
                describe(plan.description, attribute, &kept).map_err(|e| failed("keep the input of GELU", e))?;
            }
            let [left, right, out] = plan.layouts;
            let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
            let to = c.pointer as *mut c_void;
            result::matmul(
                self.handle,
                plan.description,
                scalar(&alpha),
                scalar(&beta),
                address(b),
                left,
                address(a),
                right,
                address(c),
                out,
                to,
                out,
                &plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream,
            )
        };
        done.map_err(|e| failed(&format!("multiply {}×{}×{}", shape.m, shape.n, shape.k), e))
    }

    /// Asks cuBLASLt for its best algorithm.
    fn plan(&self, key: &Key) -> Result<Plan, CublasError> {
        let Key { sizes: [m, n, k], flags: [ta, tb, _, keeps], epilogue, elements: [a, b, c], alignments } = *key;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let compute = match (a, self.arithmetic) {
            (Element::F32, Arithmetic::Tf32) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let operation = |transposed: bool| i32::from(transposed);
        let layout = |element, rows: usize, columns: usize| {
            result::create_matrix_layout(kind(element), rows as u64, columns as u64, rows as i64)
        };
        let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
        // As stored, seen column-major: b is (k×n)ᵀ = n×k, or k×n if it is stored transposed.
        let layouts = [
            if tb { layout(b, k, n)? } else { layout(b, n, k)? },
            if ta { layout(a, m, k)? } else { layout(a, k, m)? },
            layout(c, n, m)?,
        ];
        // SAFETY: the algorithm is replaced below, before it is used.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan = Plan { description, layouts, algorithm };
        // SAFETY: attributes are given as the integers that cuBLASLt documents; descriptors are alive.
        unsafe {
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(tb))?;
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(ta))?;
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if keeps {
                describe(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(n as i64))?;
            }
            let preference = result::create_matmul_pref()?;
            let prefer = |attribute, value: &[u8]| {
                result::set_matmul_pref_attribute(preference, attribute, value.as_ptr().cast(), value.len())
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
                    result::get_matmul_algo_heuristic(self.handle, description, left, right, out, out, preference)
                });
            let _ = result::destroy_matmul_pref(preference);
            plan.algorithm = chosen?.algo;
        }
        Ok(plan)
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        // SAFETY: created by cuBLASLt and destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Sets one attribute of a product.
///
/// # Safety
/// The description is alive and T is the attribute's type.
unsafe fn describe<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: of the caller.
    unsafe {
        result::set_matmul_desc_attribute(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
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
