//! The datasets of a file that samples are made of: found by their names, described, and checked
//! against each other.

use std::path::Path;

use hdf5::File;
use hdf5::dataset::Layout;
use serde::{Deserialize, Serialize};

use super::decompression_limit;
use super::dtype::Dtype;
use super::element_convert::{ElementType, ReadAs};
use super::h5::{self, shape};
use super::image_layout::Planes;
use super::normalization::MeanStd;
use super::packing::Packing;
use super::spec::{DataSpec, ExternalFiles, Ids, InputScale, SampleSpec, Target, WEIGHTS};
use super::storage;
use super::walk::dataset_names;
use hpctrain_base::error::{Error, Result};

/// The largest value means "too large", see [`ElementType::to_ids`].
pub(super) const MAX_VOCABULARY: usize = i32::MAX as usize;

/// The datasets that samples are made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum ShardSchema {
    /// A stream of ids, or documents of equal length, from which windows are cut.
    Tokens(Field),
    /// Samples of `context` ids each, with their targets.
    Samples { inputs: Field, targets: Field },
    /// One row of each dataset for every sample.
    Rows(Box<Rows>),
}

/// The datasets of rows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Rows {
    /// The inputs; `None` if samples have categories only.
    pub inputs: Option<Field>,
    /// Ids of categories.
    pub categories: Option<Field>,
    /// The targets; `None` if they are not requested.
    pub targets: Option<Field>,
    /// The factors of the rows' losses, one for each row.
    pub weights: Option<Field>,
    /// The scale of the inputs: means and standard deviations; `None` for numbers used as stored.
    pub standard: Option<MeanStd>,
    /// Images whose channels come first in the file.
    pub planes: Option<Planes>,
    /// Whether inputs are unsigned bytes without a scale.
    pub is_unscaled: bool,
}

/// An open file and its path.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub file: &'a File,
    pub path: &'a Path,
    /// The treatment of its external raw files.
    pub external_files: ExternalFiles,
}

/// The description of a dataset.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Field {
    pub name: String,
    /// The type that its elements are read as.
    pub kind: ReadAs,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The type of its elements in memory, before conversion to ids or numbers.
    pub stored: ElementType,
    /// Whether the file has the elements bit for bit as they are in memory.
    pub is_native: bool,
    /// The shape of a chunk, if it is chunked.
    pub chunk: Option<Vec<usize>>,
    /// Whether chunks are compressed, or filtered otherwise.
    pub is_filtered: bool,
    /// The offset of its elements in the shard's own file, if they are contiguous and stored as
    /// they are in memory.
    pub offset: Option<u64>,
    /// Whether some of its elements are in other files.
    pub is_elsewhere: bool,
    /// Whether none of its elements was ever written.
    pub is_unwritten: bool,
    /// How its numbers are packed, and which elements are missing; `None` if neither applies.
    pub packing: Option<Packing>,
}

impl ShardSchema {
    /// Finds the datasets of a file: rows if `spec` asks for them, otherwise tokens if there are
    /// any, else samples.
    pub(super) fn find(place: Place<'_>, spec: &DataSpec) -> Result<Self> {
        let file = place.file;
        match &spec.samples {
            SampleSpec::Rows { input, ids, target } => {
                return Self::rows(place, spec, *input, ids, *target);
            }
            SampleSpec::Anything => {
                if let Some((input, ids, target)) = rows_of(place, spec)? {
                    return Self::rows(place, spec, input, &ids, target);
                }
            }
            SampleSpec::Text => {}
        }
        if file.link_exists(&spec.tokens) {
            return Ok(Self::Tokens(Field::ids(place, &spec.tokens, &[1, 2])?));
        }
        if !file.link_exists(&spec.inputs) && !file.link_exists(&spec.targets) {
            let message =
                format!("has neither {} nor {} and {}", spec.tokens, spec.inputs, spec.targets);
            return Err(lacking(file, message));
        }
        for name in [&spec.inputs, &spec.targets] {
            if !file.link_exists(name) {
                return Err(lacking(file, format!("has no dataset {name}")));
            }
        }
        let inputs = Field::ids(place, &spec.inputs, &[2])?;
        let targets = Field::ids(place, &spec.targets, &[2])?;
        if inputs.shape != targets.shape {
            let a = shape(&inputs.shape);
            let b = shape(&targets.shape);
            return Err(Error::input(format!(
                "{} is {a}, but {} is {b}",
                inputs.name, targets.name
            ))
            .hint("each row of inputs needs a row of targets of the same length"));
        }
        Ok(Self::Samples { inputs, targets })
    }

