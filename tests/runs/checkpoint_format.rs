//! Checkpoints as `docs/checkpoint-format.md` describes them, read without this program's reader.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::Mpirun;
use hpctrain_testkit::launch::{finish, inherits_nothing};
use hpctrain_testkit::runs::{Run, json, tensors};

const BLOCK: usize = 1 << 20;

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn array(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Reads every tensor of the checkpoint in `dir` by the documented format alone, by the path of its
/// dataset. Panics if a byte is not covered by a checksum.
fn rebuilt(dir: &Path) -> BTreeMap<String, Vec<f32>> {
    let text = std::fs::read(dir.join("manifest.json")).unwrap();
    let seal = std::fs::read_to_string(dir.join("manifest.crc32")).unwrap();
    assert_eq!(seal, format!("{:08x}  manifest.json\n", crc32fast::hash(&text)));
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(manifest["version"], 3);
    let state = array(&manifest["state"]).iter().map(|name| name.as_str().unwrap());
    let groups: Vec<&str> = std::iter::once("params").chain(state).collect();
    let mut used: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
    let mut rebuilt = BTreeMap::new();
    for (tensor, entry) in manifest["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = array(&entry["shape"]).iter().map(number).collect();
        let elements = shape.iter().product();
        let mut parts = vec![vec![f32::NAN; elements]; groups.len()];
        let mut found = vec![0; elements];
        let mut files = Vec::new();
        for piece in array(&entry["pieces"]) {
            let start = number(&piece["start"]);
            let len = number(&piece["len"]);
            let columns: Option<Vec<usize>> =
                piece.get("columns").map(|columns| array(columns).iter().map(number).collect());
            // Indices of the elements that the piece may contain.
            let places: Vec<usize> = match &columns {
                Some(columns) => (0..elements)
                    .filter(|i| (columns[0]..columns[1]).contains(&(i % shape[1])))
                    .collect(),
                None => (0..elements).collect(),
            };
            let places = &places[start..start + len];
            places.iter().for_each(|&place| found[place] += 1);
            let name = piece["file"].as_str().unwrap();
            let dataset_name = match files.iter().filter(|file| **file == name).count() {
                0 => tensor.clone(),
                before => format!("{tensor}@{before}"),
            };
            files.push(name);
            let file = hdf5::File::open(dir.join(name)).unwrap();
            assert_eq!(array(&piece["parts"]).len(), groups.len());
            for ((group, part), values) in groups.iter().zip(array(&piece["parts"])).zip(&mut parts)
            {
                let dataset = file.group(group).unwrap().dataset(&dataset_name).unwrap();
                assert!(
                    !dataset.is_chunked()
                        && dataset.filters().is_empty()
                        && dataset.shape() == [len]
                );
                assert_eq!(
                    dataset.attr("start").unwrap().read_scalar::<u64>().unwrap() as usize,
                    start
                );
                assert_eq!(
                    dataset.attr("columns").ok().map(|columns| columns.read_raw().unwrap()),
                    columns
                );
                let offset = number(&part["offset"]);
                assert_eq!(dataset.offset(), Some(offset as u64));
                let read = dataset.read_raw::<f32>().unwrap();
                let sums: Vec<u32> =
                    read.chunks(BLOCK).map(|block| crc32fast::hash(&bytes(block))).collect();
                let written: Vec<u32> =
                    array(&part["crc32"]).iter().map(|sum| number(sum) as u32).collect();
                assert_eq!(sums, written, "/{group}/{tensor}");
                used.entry(name).or_default().push((offset, offset + 4 * len));
                places.iter().zip(read).for_each(|(&place, value)| values[place] = value);
            }
        }
        assert!(found.into_iter().all(|times| times == 1), "{tensor}: a hole or an overlap");
        for (group, values) in groups.iter().zip(parts) {
            rebuilt.insert(format!("/{group}/{tensor}"), values);
        }
    }
    for (name, entry) in manifest["files"].as_object().unwrap() {
        let content = std::fs::read(dir.join(name)).unwrap();
        assert_eq!(content.len(), number(&entry["bytes"]), "{name}");
        let mut ranges = used.remove(name.as_str()).unwrap_or_default();
        ranges.sort_unstable();
        let mut rest = crc32fast::Hasher::new();
        let mut at = 0;
        for (start, end) in ranges {
            rest.update(&content[at..start]);
            at = end;
        }
        rest.update(&content[at..]);
        assert_eq!(rest.finalize(), number(&entry["rest_crc32"]) as u32, "{name}");
    }
    assert!(used.is_empty());
    rebuilt
}

#[test]
fn the_documented_format_suffices() {
    let root = tempfile::tempdir().unwrap();
    // A tensor of more than one block, in pieces that do not end with blocks.
    let large = [
        "parallel.zero=1",
        "model.vocabulary=80000",
        "run.steps=1",
        "eval.samples=4",
        "model.width=30",
    ];
    let files = Run::new(Mpirun(2), root.path(), "x", &large).succeeds();
    let dir = files.checkpoint(1);
    let rebuilt = rebuilt(&dir);
    let manifest = json(&dir.join("manifest.json"));
    let longest = array(&manifest["tensors"]["wte.weight"]["pieces"])
        .iter()
        .map(|piece| number(&piece["len"]))
        .max();
    assert!(longest.unwrap() > BLOCK, "{longest:?}");

    // The program reads the same bits.
    let groups = ["params", "m", "v"];
    let read = tensors(&dir);
    assert_eq!(read.len(), rebuilt.len());
    for (name, bits) in read {
        let (tensor, part) = name.split_once(", part ").unwrap();
        let found = &rebuilt[&format!("/{}/{tensor}", groups[part.parse::<usize>().unwrap()])];
        assert!(found.iter().map(|value| value.to_bits()).eq(bits), "{name}");
    }
    the_script_agrees(&dir, &rebuilt);
}

/// Checks that the script in the documentation reads the same, if the Python given by `PYTHON`
/// (default: `python3`) has h5py and numpy.
fn the_script_agrees(dir: &Path, rebuilt: &BTreeMap<String, Vec<f32>>) {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let libraries =
        inherits_nothing(Command::new(&python).args(["-c", "import h5py, numpy"])).output();
    if !libraries.is_ok_and(|output| output.status.success()) {
        println!("skipped: {python} has no h5py and numpy");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rebuild_checkpoint.py");
    let ended = finish(Command::new(&python).arg(&script).arg(dir)).succeeded();
    let want: Vec<String> = rebuilt
        .iter()
        .map(|(name, values)| format!("{name} {:08x}", crc32fast::hash(&bytes(values))))
        .collect();
    let mut found: Vec<&str> = ended.stdout.lines().collect();
    found.sort_unstable();
    assert_eq!(found, want);
    // It detects a changed bit, in numbers and between them.
    for name in ["rank-00000.h5", "rank-00001.h5"] {
        for at in [9, 100_000] {
            let path = dir.join(name);
            let mut content = std::fs::read(&path).unwrap();
            content[at] ^= 1;
            std::fs::write(&path, &content).unwrap();
            assert!(
                !finish(Command::new(&python).arg(&script).arg(dir)).status.success(),
                "{name} {at}"
            );
            content[at] ^= 1;
            std::fs::write(&path, content).unwrap();
        }
    }
}

#[test]
fn the_documentation_shows_the_script() {
    let file = |name: &str| {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
    };
    let script = file("tests/golden/rebuild_checkpoint.py");
    assert!(file("docs/checkpoint-format.md").contains(&format!("```python\n{script}```\n")));
}
