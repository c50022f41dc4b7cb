//! Checks that all elements of a dataset are present, wherever they are stored.
//!
//! HDF5 opens a dataset whose elements are in other files, and reads fill values or zeros instead
//! of missing ones. So their presence is checked first, and errors name the dataset and the file.

use std::path::{Path, PathBuf};

use hdf5::dataset::Layout;
use hdf5::plist::DatasetCreate;
use hdf5::{Dataset, File};

use super::decompression_limit;
use super::element_convert::{ElementType, ReadAs};
use super::external_links::{Link, PREFIX, find, link};
use super::h5::{self, VirtualSource, shape};
use super::spec::ExternalFiles;
use hpctrain_base::error::{Error, Result};

/// The largest depth of nested virtual data sets: more are a cycle.
const DEEPEST: usize = 8;

/// Opens a dataset of the file at `path`.
///
/// # Errors
/// Returns an error if it does not exist, a link to it is broken, or it has a newer format.
pub(super) fn open(file: &File, path: &Path, name: &str) -> Result<Dataset> {
    file.dataset(name).map_err(|e| {
        if let Some(e) = broken_link(file, path, name) {
            e
        } else if file.group(name).is_ok() {
            Error::input(format!("{name} is a group, not a dataset")).hint("name a dataset in it")
        } else if h5::is_newer(&e) {
            h5::newer(name, &e)
        } else {
            unreadable(name, &e)
        }
    })
}

/// Returns the error of a dataset that HDF5 does not open for another reason.
pub(super) fn unreadable(name: &str, error: &hdf5::Error) -> Error {
    Error::input(format!("{name} cannot be opened as a dataset: {}", h5::one_line(error)))
        .hint("look at it with `h5ls -v` or h5py; import or write it again")
}

/// Returns the error of the first broken link on the way to `name`, if there is one.
fn broken_link(file: &File, path: &Path, name: &str) -> Option<Error> {
    let mut place = String::new();
    for part in name.split('/').filter(|part| !part.is_empty()) {
        place = format!("{place}/{part}");
        let whole = if place.trim_start_matches('/') == name.trim_start_matches('/') {
            name
        } else {
            &place
        };
        let leads = file.dataset(&place).is_ok() || file.group(&place).is_ok();
        match link(file, &place) {
            Some(Link::Soft(target)) if !leads => {
                let message = format!("{whole} is a soft link to {target}, which does not exist");
                return Some(
                    Error::input(message).hint("mend the link, or name the dataset itself"),
                );
            }
            Some(Link::External { file: other, object }) if !leads => {
                let message = format!("{whole} is an external link to {object} of {other}");
                let (why, hint) = match find(&other, path, PREFIX) {
                    None => (
                        "which does not exist",
                        "copy that file too, or set HDF5_EXT_PREFIX to its directory",
                    ),
                    Some(_) => (
                        "which does not have it or cannot be opened",
                        "mend the link, or copy that file again",
                    ),
                };
                return Some(Error::input(format!("{message}, {why}")).hint(hint));
            }
            _ if !leads => return None,
            _ => {}
        }
    }
    None
}

/// Checks that all elements of a dataset of the file at `path` are present and can be decoded, and
/// that none are in raw files that `external` does not allow.
///
/// # Errors
/// Returns an error that names the file and dataset if one is missing or not allowed.
pub(super) fn check(
    dataset: &Dataset,
    path: &Path,
    name: &str,
    external: ExternalFiles,
) -> Result<()> {
    check_to(dataset, path, name, external, DEEPEST)
}

fn check_to(
    dataset: &Dataset,
    path: &Path,
    name: &str,
    external: ExternalFiles,
    depth: usize,
) -> Result<()> {
    let unreadable = |e: hdf5::Error| unreadable(name, &e);
    let properties = dataset.create_plist().map_err(unreadable)?;
    let elements = dataset.space().map_err(unreadable)?.size();
    check_filters(dataset, &properties, name)?;
    if properties.layout() == Layout::Virtual {
        return check_sources(&properties, path, name, elements, external, depth);
    }
    let width = dataset.dtype().map_err(unreadable)?.size();
    if !properties.external().is_empty() {
        return check_raw(&properties, path, name, elements.saturating_mul(width), external);
    }
    check_size(dataset, name, width)
}

