//! Import of folders of images into shards, and errors for what cannot be imported.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hpctrain::data::import::{ImportImages, ImportOptions, NotFinite, import_images};
use hpctrain::data::{Batch, DataSpec, Dataset, Ids, SampleSpec, Split, Target, inspect, verify};
use hpctrain::error::Error;
use image::{DynamicImage, GrayImage, ImageFormat, Luma, LumaA, Rgb, RgbImage, Rgba};

use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::shards;

fn kept(out: PathBuf) -> ImportOptions {
    ImportOptions { not_finite: NotFinite::Error, every: 5, shards: 1, normalize: false, out }
}

fn encoded(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn save(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Returns an image of height 2 and width 3 whose pixels identify the image, the position and the
/// channel.
fn pixels(image: u8) -> RgbImage {
    RgbImage::from_fn(3, 2, |x, y| {
        let first = 10 * image + 3 * (3 * y + x) as u8;
        Rgb([first, first + 1, first + 2])
    })
}

fn png(image: &RgbImage) -> Vec<u8> {
    encoded(&image.clone().into(), ImageFormat::Png)
}

fn import(
    folder: &Path,
    size: Option<[u32; 2]>,
    grey: bool,
    kept: ImportOptions,
) -> Result<(), Error> {
    import_images(&ImportImages {
        folder: folder.to_path_buf(),
        no_target: false,
        size,
        grey,
        options: kept,
    })
    .map(drop)
}

/// Returns the inputs of a split, row after row, and the classes.
fn read(out: &Path, split: Split, input: usize) -> (Vec<f32>, Vec<u32>) {
    let samples = SampleSpec::Rows { input, ids: Ids::None, target: Target::Class(9) };
    let mut dataset = Dataset::open(&DataSpec { samples, ..DataSpec::new(out) }, split, 1).unwrap();
    let all = dataset.samples();
    let batch = Batch::read(&mut dataset, 0..all, 0..all).unwrap();
    (batch.parts.features, batch.parts.classes)
}

fn texts(path: &Path, name: &str) -> Vec<String> {
    let texts: Vec<VarLenUnicode> = shards::open(path).dataset(name).unwrap().read_raw().unwrap();
    texts.iter().map(ToString::to_string).collect()
}

#[test]
fn every_pixel_is_where_it_was_and_every_class_has_its_name() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("pets");
    // Eleven images of one class, three of the other; they are not written in the order of their
    // names.
    for image in (0..11).rev() {
        save(&folder.join(format!("dog/{image:02}.png")), &png(&pixels(image)));
    }
    for image in 11..14 {
        save(&folder.join(format!("Cat/{image}.png")), &png(&pixels(image)));
    }
    save(&folder.join(".DS_Store"), b"");
    save(&folder.join("dog/.hidden"), b"");
    let out = root.path().join("out");
    let imported = import_images(&ImportImages {
        folder: folder.clone(),
        no_target: false,
        size: None,
        grey: false,
        options: ImportOptions { shards: 2, ..kept(out.clone()) },
    })
    .unwrap();
    assert_eq!((&imported.shape[..], imported.classes), (&[2, 3, 3][..], Some(2)));
    assert_eq!(imported.class_names, ["Cat", "dog"]);
    assert!(
        imported.to_string().ends_with("model.input = [2, 3, 3], 2 classes\nclasses: 0 Cat, 1 dog"),
        "{imported}"
    );

    // The fifth and the tenth dog are kept for validation; three cats are too few for one.
    let shards = ["train-00000.h5", "train-00001.h5"].map(|name| out.join(name));
    let mut files: Vec<String> = shards.iter().flat_map(|shard| texts(shard, "files")).collect();
    let (inputs, classes) = read(&out, Split::Train, 18);
    assert_eq!((inputs.len(), classes.len(), files.len()), (12 * 18, 12, 12));
    for ((row, class), file) in inputs.chunks(18).zip(&classes).zip(&files) {
        let (name, number) = file.strip_suffix(".png").unwrap().split_once('/').unwrap();
        assert_eq!(name, ["Cat", "dog"][*class as usize]);
        let want = pixels(number.parse().unwrap()).into_raw();
        assert_eq!(row, want.iter().map(|x| f32::from(*x)).collect::<Vec<_>>(), "{file}");
    }
    // Cats are spread among dogs, each class in the order of its names.
    let cats: Vec<usize> = (0..12).filter(|row| classes[*row] == 0).collect();
    assert!(cats[0] < 4 && (4..8).contains(&cats[1]) && cats[2] >= 8, "{classes:?}");
    assert_eq!(texts(&out.join("val-00000.h5"), "files"), ["dog/04.png", "dog/09.png"]);
    files.sort();
    let want = (11..14).map(|i| format!("Cat/{i}.png"));
    let want = want.chain((0..11).filter(|i| i % 5 != 4).map(|i| format!("dog/{i:02}.png")));
    assert!(files.iter().cloned().eq(want), "{files:?}");

    let inspected = inspect::inspect(&out).unwrap().to_string();
    assert!(
        inspected.contains("train-00000.h5, train-00001.h5, val-00000.h5: classes 0 Cat, 1 dog\n"),
        "{inspected}"
    );
    assert_eq!(verify::verify(&out).unwrap().files, 3);
}

#[test]
fn every_class_has_its_part_of_the_validation() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("images");
    for class in 0..5 {
        for image in 0..10 {
            save(&folder.join(format!("{class}/{image}.png")), &png(&pixels(image)));
        }
    }
    let out = root.path().join("out");
    import(&folder, None, false, kept(out.clone())).unwrap();
    // Two of each class, and any first five have one of each.
    assert_eq!(read(&out, Split::Validation, 18).1, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
    assert_eq!(read(&out, Split::Train, 18).1[..10], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
}

#[test]
fn channels_are_three_or_one_whatever_the_file_has() {
    let root = tempfile::tempdir().unwrap();
    let one = |name: &str, image: DynamicImage, grey| {
        let folder = root.path().join(name);
        let out = root.path().join(format!("{name}-{grey}"));
        save(&folder.join("a/1.png"), &encoded(&image, ImageFormat::Png));
        import(&folder, None, grey, ImportOptions { every: 0, ..kept(out.clone()) }).unwrap();
        read(&out, Split::Train, if grey { 1 } else { 3 }).0
    };
    let grey = DynamicImage::ImageLuma8(GrayImage::from_pixel(1, 1, Luma([77])));
    assert_eq!(one("grey", grey.clone(), false), [77.0; 3]);
    assert_eq!(one("grey", grey, true), [77.0]);
    let alpha = DynamicImage::ImageRgba8(image::RgbaImage::from_pixel(1, 1, Rgba([1, 2, 3, 0])));
    assert_eq!(one("alpha", alpha, false), [1.0, 2.0, 3.0]);
    let grey_alpha =
        DynamicImage::ImageLumaA8(image::ImageBuffer::from_pixel(1, 1, LumaA([9, 100])));
    assert_eq!(one("grey-alpha", grey_alpha, true), [9.0]);
    let wide =
        DynamicImage::ImageRgb16(image::ImageBuffer::from_pixel(1, 1, Rgb([0u16, 0x8080, 0xffff])));
    assert_eq!(one("wide", wide, false), [0.0, 128.0, 255.0]);
    let colour = DynamicImage::ImageRgb8(RgbImage::from_pixel(1, 1, Rgb([255, 0, 0])));
    // The luminance weight of red (Rec. 709).
    assert_eq!(one("colour", colour, true), [54.0]);
}

#[test]
fn photographs_are_about_what_they_were_and_on_a_common_scale() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("photos");
    let gradient = |shift: u32| {
        RgbImage::from_fn(32, 16, |x, y| Rgb([(6 * x) as u8, (12 * y) as u8, (40 * shift) as u8]))
    };
    for image in 0..4 {
        let bytes = encoded(&gradient(image).into(), ImageFormat::Jpeg);
        // The name does not matter.
        save(&folder.join(format!("{}/{image}.img", image % 2)), &bytes);
    }
    let out = root.path().join("raw");
    import(&folder, None, false, ImportOptions { every: 0, ..kept(out.clone()) }).unwrap();
    let (inputs, classes) = read(&out, Split::Train, 16 * 32 * 3);
    assert_eq!(classes, [0, 1, 0, 1]);
    for (row, image) in inputs.chunks(16 * 32 * 3).zip(0..) {
        let want = gradient(image).into_raw();
        let off = row.iter().zip(&want).map(|(x, want)| (x - f32::from(*want)).abs()).sum::<f32>()
            / row.len() as f32;
        assert!(off < 4.0, "{image}: {off}");
    }
    let out = root.path().join("scaled");
    import(&folder, None, false, ImportOptions { every: 0, normalize: true, ..kept(out.clone()) })
        .unwrap();
    let (inputs, _) = read(&out, Split::Train, 16 * 32 * 3);
    for channel in 0..3 {
        let of: Vec<f64> = inputs.iter().skip(channel).step_by(3).map(|x| f64::from(*x)).collect();
        let mean = of.iter().sum::<f64>() / of.len() as f64;
        let variance = of.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / of.len() as f64;
        assert!(
            mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-4,
            "{channel}: {mean}, {variance}"
        );
    }
}

#[test]
fn images_are_scaled_to_cover_the_size_and_cut_around_the_middle() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("images");
    // Three stripes of one colour each: the middle one remains, and is halved.
    let wide = RgbImage::from_fn(24, 8, |x, _| {
        if (8..16).contains(&x) { Rgb([0, 200, 100]) } else { Rgb([255, 0, 0]) }
    });
    let high =
        RgbImage::from_fn(
            4,
            12,
            |_, y| if (4..8).contains(&y) { Rgb([7, 8, 9]) } else { Rgb([0, 0, 0]) },
        );
    save(&folder.join("a/1.png"), &png(&wide));
    save(&folder.join("a/2.png"), &png(&high));
    save(
        &folder.join("a/3.png"),
        &png(&RgbImage::from_fn(4, 4, |x, y| Rgb([x as u8, y as u8, 50]))),
    );
    let out = root.path().join("out");
    import(&folder, Some([4, 4]), false, ImportOptions { every: 0, ..kept(out.clone()) }).unwrap();
    let (inputs, _) = read(&out, Split::Train, 48);
    for (image, want) in [(0, [0.0, 200.0, 100.0]), (1, [7.0, 8.0, 9.0])] {
        let image = &inputs[image * 48..][..48];
        // The filter reaches one pixel beyond the crop.
        let inner = image.chunks(12).flat_map(|row| row.chunks(3).skip(1).take(2)).skip(2).take(4);
        assert!(
            inner.clone().count() == 4 && inner.clone().all(|pixel| pixel == want),
            "{image:?}"
        );
    }
    // Images that already have the size are not changed.
    let own: Vec<f32> = (0..16).flat_map(|i| [(i % 4) as f32, (i / 4) as f32, 50.0]).collect();
    assert_eq!(inputs[96..], own);
    let out = root.path().join("other");
    import(&folder, Some([2, 6]), true, ImportOptions { every: 0, ..kept(out.clone()) }).unwrap();
    assert_eq!(read(&out, Split::Train, 12).1, [0, 0, 0]);
}

