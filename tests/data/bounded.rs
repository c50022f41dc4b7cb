//! Imports of files that are larger than the memory limit.

use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use hpctrain::data::{DataSpec, Dataset, Split};

use hpctrain_testkit::launch::{Ended, finish, inherits_nothing};
use hpctrain_testkit::shards;

/// The limit of an import's data segment in KiB: a third of what it would take if it read
/// everything at once.
const LIMIT: usize = 96 << 10;

/// Runs `hpctrain data import …` with a memory limit of [`LIMIT`].
fn import(arguments: &[&str]) -> Ended {
    let mut command = Command::new("sh");
    // Only allocations count, not libraries and memory-mapped files.
    let script = format!("ulimit -d {LIMIT} && exec \"$0\" data import \"$@\"");
    command.args(["-c", &script]).arg(hpctrain_testkit::program()).args(arguments);
    finish(inherits_nothing(&mut command))
}

fn written(path: &Path, lines: impl Iterator<Item = String>) {
    let mut file = BufWriter::new(std::fs::File::create(path).unwrap());
    lines.for_each(|line| file.write_all(line.as_bytes()).unwrap());
    file.flush().unwrap();
}

/// Checks that no temporary files are left beside the shards.
fn only_shards(out: &Path) {
    let names =
        out.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let others: Vec<String> =
        names.filter(|name| !name.ends_with(".h5") || name.starts_with('.')).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn a_text_is_imported_a_piece_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let [text, out] = ["text", "out"].map(|name| root.path().join(name));
    // 64 MB, whose ids would take 256 MB in memory.
    let lines = 1_000_000;
    written(
        &text,
        (0..lines)
            .map(|i| format!("line {i:08}: the quick brown fox jumps over the lazy dog, again\n")),
    );
    let bytes = std::fs::metadata(&text).unwrap().len();
    assert!(bytes as usize > 60 << 20);
    for tokenizer in ["char", "byte"] {
        let out = out.join(tokenizer);
        let [text, out] = [&text, &out].map(|path| path.to_str().unwrap());
        let arguments = [
            "text",
            text,
            "--tokenizer",
            tokenizer,
            "--shards",
            "3",
            "--val-fraction",
            "0.1",
            "--out",
            out,
        ];
        import(&arguments).succeeded();
        only_shards(Path::new(out));
        let mut samples = 0;
        for split in [Split::Train, Split::Validation] {
            let data = Dataset::open(&DataSpec::new(out), split, 62).unwrap();
            samples += data.tokens();
            // The first line, decoded by the tokenizer of the shards.
            if split == Split::Train {
                let tokenizer = data.tokenizer().unwrap().clone();
                let shard = shards::open(Path::new(out).join("train-00000.h5"));
                let ids: Vec<u32> =
                    shard.dataset("tokens").unwrap().read_slice_1d(..14).unwrap().to_vec();
                assert_eq!(tokenizer.decode(&ids), "line 00000000:");
            }
        }
        assert_eq!(samples, bytes);
        finish(Command::new(hpctrain_testkit::program()).args(["data", "verify", out])).succeeded();
    }
}

#[test]
fn a_table_is_imported_a_line_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let [table, out] = ["table.csv", "out"].map(|name| root.path().join(name));
    // 32 MB of lines, whose numbers alone would take twice that in memory, as would the shards.
    let rows = 500_000;
    let width = 30;
    let header = (0..width).map(|column| format!("c{column},")).collect::<String>() + "class\n";
    let line = |row: usize| {
        (0..width).map(|column| format!("{},", (row * 7 + column) % 10)).collect::<String>()
            + &format!("{}\n", row % 3)
    };
    written(&table, std::iter::once(header).chain((0..rows).map(line)));
    let [table, out] = [&table, &out].map(|path| path.to_str().unwrap());
    let arguments =
        ["csv", table, "--target", "class", "--shards", "2", "--val-every", "10", "--out", out];
    import(&arguments).succeeded();
    only_shards(Path::new(out));
    let read = |name: &str, row: usize| {
        let file = shards::open(Path::new(out).join(name));
        let inputs: Vec<f32> =
            file.dataset("inputs").unwrap().read_slice_1d(ndarray::s![row, ..]).unwrap().to_vec();
        let class: Vec<u32> =
            file.dataset("targets").unwrap().read_slice_1d(row..row + 1).unwrap().to_vec();
        (inputs, class[0])
    };
    let expected = |row: usize| {
        (
            (0..width).map(|column| ((row * 7 + column) % 10) as f32).collect::<Vec<_>>(),
            (row % 3) as u32,
        )
    };
    // Every tenth row is kept for validation; the second half of the others is the second shard.
    assert_eq!(read("train-00000.h5", 0), expected(0));
    assert_eq!(read("train-00000.h5", 9), expected(10));
    assert_eq!(read("train-00001.h5", 0), expected(250_000));
    assert_eq!(read("val-00000.h5", 49_999), expected(rows - 1));
    finish(Command::new(hpctrain_testkit::program()).args(["data", "verify", out])).succeeded();
}