/// Checks the sizes of rows and chunks. A read allocates whole rows and chunks: they must not be
/// far larger than all that is stored, nor may chunks hold far more than their size, which a
/// decoder would unpack.
fn check_size(dataset: &Dataset, name: &str, width: usize) -> Result<()> {
    let shape = dataset.shape();
    let stored = dataset.storage_size();
    let bytes = |extents: &[usize]| {
        extents.iter().fold(width as u64, |all, extent| all.saturating_mul(*extent as u64))
    };
    let chunk = dataset.chunk().unwrap_or_default();
    let row = bytes(shape.get(1..).unwrap_or_default());
    let of_chunk = if chunk.is_empty() { 0 } else { bytes(&chunk) };
    decompression_limit::check(row.max(of_chunk), stored).map_err(|what| {
        Error::input(format!("{name}: a row or chunk of it: {what}"))
            .hint("write it again in smaller chunks, or without compression: h5repack -l CHUNK=… or -f NONE")
    })?;
    if !chunk.is_empty() && !dataset.filters().is_empty() {
        let along =
            shape.iter().zip(&chunk).map(|(extent, chunk)| extent.div_ceil((*chunk).max(1)) as u64);
        let chunks = along.fold(1u64, u64::saturating_mul);
        // Filters may make a chunk slightly longer.
        let most = chunks.saturating_mul((of_chunk + of_chunk / 4).saturating_add(CHUNK_ROOM));
        if stored > most {
            return Err(Error::input(format!(
                "{name} has {stored} compressed bytes for {chunks} chunks of {of_chunk}"
            ))
            .hint("the file is damaged, or made to fill the memory: copy it again"));
        }
    }
    Ok(())
}

/// Bytes that filters may add to a chunk of any size.
const CHUNK_ROOM: u64 = 64 << 10;

/// Returns whether a dataset stores its own elements and none of them was ever written, so that all
/// would be the fill value.
pub(super) fn is_unwritten(dataset: &Dataset) -> hdf5::Result<bool> {
    let properties = dataset.create_plist()?;
    let is_own = properties.layout() != Layout::Virtual && properties.external().is_empty();
    Ok(is_own && dataset.size() > 0 && dataset.storage_size() == 0)
}

/// Returns the error of a dataset that was never written.
pub(super) fn unwritten(name: &str) -> Error {
    Error::input(format!("{name} was never written: all of its elements would be the fill value"))
        .hint("its writer may have failed: write it, or name another dataset")
}

/// Returns the name of a filter that is registered with the HDF Group but not part of the library.
fn filter_name(number: i32) -> String {
    let name = match number {
        4 => "szip",
        32000 => "LZF",
        32001 => "blosc",
        32004 => "lz4",
        32008 => "bitshuffle",
        32013 => "zfp",
        32015 => "zstd",
        32017 | 32024 => "sz",
        32026 => "blosc2",
        number => return format!("filter {number}"),
    };
    format!("{name} (filter {number})")
}

/// The largest row that is read to test the filters, in elements.
const LARGEST_ROW: usize = 1 << 28;

/// Returns an error if a filter of a dataset is missing. A chunk may have been written without the
/// filter, so one is read to find out.
fn check_filters(dataset: &Dataset, properties: &DatasetCreate, name: &str) -> Result<()> {
    let missing = h5::missing_filters(properties).map_err(|e| unreadable(name, &e))?;
    let Some(first) = missing.first() else { return Ok(()) };
    if dataset.storage_size() == 0 || read_first_row(dataset).is_ok() {
        return Ok(());
    }
    let message = format!(
        "{name} is compressed with {}, which this libhdf5 does not have",
        filter_name(*first)
    );
    Err(Error::input(message).hint(match first {
        32000 => {
            "LZF is h5py's own: there, write it again with compression=\"gzip\", or without compression".to_owned()
        }
        _ => "where the filter is, h5repack -f GZIP=4 in.h5 out.h5 writes it again; or set HDF5_PLUGIN_PATH to the directory of its plugin"
            .to_owned(),
    }))
}