    /// Returns the scale of the inputs, if there is one.
    pub(super) fn standard(&self) -> Option<&MeanStd> {
        match self {
            Self::Rows(rows) => rows.standard.as_ref(),
            _ => None,
        }
    }

    /// Returns whether inputs are bytes that nothing scales.
    pub(super) fn is_unscaled(&self) -> bool {
        matches!(self, Self::Rows(rows) if rows.is_unscaled)
    }

    /// Returns the layout of images whose channels come first, if they do.
    pub(super) fn planes(&self) -> Option<Planes> {
        match self {
            Self::Rows(rows) => rows.planes,
            _ => None,
        }
    }

    /// Finds rows of `input` elements, ids of categories, and targets.
    fn rows(
        place: Place<'_>,
        spec: &DataSpec,
        input: usize,
        ids: &Ids,
        target: Target,
    ) -> Result<Self> {
        let file = place.file;
        let tables = if let Ids::Tables(tables) = ids { tables.len() } else { 0 };
        let wanted = [
            (&spec.inputs, input > 0),
            (&spec.categories, tables > 0),
            (&spec.targets, target != Target::Unknown),
        ];
        if let Some((name, _)) =
            wanted.iter().find(|(name, is_wanted)| *is_wanted && !file.link_exists(name))
        {
            return Err(lacking(file, format!("has no dataset {name}")));
        }
        let kind = if let Ids::Input(_) = ids { ReadAs::Ids } else { ReadAs::Numbers };
        let inputs = (input > 0).then(|| Field::describe(place, &spec.inputs, kind)).transpose()?;
        if let Some(inputs) = inputs.as_ref().filter(|inputs| inputs.row_len() != input) {
            let message = format!("{} has rows of {}", inputs.name, shape(&inputs.shape[1..]));
            return Err(Error::input(format!("{message}, but model.input has {input} elements"))
                .hint("set model.input to the shape of a row"));
        }
        let categories = (tables > 0)
            .then(|| Field::describe(place, &spec.categories, ReadAs::Ids))
            .transpose()?;
        if let Some(categories) =
            categories.as_ref().filter(|categories| categories.row_len() != tables)
        {
            let message =
                format!("{} has rows of {}", categories.name, shape(&categories.shape[1..]));
            return Err(Error::input(format!(
                "{message}, but the network has {tables} embedding tables"
            ))
            .hint("set `ids` of embedding_tables to one number for each category"));
        }
        let targets = match target {
            Target::Unknown => None,
            Target::Class(classes) => Some(Field::classes(place, &spec.targets, classes)?),
            Target::Values(width) => Some(Field::values(place, &spec.targets, width)?),
        };
        if spec.scale.is_some() && (kind == ReadAs::Ids || inputs.is_none()) {
            return Err(Error::input(
                "data.scale is for inputs that are numbers, but the network takes ids",
            )
            .hint("omit it"));
        }
        let mut planes = None;
        let mut standard = None;
        let mut is_unscaled = false;
        if let Some(inputs) = &inputs {
            if !spec.shape.is_empty() {
                planes = Planes::check(&inputs.name, &inputs.shape[1..], &spec.shape, spec.axes)?;
            }
            if kind == ReadAs::Numbers {
                standard = standard_of(file, inputs, planes, spec.scale)?;
                is_unscaled = inputs.dtype.is_byte()
                    && !inputs.is_scaled()
                    && standard.is_none()
                    && spec.scale.is_none();
            }
        }
        let rows = inputs.iter().chain(&categories).map(Field::rows).next().unwrap_or(0);
        let weights = match targets {
            Some(_) => Self::find_weights(place, spec, rows)?,
            None => None,
        };
        let content = Self::Rows(Box::new(Rows {
            inputs,
            categories,
            targets,
            weights,
            standard,
            planes,
            is_unscaled,
        }));
        if let [first, rest @ ..] = &content.datasets()[..]
            && let Some(other) = rest.iter().find(|other| other.rows() != first.rows())
        {
            let a = first.rows();
            let b = other.rows();
            return Err(Error::input(format!(
                "{} has {a} rows, but {} has {b}",
                first.name, other.name
            ))
            .hint("all datasets need a row for each sample"));
        }
        Ok(content)
    }

