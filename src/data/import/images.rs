//! Import of folders of images, one folder for each class, into shards.
//!
//! The crate `image` is built for PNG and JPEG alone. It includes colour management, some 200,000
//! lines, which is not used.

use std::path::{Path, PathBuf};

use image::imageops::FilterType;
use image::{DynamicImage, ImageDecoder as _, ImageFormat, ImageReader};

use super::row_writer::{ImportOptions, Imported, Inputs, Rows};
use super::spool::{Elements, Spooler};
use crate::decompression_limit;
use crate::spec::file_names;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportImages {
    /// The folder, which holds a folder of PNG and JPEG files for each class and nothing else.
    /// Names that begin with a dot are skipped.
    pub folder: PathBuf,
    /// Whether the files lie in the folder itself and have no class, for prediction.
    pub no_target: bool,
    /// The height and width to which every image is scaled. By default all must have the same size.
    pub size: Option<[u32; 2]>,
    /// Whether images are converted to one channel instead of three.
    pub grey: bool,
    /// The validation split, the shards and the destination of the samples.
    pub options: ImportOptions,
}

/// Imports images as samples of height × width × channels. Classes are numbered in the order of the
/// folders' names. The images of every class are spread evenly over the rows, in the order of their
/// names, so that any part of the rows has all classes in proportion.
///
/// # Errors
/// Returns an error if a file is missing, damaged, not an image or of another size, if there is no
/// class or a class without images, or if the shards cannot be written.
pub fn import_images(import: &ImportImages) -> Result<Imported> {
    let (classes, files) =
        if import.no_target { unlabelled(&import.folder)? } else { listed(&import.folder)? };
    let mut inputs = Spooler::create(&import.options.out)?;
    let mut first: Option<(&Path, [u32; 2])> = None;
    for Labelled { path, .. } in &files {
        let picture = decoded(path, import.grey)?;
        let picture = match import.size {
            // Scaled until it covers the size, then cropped to it around the middle.
            Some([height, width]) if [picture.height(), picture.width()] != [height, width] => {
                picture.resize_to_fill(width, height, FilterType::Triangle)
            }
            _ => picture,
        };
        let size @ [height, width] = [picture.height(), picture.width()];
        let is_first = first.is_none();
        let (first, expected) = *first.get_or_insert((path, size));
        if size != expected {
            let [high, wide] = expected;
            let path = path.display();
            let first = first.display();
            return Err(Error::input(format!(
                "{path} is {height} × {width} pixels (height × width), but {first} is {high} × {wide}"
            ))
            .hint(format!("scale all images to one size: --size {high}x{wide}")));
        }
        let pixels = picture.into_bytes();
        if is_first && import.size.is_none() {
            check_all(import, &files, pixels.len().saturating_mul(files.len()))?;
        }
        inputs.push(&pixels)?;
    }
    let [height, width] = first.map_or([0, 0], |(_, size)| size.map(|extent| extent as usize));
    let names = files.iter().map(|Labelled { path, class, .. }| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        classes.get(*class).map_or(name.to_string(), |class| format!("{class}/{name}"))
    });
    let names = names.collect();
    let folder = import.folder.display().to_string();
    let source = import
        .folder
        .file_name()
        .map_or(folder.clone(), |name| name.to_string_lossy().into_owned());
    Rows {
        inputs: Inputs::Bytes(inputs.finish()?),
        count: files.len(),
        shape: vec![height, width, if import.grey { 1 } else { 3 }],
        targets: Elements::Memory(
            files.iter().filter(|_| !import.no_target).map(|file| file.class as f64).collect(),
        ),
        width: usize::from(!import.no_target),
        weights: Elements::Memory(vec![]),
        regression: false,
        source,
        places: std::array::from_fn(|_| folder.clone()),
        classes,
        skipped: 0,
        table: None,
        files: Some(names),
    }
    .write(&import.options)
}

/// Returns an error if images together decode to far more bytes than their files have, though each
/// alone is within the limit.
fn check_all(import: &ImportImages, files: &[Labelled], decoded: usize) -> Result<()> {
    let length =
        |file: &Labelled| std::fs::metadata(&file.path).map_or(0, |metadata| metadata.len());
    let stored = files.iter().map(length).fold(0, u64::saturating_add);
    decompression_limit::check(decoded as u64, stored).map_err(|what| {
        Error::input(format!("{}: {what}", import.folder.display()))
            .hint("make the images smaller with --size")
    })
}

/// Returns the names of the images of a folder without classes, in order.
pub(super) fn file_names_of(folder: &Path) -> Result<Vec<String>> {
    visible(folder)
}

/// Returns all images of a folder without classes, in the order of their names.
fn unlabelled(folder: &Path) -> Result<(Vec<String>, Vec<Labelled>)> {
    let mut files = Vec::new();
    for name in visible(folder)? {
        let path = folder.join(name);
        if path.is_dir() {
            return Err(Error::input(format!(
                "{} is a folder among images without classes",
                path.display()
            ))
            .hint("import folders of classes without --no-target, or move the folder away"));
        }
        files.push(Labelled { path, class: 0, along: 0.0 });
    }
    match files.is_empty() {
        true => Err(Error::input(format!("{} holds no images", folder.display()))
            .hint("put PNG or JPEG files into it")),
        false => Ok((vec![], files)),
    }
}

