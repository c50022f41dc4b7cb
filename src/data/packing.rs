//! NetCDF's conventions for the numbers of a dataset: packed numbers, and numbers that stand for
//! missing values.
//!
//! | attribute of a dataset | meaning |
//! |---|---|
//! | `scale_factor`, `add_offset` | an element is its stored number times the one plus the other |
//! | `_Unsigned` | `"true"`: stored integers have no sign, although their type has; `"false"`: the reverse |
//! | `_FillValue`, `missing_value` | stored numbers that stand for missing elements |
//! | no `_FillValue`, in a NetCDF-4 file | the fill value of the dataset stands for missing elements, unless elements are bytes |
//! | `valid_range`, `valid_min`, `valid_max` | elements outside are missing; floating-point bounds of packed integers are of the elements, all others of the stored numbers |
//!
//! Elements are unpacked when rows are read, before the scale of inputs is applied. A missing
//! element is an error. Other attributes of NetCDF, such as units and names, do not change numbers.

use std::fmt;

use half::f16;
use hdf5::plist::dataset_create::FillValue;
use hdf5::types::{FixedAscii, FixedUnicode, TypeDescriptor, VarLenAscii, VarLenUnicode};
use hdf5::{Attribute, Dataset, Location};
use hdf5_sys::h5t::H5T_class_t;
use serde::{Deserialize, Serialize};

use super::element_convert::{ElementType, ReadAs};
use super::{h5, storage};
use hpctrain_base::error::{Error, Result};

/// The longest attribute that is compared with a word, in characters.
const WORD: usize = 64;

/// Names of attributes.
const SCALE: &str = "scale_factor";
const OFFSET: &str = "add_offset";
const UNSIGNED: &str = "_Unsigned";
const FILLS: [&str; 2] = ["_FillValue", "missing_value"];
/// Stands for the fill value among a dataset's properties, if it has no attribute for it.
const DEFAULT_FILL: &str = "fill value by NetCDF";
/// The attribute by which the NetCDF library marks the root group of its files, since version
/// 4.4.1.
const NETCDF: &str = "_NCProperties";
const RANGE: &str = "valid_range";
const LEAST: &str = "valid_min";
const MOST: &str = "valid_max";

/// The packing of a dataset, and its missing elements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Packing {
    scale: f64,
    offset: f64,
    fills: Vec<Fill>,
    bounds: Vec<Bound>,
}

/// A stored number that stands for a missing element.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Fill {
    attribute: String,
    number: f64,
}

/// A bound beyond which elements are missing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Bound {
    attribute: String,
    number: f64,
    is_least: bool,
    /// Whether the bound applies to elements rather than stored numbers.
    of_unpacked: bool,
}

impl Bound {
    /// Returns the bound that an attribute gives; `None` if its number is not finite. `is_float` is
    /// whether the attribute has a floating-point type.
    fn new(
        attribute: &str,
        stored: ElementType,
        number: f64,
        is_least: bool,
        is_float: bool,
    ) -> Option<Self> {
        let of_unpacked = is_float && !stored.is_float();
        number.is_finite().then(|| Self {
            attribute: attribute.to_owned(),
            number: if of_unpacked { number } else { rounded(stored, number) },
            is_least,
            of_unpacked,
        })
    }
}

/// A missing element.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MissingElement {
    /// The stored number.
    number: f64,
    why: Why,
}

#[derive(Debug, Clone, PartialEq)]
enum Why {
    /// The number equals the one of this attribute.
    Is(String),
    /// The element is beyond the bound of this attribute.
    Beyond(String, f64),
}

impl fmt::Display for MissingElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        match &self.why {
            Why::Is(attribute) => write!(f, "is missing: {number} is its {attribute}"),
            Why::Beyond(attribute, bound) => {
                write!(f, "is missing: {number} is beyond its {attribute} of {bound}")
            }
        }
    }
}