/// Returns an error if the first row of a dataset cannot be read.
fn read_first_row(dataset: &Dataset) -> hdf5::Result<()> {
    let stored = ElementType::converted(ReadAs::Numbers);
    let row_len =
        dataset.shape().iter().skip(1).fold(1usize, |row, extent| row.saturating_mul(*extent));
    if row_len > LARGEST_ROW {
        return Err("a row that is too large to read".into());
    }
    let mut rows = h5::SlabReader::new(dataset.clone(), stored)?;
    rows.read(0, &mut vec![0; row_len * stored.width()])
}

/// Checks that every source exists, is large enough and complete, and that all elements have one.
fn check_sources(
    properties: &DatasetCreate,
    path: &Path,
    name: &str,
    elements: usize,
    external: ExternalFiles,
    depth: usize,
) -> Result<()> {
    let sources = h5::sources(properties).map_err(|e| unreadable(name, &e))?;
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::input(format!(
            "{name} is one of more than {DEEPEST} virtual data sets within each other"
        ))
        .hint("write its data into one dataset"));
    };
    let virtual_set = format!("{name} is a virtual data set, and its source");
    let of_source =
        |e: Error| e.at(format_args!("{name}, a virtual data set, reads from its source"));
    for VirtualSource { file, dataset: of, gives, extents } in &sources {
        // A pattern of names stands for the files that exist.
        if [file, of].iter().any(|text| text.contains("%b")) {
            continue;
        }
        let place = if file == "." {
            Some(path.to_path_buf())
        } else {
            find(file, path, "HDF5_VDS_PREFIX")
        };
        let Some(place) = place else {
            return Err(Error::input(format!("{virtual_set} {file} does not exist"))
                .hint("copy it too, beside the file or where HDF5_VDS_PREFIX says; or write the data into one file"));
        };
        let opened = h5::open_file(&place, None).map_err(of_source)?;
        if !opened.link_exists(of) {
            return Err(Error::input(format!(
                "{virtual_set} {} has no dataset {of}",
                place.display()
            ))
            .hint("copy the source again, or write the data into one file"));
        }
        let source = open(&opened, &place, of).map_err(|e| of_source(e.at(place.display())))?;
        let has = source.shape();
        let elements = decompression_limit::extent(&has).ok_or_else(|| {
            Error::input(format!("{virtual_set} {of} is {}, larger than any memory", shape(&has)))
                .hint("write it with the shape that its data has")
        })? as u64;
        // If all of a source is used, extents are empty: it must have as many elements.
        let missing = match (extents.as_deref(), gives) {
            (Some([]), Some(gives)) => {
                (*gives != elements).then(|| format!("{gives} elements of it"))
            }
            (Some(needs), _) => {
                let fits = has.len() == needs.len()
                    && has.iter().zip(needs).all(|(has, needs)| has >= needs);
                (!fits).then(|| format!("{} of it", shape(needs)))
            }
            (None, _) => None,
        };
        if let Some(needs) = missing {
            let at = place.display();
            let has = shape(&has);
            return Err(Error::input(format!(
                "{virtual_set} {of} of {at} is {has}, but {needs} are needed"
            ))
            .hint("copy or write the source again: it does not have the shape that it had"));
        }
        check_to(&source, &place, of, external, depth)
            .map_err(|e| of_source(e.at(place.display())))?;
        if is_unwritten(&source).map_err(|e| unreadable(name, &e))? {
            return Err(of_source(unwritten(of).at(place.display())));
        }
    }
    let given =
        sources.iter().try_fold(0u64, |all, source| Some(all.saturating_add(source.gives?)));
    match given {
        Some(given) if given < elements as u64 => {
            let without = elements as u64 - given;
            Err(Error::input(format!(
                "{name} is a virtual data set, and {without} of {elements} elements have no source"
            ))
            .hint("map all of it, or write the data into one dataset"))
        }
        _ => Ok(()),
    }
}