/// The rows of arrays of unsigned bytes, 120 MB in all.
const ROWS: usize = 60_000;
const WIDTH: usize = 2_000;

fn byte(row: usize, column: usize) -> u8 {
    ((row + column) % 251) as u8
}

fn by_rows(to: &mut dyn Write) {
    (0..ROWS).for_each(|row| {
        to.write_all(&std::array::from_fn::<u8, WIDTH, _>(|column| byte(row, column))).unwrap()
    });
}

fn by_columns(to: &mut dyn Write) {
    (0..WIDTH).for_each(|column| {
        to.write_all(&std::array::from_fn::<u8, ROWS, _>(|row| byte(row, column))).unwrap()
    });
}

/// Returns the part of an NPY file before the elements.
fn npy(columns_first: bool, shape: &str) -> Vec<u8> {
    let order = if columns_first { "True" } else { "False" };
    let header = format!("{{'descr': '|u1', 'fortran_order': {order}, 'shape': {shape}, }}\n");
    [&b"\x93NUMPY\x01\x00"[..], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat()
}

/// Imports arrays of features and labels, all for training, and checks some rows.
fn imported(command: &str, features: &Path, labels: &Path, out: &Path) {
    let [features, labels, out_text] = [features, labels, out].map(|path| path.to_str().unwrap());
    import(&[command, features, labels, "--raw", "--val-every", "0", "--out", out_text])
        .succeeded();
    only_shards(out);
    let inputs = shards::open(out.join("train-00000.h5")).dataset("inputs").unwrap();
    for row in [0, 1, 31_415, ROWS - 1] {
        let found: Vec<u8> = match inputs.ndim() {
            2 => inputs.read_slice_1d(ndarray::s![row, ..]).unwrap().to_vec(),
            _ => {
                inputs.read_slice_2d(ndarray::s![row, .., .., 0]).unwrap().iter().copied().collect()
            }
        };
        assert!(
            found.len() == WIDTH && (0..WIDTH).all(|column| found[column] == byte(row, column)),
            "row {row}"
        );
    }
}

#[test]
fn arrays_are_imported_some_rows_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let [features, labels] = ["x.npy", "y.npy"].map(|name| root.path().join(name));
    std::fs::write(&labels, [npy(false, &format!("({ROWS},)")), vec![1; ROWS]].concat()).unwrap();
    for (columns_first, elements) in [(false, by_rows as fn(&mut dyn Write)), (true, by_columns)] {
        let mut file = BufWriter::new(std::fs::File::create(&features).unwrap());
        file.write_all(&npy(columns_first, &format!("({ROWS}, {WIDTH})"))).unwrap();
        elements(&mut file);
        file.flush().unwrap();
        imported("npy", &features, &labels, &root.path().join(format!("out-{columns_first}")));
    }
}

#[test]
fn compressed_images_are_imported_some_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let [images, labels] = ["images.gz", "labels"].map(|name| root.path().join(name));
    let header = |shape: &[usize]| {
        let extents = shape.iter().flat_map(|extent| (*extent as u32).to_be_bytes());
        [0, 0, 8, shape.len() as u8].into_iter().chain(extents).collect::<Vec<u8>>()
    };
    std::fs::write(&labels, [header(&[ROWS]), vec![1; ROWS]].concat()).unwrap();
    let mut file = GzEncoder::new(std::fs::File::create(&images).unwrap(), Compression::fast());
    file.write_all(&header(&[ROWS, 40, 50])).unwrap();
    by_rows(&mut file);
    file.finish().unwrap();
    imported("idx", &images, &labels, &root.path().join("out"));
}