#[test]
fn folders_that_cannot_be_imported_are_told_in_a_line() {
    let good = png(&pixels(1));
    let jpeg = encoded(&pixels(2).into(), ImageFormat::Jpeg);
    let mut bent = good.clone();
    let middle = bent.len() / 2;
    bent[middle] ^= 0x55;
    type Named<'a> = (&'a str, &'a [u8]);
    // With a preview in a separate segment, which has its own end marker.
    let preview =
        [&jpeg[..2], &[0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9], &jpeg[2..jpeg.len() - 2]]
            .concat();
    let cases: [(&[Named], &str); 15] = [
        (&[], "images holds no folder of a class"),
        (&[(".hidden/1.png", &good)], "images holds no folder of a class"),
        (
            &[("a/1.png", &good), ("readme.txt", b"hello")],
            "images/readme.txt is a file beside the folders of classes",
        ),
        (&[("a/1.png", &good), ("b/.keep", b"")], "images/b holds no images"),
        (&[("train/a/1.png", &good)], "images/train/a is a folder inside that of a class"),
        (&[("a/1.png", &good), ("a/2.png", b"")], "images/a/2.png is not a PNG or JPEG image"),
        (&[("a/1.png", &good), ("a/2.txt", b"hello")], "images/a/2.txt is not a PNG or JPEG image"),
        (
            &[("a/1.gif", b"GIF89a\x01\0\x01\0\0\0\0")],
            "images/a/1.gif is not a PNG or JPEG image, but Gif",
        ),
        (
            &[("a/1.png", &good[..good.len() - 20])],
            "images/a/1.png is a damaged or truncated image: ",
        ),
        (&[("a/1.png", &bent)], "images/a/1.png is a damaged or truncated image: "),
        (
            &[("a/1.jpg", &jpeg[..jpeg.len() - 3])],
            "images/a/1.jpg is a damaged or truncated image: it ends before",
        ),
        (
            &[("a/1.jpg", &preview)],
            "images/a/1.jpg is a damaged or truncated image: it ends before",
        ),
        (
            &[("a/1.jpg", &jpeg[..100])],
            "images/a/1.jpg is a damaged or truncated image: it ends before",
        ),
        (&[("a/1.jpg", b"\xff\xd8\xff\xd9")], "images/a/1.jpg is a damaged or truncated image: "),
        (
            &[("a/1.png", &good), ("b/2.png", &png(&RgbImage::new(2, 3)))],
            "images/b/2.png is 3 × 2 pixels (height × width), but ",
        ),
    ];
    for (files, wanted) in cases {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("images");
        let out = root.path().join("out");
        std::fs::create_dir(&folder).unwrap();
        files.iter().for_each(|(name, bytes)| save(&folder.join(name), bytes));
        let error = import(&folder, None, false, ImportOptions { every: 0, ..kept(out.clone()) })
            .unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains(wanted) && text.lines().count() == 2 && text.contains("\nhint: "),
            "{wanted}: {text}"
        );
        assert!(!out.exists());
    }
    let text = import(Path::new("/nowhere"), None, false, kept("/nowhere-else".into()))
        .unwrap_err()
        .to_string();
    assert!(text.starts_with("/nowhere does not exist\nhint: "), "{text}");
}