/// Checks that external raw files exist, are where they are allowed to be, and are as long as the
/// dataset needs.
fn check_raw(
    properties: &DatasetCreate,
    path: &Path,
    name: &str,
    bytes: usize,
    external: ExternalFiles,
) -> Result<()> {
    let mut left = bytes as u64;
    for raw in properties.external() {
        // A size of 0 means unlimited.
        let here = if raw.size == 0 { left } else { left.min(raw.size as u64) };
        left -= here;
        let place = raw_path(&raw.name, path);
        let at = place.display();
        let what = format!("{name} has its elements in the external raw file {at}");
        if external == ExternalFiles::Refuse && !is_beside(&place, path) {
            let folder = folder(path);
            return Err(Error::input(format!("{what}, which is outside {}", folder.display())).hint(
                "write its elements into the HDF5 file, or move it there; where the data is trusted, data.external_files = \"allow\" reads it",
            ));
        }
        let length = match std::fs::metadata(&place) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(Error::input(format!("{what}, which is not a regular file"))
                    .hint("name a file with the elements, or write the data into the HDF5 file"));
            }
            Ok(metadata) => metadata.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::input(format!("{what}, which does not exist"))
                    .hint("copy it too, and set HDF5_EXTFILE_PREFIX to its directory; ${ORIGIN} in it stands for that of the HDF5 file"));
            }
            Err(e) => return Err(Error::io("read", &place, e)),
        };
        let needed = (raw.offset as u64).saturating_add(here);
        if length < needed {
            return Err(Error::input(format!(
                "{what}, which has {length} bytes, but {needed} are needed"
            ))
            .hint("copy or write it again: HDF5 would read zeros"));
        }
    }
    Ok(())
}

/// Returns the directory of a file.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Returns whether a raw file is below the directory of the HDF5 file at `path`, or below that of
/// the target if `path` is a link. A file that does not exist counts as beside: its absence is
/// reported separately.
fn is_beside(raw: &Path, path: &Path) -> bool {
    let Ok(raw) = raw.canonicalize() else { return true };
    let of_target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let is_below =
        |folder: &Path| folder.canonicalize().is_ok_and(|folder| raw.starts_with(folder));
    is_below(folder(path)) || is_below(folder(&of_target))
}

/// Returns the path at which HDF5 looks for an external raw file: below `HDF5_EXTFILE_PREFIX`,
/// otherwise in the current directory.
fn raw_path(name: &str, path: &Path) -> PathBuf {
    let prefix = std::env::var("HDF5_EXTFILE_PREFIX").unwrap_or_default();
    Path::new(&prefix.replace("${ORIGIN}", &folder(path).to_string_lossy())).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_files_are_found_where_the_library_looks() {
        assert_eq!(raw_path("a.raw", Path::new("/data/x.h5")), Path::new("a.raw"));
        assert_eq!(raw_path("/b/a.raw", Path::new("/data/x.h5")), Path::new("/b/a.raw"));
    }

    #[test]
    fn raw_files_beside_the_file_are_distinguished_from_others() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for folder in ["data", "data/raw", "data-2"] {
            std::fs::create_dir(at(folder)).unwrap();
            std::fs::write(at(folder).join("x.raw"), "").unwrap();
        }
        std::fs::write(at("data/x.h5"), "").unwrap();
        std::os::unix::fs::symlink(at("data-2/x.raw"), at("data/link.raw")).unwrap();
        std::os::unix::fs::symlink(at("data/x.h5"), at("data-2/link.h5")).unwrap();
        for (raw, path, expected) in [
            ("data/x.raw", "data/x.h5", true),
            ("data/raw/x.raw", "data/x.h5", true),
            ("data/raw/../x.raw", "data/x.h5", true),
            ("data-2/x.raw", "data/x.h5", false),
            ("data/link.raw", "data/x.h5", false),
            ("data/raw/../../data-2/x.raw", "data/x.h5", false),
            // Both the directory of the link and that of its target belong to the data.
            ("data/x.raw", "data-2/link.h5", true),
            ("data-2/x.raw", "data-2/link.h5", true),
            ("data-2/gone.raw", "data/x.h5", true),
        ] {
            assert_eq!(is_beside(&at(raw), &at(path)), expected, "{raw} of {path}");
        }
    }
}