/// A file, and the number of its class.
struct Labelled {
    path: PathBuf,
    class: usize,
    /// The relative position among the files of its class, from 0 to 1.
    along: f64,
}

/// Returns the names of the classes and all images, with every class spread evenly.
fn listed(folder: &Path) -> Result<(Vec<String>, Vec<Labelled>)> {
    let classes = visible(folder)?;
    let mut files = Vec::new();
    for (class, name) in classes.iter().enumerate() {
        let of_class = folder.join(name);
        if !of_class.is_dir() {
            return Err(Error::input(format!("{} is a file beside the folders of classes", of_class.display()))
                .hint("the folder to import holds one folder for each class and nothing else: move the file away"));
        }
        let images = visible(&of_class)?;
        if images.is_empty() {
            return Err(Error::input(format!("{} holds no images", of_class.display()))
                .hint("remove the folder, or put the images of that class into it"));
        }
        for (i, name) in images.iter().enumerate() {
            let path = of_class.join(name);
            if path.is_dir() {
                return Err(Error::input(format!("{} is a folder inside that of a class", path.display())).hint(
                    "the images of a class lie in its folder: name the folder above those of classes, or move it away",
                ));
            }
            files.push(Labelled { path, class, along: (i as f64 + 0.5) / images.len() as f64 });
        }
    }
    if files.is_empty() {
        return Err(Error::input(format!("{} holds no folder of a class", folder.display()))
            .hint("put the images of each class into a separate folder there: DIR/cat/1.png, DIR/dog/1.png"));
    }
    files.sort_by(|one, other| one.along.total_cmp(&other.along).then(one.class.cmp(&other.class)));
    Ok((classes, files))
}

/// Returns the names of a folder's entries, sorted, without those that begin with a dot.
fn visible(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Err(Error::input(format!("{} does not exist", folder.display()))
            .hint("give a folder with one folder of images for each class"));
    }
    Ok(file_names(folder)?.into_iter().filter(|name| !name.starts_with('.')).collect())
}

/// Decodes the pixels of a file to bytes: three channels, or one. Transparency is dropped.
fn decoded(path: &Path, grey: bool) -> Result<DynamicImage> {
    let bytes = safe_open::read(path).map_err(|e| {
        Error::io("read", path, e)
            .hint("a class's folder holds its images and nothing else: move other things away")
    })?;
    let at = path.display();
    let reader = ImageReader::new(std::io::Cursor::new(&bytes)).with_guessed_format();
    let reader = reader.map_err(|e| Error::io("read", path, e))?;
    let format = match reader.format() {
        Some(format @ (ImageFormat::Png | ImageFormat::Jpeg)) => format,
        other => {
            let what = other.map_or(String::new(), |format| format!(", but {format:?}"));
            return Err(Error::input(format!("{at} is not a PNG or JPEG image{what}")).hint(
                "convert it, or move it away: a class's folder holds its images and nothing else",
            ));
        }
    };
    let damaged = |what: String| {
        Error::input(format!("{at} is a damaged or truncated image: {what}"))
            .hint("copy it again, or move it away")
    };
    // The decoder would fill in missing data.
    if format == ImageFormat::Jpeg && !is_whole(&bytes) {
        return Err(damaged("it ends before its end marker".into()));
    }
    let invalid = |e: image::ImageError| damaged(e.to_string().replace('\n', " "));
    // Only the header is decoded.
    let header = ImageReader::with_format(std::io::Cursor::new(&bytes), format)
        .into_decoder()
        .map_err(invalid)?;
    decompression_limit::check(header.total_bytes(), bytes.len() as u64).map_err(|what| {
        Error::input(format!("{at}: {what}")).hint("move it away, or scale it down first")
    })?;
    let picture = reader.decode().map_err(invalid)?;
    Ok(match grey {
        true => DynamicImage::ImageLuma8(picture.into_luma8()),
        false => DynamicImage::ImageRgb8(picture.into_rgb8()),
    })
}

/// Returns whether a JPEG file has its end marker, outside of previews that are embedded in its
/// segments.
fn is_whole(jpeg: &[u8]) -> bool {
    let mut rest = jpeg;
    loop {
        // Among compressed pixels 0xff is followed by 0 or by a restart marker.
        let is_marker = |two: &[u8]| two[0] == 0xff && !matches!(two[1], 0 | 0xd0..=0xd7 | 0xff);
        let Some(at) = rest.windows(2).position(is_marker) else { return false };
        let after = &rest[at + 2..];
        let skipped = match (rest[at + 1], after) {
            (0xd9, _) => return true,
            // The start of the image, or a standalone marker: no segment follows.
            (0xd8 | 0x01, _) => 0,
            (_, [high, low, ..]) => usize::from(u16::from_be_bytes([*high, *low])),
            _ => return false,
        };
        let Some(next) = after.get(skipped..) else { return false };
        rest = next;
    }
}