#[test]
fn the_command_imports_and_tells_of_sizes() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("images");
    let out = root.path().join("out").display().to_string();
    save(&folder.join("a/1.png"), &png(&pixels(1)));
    save(&folder.join("b/2.png"), &png(&RgbImage::new(9, 9)));
    let folder = folder.display().to_string();
    let command = |more: &[&str]| {
        let args =
            [&["data", "import", "images", &folder, "--out", &out, "--val-every", "0"], more]
                .concat();
        finish(&mut program(args))
    };
    let ended = command(&[]);
    assert_eq!(ended.code(), 2, "{ended}");
    let wanted = "b/2.png is 9 × 9 pixels (height × width), but ";
    assert!(
        ended.stderr.contains(wanted)
            && ended.stderr.contains("hint: scale all images to one size: --size 2x3")
    );
    for size in ["0", "3x", "x", "4x9000", "-1"] {
        let ended = command(&[&format!("--size={size}")]);
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains("height and width, such as 32x48"), "{ended}");
    }
    let ended = command(&["--size", "4x6", "--grey"]).succeeded();
    assert!(
        ended.stdout.contains("2 samples; model.input = [4, 6, 1], 2 classes\nclasses: 0 a, 1 b"),
        "{ended}"
    );
}

#[test]
fn images_in_no_class_are_rows_in_the_order_of_their_names() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("new");
    for image in [3, 1, 2] {
        save(&folder.join(format!("{image}.png")), &png(&pixels(image)));
    }
    let out = root.path().join("out");
    let import = |out: PathBuf| {
        let kept = ImportOptions { every: 2, normalize: false, ..kept(out) };
        import_images(&ImportImages {
            folder: folder.clone(),
            no_target: true,
            size: None,
            grey: false,
            options: kept,
        })
    };
    let imported = import(out.clone()).unwrap();
    assert!(
        imported
            .to_string()
            .ends_with("model.input = [2, 3, 3], without targets: for hpctrain predict"),
        "{imported}"
    );
    let shard = out.join("train-00000.h5");
    assert_eq!(texts(&shard, "files"), ["1.png", "2.png", "3.png"]);
    let file = shards::open(&shard);
    assert!(!file.link_exists("classes") && !file.link_exists("targets"));
    let found: Vec<u8> = file.dataset("inputs").unwrap().read_raw().unwrap();
    assert_eq!(found, [1, 2, 3].map(|image| pixels(image).into_raw()).concat());
    save(&folder.join("cat/4.png"), &png(&pixels(4)));
    let error = import(root.path().join("other")).unwrap_err().to_string();
    assert!(error.contains("cat is a folder among images without classes\nhint: "), "{error}");
    let empty = root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let kept = kept(root.path().join("other"));
    let size = None;
    let error = import_images(&ImportImages {
        folder: empty,
        no_target: true,
        size,
        grey: false,
        options: kept,
    })
    .unwrap_err();
    assert!(error.to_string().contains("holds no images"), "{error}");
}