impl Packing {
    /// Reads the packing of the dataset `name`, whose elements have the type `native` in memory, or
    /// `None` if no type matches bit for bit. Returns the type according to the attribute
    /// `_Unsigned`, the type as which stored numbers are read, and the packing.
    ///
    /// # Errors
    /// Returns an error if [`Packing::read`] does, or if the sign of integers cannot be changed.
    pub(super) fn read_with_types(
        dataset: &Dataset,
        name: &str,
        native: Option<ElementType>,
        kind: ReadAs,
    ) -> Result<(Option<ElementType>, ElementType, Option<Self>)> {
        let said = is_unsigned(dataset, name)?;
        let native = match (native, said) {
            (Some(native), Some(true)) => Some(native.unsigned()),
            (Some(native), Some(false)) => Some(native.signed()),
            (None, Some(_)) => {
                return Err(odd(
                    name,
                    UNSIGNED,
                    "is for integers in the byte order of this machine",
                ));
            }
            (native, None) => native,
        };
        let of_file = match native {
            Some(native) => native,
            None => similar(dataset).map_err(|e| storage::unreadable(name, &e))?,
        };
        let packing = Self::read(dataset, name, of_file, kind)?;
        let stored = native.unwrap_or(match (&packing, kind) {
            // A conversion to f32 would round before the scale does.
            (Some(_), ReadAs::Numbers) => ElementType::F64,
            _ => ElementType::converted(kind),
        });
        Ok((native, stored, packing))
    }

    /// Reads the packing of the dataset `name`; `None` if it has no such attributes. `stored` is
    /// the type of stored numbers.
    ///
    /// # Errors
    /// Returns an error if an attribute cannot be read or has no meaning, or if ids would be
    /// scaled.
    fn read(
        dataset: &Dataset,
        name: &str,
        stored: ElementType,
        kind: ReadAs,
    ) -> Result<Option<Self>> {
        let has = attributes(dataset, name)?;
        let read = |attribute: &'static str| match has.iter().any(|has| has == attribute) {
            true => numbers(dataset, name, attribute).map(Some),
            false => Ok(None),
        };
        let one = |attribute: &'static str| match read(attribute)? {
            Some((numbers, is_float)) => single(name, attribute, &numbers, is_float).map(Some),
            None => Ok(None),
        };
        let factor = one(SCALE)?.map_or(1.0, |(number, _)| number);
        let offset = one(OFFSET)?.map_or(0.0, |(number, _)| number);
        for (attribute, number) in [(SCALE, factor), (OFFSET, offset)] {
            if !number.is_finite() || attribute == SCALE && number == 0.0 {
                return Err(odd(name, attribute, &format!("is {number}")));
            }
        }
        if kind == ReadAs::Ids && (factor, offset) != (1.0, 0.0) {
            return Err(Error::input(format!(
                "{name} has {SCALE} {factor} and {OFFSET} {offset}, but ids and classes are integers"
            ))
            .hint("name another dataset, or store its numbers without packing"));
        }
        let mut fills = Vec::new();
        for attribute in FILLS {
            let all = read(attribute)?.map(|(numbers, _)| numbers).unwrap_or_default();
            // Elements that are not finite are reported elsewhere.
            let all = all
                .into_iter()
                .map(|number| rounded(stored, number))
                .filter(|number| number.is_finite());
            fills.extend(all.map(|number| Fill { attribute: attribute.to_owned(), number }));
        }
        if !has.iter().any(|has| has == FILLS[0]) {
            let default = default_fill(dataset).map_err(|e| storage::unreadable(name, &e))?;
            let default =
                default.map(|number| rounded(stored, number)).filter(|number| number.is_finite());
            fills.extend(default.map(|number| Fill { attribute: DEFAULT_FILL.to_owned(), number }));
        }
        let mut bounds = Vec::new();
        match read(RANGE)? {
            None => {}
            Some((numbers, is_float)) => match numbers[..] {
                [least, most] => {
                    bounds.extend(Bound::new(RANGE, stored, least, true, is_float));
                    bounds.extend(Bound::new(RANGE, stored, most, false, is_float));
                }
                _ => return Err(odd(name, RANGE, "does not have two numbers")),
            },
        }
        if let Some((number, is_float)) = one(LEAST)? {
            bounds.extend(Bound::new(LEAST, stored, number, true, is_float));
        }
        if let Some((number, is_float)) = one(MOST)? {
            bounds.extend(Bound::new(MOST, stored, number, false, is_float));
        }
        let packing = Self { scale: factor, offset, fills, bounds };
        Ok((packing.is_scaled() || packing.may_miss()).then_some(packing))
    }

    /// Returns whether elements differ from stored numbers.
    pub(super) fn is_scaled(&self) -> bool {
        (self.scale, self.offset) != (1.0, 0.0)
    }

    fn may_miss(&self) -> bool {
        !(self.fills.is_empty() && self.bounds.is_empty())
    }

    /// Returns the element of a stored number.
    fn unpack(&self, number: f64) -> f64 {
        number * self.scale + self.offset
    }

    /// Computes the elements of stored numbers, rounded once.
    pub(super) fn unpack_all(&self, stored: ElementType, bytes: &[u8], out: &mut [f32]) {
        if self.is_scaled() {
            stored
                .doubles(bytes)
                .zip(out)
                .for_each(|(number, out)| *out = self.unpack(number) as f32);
        } else {
            stored.to_numbers(bytes, out);
        }
    }

    /// Returns the index of the first stored number that is missing, and the reason.
    pub(super) fn first_missing(
        &self,
        mut numbers: impl Iterator<Item = f64>,
    ) -> Option<(usize, MissingElement)> {
        if !self.may_miss() {
            return None;
        }
        let mut place = 0;
        numbers.find_map(|number| {
            let why = self.why_missing(number);
            place += 1;
            why.map(|why| (place - 1, MissingElement { number, why }))
        })
    }

    fn why_missing(&self, number: f64) -> Option<Why> {
        if let Some(fill) = self.fills.iter().find(|fill| fill.number == number) {
            return Some(Why::Is(fill.attribute.clone()));
        }
        let passed = self.bounds.iter().find(|bound| {
            let number = if bound.of_unpacked { self.unpack(number) } else { number };
            if bound.is_least { number < bound.number } else { number > bound.number }
        });
        passed.map(|bound| Why::Beyond(bound.attribute.clone(), bound.number))
    }
}

