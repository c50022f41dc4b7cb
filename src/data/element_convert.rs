//! The types of stored elements, and their conversion: ids and classes to `u32`, numbers to `f32`.

use half::f16;
use hdf5::{Datatype, H5Type};
use serde::{Deserialize, Serialize};

use hpctrain_base::simd::simd;

/// The type that the elements of a dataset are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ReadAs {
    /// `u32`: ids, classes.
    Ids,
    /// `f32`: numbers.
    Numbers,
}

/// The type of an element in memory, in the byte order of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ElementType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    F32,
    F64,
}

impl ElementType {
    const ALL: [Self; 11] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F16,
        Self::F32,
        Self::F64,
    ];

    /// Returns the type that matches the file's bit for bit, or `None` if there is none, as for
    /// another byte order.
    pub(super) fn from_datatype(dtype: &Datatype) -> hdf5::Result<Option<Self>> {
        for stored in Self::ALL {
            if stored.datatype()? == *dtype {
                return Ok(Some(stored));
            }
        }
        Ok(None)
    }

    /// Returns the type to which HDF5 converts elements of other types.
    pub(super) fn converted(kind: ReadAs) -> Self {
        match kind {
            ReadAs::Ids => Self::I32,
            ReadAs::Numbers => Self::F32,
        }
    }

    /// Returns the unsigned type of the same width.
    pub(super) fn unsigned(self) -> Self {
        match self {
            Self::I8 => Self::U8,
            Self::I16 => Self::U16,
            Self::I32 => Self::U32,
            Self::I64 => Self::U64,
            other => other,
        }
    }

    /// Returns the signed type of the same width.
    pub(super) fn signed(self) -> Self {
        match self {
            Self::U8 => Self::I8,
            Self::U16 => Self::I16,
            Self::U32 => Self::I32,
            Self::U64 => Self::I64,
            other => other,
        }
    }

    /// Returns the HDF5 type.
    pub(super) fn datatype(self) -> hdf5::Result<Datatype> {
        fn datatype_of<T: H5Type>() -> hdf5::Result<Datatype> {
            Datatype::from_type::<T>()
        }
        match self {
            Self::U8 => datatype_of::<u8>(),
            Self::I8 => datatype_of::<i8>(),
            Self::U16 => datatype_of::<u16>(),
            Self::I16 => datatype_of::<i16>(),
            Self::U32 => datatype_of::<u32>(),
            Self::I32 => datatype_of::<i32>(),
            Self::U64 => datatype_of::<u64>(),
            Self::I64 => datatype_of::<i64>(),
            Self::F16 => datatype_of::<f16>(),
            Self::F32 => datatype_of::<f32>(),
            Self::F64 => datatype_of::<f64>(),
        }
    }

    /// Returns the bytes of an element.
    pub(super) fn width(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns whether elements may be NaN or infinite.
    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::F32 | Self::F64)
    }

    /// Converts elements to ids. No vocabulary reaches 2³¹ − 1: negative elements become larger ids
    /// than that, and elements that are too large become exactly that.
    pub(super) fn to_ids(self, bytes: &[u8], out: &mut [u32]) {
        const LARGEST: u32 = i32::MAX as u32;
        simd(
            #[inline(always)]
            || match self {
                Self::U8 => convert(bytes, out, |x: u8| u32::from(x)),
                Self::U16 => convert(bytes, out, |x: u16| u32::from(x)),
                Self::U32 => convert(bytes, out, |x: u32| x.min(LARGEST)),
                Self::U64 => convert(bytes, out, |x: u64| x.min(u64::from(LARGEST)) as u32),
                Self::I8 => convert(bytes, out, |x: i8| i32::from(x) as u32),
                Self::I16 => convert(bytes, out, |x: i16| i32::from(x) as u32),
                Self::I32 => convert(bytes, out, |x: i32| x as u32),
                Self::I64 => convert(bytes, out, |x: i64| {
                    x.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32
                }),
                // Datasets of ids are integers: the rest of the program treats this value as too
                // large.
                Self::F16 | Self::F32 | Self::F64 => out.fill(LARGEST),
            },
        )
    }

    /// Converts elements to numbers, rounded to the nearest.
    pub(super) fn to_numbers(self, bytes: &[u8], out: &mut [f32]) {
        simd(
            #[inline(always)]
            || match self {
                Self::U8 => convert(bytes, out, |x: u8| f32::from(x)),
                Self::I8 => convert(bytes, out, |x: i8| f32::from(x)),
                Self::U16 => convert(bytes, out, |x: u16| f32::from(x)),
                Self::I16 => convert(bytes, out, |x: i16| f32::from(x)),
                Self::U32 => convert(bytes, out, |x: u32| x as f32),
                Self::I32 => convert(bytes, out, |x: i32| x as f32),
                Self::U64 => convert(bytes, out, |x: u64| x as f32),
                Self::I64 => convert(bytes, out, |x: i64| x as f32),
                Self::F16 => convert(bytes, out, |x: u16| f16::from_bits(x).to_f32()),
                Self::F32 => convert(bytes, out, |x: f32| x),
                Self::F64 => convert(bytes, out, |x: f64| x as f32),
            },
        )
    }

    /// Returns the elements, as exactly as an `f64` represents them.
    pub(super) fn doubles(self, bytes: &[u8]) -> impl Iterator<Item = f64> {
        bytes.chunks_exact(self.width()).map(move |bytes| match self {
            Self::U8 => f64::from(bytemuck::pod_read_unaligned::<u8>(bytes)),
            Self::I8 => f64::from(bytemuck::pod_read_unaligned::<i8>(bytes)),
            Self::U16 => f64::from(bytemuck::pod_read_unaligned::<u16>(bytes)),
            Self::I16 => f64::from(bytemuck::pod_read_unaligned::<i16>(bytes)),
            Self::U32 => f64::from(bytemuck::pod_read_unaligned::<u32>(bytes)),
            Self::I32 => f64::from(bytemuck::pod_read_unaligned::<i32>(bytes)),
            Self::U64 => bytemuck::pod_read_unaligned::<u64>(bytes) as f64,
            Self::I64 => bytemuck::pod_read_unaligned::<i64>(bytes) as f64,
            Self::F16 => f16::from_bits(bytemuck::pod_read_unaligned(bytes)).to_f64(),
            Self::F32 => f64::from(bytemuck::pod_read_unaligned::<f32>(bytes)),
            Self::F64 => bytemuck::pod_read_unaligned(bytes),
        })
    }
}