    /// Finds the weights of `rows` rows, if there are to be any.
    fn find_weights(place: Place<'_>, spec: &DataSpec, rows: usize) -> Result<Option<Field>> {
        let file = place.file;
        let name = match spec.weights.as_deref() {
            Some("") => return Ok(None),
            Some(name) => name,
            None if file.link_exists(WEIGHTS) => WEIGHTS,
            None => return Ok(None),
        };
        if !file.link_exists(name) {
            return Err(lacking(file, format!("has no dataset {name}"))
                .hint("set data.weights to an existing dataset, or omit it"));
        }
        let weights = Field::describe(place, name, ReadAs::Numbers)?;
        if (weights.rows(), weights.row_len()) != (rows, 1) {
            let message =
                format!("{name} has shape {}, but there are {rows} samples", shape(&weights.shape));
            return Err(Error::input(message)
                .hint("give one weight for each sample, or data.weights = \"\""));
        }
        Ok(Some(weights))
    }

    /// Returns the dataset of weights, if there is one.
    pub(super) fn weights(&self) -> Option<&Field> {
        match self {
            Self::Rows(rows) => rows.weights.as_ref(),
            _ => None,
        }
    }

    pub(super) fn datasets(&self) -> Vec<&Field> {
        match self {
            Self::Tokens(tokens) => vec![tokens],
            Self::Samples { inputs, targets } => vec![inputs, targets],
            Self::Rows(rows) => rows
                .inputs
                .iter()
                .chain(&rows.categories)
                .chain(&rows.targets)
                .chain(&rows.weights)
                .collect(),
        }
    }
}

/// Returns the scale of the inputs of a file: that of `data.scale`, otherwise the file's own.
fn standard_of(
    file: &File,
    inputs: &Field,
    planes: Option<Planes>,
    scale: Option<InputScale>,
) -> Result<Option<MeanStd>> {
    match scale {
        Some(InputScale::None) => Ok(None),
        Some(InputScale::Unit) if inputs.is_scaled() => Err(Error::input(format!(
            "data.scale = \"unit\" is for plain bytes, but {} has scale_factor or add_offset",
            inputs.name
        ))
        .hint("omit data.scale: the numbers are unpacked as they are read")),
        Some(InputScale::Unit) if inputs.dtype.is_byte() => {
            Ok(Some(MeanStd { mean: vec![0.0], std: vec![255.0] }))
        }
        Some(InputScale::Unit) => {
            let message = format!(
                "data.scale = \"unit\" is for unsigned bytes, but {} is of type",
                inputs.name
            );
            Err(Error::input(format!("{message} {}", inputs.dtype))
                .hint("omit it; attributes mean and std of the dataset scale any type"))
        }
        None => {
            let standard = MeanStd::read(file, &inputs.name, inputs.row_len())?;
            let (Some(mut standard), Some(planes)) = (standard.clone(), planes) else {
                return Ok(standard);
            };
            match standard.mean.len() {
                places if places == inputs.row_len() => {
                    planes.to_last(&mut standard.mean);
                    planes.to_last(&mut standard.std);
                }
                places if places == 1 || places == planes.channels => {}
                places => {
                    let name = &inputs.name;
                    let channels = planes.channels;
                    return Err(Error::input(format!(
                        "{name} has {channels} channels and {places} means"
                    ))
                    .hint(
                        "give one mean and one deviation for every channel, or for every element",
                    ));
                }
            }
            Ok(Some(standard))
        }
    }
}