/// Returns whether stored integers are unsigned according to the attribute `_Unsigned`, if there is
/// one.
///
/// # Errors
/// Returns an error if the attribute cannot be read or has another value than `true` and `false`.
fn is_unsigned(dataset: &Dataset, name: &str) -> Result<Option<bool>> {
    if !attributes(dataset, name)?.iter().any(|has| has == UNSIGNED) {
        return Ok(None);
    }
    let said = dataset
        .attr(UNSIGNED)
        .and_then(|attribute| text(&attribute))
        .map_err(|e| unreadable(name, UNSIGNED, &e))?;
    match said.as_deref() {
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        said => Err(odd(name, UNSIGNED, &format!("is {said:?}, not \"true\" or \"false\""))),
    }
}

/// Returns the type that rounds like the elements of a dataset, whatever their byte order and
/// width.
fn similar(dataset: &Dataset) -> hdf5::Result<ElementType> {
    let facts = h5::type_facts(&dataset.dtype()?)?;
    Ok(match (facts.class, facts.size) {
        (H5T_class_t::H5T_FLOAT, 4) => ElementType::F32,
        (H5T_class_t::H5T_FLOAT, _) => ElementType::F64,
        _ => ElementType::I64,
    })
}

/// Returns the number that stands for missing elements if a dataset of NetCDF-4 has no attribute
/// `_FillValue`: the fill value that the NetCDF library has set for elements that are never
/// written, by default one for each type (`NC_FILL_SHORT` and so on). By NetCDF's conventions all
/// bytes are valid then, and a dataset without filling has no such number.
fn default_fill(dataset: &Dataset) -> hdf5::Result<Option<f64>> {
    let facts = h5::type_facts(&dataset.dtype()?)?;
    let is_number = matches!(facts.class, H5T_class_t::H5T_INTEGER | H5T_class_t::H5T_FLOAT);
    if !is_number
        || facts.size == 1
        || !dataset.file()?.attr_names()?.iter().any(|name| name == NETCDF)
    {
        return Ok(None);
    }
    let properties = dataset.create_plist()?;
    match properties.get_fill_value_defined()? {
        FillValue::UserDefined => properties.get_fill_value_as::<f64>(),
        FillValue::Default | FillValue::Undefined => Ok(None),
    }
}