#[inline(always)]
fn convert<T: bytemuck::AnyBitPattern, O>(bytes: &[u8], out: &mut [O], to: impl Fn(T) -> O) {
    for (element, out) in bytes.chunks_exact(size_of::<T>()).zip(out) {
        *out = to(bytemuck::pod_read_unaligned(element));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_id_stays_none() {
        const LARGEST: u32 = i32::MAX as u32;
        let ids = |stored: ElementType, bytes: &[u8]| {
            let mut out = vec![7; bytes.len() / stored.width()];
            stored.to_ids(bytes, &mut out);
            out
        };
        assert_eq!(ids(ElementType::U8, &[0, 255]), [0, 255]);
        assert_eq!(ids(ElementType::I8, &[5, 0xff]), [5, u32::MAX]);
        assert_eq!(ids(ElementType::I16, &(-2i16).to_ne_bytes()), [u32::MAX - 1]);
        assert_eq!(ids(ElementType::U32, &u32::MAX.to_ne_bytes()), [LARGEST]);
        assert_eq!(ids(ElementType::I32, &(-1i32).to_ne_bytes()), [u32::MAX]);
        assert_eq!(ids(ElementType::U64, &(1u64 << 40).to_ne_bytes()), [LARGEST]);
        assert_eq!(ids(ElementType::I64, &(-1i64 << 40).to_ne_bytes()), [1 << 31]);
        assert_eq!(ids(ElementType::F32, &[0; 4]), [LARGEST]);
    }
}
