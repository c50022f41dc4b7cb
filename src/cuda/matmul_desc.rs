//! The description of a matmul for cuBLASLt.

use cudarc::cublaslt::sys;

use super::memory::Element;
use hpctrain_device::MatmulKey;

/// The alignment in bytes that the best algorithms require, which cuBLASLt assumes by default.
pub const BEST_ALIGNMENT: usize = 256;

/// The alignment in bytes of a bias. cuBLASLt has no preference for it, and algorithms may read it
/// by vectors (<https://github.com/pytorch/pytorch/issues/194497>).
pub const BIAS_ALIGNMENT: u64 = 16;

/// An operation on the result of a matmul before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// No operation.
    None,
    /// Adds a vector to every row. The value is its address.
    Bias(u64),
    /// Adds a vector, unless its address is null, stores the sum at `kept`, and its GELU as the
    /// result.
    Gelu {
        /// The address of the vector, as in [`Epilogue::Bias`].
        bias: u64,
        /// The address of a matrix like the result.
        gelu_input: u64,
    },
    /// Multiplies by the derivative of GELU at the stored sum.
    GeluBackward {
        /// The address of the sum, as in [`Epilogue::Gelu`].
        kept: u64,
    },
}

impl Epilogue {
    /// Returns the cuBLASLt epilogue.
    pub fn kind(self) -> sys::cublasLtEpilogue_t {
        match self {
            Epilogue::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias(_) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { bias: 0, .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::Gelu { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluBackward { .. } => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// Returns the epilogue of a cuBLASLt code, with a bias and a stored sum at these addresses, or
    /// `None` for an unknown code.
    pub fn from_code(kind: u32, bias: u64, kept: u64) -> Option<Self> {
        let all = [
            Self::None,
            Self::Bias(bias),
            Self::Gelu { bias, gelu_input: kept },
            Self::Gelu { bias: 0, gelu_input: kept },
            Self::GeluBackward { kept },
        ];
        all.into_iter().find(|epilogue| epilogue.kind() as u32 == kind)
    }

    /// Returns the address of the vector to add.
    pub fn bias(self) -> Option<u64> {
        match self {
            Epilogue::Bias(bias) | Epilogue::Gelu { bias, .. } => {
                Some(bias).filter(|bias| *bias != 0)
            }
            _ => None,
        }
    }

    /// Returns the address of the sum saved for the backward.
    pub fn kept(self) -> Option<u64> {
        match self {
            Epilogue::Gelu { gelu_input: kept, .. } | Epilogue::GeluBackward { kept } => Some(kept),
            _ => None,
        }
    }
}

/// An operand or the result: address and element type.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// The address on the device.
    pub pointer: u64,
    /// The element type.
    pub element: Element,
}

/// A matmul `c = op(a)·op(b) (+ from)`, all row-major, with the letters of
/// [`Gemm`](hpctrain_device::Gemm).
#[derive(Debug, Clone, Copy)]
pub struct MatmulDesc {
    /// Sizes and transpositions.
    pub shape: hpctrain_device::Gemm,
    /// The row strides of a, b and c as they are stored, in elements.
    pub strides: [usize; 3],
    /// The left operand.
    pub a: Matrix,
    /// The right operand.
    pub b: Matrix,
    /// The result.
    pub c: Matrix,
    /// The address of a matrix like the result, to which the matmul is added if `shape.acc`. It may
    /// be the result itself.
    pub from: u64,
    /// The operation on the result before it is stored.
    pub epilogue: Epilogue,
}

impl MatmulDesc {
    /// Returns true if there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.shape.m == 0 || self.shape.n == 0
    }

    /// Returns everything on which the choice of the algorithm depends. `tf32` says whether f32
    /// operands may be rounded. The alignment of a bias is not included, since it is always
    /// [`BIAS_ALIGNMENT`].
    pub fn kind(&self, tf32: bool) -> MatmulKey {
        let Self { shape, strides, a, b, c, from, epilogue } = *self;
        MatmulKey {
            sizes: [shape.m, shape.n, shape.k],
            strides,
            transposed: [shape.ta, shape.tb],
            adds: shape.acc,
            out_of_place: shape.acc && from != c.pointer,
            epilogue: epilogue.kind() as u32,
            keeps: epilogue.kept().is_some(),
            bytes: [a, b, c].map(|matrix| matrix.element.size()),
            tf32: tf32 && a.element == Element::F32,
            alignments: [a.pointer, b.pointer, c.pointer | from]
                .map(|pointer| 1 << pointer.trailing_zeros().min(BEST_ALIGNMENT.trailing_zeros())),
        }
    }
}
