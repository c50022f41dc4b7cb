//! A matrix product as cuBLASLt is to compute it.

use cudarc::cublaslt::sys;

use super::memory::Element;
use hpctrain_device::ProductKind;

/// Bytes that an address must be a multiple of for the best algorithms: what cuBLASLt takes for
/// granted if nothing is said.
pub const BEST_ALIGNMENT: usize = 256;

/// Bytes that the address of a bias must be a multiple of. No preference of cuBLASLt speaks of it,
/// and algorithms may read it by vectors (<https://github.com/pytorch/pytorch/issues/194497>).
pub const BIAS_ALIGNMENT: u64 = 16;

/// Operation on a product before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A vector is added to every row: its address.
    Bias(u64),
    /// The vector is added, unless its address is null; the sum is kept at `kept`, and its GELU
    /// stored.
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
    pub fn kind(self) -> sys::cublasLtEpilogue_t {
        match self {
            Epilogue::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias(_) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { bias: 0, .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::Gelu { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluBackward { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// That of a name, of a vector and a matrix at these addresses; none if there is none of that
    /// name.
    pub fn of(kind: u32, bias: u64, kept: u64) -> Option<Self> {
        let all = [
            Self::None,
            Self::Bias(bias),
            Self::Gelu { bias, kept },
            Self::Gelu { bias: 0, kept },
            Self::GeluBackward { kept },
        ];
        all.into_iter().find(|epilogue| epilogue.kind() as u32 == kind)
    }

    /// The address of a vector to add.
    pub fn bias(self) -> Option<u64> {
        match self {
            Epilogue::Bias(bias) | Epilogue::Gelu { bias, .. } => {
                Some(bias).filter(|bias| *bias != 0)
            }
            _ => None,
        }
    }

    /// The address of the sum kept between forward and backward.
    pub fn kept(self) -> Option<u64> {
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

/// `c = op(a)·op(b) (+ from)`, all row-major; the letters as in [`Gemm`](hpctrain_device::Gemm).
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Sizes and transpositions.
    pub shape: hpctrain_device::Gemm,
    /// Elements from a row of a, b and c, as they are stored, to the next.
    pub strides: [usize; 3],
    /// Left operand.
    pub a: Matrix,
    /// Right operand.
    pub b: Matrix,
    /// Result.
    pub c: Matrix,
    /// Address of a matrix like the result, to which the product is added where its shape says so;
    /// the result itself, or apart.
    pub from: u64,
    /// Operation on the result before it is stored.
    pub epilogue: Epilogue,
}

impl Product {
    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.shape.m == 0 || self.shape.n == 0
    }

    /// All that the choice of its algorithm depends on; `tf32` if f32 operands may be rounded. Of
    /// the alignment of a bias cuBLASLt cannot be told: [`BIAS_ALIGNMENT`] holds for all.
    pub fn kind(&self, tf32: bool) -> ProductKind {
        let Self { shape, strides, a, b, c, from, epilogue } = *self;
        ProductKind {
            sizes: [shape.m, shape.n, shape.k],
            strides,
            transposed: [shape.ta, shape.tb],
            adds: shape.acc,
            epilogue: epilogue.kind() as u32,
            keeps: epilogue.kept().is_some(),
            bytes: [a, b, c].map(|matrix| matrix.element.size()),
            tf32: tf32 && a.element == Element::F32,
            alignments: [a.pointer, b.pointer, c.pointer | from]
                .map(|pointer| 1 << pointer.trailing_zeros().min(BEST_ALIGNMENT.trailing_zeros())),
        }
    }
}