/// Returns the number of elements of a row, the ids of its categories and the kind of its target,
/// if a file holds rows rather than text.
fn rows_of(place: Place<'_>, spec: &DataSpec) -> Result<Option<(usize, Ids, Target)>> {
    let file = place.file;
    let has = |name: &str| file.link_exists(name);
    if has(&spec.tokens) || !(has(&spec.inputs) || has(&spec.categories)) {
        return Ok(None);
    }
    let describe = |name: &str, kind: ReadAs| {
        has(name).then(|| Field::describe(place, name, kind)).transpose()
    };
    let inputs = describe(&spec.inputs, ReadAs::Numbers)?;
    let ids = match describe(&spec.categories, ReadAs::Ids)? {
        Some(categories) => Ids::Tables(vec![MAX_VOCABULARY; categories.row_len()].into()),
        None => Ids::None,
    };
    let input = inputs.as_ref().map_or(0, Field::row_len);
    if !file.link_exists(&spec.targets) {
        return Ok(Some((input, ids, Target::Unknown)));
    }
    let targets = Field::describe(place, &spec.targets, ReadAs::Numbers)?;
    let is_integer = |field: &Field| field.dtype.is_integer() && !field.is_scaled();
    // Windows of text have an id to predict for each id.
    let is_text = inputs.as_ref().is_some_and(|inputs| {
        is_integer(inputs) && inputs.shape.len() == 2 && inputs.shape == targets.shape
    });
    if is_integer(&targets) && is_text && ids == Ids::None {
        return Ok(None);
    }
    let is_class = is_integer(&targets) && targets.row_len() == 1;
    let target =
        if is_class { Target::Class(MAX_VOCABULARY) } else { Target::Values(targets.row_len()) };
    Ok(Some((input, ids, target)))
}

fn lacking(file: &File, message: String) -> Error {
    let existing = dataset_names(file).unwrap_or_default();
    let existing = if existing.is_empty() { "no dataset".to_owned() } else { existing.join(", ") };
    Error::input(message).hint(format!(
        "the file holds {existing}; name its datasets in data.tokens, or data.inputs, data.categories and data.targets"
    ))
}

impl Field {
    /// Describes a dataset of token ids, which must have one of these numbers of dimensions.
    fn ids(place: Place<'_>, name: &str, ranks: &[usize]) -> Result<Self> {
        let field = Self::describe(place, name, ReadAs::Ids)?;
        if !ranks.contains(&field.shape.len()) {
            let expected = match ranks {
                [2] => "two dimensions, samples x context",
                _ => "one dimension, or documents x ids",
            };
            return Err(Error::input(format!(
                "{name} has shape {}, but {expected} is expected",
                shape(&field.shape)
            ))
            .hint("name another dataset, or store the ids in that shape"));
        }
        Ok(field)
    }

    /// Describes targets that are classes, or one-hot rows of all classes.
    fn classes(place: Place<'_>, name: &str, classes: usize) -> Result<Self> {
        let dataset = storage::open(place.file, place.path, name)?;
        // Overflow of sizes is checked where the dataset is described.
        match dataset.shape().iter().skip(1).fold(1usize, |row, extent| row.saturating_mul(*extent)) {
            1 => Self::describe(place, name, ReadAs::Ids),
            columns if columns == classes => Self::describe(place, name, ReadAs::Numbers),
            columns => {
                Err(Error::input(format!("{name} has rows of {columns}, but the network has {classes} classes"))
                    .hint(format!("store the number of the class of each row, or one-hot rows of {classes}; for several labels a row, set loss.kind = \"binary-cross-entropy\"")))
            }
        }
    }

    /// Describes targets that are `width` numbers per row.
    fn values(place: Place<'_>, name: &str, width: usize) -> Result<Self> {
        let targets = Self::describe(place, name, ReadAs::Numbers)?;
        if targets.row_len() == width {
            return Ok(targets);
        }
        let message = format!("{name} has rows of {}", targets.row_len());
        Err(Error::input(format!("{message}, but the network predicts {width} for each sample"))
            .hint("the last of model.layers must have as many units, and loss.kind must fit the targets"))
    }