/// Returns whether a dataset is a dimension scale, which holds coordinates of an axis of others.
pub(super) fn is_dimension_scale(dataset: &Location) -> hdf5::Result<bool> {
    if !dataset.attr_names()?.iter().any(|name| name == "CLASS") {
        return Ok(false);
    }
    Ok(text(&dataset.attr("CLASS")?)?.as_deref() == Some("DIMENSION_SCALE"))
}

fn attributes(dataset: &Dataset, name: &str) -> Result<Vec<String>> {
    dataset.attr_names().map_err(|e| {
        Error::input(format!("the attributes of {name} cannot be listed: {}", h5::one_line(&e)))
    })
}

fn unreadable(name: &str, attribute: &str, error: &hdf5::Error) -> Error {
    odd(name, attribute, &format!("cannot be read: {}", h5::one_line(error)))
}

fn odd(name: &str, attribute: &str, what: &str) -> Error {
    Error::input(format!("attribute {attribute} of {name} {what}"))
        .hint("correct the attribute, or remove it if it has another meaning than NetCDF's")
}

/// Returns the only number of an attribute, and whether it has a floating-point type.
fn single(name: &str, attribute: &str, numbers: &[f64], is_float: bool) -> Result<(f64, bool)> {
    match numbers {
        [number] => Ok((*number, is_float)),
        _ => Err(odd(name, attribute, "has more than one number")),
    }
}

/// Returns the numbers of an attribute, and whether they have a floating-point type.
fn numbers(dataset: &Dataset, name: &str, attribute: &str) -> Result<(Vec<f64>, bool)> {
    read_numbers(dataset, attribute).map_err(|e| unreadable(name, attribute, &e))
}

/// Returns what [`numbers`] does, or the error of HDF5.
fn read_numbers(dataset: &Dataset, attribute: &str) -> hdf5::Result<(Vec<f64>, bool)> {
    let found = dataset.attr(attribute)?;
    let is_float = match found.dtype()?.to_descriptor()? {
        TypeDescriptor::Integer(_) | TypeDescriptor::Unsigned(_) => false,
        TypeDescriptor::Float(_) => true,
        other => return Err(format!("its type is {other}, not a number").into()),
    };
    Ok((found.read_raw::<f64>()?, is_float))
}

/// Returns the text of an attribute with one string of any kind; `None` if it has another type.
fn text(attribute: &Attribute) -> hdf5::Result<Option<String>> {
    Ok(match attribute.dtype()?.to_descriptor()? {
        TypeDescriptor::FixedAscii(_) => first(attribute.read_raw::<FixedAscii<WORD>>()?),
        TypeDescriptor::FixedUnicode(_) => first(attribute.read_raw::<FixedUnicode<WORD>>()?),
        TypeDescriptor::VarLenAscii => first(attribute.read_raw::<VarLenAscii>()?),
        TypeDescriptor::VarLenUnicode => first(attribute.read_raw::<VarLenUnicode>()?),
        _ => None,
    })
}

fn first(texts: Vec<impl ToString>) -> Option<String> {
    texts.first().map(|text| text.to_string())
}