/// Folders of another data set, where the same names have other numbers.
#[test]
fn classes_are_matched_by_name() {
    let root = tempfile::tempdir().unwrap();
    let import_of = |name: &str, classes: &[&str]| {
        for (number, class) in classes.iter().enumerate() {
            save(
                &root.path().join(format!("{name}-files/{class}/0.png")),
                &png(&pixels(number as u8)),
            );
        }
        let out = root.path().join(name);
        import(
            &root.path().join(format!("{name}-files")),
            None,
            false,
            ImportOptions { every: 0, ..kept(out.clone()) },
        )
        .unwrap();
        out
    };
    let open = |out: &Path| {
        let samples = SampleSpec::Rows { input: 18, ids: Ids::None, target: Target::Class(3) };
        Dataset::open(&DataSpec { samples, ..DataSpec::new(out) }, Split::Train, 1).unwrap()
    };
    let learned = open(&import_of("learned", &["ant", "cat", "dog"])).preprocessing().clone();
    assert_eq!(learned.classes, ["ant", "cat", "dog"]);
    let mut other = open(&import_of("other", &["cat", "dog"]));
    let notes = other.conform(&learned).unwrap();
    assert!(
        notes
            .iter()
            .any(|note| note == "classes get the numbers that their names have in the network"),
        "{notes:?}"
    );
    let batch = Batch::read(&mut other, 0..2, 0..2).unwrap();
    assert_eq!(batch.parts.classes, [1, 2]);
    let error =
        open(&import_of("unknown", &["cat", "owl"])).conform(&learned).unwrap_err().to_string();
    assert!(
        error.contains("train-00000.h5: class \"owl\" is not one of the network's: ant, cat, dog"),
        "{error}"
    );
}
