//! The types of the elements of datasets: their names, and whether they can be converted to ids or
//! numbers.

use std::fmt;

use hdf5::Datatype;
use hdf5_sys::h5t::H5T_class_t;
use serde::{Deserialize, Serialize};

use super::element_convert::ReadAs;
use super::h5::{self, TypeFacts};
use hpctrain_base::error::{Error, Result};

/// The type of the elements of a dataset, irrespective of byte order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Dtype {
    name: String,
    class: Class,
    size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Class {
    Integer,
    /// An enumeration, such as of truth values.
    Enum,
    Float,
    /// A float that HDF5 does not convert as its writer intended.
    OtherFloat,
    Text,
    Compound,
    Other,
}

impl Dtype {
    /// Returns the type of a dataset's elements.
    pub(super) fn from_datatype(dtype: &Datatype) -> hdf5::Result<Self> {
        let facts = h5::type_facts(dtype)?;
        let (name, class) = named(&facts);
        Ok(Self { name, class, size: facts.size })
    }

    /// Returns the bytes of an element in the file.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Returns whether elements are plain integers.
    pub(super) fn is_integer(&self) -> bool {
        self.class == Class::Integer
    }

    /// Returns whether elements are unsigned bytes, such as those of images.
    pub(super) fn is_byte(&self) -> bool {
        self.is_integer() && self.name == "uint8"
    }

    /// Returns an error if elements of the dataset `of` cannot be converted to `kind`.
    pub(super) fn check(&self, of: &str, kind: ReadAs) -> Result<()> {
        let wanted = match (kind, self.class) {
            (_, Class::Integer | Class::Enum) | (ReadAs::Numbers, Class::Float) => return Ok(()),
            (ReadAs::Ids, _) => "ids and classes are integers",
            (ReadAs::Numbers, _) => "numbers are expected",
        };
        let hint = match (kind, self.class) {
            (ReadAs::Ids, Class::Text) => "number the classes from 0 on, and store the numbers",
            (ReadAs::Ids, Class::Float) => {
                "store them as a dataset of integers of any width, or of one-hot rows"
            }
            (ReadAs::Numbers, Class::Compound) => {
                "store each field, or all of them as columns, in a separate dataset"
            }
            (ReadAs::Numbers, Class::OtherFloat) => "store it as float16, float32 or float64",
            (ReadAs::Ids, _) => "store them as a dataset of integers of any width",
            (ReadAs::Numbers, _) => "store it as a dataset of floating-point numbers or integers",
        };
        Err(Error::input(format!("{of} is of type {self}, but {wanted}")).hint(hint))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn named(facts: &TypeFacts) -> (String, Class) {
    let TypeFacts { class, size, precision, is_signed, is_bool, is_variable, float } = *facts;
    let integer = format!("{}int{precision}", if is_signed { "" } else { "u" });
    let other = |name: &str| (name.to_owned(), Class::Other);
    match class {
        H5T_class_t::H5T_INTEGER => (integer, Class::Integer),
        H5T_class_t::H5T_ENUM if is_bool => ("bool".to_owned(), Class::Enum),
        H5T_class_t::H5T_ENUM => (format!("enum of {} bytes", size), Class::Enum),
        H5T_class_t::H5T_FLOAT => match float {
            [5, 10, 15] => ("float16".to_owned(), Class::Float),
            [8, 7, 127] => ("bfloat16".to_owned(), Class::Float),
            [8, 23, 127] => ("float32".to_owned(), Class::Float),
            [11, 52, 1023] => ("float64".to_owned(), Class::Float),
            [15, 64 | 112, 16383] => ("long double".to_owned(), Class::Float),
            [exponent, mantissa, _] => (
                format!("float of {exponent} exponent and {mantissa} mantissa bits"),
                Class::OtherFloat,
            ),
        },
        H5T_class_t::H5T_STRING if is_variable => {
            ("string of variable length".to_owned(), Class::Text)
        }
        H5T_class_t::H5T_STRING => (format!("string of {size} bytes"), Class::Text),
        H5T_class_t::H5T_COMPOUND => ("compound".to_owned(), Class::Compound),
        H5T_class_t::H5T_ARRAY => other("array"),
        H5T_class_t::H5T_VLEN => other("array of variable length"),
        H5T_class_t::H5T_REFERENCE => other("reference"),
        H5T_class_t::H5T_OPAQUE => other("opaque"),
        H5T_class_t::H5T_BITFIELD => other("bit field"),
        H5T_class_t::H5T_TIME => other("time"),
        _ => other("unknown"),
    }
}

#[cfg(test)]
mod tests {
    use hdf5::types::VarLenUnicode;

    use super::*;

    #[test]
    fn names_are_those_of_numpy() {
        fn name<T: hdf5::H5Type>() -> String {
            Dtype::from_datatype(&Datatype::from_type::<T>().unwrap()).unwrap().to_string()
        }
        assert_eq!([name::<u8>(), name::<i16>(), name::<u64>()], ["uint8", "int16", "uint64"]);
        assert_eq!(
            [name::<half::f16>(), name::<f32>(), name::<f64>()],
            ["float16", "float32", "float64"]
        );
        assert_eq!(
            [name::<bool>(), name::<VarLenUnicode>()],
            ["bool", "string of variable length"]
        );
    }
}