    fn describe(place: Place<'_>, name: &str, kind: ReadAs) -> Result<Self> {
        let Place { file, path, external_files } = place;
        let unreadable = |e: hdf5::Error| storage::unreadable(name, &e);
        let dataset = storage::open(file, path, name)?;
        let dtype =
            dataset.dtype().and_then(|dtype| Dtype::from_datatype(&dtype)).map_err(unreadable)?;
        dtype.check(name, kind)?;
        let dims = dataset.get_shape().map_err(unreadable)?;
        if dataset.space().map_err(unreadable)?.is_null() {
            return Err(Error::input(format!("{name} has no elements"))
                .hint("store one row for each sample"));
        }
        if dims.is_empty() {
            return Err(
                Error::input(format!("{name} is a scalar")).hint("store one row for each sample")
            );
        }
        // From here on sizes are counted in bytes.
        if decompression_limit::extent(&dims)
            .and_then(|elements| elements.checked_mul(dtype.size().max(8)))
            .is_none()
        {
            return Err(Error::input(format!(
                "{name} has shape {}, too large for any memory",
                shape(&dims)
            ))
            .hint("write it with the shape that its data has"));
        }
        storage::check(&dataset, path, name, external_files)?;
        let native = dataset
            .dtype()
            .and_then(|dtype| ElementType::from_datatype(&dtype))
            .map_err(unreadable)?;
        let (native, stored, packing) = Packing::read_with_types(&dataset, name, native, kind)?;
        let properties = dataset.create_plist().map_err(unreadable)?;
        // A link may lead into another file, and elements may lie in external raw files.
        let is_here = dataset.filename() == file.filename() && properties.external().is_empty();
        let is_virtual = dataset.layout() == Layout::Virtual;
        let sources =
            if is_virtual { h5::sources(&properties).map_err(unreadable)? } else { Vec::new() };
        let is_plain = dataset.layout() == Layout::Contiguous && is_here && native.is_some();
        Ok(Self {
            name: name.to_owned(),
            kind,
            dtype,
            shape: dims,
            stored,
            is_native: native.is_some(),
            chunk: dataset.chunk(),
            is_filtered: !dataset.filters().is_empty(),
            offset: dataset.offset().filter(|_| is_plain),
            is_elsewhere: !is_here || sources.iter().any(|source| source.file != "."),
            is_unwritten: storage::is_unwritten(&dataset).map_err(unreadable)?,
            packing,
        })
    }

    /// Returns whether its elements differ from stored numbers by a scale or an offset.
    pub(super) fn is_scaled(&self) -> bool {
        self.packing.as_ref().is_some_and(Packing::is_scaled)
    }

    /// Returns whether its elements have the same bits in memory as in the file.
    pub(super) fn is_native(&self) -> bool {
        self.is_native
    }

    /// Returns the bytes of a row in memory.
    pub(super) fn row_bytes(&self) -> usize {
        self.row_len() * self.stored.width()
    }

    /// Returns the decompressed bytes of a chunk, if there are chunks.
    pub(super) fn chunk_bytes(&self) -> Option<usize> {
        self.chunk.as_ref().map(|chunk| {
            chunk.iter().fold(self.dtype.size(), |bytes, extent| bytes.saturating_mul(*extent))
        })
    }

    /// Returns the number of rows; the number of elements if there is one dimension.
    pub(super) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Returns the number of elements of a row.
    pub(super) fn row_len(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Returns the number of ids of a document: all ids of a stream, otherwise those of a row.
    pub(super) fn document(&self) -> usize {
        if self.shape.len() == 1 { self.rows() } else { self.row_len() }
    }

    /// Returns the number of all ids.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Names the element at `offset` as in `/inputs[3, 17]`.
    pub(super) fn element(&self, offset: usize) -> String {
        match self.shape.len() {
            1 => format!("{}[{offset}]", self.name),
            _ => format!("{}[{}, {}]", self.name, offset / self.row_len(), offset % self.row_len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_named_by_row_and_column() {
        assert_eq!(ids(vec![100]).element(42), "/x[42]");
        assert_eq!(ids(vec![10, 8]).element(42), "/x[5, 2]");
    }

    /// Returns a dataset of ids.
    fn ids(shape: Vec<usize>) -> Field {
        Field {
            name: "/x".into(),
            kind: ReadAs::Ids,
            dtype: Dtype::from_datatype(&hdf5::Datatype::from_type::<u8>().unwrap()).unwrap(),
            shape,
            stored: ElementType::U8,
            is_native: true,
            chunk: None,
            is_filtered: false,
            offset: None,
            is_elsewhere: false,
            is_unwritten: false,
            packing: None,
        }
    }
}