/// Rounds an attribute's number to a type of elements: attributes may have wider types, and be
/// negative if `_Unsigned` makes integers unsigned.
fn rounded(stored: ElementType, number: f64) -> f64 {
    let without_sign =
        |bits: u32| if number < 0.0 { number + 2f64.powi(bits as i32) } else { number };
    match stored {
        ElementType::F16 => f16::from_f64(number).to_f64(),
        ElementType::F32 => f64::from(number as f32),
        ElementType::U8 => without_sign(8),
        ElementType::U16 => without_sign(16),
        ElementType::U32 => without_sign(32),
        ElementType::U64 => without_sign(64),
        _ => number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&Dataset)) -> (tempfile::TempDir, Dataset) {
        let folder = tempfile::tempdir().unwrap();
        let file = crate::hdf5_open::create(&folder.path().join("x.h5")).unwrap();
        let dataset = file.new_dataset::<i16>().shape(3).create("x").unwrap();
        write(&dataset);
        (folder, dataset)
    }

    fn attribute<T: hdf5::H5Type>(dataset: &Dataset, name: &str, values: &[T]) {
        dataset
            .new_attr::<T>()
            .shape(values.len())
            .create(name)
            .unwrap()
            .write_raw(values)
            .unwrap();
    }

    fn read(dataset: &Dataset, kind: ReadAs) -> Result<Option<Packing>> {
        Packing::read(dataset, "/x", ElementType::I16, kind)
    }

    #[test]
    fn missing_elements_are_named_by_their_attribute() {
        let (_folder, dataset) = written(|dataset| {
            attribute(dataset, "scale_factor", &[0.5f64]);
            attribute(dataset, "add_offset", &[100.0f32]);
            attribute(dataset, "_FillValue", &[-32768i16]);
            attribute(dataset, "missing_value", &[-1i16, -2]);
            // Bounds of stored numbers, and of elements.
            attribute(dataset, "valid_min", &[-10i16]);
            attribute(dataset, "valid_max", &[300.0f32]);
        });
        let packing = read(&dataset, ReadAs::Numbers).unwrap().unwrap();
        assert_eq!((packing.unpack(3.0), packing.is_scaled()), (101.5, true));
        assert_eq!(packing.first_missing([-10.0, 400.0, 0.0].into_iter()), None);
        for (number, expected) in [
            (-32768.0, "is missing: -32768 is its _FillValue"),
            (-2.0, "is missing: -2 is its missing_value"),
            (-11.0, "is missing: -11 is beyond its valid_min of -10"),
            (401.0, "is missing: 401 is beyond its valid_max of 300"),
        ] {
            let (place, missing) = packing.first_missing([0.0, number].into_iter()).unwrap();
            assert_eq!((place, missing.to_string().as_str()), (1, expected));
        }
        let error = read(&dataset, ReadAs::Ids).unwrap_err().to_string();
        assert!(error.contains("/x has scale_factor 0.5 and add_offset 100, but ids"), "{error}");
    }

    #[test]
    fn attributes_without_a_meaning_are_refused() {
        assert_eq!(read(&written(|_| {}).1, ReadAs::Numbers).unwrap(), None);
        let (_folder, dataset) = written(|dataset| attribute(dataset, "scale_factor", &[1.0f32]));
        assert_eq!(read(&dataset, ReadAs::Ids).unwrap(), None);
        for (name, numbers) in [
            ("scale_factor", &[0.0][..]),
            ("scale_factor", &[1.0, 2.0]),
            ("add_offset", &[f64::NAN]),
            ("valid_range", &[1.0]),
        ] {
            let (_folder, dataset) = written(|dataset| attribute(dataset, name, numbers));
            let error = read(&dataset, ReadAs::Numbers).unwrap_err().to_string();
            assert!(
                error.contains(&format!("attribute {name} of /x ")) && error.contains("\nhint: "),
                "{error}"
            );
        }
        let (_folder, dataset) = written(|dataset| {
            let text: VarLenUnicode = "a lot".parse().unwrap();
            dataset
                .new_attr::<VarLenUnicode>()
                .create("_FillValue")
                .unwrap()
                .write_scalar(&text)
                .unwrap();
        });
        assert!(
            read(&dataset, ReadAs::Numbers)
                .unwrap_err()
                .to_string()
                .contains("attribute _FillValue of /x cannot be read")
        );
    }

    /// Variables as the NetCDF library writes them: with a fill value among the properties, and
    /// without one if filling is off.
    #[test]
    fn default_fill_values_of_netcdf_are_missing_elements() {
        let folder = tempfile::tempdir().unwrap();
        let file = crate::hdf5_open::create(&folder.path().join("x.nc")).unwrap();
        file.new_dataset::<i16>().fill_value(-32767i16).shape(3).create("short").unwrap();
        file.new_dataset::<f32>().fill_value(9.969_21e36f32).shape(3).create("float").unwrap();
        file.new_dataset::<u64>().fill_value(u64::MAX - 1).shape(3).create("long").unwrap();
        file.new_dataset::<u8>().fill_value(255u8).shape(3).create("bytes").unwrap();
        file.new_dataset::<i16>().shape(3).create("nofill").unwrap();
        let own = file.new_dataset::<i16>().fill_value(-1i16).shape(3).create("own").unwrap();
        attribute(&own, "_FillValue", &[-1i16]);
        let cases = [
            (
                "short",
                ElementType::I16,
                -32767.0,
                Some("is missing: -32767 is its fill value by NetCDF"),
            ),
            (
                "float",
                ElementType::F32,
                f64::from(9.969_21e36f32),
                Some("is its fill value by NetCDF"),
            ),
            ("long", ElementType::U64, (u64::MAX - 1) as f64, Some("is its fill value by NetCDF")),
            ("bytes", ElementType::U8, 255.0, None),
            ("nofill", ElementType::I16, 0.0, None),
            ("own", ElementType::I16, -1.0, Some("is missing: -1 is its _FillValue")),
        ];
        // The fill value of any other HDF5 file means nothing by itself.
        assert_eq!(missing(&file, "short", ElementType::I16, &[-32767.0]), None);
        let text: VarLenAscii =
            VarLenAscii::from_ascii("version=2,netcdf=4.10.1,hdf5=2.2.0").unwrap();
        file.new_attr::<VarLenAscii>()
            .create("_NCProperties")
            .unwrap()
            .write_scalar(&text)
            .unwrap();
        for (name, stored, number, expected) in cases {
            let found = missing(&file, name, stored, &[1.0, number]);
            match expected {
                None => assert_eq!(found, None, "{name}"),
                Some(expected) => {
                    assert!(
                        found.as_ref().is_some_and(|found| found.contains(expected)),
                        "{name}: {found:?}"
                    )
                }
            }
            assert_eq!(missing(&file, name, stored, &[1.0, 2.0]), None, "{name}");
        }
    }

    /// Returns why the first missing element of these stored numbers is missing.
    fn missing(
        file: &hdf5::File,
        name: &str,
        stored: ElementType,
        numbers: &[f64],
    ) -> Option<String> {
        let dataset = file.dataset(name).unwrap();
        let packing = Packing::read(&dataset, name, stored, ReadAs::Numbers).unwrap();
        packing
            .and_then(|packing| packing.first_missing(numbers.iter().copied()))
            .map(|(_, element)| element.to_string())
    }

    #[test]
    fn signs_are_as_said() {
        let (_folder, dataset) = written(|dataset| {
            let text: VarLenUnicode = "true".parse().unwrap();
            dataset
                .new_attr::<VarLenUnicode>()
                .create("_Unsigned")
                .unwrap()
                .write_scalar(&text)
                .unwrap();
            attribute(dataset, "_FillValue", &[-1i16]);
        });
        let (native, stored, packing) =
            Packing::read_with_types(&dataset, "/x", Some(ElementType::I16), ReadAs::Numbers)
                .unwrap();
        assert_eq!((native, stored), (Some(ElementType::U16), ElementType::U16));
        assert!(packing.unwrap().first_missing([65535.0].into_iter()).is_some());
        // HDF5 would convert with a sign.
        assert!(Packing::read_with_types(&dataset, "/x", None, ReadAs::Numbers).is_err());
    }
}
